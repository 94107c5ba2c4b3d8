"""The part of the HTTP API for joining: every node answers it for itself, never the head for it."""

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..placement.errors import InvalidRequest, JoinRequestNotFound
from .body_schema import StrictBody, read_body
from .http_errors import JsonResponse
from .setting_values import is_loopback

JOIN_PREFIX = "/v1/join"

Json = Mapping[str, Any]


class JoinOperations(Protocol):
    """What the HTTP layer needs of joining. Each method may raise an ExoNodeError."""

    async def requests(self) -> Json:
        """`{"object": "list", "data", "asking", "fresh", "open"}`."""
        ...

    async def approve(self, id_: str, code: str) -> Json:
        """Raises JoinRequestNotFound; InvalidRequest for other digits than the node's."""
        ...

    async def deny(self, id_: str) -> Json: ...

    async def take_key(self, text: str) -> Json: ...

    async def leave(self) -> Json: ...


class NoJoining:
    """Of an app without a node: nobody asks, and nobody is asked."""

    async def requests(self) -> Json:
        return {"object": "list", "data": [], "asking": [], "fresh": False, "open": False}

    async def approve(self, id_: str, code: str) -> Json:
        raise JoinRequestNotFound("no node asks to join here", param="id")

    async def deny(self, id_: str) -> Json:
        raise JoinRequestNotFound("no node asks to join here", param="id")

    async def take_key(self, text: str) -> Json:
        raise InvalidRequest("there is no node that could take a key", param="key")

    async def leave(self) -> Json:
        raise InvalidRequest("there is no node that could leave", param="body")


class ApproveBody(StrictBody):
    code: Annotated[str, Field(min_length=6, max_length=16)]


class EmptyBody(StrictBody):
    pass


class KeyBody(StrictBody):
    key: Annotated[str, Field(min_length=1, max_length=128)]


class JoinApi:
    """The endpoints over a `JoinOperations`."""

    def __init__(self, joining: JoinOperations) -> None:
        self._joining = joining

    def routes(self) -> list[Route]:
        return [
            Route(f"{JOIN_PREFIX}/requests", self.requests, methods=["GET"]),
            Route(f"{JOIN_PREFIX}/requests/{{id}}/approve", self.approve, methods=["POST"]),
            Route(f"{JOIN_PREFIX}/requests/{{id}}/deny", self.deny, methods=["POST"]),
            Route(f"{JOIN_PREFIX}/key", self.take_key, methods=["POST"]),
            Route(f"{JOIN_PREFIX}/leave", self.leave, methods=["POST"]),
        ]

    async def requests(self, _: Request) -> Response:
        return JsonResponse(await self._joining.requests())

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
