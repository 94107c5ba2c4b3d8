"""Who may run and who waits, for one model on the head: bounded, in the order of arrival.

Those in the background wait for all others.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from ...placement.errors import QueueFull

MAX_RUNNING = 16
MAX_WAITING = 32


@dataclass(slots=True, eq=False)
class Turn:
    """One answer's; `Turns.leave` ends it."""

    background: bool = False
    """Its turn comes behind those that are not."""
    runs: bool = False
    came: asyncio.Event = field(default_factory=asyncio.Event)


class Turns:
    """The answers of one model. An answer that was lost runs on at once: it had its turn."""

    def __init__(self, running: int = MAX_RUNNING, waiting: int = MAX_WAITING) -> None:
        self._most_running = running
        self._most = running + waiting
        self._waiting: deque[Turn] = deque()
        self._background: deque[Turn] = deque()
        self._present = 0
        self._running = 0

    @property
    def present(self) -> int:
        return self._present

    def enter(self, *, had: bool = False, background: bool = False) -> Turn:
        """`had`: it has had its turn, on this head or another. Raises QueueFull."""
        if self._present >= self._most and not had:
            waiting = self._most - self._most_running
            raise QueueFull(f"{waiting} requests are waiting already; try again shortly")
        self._present += 1
        turn = Turn(background)
        if had:
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
        if turn.runs:
            turn.runs = False
            self._running -= 1
        else:
            for queue in (self._waiting, self._background):
                if turn in queue:
                    queue.remove(turn)
        self._give_next()

    def _give_next(self) -> None:
        while self._running < self._most_running and (queue := self._waiting or self._background):
            self._give(queue.popleft())

    def _give(self, turn: Turn) -> None:
        turn.runs = True
        self._running += 1
        turn.came.set()
