"""The log of the cluster's events, one line each for a person, in memory and in the process's log.

Every node keeps a log of its own. All nodes record the same events of the cluster, at slightly
different times; only the head records those of placements.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from .log import terminal

EVENTS_PATH: Final = "/v1/events"

log = logging.getLogger(__name__)

_OfMembers = Literal[
    "joined", "left", "leaving", "suspected", "recovered", "refuted", "died", "woke"
]
_OfHeads = Literal["election", "head_changed", "term_not_stored", "term_stored"]
_OfPlacements = Literal["placed", "replicas", "adopted", "superseded", "stage_lost", "replanned"]
_OfLoads = Literal["resumed", "load_failed", "unloaded"]
_OfFiles = Literal["copied", "pulled", "pull_failed", "removed", "peer_left"]
_OfJoining = Literal["join_requested", "join_approved", "join_refused"]
_OfThisNode = Literal["woke", "gpu_fault", "loop_ended", "loop_recovered", "dropped"]
Kind: TypeAlias = (
    _OfMembers | _OfHeads | _OfPlacements | _OfLoads | _OfFiles | _OfJoining | _OfThisNode
)
Fact: TypeAlias = str | int | float | bool | None

CAPACITY: Final = 1000
BACKLOG: Final = 256
"""Events that a listener may leave unread before it is dropped."""

_WARNINGS: Final[frozenset[Kind]] = frozenset(
    (
        *("suspected", "died", "term_not_stored", "loop_ended", "stage_lost", "superseded"),
        *("gpu_fault", "load_failed", "pull_failed", "peer_left", "join_refused", "dropped"),
    )
)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; `time` in Unix seconds, `sequence` from 1 without gaps."""

    log: str
    sequence: int
    time: float
    kind: Kind
    text: str
    facts: Mapping[str, Fact]

    @property
    def id(self) -> str:
        """`LOG-SEQUENCE`, unique over all nodes and processes, unlike the number alone."""
        return f"{self.log}-{self.sequence}"

    def describe(self) -> dict[str, Any]:
        """The JSON of `GET /v1/events`."""
        own = {"id": self.id, "sequence": self.sequence, "time": self.time}
        return {**own, "kind": self.kind, "text": self.text, "facts": dict(self.facts)}


class EventLog:
    """The last `capacity` events. All methods run on the node's event loop."""

    def __init__(self, capacity: int = CAPACITY, *, clock: Callable[[], float] = time.time) -> None:
        self.name: Final = secrets.token_hex(4)
        """The log's name; another process of the same node has a different one."""
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=capacity)
        self._sequence = 0
        self._listeners: set[asyncio.Queue[Event | None]] = set()
        """The unread events of each; None ends it."""
        self._closed = False

    def add(self, kind: Kind, text: str, **facts: Fact) -> Event:
        """Stores, logs and sends an event; `text` is a sentence for a person, without full stop."""
        if kind != "join_requested" or terminal() is None:  # there a block says it, with digits
            level = logging.WARNING if kind in _WARNINGS else logging.INFO
            log.log(level, "%s", text)
        self._sequence += 1
        event = Event(self.name, self._sequence, self._clock(), kind, text, facts)
        self._events.append(event)
        for unread in list(self._listeners):
            if unread.qsize() < BACKLOG:
                unread.put_nowait(event)
                continue
            self._listeners.discard(unread)
            unread.put_nowait(self._dropped(event.sequence - 1))
            unread.put_nowait(None)
        return event

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def entries(self, after: str | int | None = None) -> list[Event]:
        """The events in memory after that id or sequence number, oldest first.

        All of them where `after` is None, of another log, or larger than the last number of this
        one, because then it comes from an earlier process.
        """
        last = self._position(after)
        return [event for event in self._events if event.sequence > last]

    async def subscribe(self, after: str | int | None = None) -> AsyncGenerator[Event]:
        """Yields `entries(after)`, then new events until the log is closed.

        A listener that leaves BACKLOG events unread gets a last one, `dropped`, and no more.
        """
        unread: asyncio.Queue[Event | None] = asyncio.Queue()
        if self._closed:
            unread.put_nowait(None)
        else:
            self._listeners.add(unread)
        try:
            for event in self.entries(after):  # no await between this and `add` above
                yield event
            while (event := await unread.get()) is not None:
                yield event
        finally:
            self._listeners.discard(unread)

    def close(self) -> None:
        self._closed = True
        for unread in self._listeners:
            unread.put_nowait(None)
        self._listeners.clear()

    def _position(self, after: str | int | None) -> int:
        match after:
            case None:
                return 0
            case int():
                return after if after <= self._sequence else 0
            case str():
                name, _, number = after.rpartition("-")
                is_own = name == self.name and number.isdecimal()
                return self._position(int(number)) if is_own else 0

    def _dropped(self, last: int) -> Event:
        """The event that ends a subscription, with the number from which the listener resumes."""
        text = f"{BACKLOG} events were left unread, so no more follow; ask again with the last id"
        return Event(self.name, last, self._clock(), "dropped", text, {})
