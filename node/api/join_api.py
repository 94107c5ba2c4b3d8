"""The part of the HTTP API for joining: every node answers it for itself, never the head for it."""

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...placement.errors import InvalidRequest
from ..machine.setting_values import is_loopback
from .body_schema import StrictBody, read_body
from .errors import JsonResponse

if TYPE_CHECKING:
    from ..join.operations import JoinOperations

JOIN_PREFIX = "/v1/join"


_SIX_DIGITS: Final = r"^([\s-]*[0-9]){6}[\s-]*$"
"""For the document: `join` itself refuses others, in words of its own."""


class ApproveBody(StrictBody):
    code: Annotated[
        str, Field(min_length=6, max_length=16, json_schema_extra={"pattern": _SIX_DIGITS})
    ]


class EmptyBody(StrictBody):
    pass


class KeyBody(StrictBody):
    key: Annotated[str, Field(min_length=1, max_length=128)]


class RekeyBody(StrictBody):
    without: Annotated[list[str], Field(max_length=64, default_factory=list)]
    drop_absent: bool = False


class JoinApi:
    """The endpoints over a `JoinOperations`."""

    def __init__(self, joining: "JoinOperations") -> None:
        self._joining = joining

    def routes(self) -> list[Route]:
        return [
            Route(f"{JOIN_PREFIX}/requests", self.requests, methods=["GET"]),
            Route(f"{JOIN_PREFIX}/requests/{{id}}/approve", self.approve, methods=["POST"]),
            Route(f"{JOIN_PREFIX}/requests/{{id}}/deny", self.deny, methods=["POST"]),
            Route(f"{JOIN_PREFIX}/key", self.take_key, methods=["POST"]),
            Route(f"{JOIN_PREFIX}/rekey", self.rekey, methods=["POST"]),
            Route(f"{JOIN_PREFIX}/leave", self.leave, methods=["POST"]),
        ]

    async def requests(self, request: Request) -> Response:
        return JsonResponse(self._joining.requests(trusted=request.state.trusted))

    async def approve(self, request: Request) -> Response:
        body = await read_body(request, ApproveBody)
        return JsonResponse(await self._joining.approve(request.path_params["id"], body.code))

    async def deny(self, request: Request) -> Response:
        _ = await read_body(request, EmptyBody)
        return JsonResponse(await self._joining.deny(request.path_params["id"]))

    async def take_key(self, request: Request) -> Response:
        """Over loopback only: this HTTP is not encrypted."""
        if request.client is None or not is_loopback(request.client.host):
            raise InvalidRequest(
                "the cluster key is taken from this machine only; run `exo-node join` on it",
                param="key",
            )
        body = await read_body(request, KeyBody)
        return JsonResponse(await self._joining.take_key(body.key))

    async def leave(self, request: Request) -> Response:
        _ = await read_body(request, EmptyBody)
        return JsonResponse(await self._joining.leave())

    async def rekey(self, request: Request) -> Response:
        body = await read_body(request, RekeyBody)
        return JsonResponse(await self._joining.rekey(body.without, drop_absent=body.drop_absent))
