"""The part of the HTTP API for joining; every node answers it itself, it is not forwarded."""

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import InvalidRequest
from ...machine.setting_values import is_loopback
from ..http.bodies import StrictBody, read_body
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


def join_routes(joining: "JoinOperations") -> list[ApiRoute]:
    """The endpoints over a `JoinOperations`."""

    async def requests(request: Request) -> Response:
        return json_response(joining.requests(trusted=request.state.trusted))

    async def take_key(request: Request) -> Response:
        """Accepts the key over loopback only, since this HTTP is not encrypted.

        The client's address is checked before the body.
        """
        if request.client is None or not is_loopback(request.client.host):
            raise InvalidRequest(
                "the cluster key is taken from this machine only; run `exo-node join` on it",
                param="key",
            )
        body = await read_body(request, KeyBody)
        return json_response(await joining.take_key(body.key))

    path = f"{JOIN_PREFIX}/requests"
    return [
        ApiRoute("GET", path, requests),
        post_json(
            f"{path}/{{id}}/approve",
            lambda request, body: joining.approve(request.path_params["id"], body.code),
            ApproveBody,
        ),
        post_json(
            f"{path}/{{id}}/deny", lambda request, _: joining.deny(request.path_params["id"])
        ),
        ApiRoute("POST", f"{JOIN_PREFIX}/key", take_key, body=KeyBody),
        post_json(f"{JOIN_PREFIX}/leave", lambda _request, _: joining.leave()),
        post_json(f"{JOIN_PREFIX}/again", lambda _request, _: joining.ask_again()),
    ]
