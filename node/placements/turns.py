"""The turns of one model's answers on the head: bounded, and shared fairly by clients.

A turn goes to the client with the fewest running answers, and among those in the order of arrival.
Answers in the background wait for all others.
"""

import asyncio
from collections import Counter
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
    """Its turn comes after those that are not."""
    client: str = ""
    runs: bool = False
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def give(self) -> None:
        self.runs = True
        self.came.set()


class Turns:
    """The answers of one model. An answer that was lost runs on at once: it had its turn."""

    def __init__(
        self, running: int = MAX_RUNNING, waiting: int = MAX_WAITING, spare: int = SPARE
    ) -> None:
        self._running_each = self._most_running = running
        self._waiting_places = waiting
        self._spare = spare
        self._turns: list[Turn] = []
        self._queue: list[Turn] = []
        """Turns that ask to run, in the order of arrival."""

    @property
    def present(self) -> int:
        return len(self._turns)

    def set_replicas(self, count: int) -> None:
        """Lets each of the model's placements run as many answers."""
        self._most_running = self._running_each * max(1, count)
        self._give_next()

    def enter(
        self, *, is_resumed: bool = False, background: bool = False, client: str = ""
    ) -> Turn:
        """`is_resumed`: it has had its turn, on this head or another. Raises QueueFull."""
        is_known = any(turn.client == client for turn in self._turns)
        most = self._most_running + self._waiting_places
        places = most + (0 if is_known else SPARE_PLACES)
        if len(self._turns) >= places and not is_resumed:
            raise QueueFull(
                f"{self._waiting_places} requests are waiting already; try again shortly"
            )
        turn = Turn(background, client)
        self._turns.append(turn)
        if is_resumed:
            turn.give()
        return turn

    def ask(self, turn: Turn) -> None:
        """Its model is loaded: `came` is set once it may run."""
        if not turn.runs and turn not in self._queue:
            self._queue.append(turn)
            self._give_next()

    def leave(self, turn: Turn) -> None:
        self._turns.remove(turn)
        if turn in self._queue:
            self._queue.remove(turn)
        turn.runs = False
        self._give_next()

    def _give_next(self) -> None:
        running = Counter(turn.client for turn in self._turns if turn.runs)
        while self._queue:
            turn = min(self._queue, key=lambda each: (each.background, running[each.client]))
            spare = 0 if running[turn.client] else self._spare
            if running.total() >= self._most_running + spare:
                return
            self._queue.remove(turn)
            turn.give()
            running[turn.client] += 1
