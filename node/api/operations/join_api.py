"""The part of the HTTP API for joining; every node answers it itself, it is not forwarded."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import InvalidRequest
from ...machine.setting_values import is_loopback
from ..http.bodies import EmptyBody, StrictBody, read_body
from ..http.long_bodies import json_response
from ..http.routes import ApiRoute, post_json

if TYPE_CHECKING:
    from ...join.operations import JoinOperations

JOIN_PREFIX = "/v1/join"
_SIX_DIGITS: Final = r"^([\s-]*[0-9]){6}[\s-]*$"
"""The document's pattern; `join` refuses other codes with its own message."""


class ApproveBody(StrictBody):
    code: Annotated[
        str, Field(min_length=6, max_length=16, json_schema_extra={"pattern": _SIX_DIGITS})
    ]


class KeyBody(StrictBody):
    key: Annotated[str, Field(min_length=1, max_length=128)]


class RekeyBody(StrictBody):
    without: Annotated[list[str], Field(max_length=64, default_factory=list)]
    drop_absent: bool = False


class JoinApi:
    """The endpoints over a `JoinOperations`."""

    def __init__(self, joining: "JoinOperations") -> None:
        self._joining = joining

    def routes(self) -> list[ApiRoute]:
        requests = f"{JOIN_PREFIX}/requests"
        return [
            ApiRoute("GET", requests, self.requests),
            post_json(f"{requests}/{{id}}/approve", self.approve, ApproveBody),
            post_json(f"{requests}/{{id}}/deny", self.deny),
            ApiRoute("POST", f"{JOIN_PREFIX}/key", self.take_key, body=KeyBody),
            post_json(f"{JOIN_PREFIX}/rekey", self.rekey, RekeyBody),
            post_json(f"{JOIN_PREFIX}/leave", self.leave),
            post_json(f"{JOIN_PREFIX}/again", self.ask_again),
        ]

    async def requests(self, request: Request) -> Response:
        return json_response(self._joining.requests(trusted=request.state.trusted))

    async def approve(self, request: Request, body: ApproveBody) -> Mapping[str, Any]:
        return await self._joining.approve(request.path_params["id"], body.code)

    async def deny(self, request: Request, _: EmptyBody) -> Mapping[str, Any]:
        return await self._joining.deny(request.path_params["id"])

    async def take_key(self, request: Request) -> Response:
        """Accepts the key over loopback only, since this HTTP is not encrypted.

        The client's address is checked before the body.
        """
        if request.client is None or not is_loopback(request.client.host):
            raise InvalidRequest(
                "the cluster key is taken from this machine only; run `exo-node join` on it",
                param="key",
            )
        body = await read_body(request, KeyBody)
        return json_response(await self._joining.take_key(body.key))

    async def ask_again(self, _request: Request, _: EmptyBody) -> Mapping[str, Any]:
        return await self._joining.ask_again()

    async def leave(self, _request: Request, _: EmptyBody) -> Mapping[str, Any]:
        return await self._joining.leave()

    async def rekey(self, _: Request, body: RekeyBody) -> Mapping[str, Any]:
        return await self._joining.rekey(body.without, drop_absent=body.drop_absent)
