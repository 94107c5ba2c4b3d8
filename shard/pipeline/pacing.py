"""How many chunks of prompts are under way through a pipeline: as many as keep all stages busy.

More would only wait at a stage, where those of prompts that come later, in front or in the
background, would be behind them. Chunks of several prompts set out in turn.
"""

import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ...mtp.seams import Wait


@dataclass(slots=True, eq=False)
class _Ask:
    reader: int
    background: bool
    came: "Future[None]" = field(default_factory=lambda: Future[None]())


class Place:
    """One chunk's, until the last stage has computed it."""

    def __init__(self, pacing: "Pacing") -> None:
        self._pacing = pacing
        self._kept = False

    def keep(self, computed: "Future[Any]") -> None:
        """It was sent; the place is free again when that is done, with whatever result."""
        self._kept = True
        computed.add_done_callback(lambda _: self._pacing.free())

    def close(self) -> None:
        """Free now, unless it was kept."""
        if not self._kept:
            self._pacing.free()


class Pacing:
    """Of one generator. A place is free again on any thread; the rest is the compute thread's."""

    def __init__(self, stages: int) -> None:
        self._most = stages + 1  # one more than are computed, so that none waits for a message
        self._lock = threading.Lock()
        self._under_way = 0
        self._asks: deque[_Ask] = deque()
        self._present: set[int] = set()
        """Those that read and are not in the background."""

    @property
    def under_way(self) -> int:
        return self._under_way

    def place(self, reader: object, *, background: bool = False) -> Generator[Wait, None, Place]:
        """Waits until a chunk of that prompt may set out; the place must be kept or closed.

        In the background: until no other prompt is being read, too. `done` ends that.
        """
        ask = _Ask(id(reader), background)
        with self._lock:
            if not background:
                self._present.add(ask.reader)
            self._asks.append(ask)
        self._give()
        try:
            if not ask.came.done():
                yield Wait(ask.came)
        except GeneratorExit:
            self._withdraw(ask)
            raise
        return Place(self)

    def done(self, reader: object) -> None:
        """Its prompt is read, or will not be."""
        with self._lock:
            self._present.discard(id(reader))
        self._give()

    def free(self) -> None:
        with self._lock:
            self._under_way -= 1
        self._give()

    def _withdraw(self, ask: _Ask) -> None:
        with self._lock:
            if ask in self._asks:
                self._asks.remove(ask)
            else:
                self._under_way -= 1
        self._give()

    def _give(self) -> None:
        """Who gets a place is told outside the lock: what that wakes may ask at once."""
        given = list[_Ask]()
        with self._lock:
            while self._under_way < self._most and (ask := self._next()) is not None:
                self._asks.remove(ask)
                self._under_way += 1
                given.append(ask)
        for ask in given:
            ask.came.set_result(None)

    def _next(self) -> _Ask | None:
        return next((ask for ask in self._asks if not (ask.background and self._present)), None)
