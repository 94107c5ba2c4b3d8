"""Answers of a whole model on a real compute thread: cancelled early, or read slowly."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import request
from small import PROMPT, small_engine

from exo_node.mtp.types import Prefilled
from exo_node.shard.engine.answers.events import AnswerEnd
from exo_node.shard.engine.answers.text_engine import AnswerHandle, TextEngine
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.request import MAX_UNREAD_EVENTS, Parameters
from exo_node.shard.engine.scheduler import ALONE_DEPTH

CHUNK, ROWS = 64, 640
SOON_S = 60.0
"""Far more than anything here takes; only a fault waits this long."""


@dataclass(slots=True)
class Reader:
    """The events of one answer, and its end."""

    events: list[Any] = field(default_factory=list[Any])
    run: "Future[AnswerHandle]" = field(default_factory=Future)
    ended: "Future[BaseException | None]" = field(default_factory=Future)


@dataclass(slots=True)
class Served:
    """An engine and its thread."""

    compute: ComputeThread
    engine: TextEngine

    def drive(
        self, engine_request: Parameters, take: Callable[[Any], None] = lambda _: None
    ) -> Reader:
        reader = Reader()

        def deliver(event: Any) -> None:
            reader.events.append(event)
            take(event)

        run = self.engine.drive(self.compute, engine_request, deliver, reader.ended.set_result)
        reader.run.set_result(run)
        return reader

    def settled(self, count: Callable[[], int]) -> int:
        """The count once the engine has no work left."""
        before = -1
        while before < (now := self.compute.submit(count).result(SOON_S)):
            before = now
            for _ in range(200):  # it does a step after each, if there is any
                self.compute.submit(lambda: None).result(SOON_S)
        return before


@pytest.fixture
def served() -> Iterator[Served]:
    compute = ComputeThread()
    try:
        job = compute.submit(lambda: small_engine(prefill_chunk=CHUNK))
        yield Served(compute, job.result(SOON_S))
    finally:
        compute.close()


def test_a_cancelled_prompt_computes_no_more_than_the_chunk_under_way(served: Served) -> None:
    started = Future[Reader]()

    def take(event: Any) -> None:
        if isinstance(event, Prefilled) and event.rows == CHUNK:
            started.result(SOON_S).run.result(SOON_S).cancel()

    prompt = [7 * i % 4000 + 3 for i in range(ROWS)]
    started.set_result(served.drive(request(prompt), take))
    events = started.result().events
    _ = served.settled(lambda: len(events))
    assert CHUNK in [event.rows for event in events]
    assert max(event.rows for event in events) <= 2 * CHUNK
    assert served.compute.submit(served.engine.cache_bytes).result(SOON_S) == 0


def test_an_answer_pauses_for_a_slow_reader_alone(served: Served) -> None:
    tokens = MAX_UNREAD_EVENTS + 100
    slow = served.drive(request(PROMPT, 0, tokens, ignore_eos=True))
    other = served.drive(request(PROMPT[:-1], 0, 40, ignore_eos=True))
    assert other.ended.result(SOON_S) is None
    events_before = served.settled(lambda: len(slow.events))
    assert (
        MAX_UNREAD_EVENTS <= events_before < MAX_UNREAD_EVENTS + ALONE_DEPTH
    )  # what is in flight comes, too
    run = slow.run.result()
    for _ in range(events_before - MAX_UNREAD_EVENTS + 1):
        run.acknowledge()
    assert events_before < served.settled(lambda: len(slow.events)) <= events_before + ALONE_DEPTH
    for _ in range(events_before):
        run.acknowledge()
    assert slow.ended.result(SOON_S) is None
    assert isinstance(slow.events[-1], AnswerEnd)
    assert slow.events[-1].stats.completion_tokens == tokens
