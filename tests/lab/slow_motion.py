"""Processes that run for an eighth of the time: answers that last as long as a test needs them.

They cost no CPU while they stand still. To their cluster they are on a busy machine: what a runner
may be silent for before anybody asks is many times as long as it stands.
"""

import contextlib
import signal
import threading
from collections.abc import Generator, Iterable, Sequence

import psutil
from nodes import Node

_RUNS_S = 0.02
_STANDS_S = 0.15


def runners_of(running: Iterable[Node]) -> list[psutil.Process]:
    """The children of these nodes, without their own: helpers have nothing to do meanwhile."""
    return [child for node in running for child in psutil.Process(node.process.pid).children()]


@contextlib.contextmanager
def slowed(processes: Sequence[psutil.Process]) -> Generator[None]:
    """All run and stand at the same times meanwhile. Those that end are left out."""
    over = threading.Event()
    pacing = threading.Thread(target=_pace, args=(processes, over), daemon=True)
    pacing.start()
    try:
        yield
    finally:
        over.set()
        pacing.join()


def _pace(processes: Sequence[psutil.Process], over: threading.Event) -> None:
    while not over.wait(_RUNS_S):
        _send(processes, signal.SIGSTOP)
        _ = over.wait(_STANDS_S)
        _send(processes, signal.SIGCONT)


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
