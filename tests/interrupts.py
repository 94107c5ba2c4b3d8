"""Children that Ctrl-C ends, although these tests run where it is ignored (nohup, cron, `&`)."""

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def ending_on_interrupt() -> Generator[None]:
    """A process that is started in this block does not inherit that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        _ = signal.signal(signal.SIGINT, before)
