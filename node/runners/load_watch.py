"""Whether a runner that loads a stage still gets on: pure, fed by its reports and by ticks."""

from typing import Final

SLOWEST_BYTES_S: Final = 10_000_000
"""A large model's steps take longer: as much as one pass over its files takes at this speed."""
SILENT_PART: Final = 5
"""The part of the timeout that a runner may say nothing at all: it speaks four times a second."""
FIRST_WORD_S: Final = 60.0
"""At least so long it may take until it first speaks: Python's imports take seconds, and a multiple
of that on a busy machine or a slow disk. Never longer than the timeout."""
NEWS_S: Final = 5.0
"""Between two words to a person that it has not spoken yet."""


class LoadWatch:
    """Counts the ticks since a load last moved; ticks are this process's own, a second each.

    So a pause of this process is not taken for the runner's.
    """

    def __init__(self, timeout_s: float, size_bytes: int) -> None:
        """`size_bytes`: of the model's files."""
        self._patience_s = timeout_s + size_bytes / SLOWEST_BYTES_S
        self._silence_s = max(timeout_s / SILENT_PART, 1.0)
        self._start_s = min(timeout_s, max(self._silence_s, FIRST_WORD_S))
        self._spoke = False
        self._counted = -1
        self._still = 0.0
        self._silent = 0.0

    def heard(self, progress: int) -> None:
        """A report with what the runner counts while it reads, checks and compiles."""
        self._spoke, self._silent = True, 0.0
        if progress != self._counted:
            self._counted, self._still = progress, 0.0

    def moved(self) -> None:
        """A step that a person is shown."""
        self._spoke, self._silent, self._still = True, 0.0, 0.0

    @property
    def news(self) -> str:
        """For a person, now and then while the runner has not spoken yet; else ""."""
        if self._spoke or not self._silent or self._silent % NEWS_S:
            return ""
        return f"its runner has not spoken for {self._silent:.0f} of {self._start_s:.0f} s"

    def tick(self, seconds: float) -> str:
        """Why the load is given up; "" while it gets on."""
        self._silent += seconds
        self._still += seconds
        silence_s = self._silence_s if self._spoke else self._start_s  # Python's imports
        if self._silent >= silence_s:
            return f"it said nothing for {silence_s:.0f} s while it loaded"
        if self._still >= self._patience_s:
            return (
                f"its load did not get on for {self._patience_s:.0f} s "
                "(EXO_LOAD_TIMEOUT gives it longer)"
            )
        return ""
