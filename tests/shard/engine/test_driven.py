"""Answers of a whole model on a real compute thread: cancelled early, or read slowly."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import request
from small import PROMPT, small_engine

from exo_node.mtp.steps import Prefilled
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.events import Done
from exo_node.shard.engine.request import MOST_UNREAD, EngineRequest
from exo_node.shard.engine.scheduler import ALONE_DEPTH
from exo_node.shard.engine.text_engine import Driven, TextEngine

CHUNK, ROWS = 64, 640
SOON_S = 60.0
"""Far more than anything here takes; only a fault waits this long."""


@dataclass(slots=True)
class Reader:
    """What one answer delivered, and how it ended."""

    events: list[Any] = field(default_factory=list[Any])
    run: "Future[Driven]" = field(default_factory=Future)
    ended: "Future[BaseException | None]" = field(default_factory=Future)


@dataclass(slots=True)
class Served:
    """An engine and its thread."""

    compute: ComputeThread
    engine: TextEngine

    def drive(self, asked: EngineRequest, take: Callable[[Any], None] = lambda _: None) -> Reader:
        reader = Reader()

        def deliver(event: Any) -> None:
            reader.events.append(event)
            take(event)

        run = self.engine.drive(self.compute, asked, deliver, reader.ended.set_result)
        reader.run.set_result(run)
        return reader

    def settled(self, count: Callable[[], int]) -> int:
        """What is counted once the engine has no work left."""
        before = -1
        while before < (now := self.compute.submit(count).result(SOON_S)):
            before = now
            for _ in range(200):  # it does a step behind each, if there is any
                self.compute.submit(lambda: None).result(SOON_S)
        return before


@pytest.fixture
def served() -> Iterator[Served]:
    compute = ComputeThread()
    try:
        made = compute.submit(lambda: small_engine(prefill_chunk=CHUNK))
        yield Served(compute, made.result(SOON_S))
    finally:
        compute.close()


def test_a_cancelled_prompt_computes_no_more_than_the_chunk_under_way(served: Served) -> None:
    started = Future[Reader]()

    def take(event: Any) -> None:
        if isinstance(event, Prefilled) and event.done == CHUNK:
            started.result(SOON_S).run.result(SOON_S).cancel()

    prompt = [7 * i % 4000 + 3 for i in range(ROWS)]
    started.set_result(served.drive(request(prompt), take))
    events = started.result().events
    _ = served.settled(lambda: len(events))
    assert CHUNK in [event.done for event in events]
    assert max(event.done for event in events) <= 2 * CHUNK
    assert served.compute.submit(served.engine.cache_bytes).result(SOON_S) == 0


def test_an_answer_pauses_for_a_slow_reader_alone(served: Served) -> None:
    tokens = MOST_UNREAD + 100
    slow = served.drive(request(PROMPT, 0, tokens, ignore_end=True))
    other = served.drive(request(PROMPT[:-1], 0, 40, ignore_end=True))
    assert other.ended.result(SOON_S) is None
    told = served.settled(lambda: len(slow.events))
    assert MOST_UNREAD <= told < MOST_UNREAD + ALONE_DEPTH  # what is in flight comes, too
    run = slow.run.result()
    for _ in range(told - MOST_UNREAD + 1):
        run.read()
    assert told < served.settled(lambda: len(slow.events)) <= told + ALONE_DEPTH
    for _ in range(told):
        run.read()
    assert slow.ended.result(SOON_S) is None
    assert isinstance(slow.events[-1], Done)
    assert slow.events[-1].stats.completion_tokens == tokens
