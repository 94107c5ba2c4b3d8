"""How often a model and its stages failed lately, and the pause before they are loaded again."""

import time
from collections import deque
from collections.abc import Callable, Iterable

from ...placement.ids import ModelId
from ..machine.timing import PlacementTiming

COVERED = 3
"""Losses that count as one failure where a spare was ready: nothing had to be loaded."""
TRIES = 4
"""Failures in a row after which what waits for a load is told that it failed."""
_MOST = 10
"""Failures that are remembered of a stage; pauses grow no further long before."""


class RestartBackoff:
    """Counts each stage's losses apart; stage None stands for the placement as a whole.

    `clock` gives monotonic seconds.
    """

    def __init__(
        self, timing: PlacementTiming, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timing = timing
        self._clock = clock
        self._times: dict[ModelId, dict[int | None, deque[float]]] = {}
        """As many entries a failure as COVERED."""

    def note(self, model: ModelId, stage: int | None = None, *, covered: bool = False) -> None:
        """`covered`: a spare was ready to take the place of what was lost."""
        entries = 1 if covered else COVERED
        times = self._times.setdefault(model, {}).setdefault(stage, deque(maxlen=_MOST * COVERED))
        times.extend([self._clock()] * entries)

    def forget(self, model: ModelId) -> None:
        """It works, or a person said to try again."""
        _ = self._times.pop(model, None)

    def count(self, model: ModelId, stage: int | None = None) -> int:
        """Failures in a row, with no good answer between them, within `failures_within_s`."""
        since = self._clock() - self._timing.failures_within_s
        return sum(time > since for time in self._times.get(model, {}).get(stage, ())) // COVERED

    def pause_s(self, model: ModelId, stages: Iterable[int | None] = (None,)) -> float:
        """Seconds between the last failure and the next load: none after the first failure, then
        1, 2, 4, .. for the stage that failed most often."""
        failures = max((self.count(model, stage) for stage in stages), default=0)
        return 0.0 if failures < 2 else min(self._timing.max_pause_s, 2.0 ** (failures - 2))

    def remaining_s(self, model: ModelId) -> float:
        """Seconds until the placement as a whole may be loaded again; 0 where it may be now."""
        times = self._times.get(model, {}).get(None)
        return max(0.0, times[-1] + self.pause_s(model) - self._clock()) if times else 0.0
