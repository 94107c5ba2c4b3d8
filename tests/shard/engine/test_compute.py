"""The compute thread: jobs before steps, what one failure leaves, and how it ends."""

import queue
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest

from exo_node.placement.errors import ExoNodeError
from exo_node.shard.engine.compute import ComputeThread

SOON_S = 60.0
"""Far more than anything here takes; only a fault waits this long."""


class Work:
    """An engine that has some steps to do, and does them when it is told to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.left = 0
        self.calls = 0
        self.idle = threading.Event()

    def step(self) -> bool:
        self.calls += 1
        if not self.left:
            self.idle.set()
            return False
        self.left -= 1
        self.done.append("step")
        return True

    def add(self, steps: int) -> None:
        """On the compute thread."""
        self.idle.clear()
        self.left += steps


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    thread.close()


@pytest.fixture
def work(compute: ComputeThread) -> Work:
    recorder = Work()
    compute.attach(recorder.step)
    return recorder


def test_a_job_that_comes_between_steps_runs_before_the_next(
    compute: ComputeThread, work: Work
) -> None:
    first = work.step

    def step() -> bool:
        if len(work.done) == 1:
            compute.post(lambda: work.done.append("job"))
        return first()

    compute.attach(step)
    compute.post(lambda: work.add(4))
    assert work.idle.wait(SOON_S)
    assert work.done == ["step", "step", "job", "step", "step"]


def test_an_idle_thread_looks_once_after_each_job(compute: ComputeThread, work: Work) -> None:
    for _ in range(5):
        compute.submit(lambda: None).result(SOON_S)
    compute.submit(lambda: None).result(SOON_S)
    assert 1 <= work.calls <= 6
    before = compute.progress
    compute.submit(lambda: None).result(SOON_S)
    assert compute.progress - before <= 2, "looking for work is no progress"


def test_a_job_that_fails_says_so_to_its_caller_only(compute: ComputeThread) -> None:
    def failing() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compute.submit(failing).result(SOON_S)
    assert compute.submit(lambda: 3).result(SOON_S) == 3


@pytest.mark.parametrize("fault", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_job_that_would_end_the_process_ends_itself(
    compute: ComputeThread, fault: BaseException
) -> None:
    def leaving() -> None:
        raise fault

    with pytest.raises(ExoNodeError, match=type(fault).__name__):
        compute.submit(leaving).result(SOON_S)
    assert compute.submit(lambda: 3).result(SOON_S) == 3
    assert compute.alive


def test_a_job_that_was_cancelled_does_not_run(compute: ComputeThread) -> None:
    ran, release = list[int](), threading.Event()
    compute.post(lambda: ran.clear() if release.wait(SOON_S) else ran.append(0))
    waiting = compute.submit(lambda: ran.append(1))
    assert waiting.cancel()
    release.set()
    compute.submit(lambda: None).result(SOON_S)
    assert not ran


@pytest.mark.parametrize("where", ["a step", "a job that reports its own faults"])
def test_the_death_of_the_thread_is_told(where: str) -> None:
    deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    thread = ComputeThread("compute-to-die", deaths.put)

    def dying() -> NoReturn:
        raise RuntimeError("the event loop is closed")

    if where == "a step":
        thread.attach(dying)
        thread.post(lambda: None)
    else:
        thread.post(dying)
    assert str(deaths.get(timeout=SOON_S)) == "the event loop is closed"
    thread.close()
    assert not thread.alive
