"""Conversations that are answered together from one prefix cache, against engines that are new."""

import random
from dataclasses import dataclass
from unittest import mock

from driven import driven
from engines import changed, request
from held_prefixes import held_bytes
from readers import Reader, alone, engine

from exo_node.mtp.types import Sampling
from exo_node.shard.engine import prefill_forward
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters

END = 4095
"""The tokenizer's end token."""


MOST_TOKENS = 15
"""The most tokens of one answer."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of one trace, or the sum of several."""

    answers: int = 0
    cancelled: int = 0
    tokens: int = 0
    cached: int = 0
    """Prompt tokens from the prefix cache."""
    batched: int = 0
    """Tokens of forwards that other requests shared."""

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.answers + other.answers,
            self.cancelled + other.cancelled,
            self.tokens + other.tokens,
            self.cached + other.cached,
            self.batched + other.batched,
        )


def warm_engine(room: int) -> TextEngine:
    return engine(prefix_cache_bytes=room, context_length=4096)


def follow(warm: TextEngine, seed: int, room: int) -> Totals:
    """Asserts that each answer is the one of a new engine that has nothing else to do, whoever was
    beside it, came, went, or had its prefix thrown away; and that nothing is left but the cache.

    In every second trace the others have a turn after each layer of a prompt.
    """
    with mock.patch.object(
        prefill_forward, "MAX_PART_S", 0.0 if seed % 2 else prefill_forward.MAX_PART_S
    ):
        return _follow(warm, seed, room)


def _follow(warm: TextEngine, seed: int, room: int) -> Totals:
    draw, totals = random.Random(seed), Totals()

    def check(_: int) -> None:
        """The tree is in order."""
        _ = held_bytes(warm)

    for _ in range(draw.randrange(1, 4)):
        readers = [_reader(draw) for _ in range(draw.randrange(1, 6))]
        driven(warm, readers, check)
        for reader in readers:
            totals += _compared(reader)
        assert warm.live_requests == warm.cache_bytes() == 0, seed
        assert warm.prefix_cache_bytes <= room, seed
    return totals


def _compared(reader: Reader) -> Totals:
    assert reader.fault is None, reader.fault
    expected = _cold(reader.request)
    if reader.end is None:
        assert tuple(reader.ids) == expected[: len(reader.ids)], reader.request
        return Totals(cancelled=1, tokens=len(reader.ids))
    assert tuple(reader.ids) == expected, reader.request
    stats = reader.end.stats
    return Totals(1, 0, len(reader.ids), stats.cached_tokens, stats.batched_tokens)


def _cold(request_of_trace: Parameters) -> tuple[int, ...]:
    """The ids of a new engine without drafts.

    Answers to this prompt with these draws are its beginnings for every K: one is cached for all.
    """
    key = (
        tuple(request_of_trace.prompt),
        request_of_trace.sampling,
        request_of_trace.limits.ignore_eos,
    )
    if key not in _ANSWERS:
        drafting = {"num_draft_tokens": 0, "drafting_reason": "of a cold engine"}
        whole = changed(request_of_trace, **drafting, max_tokens=MOST_TOKENS)
        _ANSWERS[key] = tuple(alone(whole).ids)
    return _ANSWERS[key][: request_of_trace.limits.max_tokens]


_ANSWERS: dict[tuple[object, ...], tuple[int, ...]] = {}


def _reader(draw: random.Random) -> Reader:
    sampling = Sampling()
    if draw.random() < 0.3:
        sampling = Sampling(temperature=0.8, seed=draw.randrange(9))
    request_of_reader = request(
        _prompt(draw),
        draw.randrange(4),
        draw.randrange(1, MOST_TOKENS + 1),
        sampling=sampling,
        ignore_eos=draw.random() < 0.5,
    )
    begins = draw.choice([0, 0, 0, draw.randrange(1, 12)])
    ends = begins + draw.randrange(1, 20) if draw.random() < 0.2 else None
    return Reader(request_of_reader, begins, ends)


def _prompt(draw: random.Random) -> list[int]:
    """A prompt from few system messages and few turns, so that prompts share beginnings."""
    turns = [(draw.choice([10, 130, 190]), draw.randrange(3))]
    turns += [
        (draw.choice([3, 64, 140]), draw.randrange(2)) for _ in range(draw.choice([0, 1, 1, 2, 3]))
    ]
    ids = [token for rows, seed in turns for token in _turn(rows, seed)]
    return ids[: draw.randrange(1, len(ids))] if draw.random() < 0.1 else [*ids, 7, 8]


def _turn(rows: int, seed: int) -> list[int]:
    draw = random.Random(1000 * rows + seed)
    return [*(draw.randrange(3, 4000) for _ in range(rows - 1)), END]
