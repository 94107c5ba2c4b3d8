"""`/v1/cluster/profile`: what nodes and the links between them were measured to do."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .body_schema import StrictBody, read_body
from .errors import JsonResponse

PROFILE_PATH: Final = "/v1/cluster/profile"


class Measurements(Protocol):
    """What the head knows of the cluster's speeds; every mapping is ready for the wire."""

    def describe(self) -> Mapping[str, Any]: ...

    async def measure_cluster(self) -> Mapping[str, Any]:
        """Measures every link anew, then describes."""
        ...


class _MeasureBody(StrictBody):
    """Nothing can be chosen: `{}`."""


class ProfileApi:
    """The endpoints over `Measurements`; they are forwarded to the head."""

    def __init__(self, measurements: Measurements) -> None:
        self._measurements = measurements

    def routes(self) -> list[Route]:
        return [
            Route(PROFILE_PATH, self.profile, methods=["GET"]),
            Route(PROFILE_PATH, self.measure, methods=["POST"]),
        ]

    async def profile(self, _: Request) -> Response:
        return JsonResponse(self._measurements.describe())

    async def measure(self, request: Request) -> Response:
        _ = await read_body(request, _MeasureBody)
        return JsonResponse(await self._measurements.measure_cluster())
