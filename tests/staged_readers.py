"""Readers of the small model in stages, and what the whole model tells each of them alone.

Every linear layer is perturbed by a request's own rows: a row that another forward than the
recorded one gave would show, and one that others share would not.
"""

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from engines import Answer, answer, engine_of, load_quietly, request
from pipelines import TWO, Message, Pipeline, small_pipeline
from readers import Reader, prompt
from shims import by_own_rows, perturb
from small import small_spec

from exo_node.mtp.types import Sampling
from exo_node.placement.errors import ExoNodeError
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters

CHUNK = 8
"""Rows of a forward over a prompt."""
SIZE = 0.1
"""Size of the perturbation."""
LONG = prompt(5, 3 * CHUNK + 5)
"""A prompt of four chunks."""


def staged(bounds: Sequence[int] = TWO, *, room: int = 0, **changes: Any) -> Pipeline:
    """`room`: of each stage for prefixes. `changes`: of the generator's specification."""
    ticks = itertools.count(1)

    def clock() -> float:
        """Whose turn it is depends on what took how long: here as much in each run."""
        return next(ticks) / 1000

    rooms = (room,) * (len(bounds) - 1)
    fields: dict[str, Any] = {"numbers": by_own_rows, "size": SIZE, "chunk": CHUNK, "clock": clock}
    return small_pipeline(bounds, rooms=rooms, **fields, **changes)


@functools.cache
def _whole() -> TextEngine:
    loaded = load_quietly(small_spec())
    assert perturb(loaded.model.model, by_own_rows, size=SIZE) > 4
    return engine_of(loaded, small_spec(prefill_chunk=CHUNK, batching=False))


@functools.cache
def _alone(prompt: tuple[int, ...], tokens: int, sampling: Sampling) -> Answer:
    fields = {"ignore_eos": True, "top_logprobs": 0, "sampling": sampling}
    return answer(_whole(), request(prompt, 0, tokens, **fields))


def alone(engine_request: Parameters) -> list[tuple[object, ...]]:
    """Ids and log-probabilities by round, of the whole model, which answers nobody else."""
    tokens = engine_request.limits.max_tokens
    got = _alone(tuple(engine_request.prompt), tokens, engine_request.sampling)
    return [(round_.tokens, round_.logprobs) for round_ in got.rounds]


def tokens_of(*readers: Reader) -> list[tuple[object, ...]]:
    """The same of what readers were given, each the next attempt of the one before."""
    return [(round_.tokens, round_.logprobs) for reader in readers for round_ in reader.rounds]


def asks(prompt: Sequence[int], tokens: int, **changes: Any) -> Parameters:
    """Greedy unless said otherwise, with log-probabilities, and to its last token."""
    return request(prompt, 0, tokens, **({"ignore_eos": True, "top_logprobs": 0} | changes))


def readers_of(count: int) -> list[Reader]:
    """They come one after the other, and their answers have other lengths."""
    requests = [asks(prompt(i, (7, 9, 20)[i % 3]), 14 + 3 * i) for i in range(count)]
    return [Reader(each, begins=i) for i, each in enumerate(requests)]


def few_tokens(count: int) -> list[Reader]:
    """Requests that come at once and take a few turns."""
    return [Reader(asks(prompt(i), 12)) for i in range(count)]


def lost_of(readers: Sequence[Reader]) -> list[Reader]:
    return [reader for reader in readers if reader.fault is not None]


class Scene:
    """Readers of one engine, whose trips are held back."""

    def __init__(
        self, bounds: Sequence[int] = TWO, room: int = 0, pipeline: Pipeline | None = None
    ) -> None:
        self.pipeline = pipeline or staged(bounds, room=room)
        self.link = self.pipeline.link
        self.link.holds = True
        self._running: dict[int, tuple[Reader, Generator[Any]]] = {}

    @property
    def live(self) -> list[Reader]:
        """Readers whose answers have not ended."""
        return [reader for reader, _ in self._running.values()]

    def ask(self, engine_request: Parameters) -> Reader:
        reader = Reader(engine_request)
        self._running[id(reader)] = reader, self.pipeline.engine.generate(engine_request)
        return reader

    def settle(self) -> None:
        """All take what there is, until there is nothing to do but to wait."""
        for reader, events in list(self._running.values()):
            try:
                for event in events:
                    if event is None:
                        break
                    reader.take(event)
                else:
                    del self._running[id(reader)]
            except ExoNodeError as fault:
                reader.fault = fault
                del self._running[id(reader)]

    def cancel(self, reader: Reader) -> None:
        _, events = self._running.pop(id(reader))
        events.close()

    def bring(self, message: Message) -> None:
        self.link.bring(message)
        self.settle()

    def until(self, sought: Callable[[Message], bool]) -> Message:
        """Such a message is in flight, and what was before it is back."""
        for _ in range(1000):
            self.settle()
            able = self.link.able()
            if matches := [message for message in able if sought(message)]:
                return matches[0]
            self.link.bring(able[0])
        raise AssertionError("none sets out")

    def finish(self) -> None:
        """All that go on come to their end."""
        self.settle()
        for _ in range(5000):
            if not self.live:
                self.link.flush()
                return
            self.bring(self.link.able()[0])
        raise AssertionError("they do not end")

    def answered(self, engine_request: Parameters) -> Reader:
        """One that ended, and was told what it is told alone."""
        reader = self.ask(engine_request)
        self.finish()
        assert reader.fault is None and tokens_of(reader) == alone(engine_request)
        return reader

    def of_kind(self, kind: str) -> Reader:
        """A request that will have such a trip."""
        engine_request = asks(LONG, 12)
        if kind == "question":
            _ = self.answered(asks(LONG, 4))
        if kind == "log":
            rounds = self.answered(engine_request).rounds
            engine_request = replace(engine_request, attempt=2, replay=tuple(rounds[:8]))
        assert not self.pipeline.leftovers
        return self.ask(engine_request)
