"""Answers of an engine in this process, with their times; `exo-node bench mtp` uses them too."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....mtp.types import GenerationStats, Sampling
from ....placement.errors import LoadFailed
from ....proto import peer_pb2 as pb
from ...engine.answers.events import AnswerEnd, Delta
from ...engine.answers.text_engine import TextEngine
from ...engine.options import EngineOptions
from ...engine.request import Parameters
from ...model.load import Loaded


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer with its times in seconds; `stats` None: another engine's."""

    ids: tuple[int, ...]
    ttft_s: float
    decode_s: float
    finish: str
    stats: GenerationStats | None


class Stopwatch:
    """Times of the first and the last event since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first = self._last = self._start
        self._events = 0

    def event(self) -> None:
        self._last = time.perf_counter()
        if not self._events:
            self._first = self._last
        self._events += 1

    @property
    def ttft_s(self) -> float:
        return self._first - self._start

    @property
    def decode_s(self) -> float:
        return self._last - self._first


def measured_engine(loaded: Loaded, spec: pb.StageSpec) -> TextEngine:
    """The engine of a loaded model, warmed up and probed like a runner's."""
    # Without a prefix cache each repeat reads its prompt.
    engine = TextEngine(loaded, replace(EngineOptions.of(spec), prefix_cache_bytes=0))
    engine.measurements.measure()
    return engine


def timed_answer(
    engine: TextEngine,
    prompt: Sequence[int],
    max_tokens: int,
    drafting: pb.Drafting,
    temperature: float = 0.0,
) -> TimedAnswer:
    """Runs one answer. Raises LoadFailed if the engine ends it without its last event."""
    parameters = Parameters(
        name="bench",
        attempt=1,
        prompt=prompt,
        sampling=Sampling(temperature=temperature),
        limits=pb.Limits(max_tokens=max_tokens),
        drafting=drafting,
    )
    watch, ids = Stopwatch(), list[int]()
    for event in engine.generate(parameters):
        if isinstance(event, Delta):
            watch.event()
            ids += event.round.tokens
        elif isinstance(event, AnswerEnd):
            return TimedAnswer(tuple(ids), watch.ttft_s, watch.decode_s, event.reason, event.stats)
    raise LoadFailed("the engine ended an answer without its last event")
