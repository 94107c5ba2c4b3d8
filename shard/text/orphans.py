"""The end of a process whose parent was killed while it was stopped itself."""

import ctypes
import signal
import sys
from typing import Any, Final

_SET_PARENT_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def continue_when_orphaned() -> None:
    """Has Linux continue this process when its parent ends: then it sees that and ends, too.

    A running process does not notice the signal. macOS has no such call.
    """
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None)
        _ = libc.prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGCONT))
