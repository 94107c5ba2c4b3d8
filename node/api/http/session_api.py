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


class SessionApi:
    """The endpoints over a `LocalToken`; the guard lets the first one through without a token."""

    def __init__(self, token: LocalToken) -> None:
        self._token = token

    def routes(self) -> list[ApiRoute]:
        return [
            post_json(SESSION_PATH, self.begin, TicketBody),
            post_json(TICKET_PATH, self.ticket),
        ]

    async def begin(self, _: Request, body: TicketBody) -> Mapping[str, str]:
        return {"session": self._token.redeem(body.ticket)}

    async def ticket(self, _request: Request, _: EmptyBody) -> Mapping[str, str]:
        return {"ticket": self._token.ticket()}
