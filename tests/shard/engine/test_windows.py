"""Models with sliding windows: the numbers of mlx-lm's own loop, copies that change no answer."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from clocks import Clock
from engines import answer, request
from forced_copies import FixedLength, force
from models import DEMO
from zoo import VOCABULARY, tiny_config
from zoo_runs import small

from exo_node.mtp.caches.window import WindowCache
from exo_node.mtp.types import Sampling
from exo_node.placement.config import hidden_size
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.text.codec import TextCodec

KINDS = (
    *("afmoe", "cohere2", "exaone4", "exaone_moe", "gemma3_text", "gemma4_text", "gemma3n"),
    *("gpt_oss", "laguna", "mellum", "mimo_v2_flash", "ministral3", "olmo3", "plamo3"),
    *("spark2_5", "step3p5", "llama with windows"),
)
TOKENS = 40
ATOL = 2e-4
FEW = tuple((token, 100.0) for token in (40, 41, 42))
OF_FEW = Sampling(logit_bias=FEW)
"""Greedy among three ids, so that the last ones occurred before, and other ones often followed."""


def ids(rows: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY - 2) for _ in range(rows)]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_mlx_lms_rings(kind: str) -> None:
    model: Any = small(tiny_config(kind))
    ours, rings = StageModel(model, 0, len(model.layers)).make_caches(), model.make_cache()
    assert any(isinstance(cache, WindowCache) for cache in ours)
    at, prompt = 0, ids(600, 1)
    for rows in (300, 150, 1, 1, 3, 60, *[1] * 20):
        block = mx.array([prompt[at : at + rows]])
        mine, theirs = (model(block, cache=each) for each in (ours, rings))
        # plamo3's mask asks for a row that its ring has only within a block.
        if kind != "plamo3":
            assert mx.allclose(mine, theirs, rtol=0, atol=ATOL).item(), (at, rows)
        at += rows


def copying(kind: str, **changes: Any) -> TextEngine:
    config = tiny_config(kind)
    model: Any = small(config)
    limits = StageLimits("p", 0, "float32", hidden_size(config), 64, 4096, VOCABULARY)
    loaded = Loaded(StageModel(model, 0, len(model.layers)), limits, TextCodec.load(DEMO))
    served = TextEngine(
        loaded, EngineOptions("float32", 4096, 64, **changes), clock=Clock(step=0.001)
    )
    served.measurements.batch_identity = "bitwise"
    served.measurements.shares_prompts = True
    force(served.lookup, FixedLength(7))
    return served


def query(repeats: Sequence[int], seed: int, *, lookup: bool) -> Parameters:
    """The prompt holds the answer with a changed id in it, and its own beginning again."""
    start = ids(150, seed)
    body = [*repeats[: TOKENS // 2], 5, *repeats[TOKENS // 2 + 1 :]]
    prompt = [*start, *body, *ids(90, seed + 1), *start[-40:]]
    return request(prompt, 0, TOKENS, sampling=OF_FEW, ignore_eos=True, prompt_lookup=lookup)


def repeated(served: TextEngine, seed: int) -> tuple[Parameters, Sequence[int]]:
    """A request whose answer repeats much of its prompt, and that answer without copies."""
    body = answer(served, query([7] * TOKENS, seed, lookup=False)).ids
    return query(body, seed, lookup=True), answer(served, query(body, seed, lookup=False)).ids


@pytest.mark.parametrize("kind", KINDS)
def test_copies_change_no_answer(kind: str) -> None:
    served, accepted, rejected = copying(kind), 0, 0
    for seed in (10, 20):
        engine_request, plain = repeated(served, seed)
        result = answer(served, engine_request)
        assert tuple(result.ids) == tuple(plain)
        accepted += result.stats.lookup_accepted_tokens
        rejected += result.stats.lookup_proposed_tokens - result.stats.lookup_accepted_tokens
    assert accepted > 0
    assert rejected > 0


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "llama with windows"])
def test_copies_after_a_cached_prefix_and_a_resumed_answer_change_nothing(kind: str) -> None:
    served = copying(kind, prefix_cache_bytes=1 << 26)
    engine_request, plain = repeated(served, 10)
    again = answer(served, engine_request)
    assert again.stats.cached_tokens > 0
    assert tuple(again.ids) == tuple(plain)
    assert again.stats.lookup_accepted_tokens > 0
    for cut in (1, len(again.rounds) // 2, len(again.rounds) - 1):
        log = again.rounds[:cut]
        rest = answer(copying(kind), replace(engine_request, attempt=2, replay=log))
        assert [*(token for round_ in log for token in round_.tokens), *rest.ids] == [*again.ids]
