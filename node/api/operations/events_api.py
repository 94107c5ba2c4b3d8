"""`GET /v1/events`: the event log as server-sent events."""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import InvalidRequest, QueueFull
from ...machine.events import CAPACITY, EVENTS_PATH, Event, EventLog
from ..http.dialects import EVENT_STREAM
from ..http.routes import ApiRoute, Schema, query_values
from ..http.sse import EventStream, Silence, attended, comment
from ..http.strict_json import encode

MAX_LISTENERS: Final = 128

_ID: Final = r"^((?:[0-9a-f]{8}-)?[0-9]{1,15})$"
_QUERY: Final[Mapping[str, Schema]] = {
    "after": {"type": "string", "pattern": _ID, "description": "the id of an event"},
    "limit": {"type": "integer", "minimum": 0, "maximum": CAPACITY},
    "follow": {"enum": ["0", "1"]},
    # `node/api/forward.py` applies it before.
    "scope": {"enum": ["cluster", "node"]},
}


class EventsApi:
    """The endpoint over an `EventLog`. `keep_alive_s` is the longest silence on a stream."""

    def __init__(self, events: EventLog, keep_alive_s: float) -> None:
        self._events = events
        self._keep_alive_s = keep_alive_s

    def routes(self) -> list[ApiRoute]:
        return [ApiRoute("GET", EVENTS_PATH, self.events, query=_QUERY, media_type=EVENT_STREAM)]

    async def events(self, request: Request) -> Response:
        query = query_values(request, _QUERY)
        follows = query.get("follow", "1") == "1"
        if follows and self._events.listeners >= MAX_LISTENERS:
            raise QueueFull(
                f"{MAX_LISTENERS} clients follow the events already; close one, or ask with "
                "follow=0 now and then"
            )
        limit = int(query.get("limit", CAPACITY))
        return EventStream(self._frames(_after(query, request), limit, follows, request))

    async def _frames(
        self, after: str | int | None, limit: int, follows: bool, request: Request
    ) -> AsyncGenerator[bytes]:
        """`after`: an event's id, or its number in this node's log. `limit`: of past events."""
        past = self._events.entries(after)
        skipped = past[: max(0, len(past) - limit)]
        after = skipped[-1].id if skipped else after
        if not follows:
            for event in past[len(skipped) :]:
                yield frame(event)
            return
        # A first comment at once, so that a client knows that it is connected. A client that has
        # the present state needs only the events after this number.
        yield comment(f"past events: {len(past) - len(skipped)}")
        silence = Silence(self._keep_alive_s)
        news = attended(self._events.subscribe(after), request.receive, silence)
        async with aclosing(news):
            async for event in news:
                silence.end()
                yield comment("no news") if event is None else frame(event)


def _after(query: Mapping[str, str], request: Request) -> str | int | None:
    """The event to continue after; a browser that reconnects sends the header."""
    last_id = request.headers.get("last-event-id")
    if last_id and not re.fullmatch(_ID, last_id):
        raise InvalidRequest("'Last-Event-ID' should be the id of an event", param="Last-Event-ID")
    text = last_id or query.get("after")
    return int(text) if text is not None and text.isdecimal() else text


def frame(event: Event) -> bytes:
    """One event with its id, its kind as the event's name, and everything as JSON."""
    # Named events reach only listeners of that name: without `event:` a browser's `onmessage`
    # would get them all, but a client could not choose.
    name = event.kind.encode()
    head = b"id: " + event.id.encode() + b"\nevent: " + name + b"\n"
    return head + b"data: " + encode(event.describe()) + b"\n\n"
