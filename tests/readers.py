"""Requests that are stepped beside each other, as the compute thread does, on the small model."""

import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import ORACLE, Answer, answer, engine_of, load_quietly
from small import small_spec

from exo_node.mtp.types import Round, Sampling
from exo_node.placement.errors import ExoNodeError
from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.load import Loaded

GREEDY = Sampling()
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11)
both_ways = pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
PROMPTS: list[list[int]] = [row["prompt_ids"] for row in ORACLE]


@functools.cache
def loaded() -> Loaded:
    return load_quietly(small_spec(native_mtp=True))


def engine(
    runs_ahead: bool | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **changes: Any,
) -> TextEngine:
    """`runs_ahead`: True as on a GPU, False as on a CPU, None as where the test runs. `clock`: of
    the engine, which shares time between prompts and answers by it."""
    spec = small_spec(native_mtp=True, prefill_chunk=160, **changes)
    text_engine = engine_of(loaded(), spec, runs_ahead=runs_ahead, clock=clock)
    text_engine.measurements.batch_identity = "bitwise"  # as measurements find
    text_engine.measurements.shares_prompts = True
    return text_engine


def prompt(number: int, rows: int = 0) -> list[int]:
    """One of the oracle's, or so many ids."""
    if not rows:
        return PROMPTS[number % len(PROMPTS)]
    draw = random.Random(number)
    return [draw.randrange(3, 4000) for _ in range(rows)]


@dataclass(slots=True)
class Reader:
    """One request that is stepped beside others, as the compute thread does."""

    request: Parameters
    begins: int = 0
    """The turn at which it comes."""
    ends: int | None = None
    """The turn at which it is cancelled."""
    stalls: range = range(0)
    """Turns at which it does not read."""
    ids: list[int] = field(default_factory=list[int])
    rounds: list[Round] = field(default_factory=list[Round])
    end: AnswerEnd | None = None
    fault: BaseException | None = None

    def take(self, event: object) -> None:
        if isinstance(event, Delta):
            self.ids += event.round.tokens
            self.rounds.append(event.round)
        elif isinstance(event, AnswerEnd):
            self.end = event


def together(
    served: TextEngine, readers: Sequence[Reader], each: Callable[[int], None] = lambda _: None
) -> None:
    """Steps all of them in turn until each ended."""
    running = {id(r): served.generate(r.request) for r in readers}
    live = list(readers)
    for turn in range(100_000):
        if not live:
            return
        for reader in list(live):
            if turn < reader.begins or turn in reader.stalls:
                continue
            if turn == reader.ends:
                running[id(reader)].close()
                live.remove(reader)
                continue
            try:
                event = next(running[id(reader)])
            except StopIteration:
                live.remove(reader)
            except ExoNodeError as fault:
                reader.fault = fault
                live.remove(reader)
            else:
                reader.take(event)
        each(turn)
    raise AssertionError("they do not end")


def alone(engine_request: Parameters) -> Answer:
    return answer(engine(batching=False), engine_request)


def assert_as_alone(readers: Sequence[Reader]) -> None:
    """A cancelled answer is compared as far as it got."""
    for reader in readers:
        expected = alone(reader.request)
        count = len(expected.ids) if reader.ends is None else len(reader.ids)
        assert reader.fault is None and tuple(reader.ids) == expected.ids[:count]
        if reader.ends is None:
            assert reader.end is not None
            assert (reader.end.reason, reader.end.text) == (expected.end.reason, expected.end.text)
