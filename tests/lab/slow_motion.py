"""Processes that run for an eighth of the time, so that answers last as long as a test needs.

They use no CPU while suspended. Their cluster sees a busy machine: a runner may be silent for many
times as long as one suspension.
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
    """The children of these nodes, without their own children, which are idle meanwhile.

    A child that does not run its own program yet is none: its node waits for that, and would hang
    with it.
    """
    nodes = [psutil.Process(node.process.pid) for node in running]
    children = ((child, node.cmdline()) for node in nodes for child in node.children())
    return [child for child, nodes_own in children if _program(child) not in ([], nodes_own)]


def _program(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


@contextlib.contextmanager
def slowed(processes: Sequence[psutil.Process]) -> Generator[None]:
    """Suspends and resumes all processes at the same times; ended ones are skipped."""
    ended = threading.Event()
    pacing = threading.Thread(target=_pace, args=(processes, ended), daemon=True)
    pacing.start()
    try:
        yield
    finally:
        ended.set()
        pacing.join()


def _pace(processes: Sequence[psutil.Process], ended: threading.Event) -> None:
    while not ended.wait(_RUNS_S):
        _send(processes, signal.SIGSTOP)
        _ = ended.wait(_STANDS_S)
        _send(processes, signal.SIGCONT)


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
