"""Conversations that are answered together from one prefix cache, against engines that are new."""

import random
from dataclasses import dataclass, replace
from unittest import mock

from driven import driven
from engines import request
from held_prefixes import held_bytes
from readers import Reader, alone, engine

from exo_node.mtp.types import Sampling
from exo_node.shard.engine import prefill_forward
from exo_node.shard.engine.request import EngineRequest
from exo_node.shard.engine.text_engine import TextEngine

END = 4095
"""The tokenizer's end token."""


MOST_TOKENS = 15
"""Of an answer."""


@dataclass(frozen=True, slots=True)
class Told:
    """Of one trace, or of several."""

    answers: int = 0
    cancelled: int = 0
    tokens: int = 0
    cached: int = 0
    """Tokens of prompts that were not read again."""
    batched: int = 0
    """Tokens whose forward others shared."""

    def __add__(self, other: "Told") -> "Told":
        return Told(
            self.answers + other.answers,
            self.cancelled + other.cancelled,
            self.tokens + other.tokens,
            self.cached + other.cached,
            self.batched + other.batched,
        )


def warm_engine(room: int) -> TextEngine:
    return engine(prefix_cache_bytes=room, context_length=4096)


def follow(warm: TextEngine, seed: int, room: int) -> Told:
    """Asserts that each answer is the one of a new engine that has nothing else to do, whoever was
    beside it, came, went, or had its prefix thrown away; and that nothing is left but the cache.

    In every second trace the others have a turn behind each layer of a prompt.
    """
    with mock.patch.object(
        prefill_forward, "MAX_PART_S", 0.0 if seed % 2 else prefill_forward.MAX_PART_S
    ):
        return _follow(warm, seed, room)


def _follow(warm: TextEngine, seed: int, room: int) -> Told:
    draw, told = random.Random(seed), Told()

    def check(_: int) -> None:
        """The tree is in order."""
        _ = held_bytes(warm)

    for _ in range(draw.randrange(1, 4)):
        readers = [_reader(draw) for _ in range(draw.randrange(1, 6))]
        driven(warm, readers, check)
        for reader in readers:
            told += _compared(reader)
        assert warm.live_requests == warm.cache_bytes() == 0, seed
        assert warm.prefix_cache_bytes <= room, seed
    return told


def _compared(reader: Reader) -> Told:
    assert reader.fault is None, reader.fault
    wanted = _cold(reader.request)
    if reader.end is None:
        assert tuple(reader.ids) == wanted[: len(reader.ids)], reader.request
        return Told(cancelled=1, tokens=len(reader.ids))
    assert tuple(reader.ids) == wanted, reader.request
    stats = reader.end.stats
    return Told(1, 0, len(reader.ids), stats.cached_tokens, stats.batched_tokens)


def _cold(asked: EngineRequest) -> tuple[int, ...]:
    """What a new engine answers without drafts. What others with this prompt and these draws get is
    its beginning, whatever their K, so that one such answer stands for all of them."""
    key = (tuple(asked.prompt), asked.sampling, asked.ignore_end)
    if key not in _ANSWERS:
        whole = replace(asked, k=0, drafting_reason="of a cold engine", max_tokens=MOST_TOKENS)
        _ANSWERS[key] = tuple(alone(whole).ids)
    return _ANSWERS[key][: asked.max_tokens]


_ANSWERS: dict[tuple[object, ...], tuple[int, ...]] = {}


def _reader(draw: random.Random) -> Reader:
    sampling = Sampling()
    if draw.random() < 0.3:
        sampling = Sampling(temperature=0.8, seed=draw.randrange(9))
    asked = request(
        _prompt(draw),
        draw.randrange(4),
        draw.randrange(1, MOST_TOKENS + 1),
        sampling=sampling,
        ignore_end=draw.random() < 0.5,
    )
    begins = draw.choice([0, 0, 0, draw.randrange(1, 12)])
    ends = begins + draw.randrange(1, 20) if draw.random() < 0.2 else None
    return Reader(asked, begins, ends)


def _prompt(draw: random.Random) -> list[int]:
    """Of few systems and few turns, so that prompts begin alike and then differ."""
    turns = [(draw.choice([10, 130, 190]), draw.randrange(3))]
    turns += [
        (draw.choice([3, 64, 140]), draw.randrange(2)) for _ in range(draw.choice([0, 1, 1, 2, 3]))
    ]
    ids = [token for rows, seed in turns for token in _turn(rows, seed)]
    return ids[: draw.randrange(1, len(ids))] if draw.random() < 0.1 else [*ids, 7, 8]


def _turn(rows: int, seed: int) -> list[int]:
    draw = random.Random(1000 * rows + seed)
    return [*(draw.randrange(3, 4000) for _ in range(rows - 1)), END]
