"""The progress of a runner that loads a stage, by its reports, its CPU time and ticks."""

from typing import Final

import psutil

SLOWEST_BYTES_S: Final = 10_000_000
"""The reading speed by which a model's size lengthens the timeout: large ones take longer."""
SILENT_PART: Final = 5
"""A runner may be silent for the timeout divided by this; it reports four times a second."""
FIRST_REPORT_S: Final = 60.0
"""The least time for the first report, within the timeout: Python's imports take seconds, and a
multiple of that on a busy machine or a slow disk."""
COMPUTING: Final = 0.02
"""The share of a core from which on a process computes: one that only reports uses less."""
NOTICE_S: Final = 5.0
"""The time between two notices to a person that the first report is still missing."""


def cpu_seconds(pid: int) -> float:
    """User and system time of the process, without its children's; 0.0 where it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process: it neither computes nor waits for a disk."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def idle_s(seconds: float, cpu_s: float) -> float:
    """The seconds by which a process that used `cpu_s` of CPU time has come nearer to its end.

    One that computes is given its patience in CPU time: on a busy machine it gets little of that,
    and one that runs in circles ends all the same.
    """
    return min(cpu_s, seconds) if cpu_s >= COMPUTING * seconds else seconds


class LoadWatch:
    """The ticks of this process since the load last advanced.

    A pause of this process stops its ticks too, so it does not count as the runner's.
    """

    def __init__(self, timeout_s: float, size_bytes: int) -> None:
        """`size_bytes` is the size of the model's files."""
        self._patience_s = timeout_s + size_bytes / SLOWEST_BYTES_S
        self._silence_s = max(timeout_s / SILENT_PART, 1.0)
        self._start_s = min(timeout_s, max(self._silence_s, FIRST_REPORT_S))
        self._has_reported = False
        self._progress = -1
        self._stalled_s = 0.0
        self._silent_s = 0.0
        self._notice_s = NOTICE_S

    def report_progress(self, progress: int) -> None:
        """Takes a report with the runner's count of reading, checking and compiling."""
        self._has_reported, self._silent_s = True, 0.0
        if progress != self._progress:
            self._progress, self._stalled_s = progress, 0.0

    def report_step(self) -> None:
        """Takes a report of a new step, which is progress."""
        self._has_reported, self._silent_s, self._stalled_s = True, 0.0, 0.0

    def notice(self) -> str:
        """A text for a person, every NOTICE_S before the first report; else ""."""
        if self._has_reported or self._silent_s < self._notice_s:
            return ""
        self._notice_s += NOTICE_S
        return f"its runner has not spoken for {self._silent_s:.0f} of {self._start_s:.0f} s"

    def tick(self, seconds: float, cpu_s: float = 0.0) -> str:
        """Counts the time, in which the runner used `cpu_s` of CPU time; returns the reason to end
        the load, "" while there is none."""
        self._silent_s += idle_s(seconds, cpu_s)
        self._stalled_s += idle_s(seconds, cpu_s)
        silence_s = self._silence_s if self._has_reported else self._start_s  # Python's imports
        if self._silent_s >= silence_s:
            return f"it said nothing for {silence_s:.0f} s while it loaded"
        if self._stalled_s >= self._patience_s:
            return (
                f"its load did not get on for {self._patience_s:.0f} s "
                "(EXO_LOAD_TIMEOUT gives it longer)"
            )
        return ""
