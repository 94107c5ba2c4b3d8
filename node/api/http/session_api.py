"""Sessions for browsers, with the rights of the node's own user, in exchange for a ticket."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from starlette.requests import Request

from ...trust.local_token import LocalToken
from .bodies import EmptyBody, StrictBody
from .routes import ApiRoute, post_json

SESSION_PATH = "/v1/session"
TICKET_PATH = "/v1/session/ticket"


class TicketBody(StrictBody):
    ticket: Annotated[str, Field(min_length=1, max_length=64)]


def session_routes(token: LocalToken) -> list[ApiRoute]:
    """The endpoints; the guard lets the first one through without a token."""

    async def begin(_: Request, body: TicketBody) -> Mapping[str, str]:
        return {"session": token.redeem(body.ticket)}

    async def ticket(_request: Request, _: EmptyBody) -> Mapping[str, str]:
        return {"ticket": token.ticket()}

    return [post_json(SESSION_PATH, begin, TicketBody), post_json(TICKET_PATH, ticket)]
