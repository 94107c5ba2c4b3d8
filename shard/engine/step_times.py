"""Seconds of plain steps as answers show them, by which the planner's figures are corrected."""

import statistics
from typing import Final

SHORT_ROWS: Final = 2048
"""Rows of a context up to which steps count: reading a longer one shows in their time."""
ENOUGH: Final = 5
"""Steps that an answer must show. A pause or a slow delivery then does not move its median."""


class StepTimes:
    """The median plain step of the last answer. Pure, no clock.

    A step is plain if it computes one row of one request and shares nothing with others.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """The median of the last answer that showed ENOUGH steps; 0 before the first."""
        self.answers = 0
        """Answers that showed ENOUGH steps."""
        self._request: object = None
        self._steps: list[float] = []
        self._last: tuple[object, float] | None = None

    def add(self, request: object, rows: int, seconds: float) -> None:
        """Adds a plain step of `request` after `rows` rows."""
        if request is not self._request:
            self._note()
            self._request = request
        if rows <= SHORT_ROWS:
            self._steps.append(seconds)

    def read(self, request: object, rows: int, now: float, *, is_plain: bool) -> None:
        """Adds a step that was read at `now`, if it and the one before are plain steps of the same
        answer: the time between them has all that a step takes."""
        before, self._last = self._last, (request, now) if is_plain else None
        if is_plain and before is not None and before[0] is request:
            self.add(request, rows, now - before[1])

    def estimate(self, request: object, seconds: float | None) -> None:
        """Counts `seconds`, if they are known, for an answer that drafted: it ends without ENOUGH
        plain steps."""
        if seconds is not None and (request is not self._request or len(self._steps) < ENOUGH):
            self._note()
            self._request, self._steps = request, [seconds] * ENOUGH

    def end(self, request: object) -> None:
        """Notes the median of an answer that has ended."""
        if request is self._request:
            self._note()

    def _note(self) -> None:
        if len(self._steps) >= ENOUGH:
            self.seconds = statistics.median(self._steps)
            self.answers += 1
        self._request, self._steps = None, []
