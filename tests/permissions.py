"""File permissions that hold for root too, by dropping its right to override them.

On Linux that right is a capability of each thread, which new threads and the executors of a new
event loop take over. Elsewhere, and for other users, permissions hold as they are.
"""

import ctypes
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
_OVERRIDE = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextmanager
def permissions_hold() -> Generator[None]:
    """Drops the right for this thread and the threads that it starts."""
    if sys.platform != "linux" or os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = _Header(_VERSION_3, 0), (_Data * 2)()
    assert libc.capget(ctypes.byref(header), before) == 0
    without = (_Data * 2).from_buffer_copy(before)
    without[0].effective &= ~_OVERRIDE
    assert libc.capset(ctypes.byref(header), without) == 0
    try:
        yield
    finally:
        assert libc.capset(ctypes.byref(header), before) == 0
