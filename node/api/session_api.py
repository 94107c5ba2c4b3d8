"""How a browser comes to the rights of the node's own user: a ticket for a session."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..trust.local_token import LocalToken
from .body_schema import StrictBody, read_body
from .errors import JsonResponse

SESSION_PATH = "/v1/session"
TICKET_PATH = "/v1/session/ticket"


class EmptyBody(StrictBody):
    pass


class TicketBody(StrictBody):
    ticket: Annotated[str, Field(min_length=1, max_length=64)]


class SessionApi:
    """The endpoints over a `LocalToken`; the guard lets the first one through without a token."""

    def __init__(self, token: LocalToken) -> None:
        self._token = token

    def routes(self) -> list[Route]:
        return [
            Route(SESSION_PATH, self.begin, methods=["POST"]),
            Route(TICKET_PATH, self.ticket, methods=["POST"]),
        ]

    async def begin(self, request: Request) -> Response:
        body = await read_body(request, TicketBody)
        return JsonResponse({"session": self._token.redeem(body.ticket)})

    async def ticket(self, request: Request) -> Response:
        _ = await read_body(request, EmptyBody)
        return JsonResponse({"ticket": self._token.ticket()})
