"""The compute thread: who runs when, what a cancellation closes, and what one failure leaves."""

import queue
import re
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from exo_node.mtp.seams import Wait
from exo_node.mtp.steps import Prefilled
from exo_node.placement.errors import ExoNodeError
from exo_node.shard.engine.compute import OUTBOX_LIMIT, ComputeThread, Run, Turns

SOON_S = 60.0
"""Far more than anything here takes; only a fault waits this long."""

SETTLING_TURNS = 2 * OUTBOX_LIMIT

Steps = Generator[Any, None, None]


@dataclass(slots=True)
class Outcome:
    """What one generation delivered and how it ended."""

    items: list[Any] = field(default_factory=list[Any])
    endings: list[BaseException | None] = field(default_factory=list[BaseException | None])
    over: threading.Event = field(default_factory=threading.Event)

    def done(self, fault: BaseException | None) -> None:
        self.endings.append(fault)
        self.over.set()

    def wait(self) -> BaseException | None:
        """How it ended; fails the test where it does not, or more than once."""
        assert self.over.wait(SOON_S), "the generation did not end"
        assert len(self.endings) == 1
        return self.endings[0]


class Compute:
    """A compute thread that can be held, so that what comes meanwhile is all there at once."""

    def __init__(self) -> None:
        self.thread = ComputeThread(clock=lambda: 0.0)

    def drive(self, steps: Steps) -> tuple[Run, Outcome]:
        outcome = Outcome()
        return self.thread.drive(steps, outcome.items.append, outcome.done), outcome

    def held(self) -> "Held":
        return Held(self.thread)

    def settle(self) -> None:
        """Returns after every generation that could run had `SETTLING_TURNS` turns."""
        assert self.drive(_turns())[1].wait() is None


def _turns() -> Steps:
    future: Future[None] = Future()
    future.set_result(None)
    for _ in range(SETTLING_TURNS):
        yield Wait(future)


class Held:
    """While it is open the thread is inside one job."""

    def __init__(self, thread: ComputeThread) -> None:
        self._thread = thread
        self._release = threading.Event()

    def __enter__(self) -> None:
        entered = threading.Event()

        def hold() -> None:
            entered.set()
            assert self._release.wait(SOON_S)

        _ = self._thread.submit(hold)
        assert entered.wait(SOON_S)

    def __exit__(self, *_: object) -> None:
        self._release.set()


@pytest.fixture
def compute() -> Iterator[Compute]:
    made = Compute()
    yield made
    made.thread.close()


def counting(name: str, log: list[str], count: int = 3) -> Steps:
    for number in range(count):
        log.append(f"{name}{number}")
        yield number


@dataclass(slots=True)
class Closing:
    """A generation that never ends by itself and notes how it was closed."""

    first: object = None
    seen: list[str] = field(default_factory=list[str])

    def steps(self) -> Steps:
        try:
            if self.first is not None:
                yield self.first
            while True:
                yield "item"
        except GeneratorExit:
            self.seen.append("GeneratorExit")
            raise
        finally:
            self.seen.append(threading.current_thread().name)


def test_jobs_run_before_the_next_step_of_a_generation(compute: Compute) -> None:
    log: list[str] = []
    with compute.held():
        _, outcome = compute.drive(counting("a", log))
        jobs = [compute.thread.submit(lambda: log.append("job")) for _ in range(3)]
    assert outcome.wait() is None
    assert all(job.done() for job in jobs)
    assert log == ["job", "job", "job", "a0", "a1", "a2"]


def test_a_job_that_comes_between_steps_runs_before_the_next(compute: Compute) -> None:
    log: list[str] = []

    def steps() -> Steps:
        log.append("step")
        _ = compute.thread.submit(lambda: log.append("job"))
        yield 0
        log.append("step")
        yield 1

    assert compute.drive(steps())[1].wait() is None
    assert log == ["step", "job", "step"]


def test_generations_take_turns(compute: Compute) -> None:
    log: list[str] = []
    with compute.held():
        outcomes = [compute.drive(counting(name, log))[1] for name in "abc"]
    assert [outcome.wait() for outcome in outcomes] == [None] * 3
    # Each begins by what may be a chunk of its prompt: between two, all that answer have a turn.
    assert log == ["a0", "a1", "b0", "a2", "b1", "c0", "b2", "c1", "c2"]
    assert [outcome.items for outcome in outcomes] == [[0, 1, 2]] * 3


def test_prompts_hold_up_those_that_answer_for_one_chunk_at_a_time(compute: Compute) -> None:
    log: list[str] = []

    def reading(name: str) -> Steps:
        for chunk in range(3):
            log.append(name)
            yield Prefilled(chunk, 4)

    def answering(name: str) -> Steps:
        yield Prefilled(1, 1)
        for _ in range(30):
            log.append(name)
            yield 0

    with compute.held():
        given = [answering("a"), answering("b"), reading("X"), reading("Y"), reading("Z")]
        outcomes = [compute.drive(steps)[1] for steps in given]
    assert [outcome.wait() for outcome in outcomes] == [None] * 5
    told = "".join(log)
    between = re.split("[XYZ]", told)[1:-1]
    assert between == ["ab"] * 8
    assert re.sub("[ab]", "", told) == "XYZXYZXYZ"  # and no prompt waits for another's end


def _made(*, reads: bool) -> Run:
    made = Run(counting("", []), lambda _: None, lambda _: None, lambda _: None)
    made.reads = reads
    return made


def test_who_only_waits_does_not_hold_up_those_that_answer() -> None:
    turns, answers = Turns(), _made(reads=False)
    waits = [_made(reads=True), _made(reads=True)]
    for each in (*waits, answers):
        turns.add(each)
    had = list[Run]()
    for _ in range(60):
        had.append(turns.next())
        if had[-1] is not answers:
            turns.spare()
        turns.add(had[-1])
    assert had.count(answers) >= 60 // 3
    assert all(had.count(each) >= 60 // 4 for each in waits)


@pytest.mark.parametrize(("chunk_s", "round_s"), [(0.13, 0.01), (0.02, 0.012), (0.001, 0.03)])
@pytest.mark.parametrize("prompts", [1, 5])
def test_while_prompts_are_read_answers_keep_half_of_their_speed(
    chunk_s: float, round_s: float, prompts: int
) -> None:
    turns, answer = Turns(), _made(reads=False)
    reading = [_made(reads=True) for _ in range(prompts)]
    for each in (*reading, answer):
        turns.add(each)
    had = {"chunk": 0.0, "round": 0.0}
    gaps, gap = list[float](), 0.0
    while sum(had.values()) < 20:
        run = turns.next()
        kind, seconds = ("round", round_s) if run is answer else ("chunk", chunk_s)
        turns.took(seconds)
        had[kind] += seconds
        gap += seconds
        if kind == "round":
            gaps.append(gap)
            gap = 0.0
        turns.add(run)
    assert had["round"] >= had["chunk"] * 0.99
    chunks = had["chunk"] / chunk_s
    assert had["round"] <= had["chunk"] + chunks * round_s + 0.2, "prompts have the rest"
    assert max(gaps) <= chunk_s + round_s + 1e-9


def test_an_answer_that_comes_later_is_owed_nothing_for_chunks_before_it() -> None:
    turns, reading, answer = Turns(), _made(reads=True), _made(reads=False)
    turns.add(reading)
    for _ in range(9):
        turns.add(turns.next())
        turns.took(1.0)
    turns.add(answer)
    told = list[Run]()
    for _ in range(4):
        told.append(turns.next())
        turns.took(1.0 if told[-1] is reading else 0.5)
        turns.add(told[-1])
    assert told == [answer, answer, reading, answer] or told == [answer, reading, answer, answer]


def test_an_answer_whose_round_is_back_sets_out_before_the_next_chunk(compute: Compute) -> None:
    """What it waits for is done in the middle of the second chunk."""
    log: list[str] = []
    back: Future[None] = Future()

    def reading() -> Steps:
        for chunk in range(4):
            if chunk == 1:
                back.set_result(None)
            log.append("X")
            yield Prefilled(chunk, 9)

    def answering() -> Steps:
        yield Prefilled(1, 1)
        log.append("out")
        yield Wait(back)
        log.append("round")
        yield 0
        yield Wait.a_turn()  # for others that set out with it
        log.append("out")
        yield Wait(Future())

    with compute.held():
        _ = compute.drive(answering())
        _, outcome = compute.drive(reading())
    assert outcome.wait() is None
    assert " ".join(log) in ("out X X round out X X", "X out X round out X X")


def test_an_answer_has_no_second_turn_before_the_next_chunk(compute: Compute) -> None:
    log: list[str] = []

    def reading() -> Steps:
        for chunk in range(8):
            log.append("X")
            yield Prefilled(chunk, 9)

    def answering() -> Steps:
        """Each of its rounds is back at once: other nodes are fast."""
        yield Prefilled(1, 1)
        for _ in range(64):
            log.append("a")
            back: Future[None] = Future()
            back.set_result(None)
            yield Wait(back)
            yield 0

    with compute.held():
        _ = compute.drive(answering())
        _, outcome = compute.drive(reading())
    assert outcome.wait() is None
    told = "".join(log)
    assert re.fullmatch("(aa?X){8}a*", told), told


def test_an_answer_that_waited_once_takes_turns_as_the_others_do(compute: Compute) -> None:
    log: list[str] = []

    def reading() -> Steps:
        for chunk in range(8):
            log.append("X")
            yield Prefilled(chunk, 9)

    def answering() -> Steps:
        yield Prefilled(1, 1)
        admitted: Future[None] = Future()
        admitted.set_result(None)
        yield Wait(admitted)
        for _ in range(64):
            log.append("a")
            yield 0

    with compute.held():
        _ = compute.drive(answering())
        _, outcome = compute.drive(reading())
    assert outcome.wait() is None
    told = "".join(log)
    assert re.fullmatch("X?a{1,4}X(aX){6,7}a*", told), told


def test_one_that_gives_the_others_a_turn_does_not_pass_them(compute: Compute) -> None:
    log: list[str] = []

    def answering(name: str) -> Steps:
        yield Prefilled(1, 1)
        for _ in range(3):
            yield 0
        for _ in range(4):
            log.append(name)
            yield Wait.a_turn() if name == "a" else 0

    with compute.held():
        outcomes = [compute.drive(answering(name))[1] for name in "bca"]
    assert [outcome.wait() for outcome in outcomes] == [None] * 3
    assert "aa" not in "".join(log).rstrip("a")


def test_prompts_in_the_background_are_read_last(compute: Compute) -> None:
    log: list[str] = []

    def reading(name: str) -> Steps:
        for chunk in range(3):
            log.append(name)
            yield Prefilled(chunk, 4)

    with compute.held():
        outcomes = [Outcome() for _ in "bp"]
        for name, outcome in zip("bp", outcomes, strict=True):
            steps, behind = reading(name), name == "b"
            _ = compute.thread.drive(steps, outcome.items.append, outcome.done, background=behind)
    assert [outcome.wait() for outcome in outcomes] == [None] * 2
    assert "".join(log) == "pppbbb"


def test_a_generation_that_waits_lets_the_others_run_and_goes_on_afterwards(
    compute: Compute,
) -> None:
    future: Future[str] = Future()
    log: list[str] = []

    def waiting() -> Steps:
        yield Wait(future)
        yield future.result()

    _, parked = compute.drive(waiting())
    _, other = compute.drive(counting("a", log, 50))
    assert other.wait() is None
    assert parked.items == [] and not parked.over.is_set()
    future.set_result("answer")
    assert parked.wait() is None
    assert parked.items == ["answer"], "a Wait is not for the reader"


def test_a_future_that_is_done_already_does_not_park(compute: Compute) -> None:
    future: Future[int] = Future()
    future.set_result(7)

    def steps() -> Steps:
        yield Wait(future)
        yield future.result()

    outcome = compute.drive(steps())[1]
    assert outcome.wait() is None
    assert outcome.items == [7]


def test_an_idle_thread_makes_no_turns_for_what_waits(compute: Compute) -> None:
    closing = Closing(Wait(Future()))
    run, _ = compute.drive(closing.steps())
    compute.settle()
    before = compute.thread.progress
    compute.settle()
    # One turn for each step of the settling itself and one for its end.
    assert compute.thread.progress - before <= SETTLING_TURNS + 2
    run.cancel()


def waiting_for_a_future(compute: Compute, closing: Closing) -> tuple[Run, Outcome]:
    future: Future[None] = Future()
    closing.first = Wait(future)
    started = compute.drive(closing.steps())
    compute.settle()
    return started


def paused_by_its_reader(compute: Compute, closing: Closing) -> tuple[Run, Outcome]:
    run, outcome = compute.drive(closing.steps())
    compute.settle()
    assert len(outcome.items) == OUTBOX_LIMIT
    return run, outcome


def running(compute: Compute, closing: Closing) -> tuple[Run, Outcome]:
    started = threading.Event()
    outcome = Outcome()

    def deliver(item: object) -> None:
        run.read()
        started.set()

    held = compute.held()
    with held:  # `run` must be bound before the first item is delivered
        run = compute.thread.drive(closing.steps(), deliver, outcome.done)
    assert started.wait(SOON_S)
    return run, outcome


@pytest.mark.parametrize("state", [waiting_for_a_future, paused_by_its_reader, running])
def test_a_cancellation_closes_the_generator_on_the_compute_thread_once(
    compute: Compute, state: Callable[[Compute, Closing], tuple[Run, Outcome]]
) -> None:
    closing = Closing()
    run, outcome = state(compute, closing)
    for _ in range(3):
        run.cancel()
    assert outcome.wait() is None
    compute.settle()
    run.cancel()
    compute.settle()
    assert closing.seen == ["GeneratorExit", "compute"]
    assert len(outcome.endings) == 1


def test_a_future_that_ends_after_the_cancellation_wakes_nothing(compute: Compute) -> None:
    future: Future[None] = Future()
    closing = Closing(Wait(future))
    run, outcome = compute.drive(closing.steps())
    compute.settle()
    run.cancel()
    assert outcome.wait() is None
    future.set_result(None)
    compute.settle()
    assert outcome.items == []
    assert len(outcome.endings) == 1


def test_a_run_that_is_cancelled_before_its_first_step_is_closed(compute: Compute) -> None:
    log: list[str] = []
    with compute.held():
        run, outcome = compute.drive(counting("a", log))
        run.cancel()
    assert outcome.wait() is None
    assert log == [] and outcome.items == []


def test_a_cancellation_after_the_end_changes_nothing(compute: Compute) -> None:
    run, outcome = compute.drive(counting("a", []))
    assert outcome.wait() is None
    run.cancel()
    compute.settle()
    assert outcome.endings == [None]


def test_an_exception_ends_one_generation_and_leaves_the_others(compute: Compute) -> None:
    log: list[str] = []

    def failing() -> Steps:
        yield 0
        raise ZeroDivisionError("one request's")

    with compute.held():
        _, bad = compute.drive(failing())
        _, good = compute.drive(counting("a", log, 20))
    assert isinstance(bad.wait(), ZeroDivisionError)
    assert good.wait() is None
    assert bad.items == [0] and len(good.items) == 20


def test_a_job_that_fails_says_so_to_its_caller_only(compute: Compute) -> None:
    def failing() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compute.thread.submit(failing).result(SOON_S)
    assert compute.thread.submit(lambda: 3).result(SOON_S) == 3


@pytest.mark.parametrize("fault", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_job_that_would_end_the_process_ends_itself(
    compute: Compute, fault: BaseException
) -> None:
    def leaving() -> None:
        raise fault

    with pytest.raises(ExoNodeError, match=type(fault).__name__):
        compute.thread.submit(leaving).result(SOON_S)
    assert compute.thread.submit(lambda: 3).result(SOON_S) == 3
    assert compute.thread.alive


@pytest.mark.parametrize("fault", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_generation_that_would_end_the_process_ends_itself(
    compute: Compute, fault: BaseException
) -> None:
    def leaving() -> Steps:
        yield 0
        raise fault

    log: list[str] = []
    with compute.held():
        _, bad = compute.drive(leaving())
        _, good = compute.drive(counting("a", log, 20))
    assert isinstance(bad.wait(), ExoNodeError)
    assert good.wait() is None and len(good.items) == 20


def test_a_generation_that_would_end_the_process_as_it_is_closed_ends_itself(
    compute: Compute,
) -> None:
    def stubborn() -> Steps:
        try:
            yield Wait(Future())
        finally:
            raise SystemExit(1)

    run, outcome = compute.drive(stubborn())
    compute.settle()
    run.cancel()
    assert isinstance(outcome.wait(), ExoNodeError)
    assert compute.thread.submit(lambda: 3).result(SOON_S) == 3


def test_the_death_of_the_thread_is_told() -> None:
    deaths: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    thread = ComputeThread("compute-to-die", deaths.put)

    def deliver(_: object) -> None:
        raise RuntimeError("the event loop is closed")

    _ = thread.drive(counting("a", []), deliver, lambda _: None)
    assert str(deaths.get(timeout=SOON_S)) == "the event loop is closed"
    thread.close()
    assert not thread.alive


def test_an_exception_on_the_way_out_is_reported(compute: Compute) -> None:
    def stubborn() -> Steps:
        try:
            yield Wait(Future())
        finally:
            raise ZeroDivisionError

    run, outcome = compute.drive(stubborn())
    compute.settle()
    run.cancel()
    assert isinstance(outcome.wait(), ZeroDivisionError)


def test_a_reader_that_does_not_read_pauses_its_own_generation_only(compute: Compute) -> None:
    run, outcome = compute.drive(counting("a", [], OUTBOX_LIMIT + 100))
    _, other = compute.drive(counting("b", [], 5))
    assert other.wait() is None
    compute.settle()
    assert len(outcome.items) == OUTBOX_LIMIT
    run.read()
    compute.settle()
    assert len(outcome.items) == OUTBOX_LIMIT + 1
    run.read(50)
    compute.settle()
    assert len(outcome.items) == OUTBOX_LIMIT + 51
    run.read(OUTBOX_LIMIT)
    assert outcome.wait() is None
    assert outcome.items == list(range(OUTBOX_LIMIT + 100))


def test_close_ends_the_thread() -> None:
    thread = ComputeThread("compute-to-close")
    _ = thread.drive(Closing(Wait(Future())).steps(), lambda _: None, lambda _: None)
    thread.close()
    assert "compute-to-close" not in {each.name for each in threading.enumerate()}
