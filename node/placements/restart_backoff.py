"""How often a model's placement failed lately, and what follows: a pause, or no more by itself."""

import time
from collections import deque
from collections.abc import Callable

from ...placement.ids import ModelId
from ..machine.timing import PlacementTiming

MAX_FAILURES = 3
"""In a row, with no good answer between them, within `failures_within_s`."""
COVERED = 3
"""Losses that count as one failure where a spare was ready: nothing had to be loaded."""


class RestartBackoff:
    """Counts by model; `clock` gives monotonic seconds."""

    def __init__(
        self, timing: PlacementTiming, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timing = timing
        self._clock = clock
        self._when: dict[ModelId, deque[float]] = {}
        """As many entries a failure as COVERED."""

    def note(self, model: ModelId, *, covered: bool = False) -> None:
        """`covered`: a spare was ready to take the place of what was lost."""
        entries = 1 if covered else COVERED
        when = self._when.setdefault(model, deque(maxlen=MAX_FAILURES * COVERED))
        when.extend([self._clock()] * entries)

    def forget(self, model: ModelId) -> None:
        """It works, or a person said to try again."""
        _ = self._when.pop(model, None)

    def count(self, model: ModelId) -> int:
        since = self._clock() - self._timing.failures_within_s
        return sum(when > since for when in self._when.get(model, ())) // COVERED

    def too_many(self, model: ModelId) -> bool:
        return self.count(model) >= MAX_FAILURES

    def pause_s(self, model: ModelId) -> float:
        """Seconds to wait before the next load: none after the first failure, then 1, 2, 4, .."""
        failures = self.count(model)
        return 0.0 if failures < 2 else min(self._timing.max_pause_s, 2.0 ** (failures - 2))
