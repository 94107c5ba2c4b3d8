"""`GET /v1/events`: the event log as server-sent events."""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import InvalidRequest, QueueFull
from ...machine.events import CAPACITY, EVENTS_PATH, Event, EventLog
from ..http.dialects import EVENT_STREAM
from ..http.routes import ApiRoute, query_values
from ..http.sse import EventStream, Silence, attended, comment
from ..http.strict_json import encode

MAX_LISTENERS: Final = 128

_ID: Final = re.compile(r"(?:[0-9a-f]{8}-)?[0-9]{1,15}")
_SCOPES: Final = ("cluster", "node")
_FLAGS: Final = {"0": False, "1": True}


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a request. `scope` is missing: `node/api/forward.py` applies it before."""

    after: str | int | None = None
    """An event's id, or its number in this node's log."""
    limit: int = CAPACITY
    """The greatest number of past events, the latest ones."""
    follow: bool = True


def parse_query(pairs: list[tuple[str, str]], last_event_id: str | None) -> Query:
    """Reads a query. Raises InvalidRequest, which names the parameter at fault."""
    values = query_values(pairs, ("after", "limit", "follow", "scope"))
    if values.get("scope", "cluster") not in _SCOPES:
        raise InvalidRequest("'scope' should be cluster or node", param="scope")
    return Query(_after(values.get("after"), last_event_id), _limit(values), _follow(values))


def _after(after: str | None, last_event_id: str | None) -> str | int | None:
    """The event to continue after; a browser that reconnects sends the header."""
    text, param = (last_event_id, "Last-Event-ID") if last_event_id else (after, "after")
    if text is None:
        return None
    if not _ID.fullmatch(text):
        raise InvalidRequest(f"'{param}' should be the id of an event", param=param)
    return int(text) if text.isdecimal() else text


def _limit(values: Mapping[str, str]) -> int:
    text = values.get("limit", str(CAPACITY))
    if not (text.isascii() and text.isdecimal() and len(text) <= 6) or int(text) > CAPACITY:
        raise InvalidRequest(f"'limit' should be a number from 0 to {CAPACITY}", param="limit")
    return int(text)


def _follow(values: Mapping[str, str]) -> bool:
    text = values.get("follow", "1")
    if text not in _FLAGS:
        raise InvalidRequest("'follow' should be 1, or 0 to end after what is held", param="follow")
    return _FLAGS[text]


class EventsApi:
    """The endpoint over an `EventLog`. `keep_alive_s` is the longest silence on a stream."""

    def __init__(self, events: EventLog, keep_alive_s: float) -> None:
        self._events = events
        self._keep_alive_s = keep_alive_s

    def routes(self) -> list[ApiRoute]:
        query = {
            "after": {"type": "string", "pattern": f"^({_ID.pattern})$"},
            "limit": {"type": "integer", "minimum": 0, "maximum": CAPACITY},
            "follow": {"enum": ["0", "1"]},
            "scope": {"enum": ["cluster", "node"]},
        }
        return [ApiRoute("GET", EVENTS_PATH, self.events, query=query, media_type=EVENT_STREAM)]

    async def events(self, request: Request) -> Response:
        last_id = request.headers.get("last-event-id")
        query = parse_query(request.query_params.multi_items(), last_id)
        if query.follow and self._events.listeners >= MAX_LISTENERS:
            raise QueueFull(
                f"{MAX_LISTENERS} clients follow the events already; close one, or ask with "
                "follow=0 now and then"
            )
        return EventStream(self._frames(query, request))

    async def _frames(self, query: Query, request: Request) -> AsyncGenerator[bytes]:
        past = self._events.entries(query.after)
        skipped = past[: max(0, len(past) - query.limit)]
        after = skipped[-1].id if skipped else query.after
        if not query.follow:
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


def frame(event: Event) -> bytes:
    """One event with its id, its kind as the event's name, and everything as JSON."""
    # Named events reach only listeners of that name: without `event:` a browser's `onmessage`
    # would get them all, but a client could not choose.
    name = event.kind.encode()
    head = b"id: " + event.id.encode() + b"\nevent: " + name + b"\n"
    return head + b"data: " + encode(event.describe()) + b"\n\n"
