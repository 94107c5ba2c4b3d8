"""Readers of the small model in stages, and what the whole model tells each of them alone.

Every linear layer is perturbed by a request's own rows: a row that another forward than the
recorded one gave would show, and one that others share would not.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from engines import Answer, answer, engine_of, load_quietly, request
from pipelines import TWO, Pipeline, small_pipeline
from readers import Reader, prompt
from shims import by_own_rows, perturb
from small import small_spec

from exo_node.mtp.types import Sampling
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters

CHUNK = 8
"""Rows of a forward over a prompt."""
SIZE = 0.1
"""Size of the perturbation."""


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
