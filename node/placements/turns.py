"""The turns of one model's answers on the head: bounded, and shared fairly by clients.

A turn goes to the client with the fewest running answers, and among those in the order of arrival.
Answers in the background wait for all others.
"""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from ...placement.errors import QueueFull

MAX_RUNNING = 16
MAX_WAITING = 32
SPARE = 4
"""Turns beyond MAX_RUNNING for clients that have no running answer: one client's long answers must
not keep all others waiting until one of them ends."""
SPARE_PLACES = 16
"""Places beyond all others for clients that have no request here yet."""


@dataclass(slots=True, eq=False)
class Turn:
    """One answer's; `Turns.leave` ends it."""

    background: bool = False
    """Its turn comes behind those that are not."""
    client: str = ""
    runs: bool = False
    came: asyncio.Event = field(default_factory=asyncio.Event)


class Turns:
    """The answers of one model. An answer that was lost runs on at once: it had its turn."""

    def __init__(
        self, running: int = MAX_RUNNING, waiting: int = MAX_WAITING, spare: int = SPARE
    ) -> None:
        self._running_each = self._most_running = running
        self._waiting_places = waiting
        self._spare = spare
        self._present_of: Counter[str] = Counter()
        self._running_of: Counter[str] = Counter()
        self._waiting: deque[Turn] = deque()
        self._background: deque[Turn] = deque()
        self._present = 0
        self._running = 0

    @property
    def present(self) -> int:
        return self._present

    def set_replicas(self, count: int) -> None:
        """Lets each of the model's placements run as many answers."""
        self._most_running = self._running_each * max(1, count)
        self._give_next()

    def enter(
        self, *, is_resumed: bool = False, background: bool = False, client: str = ""
    ) -> Turn:
        """`is_resumed`: it has had its turn, on this head or another. Raises QueueFull."""
        most = self._most_running + self._waiting_places
        places = most + (0 if self._present_of[client] else SPARE_PLACES)
        if self._present >= places and not is_resumed:
            raise QueueFull(
                f"{self._waiting_places} requests are waiting already; try again shortly"
            )
        self._present += 1
        self._present_of[client] += 1
        turn = Turn(background, client)
        if is_resumed:
            self._give(turn)
        return turn

    def ask(self, turn: Turn) -> None:
        """Its model is loaded: `came` is set once it may run."""
        queue = self._background if turn.background else self._waiting
        if not turn.runs and turn not in queue:
            queue.append(turn)
            self._give_next()

    def leave(self, turn: Turn) -> None:
        self._present -= 1
        _take_one(self._present_of, turn.client)
        if turn.runs:
            turn.runs = False
            self._running -= 1
            _take_one(self._running_of, turn.client)
        else:
            for queue in (self._waiting, self._background):
                if turn in queue:
                    queue.remove(turn)
        self._give_next()

    def _give_next(self) -> None:
        while queue := self._waiting or self._background:
            turn = min(queue, key=lambda each: self._running_of[each.client])
            is_first = self._running_of[turn.client] == 0
            if self._running >= self._most_running + (self._spare if is_first else 0):
                return
            queue.remove(turn)
            self._give(turn)

    def _give(self, turn: Turn) -> None:
        turn.runs = True
        self._running += 1
        self._running_of[turn.client] += 1
        turn.came.set()


def _take_one(counts: Counter[str], client: str) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]
