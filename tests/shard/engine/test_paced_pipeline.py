"""A prompt beside answers in a pipeline: who waits for whom, in virtual time, on real stages.

Compute threads take turns of virtual time: who computes what when is no chance. Services, ring,
queues, engine and models are the real ones; streams and clocks are not. A forward over a chunk
takes CHUNK_S of its stage's time, one over rows of answers ROW_S; on the last stage `slow` times
as long.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from engines import request
from pipelines import small_parts, small_pipeline, stage_specs
from small import LAYERS, PROMPT, small_checkpoint

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.events import Delta
from exo_node.shard.engine.answers.text_engine import AnswerHandle
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.pipeline import ring
from exo_node.shard.runner.stage_service import Incoming, RingService, StageService
from exo_node.shard.runner.worker_service import WorkerService

CHUNK_S, ROW_S = 1.0, 0.125
ROWS = 4
"""Rows of a chunk."""


@dataclass(frozen=True, slots=True)
class Forward:
    """That one stage began."""

    at: float
    stage: int
    rows: int
    first_id: int

    @property
    def is_chunk(self) -> bool:
        return self.rows > 1


@dataclass(slots=True, eq=False)
class PacedAnswer:
    """The tokens of one answer, and their times."""

    handle: AnswerHandle | None = None
    ids: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    ended: list[BaseException | None] = field(default_factory=list[BaseException | None])

    def gap(self, since: float, until: float) -> float:
        inside = [since, *(when for when in self.times if since < when < until), until]
        return max(b - a for a, b in itertools.pairwise(inside))


class _Thread:
    """A compute thread: one piece of work at a time, each as long as its forwards take."""

    def __init__(self, world: "PacedPipeline") -> None:
        self._world = world
        self._inbox: deque[Callable[[], None]] = deque()
        self._step: Callable[[], bool] | None = None
        self._has_work = False
        self._busy = False

    def post(self, run: Callable[[], None]) -> None:
        self._inbox.append(run)
        self.advance()

    def attach(self, step: Callable[[], bool]) -> None:
        self._step = step

    def advance(self) -> None:
        if self._busy or not (self._inbox or self._has_work):
            return
        self._busy = True
        self._world.begin()
        self._work()
        callbacks = self._world.end_of_work()
        self._world.later(self._world.taken_s, lambda: self._ended(callbacks))

    def _ended(self, callbacks: Sequence[Callable[[], None]]) -> None:
        for each in callbacks:
            each()
        self._busy = False
        self.advance()

    def _work(self) -> None:
        """Runs like `ComputeThread`: the first job, then one step."""
        if self._inbox:
            self._inbox.popleft()()
            self._has_work = self._step is not None
        else:
            assert self._step is not None
            self._has_work = self._step()


class PacedPipeline:
    """`stages` stages of the small model. It is also the event loop of all of them."""

    def __init__(self, patch: pytest.MonkeyPatch, stages: int, slow: int = 1) -> None:
        self.now = 0.0
        self.taken_s = 0.0
        self.left_over: list[Callable[[], None]] | None = None
        """Calls for the loop from a thread at work: they run at the end of its work."""
        self.log: list[Forward] = []
        self._asked: list[PacedAnswer] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._patch(patch)
        self.stages = stages
        self.slow = slow
        self._build([LAYERS * i // stages for i in range(stages + 1)])

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        hidden = StageModel.hidden

        def timed(model: StageModel, ids: Any, *rest: Any) -> Any:
            rows = ids.shape[1]
            stage = self._firsts.index(model.first)
            self.log.append(Forward(self.now, stage, rows, ids[0, 0].item()))
            times = self.slow if stage == self.stages - 1 else 1
            self.taken_s += times * (CHUNK_S if rows > 1 else ROW_S)
            return hidden(model, ids, *rest)

        patch.setattr(StageModel, "hidden", timed)
        patch.setattr(asyncio, "get_running_loop", lambda: self)

    def _build(self, bounds: Sequence[int]) -> None:
        self._firsts = bounds[:-1]
        self.threads = [_Thread(self) for _ in range(self.stages)]
        limits = [part.expected for part in small_parts(tuple(bounds), ROWS)]
        self.ring = ring.Ring("p1", "float32", limits[0].hidden_size)
        pipeline = small_pipeline(bounds, chunk=ROWS, link=self.ring, clock=self.clock)
        self.engine, self._workers = pipeline.engine, pipeline.workers
        specs = stage_specs(small_checkpoint(), bounds, prefill_chunk=ROWS)
        ends = [_Stream(self, (i + 1) % self.stages) for i in range(self.stages)]
        self.services: list[StageService] = [
            RingService(specs[0], limits[0], cast("Any", None), self.ring)
        ]
        for i, worker in enumerate(self._workers, 1):
            compute, end = cast("Any", self.threads[i]), cast("Any", ends[i])
            self.services.append(WorkerService(specs[i], limits[i], end, compute, worker))
        self._incoming = [
            Incoming(service._limits, self.stages)  # pyright: ignore[reportPrivateUsage]
            for service in self.services
        ]
        self.ring.connect(cast("Any", ends[0]))

    def clock(self) -> float:
        """Seconds, as the generator's engine sees them within a piece of its work too."""
        return self.now + (self.taken_s if self.left_over is not None else 0.0)

    def begin(self) -> None:
        """A thread begins a piece of work: what it tells the loop is heard when it has ended."""
        self.taken_s, self.left_over = 0.0, []

    def end_of_work(self) -> list[Callable[[], None]]:
        """The calls that it made for the loop."""
        frames, self.left_over = self.left_over, None
        return frames or []

    # ---- the event loop

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        if self.left_over is not None:
            self.left_over.append(lambda: call(*args))
        else:
            call(*args)

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> "_Timer":
        """Deadlines; renewals are left out, which would never end."""
        timer = _Timer()
        if seconds != ring.RENEW_S:
            self.later(seconds, lambda: None if timer.cancelled else call(*args))
        return timer

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def deliver(self, stage: int, frames: Sequence[pb.Frame]) -> None:
        for frame in frames:
            taking = self.services[stage].take(frame, self._incoming[stage])
            with pytest.raises(StopIteration):  # it never waits: no stream is ever held up
                taking.send(None)

    # ---- what tests do

    def ask(self, request: Parameters) -> PacedAnswer:
        paced_answer = PacedAnswer()

        def deliver(event: object) -> None:
            assert paced_answer.handle is not None
            paced_answer.handle.acknowledge()
            if isinstance(event, Delta):
                paced_answer.ids += event.round.tokens
                paced_answer.times.append(self.now)

        self._asked.append(paced_answer)
        compute = cast("Any", self.threads[0])
        paced_answer.handle = AnswerHandle(self.engine, compute)
        compute.attach(self.engine._engine.step)  # pyright: ignore[reportPrivateUsage]
        self.ring.listen(lambda: compute.post(lambda: None))
        handle = paced_answer.handle
        compute.post(lambda: handle.begin(request, deliver, paced_answer.ended.append))
        return paced_answer

    def until(self, condition: Callable[[], bool]) -> float:
        """The time at which it is so; fails the test where nothing happens any more."""
        while not condition():
            assert self._events, "it stands still"
            self.now, _, call = heapq.heappop(self._events)
            call()
        return self.now

    def cancel(self, paced_answer: PacedAnswer) -> None:
        assert paced_answer.handle is not None
        paced_answer.handle.cancel()

    def end(self) -> None:
        """Cancels what goes on; returns when nothing happens any more."""
        for paced_answer in self._asked:
            if not paced_answer.ended:
                self.cancel(paced_answer)
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()

    def chunks(self, stage: int, since: float = -1.0) -> list[Forward]:
        return [f for f in self.log if f.stage == stage and f.is_chunk and f.at > since]

    @property
    def held_bytes(self) -> list[int]:
        """Requests whose state each stage holds."""
        return [self.engine.live_requests, *(worker.live_requests for worker in self._workers)]

    @property
    def refused(self) -> int:
        """Failures that stages sent back."""
        return sum(incoming.up.qsize() for incoming in self._incoming)


class _Timer:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class _Stream:
    """To a stage: frames are there at once, still as bytes."""

    def __init__(self, world: PacedPipeline, stage: int) -> None:
        self._world = world
        self._stage = stage

    def send(self, frames: Iterable[pb.Frame]) -> None:
        copies = [pb.Frame.FromString(frame.SerializeToString()) for frame in frames]
        self._world.deliver(self._stage, copies)


# ---- the tests

CHUNKS = 12
"""Chunks of a long prompt."""
ANSWERS = 3


def prompt(number: int, chunks: int = CHUNKS) -> list[int]:
    """Each chunk begins with an id that tells whose it is."""
    rows = itertools.islice(itertools.cycle(PROMPT), chunks * ROWS)
    return [number if i % ROWS == 0 else token for i, token in enumerate(rows)]


def short(number: int) -> list[int]:
    return [40 + number, *PROMPT[:2]]


@pytest.fixture(params=[(2, 1), (3, 3)], ids=["two", "three, one slow"])
def pipeline(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PacedPipeline]:
    paced = PacedPipeline(monkeypatch, *request.param)
    yield paced
    paced.end()
    assert paced.held_bytes == [0] * paced.stages


def read(pipeline: PacedPipeline, number: int, **changes: bool) -> PacedAnswer:
    return pipeline.ask(request(prompt(number), max_tokens=2, ignore_eos=True, **changes))


def answers(pipeline: PacedPipeline, count: int = ANSWERS) -> list[PacedAnswer]:
    paced_answers = [
        pipeline.ask(request(short(i), max_tokens=400, ignore_eos=True)) for i in range(count)
    ]
    _ = pipeline.until(lambda: all(len(each.ids) > 3 for each in paced_answers))
    return paced_answers


def first_token(pipeline: PacedPipeline, paced_answer: PacedAnswer) -> float:
    return pipeline.until(lambda: bool(paced_answer.ids))


def of(chunks: Sequence[Forward], number: int) -> list[Forward]:
    return [chunk for chunk in chunks if chunk.first_id == number]


@pytest.mark.parametrize("prompts", [1, 3])
def test_an_answer_waits_for_a_chunk_on_each_stage_at_most(
    pipeline: PacedPipeline, prompts: int
) -> None:
    others = answers(pipeline)
    start, joined = pipeline.now, [read(pipeline, 7 + i) for i in range(prompts)]
    end = max(first_token(pipeline, each) for each in joined)
    # On each stage the chunk under way, a row of each other answer, and one of its own.
    stages = pipeline.stages - 1 + pipeline.slow
    round_s = stages * (CHUNK_S + 2 * ANSWERS * ROW_S)
    assert max(other.gap(start, end) for other in others) <= round_s
    assert pipeline.refused == 0


def test_a_prompt_waits_for_a_row_of_each_answer_after_each_chunk(
    pipeline: PacedPipeline,
) -> None:
    start, alone = pipeline.now, read(pipeline, 7)
    alone_s = first_token(pipeline, alone) - start
    # The slowest stage stood still for its first chunk only.
    assert alone_s == (CHUNKS * pipeline.slow + pipeline.stages - 1) * CHUNK_S
    _ = answers(pipeline)
    start, beside = pipeline.now, read(pipeline, 8)
    beside_s = first_token(pipeline, beside) - start
    assert beside_s <= alone_s * (1 + 1.5 * ANSWERS * ROW_S / CHUNK_S)


def test_a_prompt_passes_those_in_the_background(pipeline: PacedPipeline) -> None:
    behind = read(pipeline, 7, background=True)
    _ = pipeline.until(lambda: len(pipeline.chunks(0)) == 5)
    start, front = pipeline.now, read(pipeline, 8)
    end = first_token(pipeline, front)
    assert not behind.ids
    # Those that were under way already, and none that set out later.
    last = pipeline.stages - 1
    assert len(of(pipeline.chunks(last, start), 7)) <= pipeline.stages + 1
    assert end - start <= (CHUNKS + 2 * pipeline.stages) * pipeline.slow * CHUNK_S
    _ = pipeline.until(lambda: bool(behind.ended))
    assert behind.ended == [None]


def test_a_cancelled_prompt_stops_within_a_chunk_on_every_stage(pipeline: PacedPipeline) -> None:
    _ = answers(pipeline)
    cancelled = read(pipeline, 7)
    _ = pipeline.until(lambda: len(pipeline.chunks(pipeline.stages - 1)) >= 4 + ANSWERS)
    start = pipeline.now
    pipeline.cancel(cancelled)
    after = read(pipeline, 8)
    _ = pipeline.until(lambda: bool(after.ended))
    for stage in range(pipeline.stages):
        assert len(of(pipeline.chunks(stage, start), 7)) <= 1
    assert pipeline.refused == 0
