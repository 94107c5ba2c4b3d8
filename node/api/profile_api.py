"""`/v1/cluster/profile`: measured speeds of nodes and of the links between them."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from starlette.requests import Request

from .bodies import EmptyBody
from .routes import ApiRoute, get_json, post_json

PROFILE_PATH: Final = "/v1/cluster/profile"


class Measurements(Protocol):
    """The head's measurements of the cluster, as JSON."""

    def describe(self) -> Mapping[str, Any]: ...

    async def measure_cluster(self) -> Mapping[str, Any]:
        """Measures every link again, then describes."""
        ...


class ProfileApi:
    """The endpoints over `Measurements`; they are forwarded to the head."""

    def __init__(self, measurements: Measurements) -> None:
        self._measurements = measurements

    def routes(self) -> list[ApiRoute]:
        return [get_json(PROFILE_PATH, self.profile), post_json(PROFILE_PATH, self.measure)]

    async def profile(self) -> Mapping[str, Any]:
        return self._measurements.describe()

    async def measure(self, _request: Request, _: EmptyBody) -> Mapping[str, Any]:
        return await self._measurements.measure_cluster()
