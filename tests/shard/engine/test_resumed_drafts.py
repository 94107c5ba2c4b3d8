"""A runner of a whole model that takes over an answer goes on with the same tokens and drafts.

A small checkpoint with its head, both perturbed by their rows: only the very forwards of before
give the numbers of before.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from engines import STORY, Stretches, answer, engine_of, load_quietly, request
from shims import by_rows, perturb
from small import small_spec

from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.load import Loaded

PROMPT: list[int] = STORY["prompt_ids"]
LONG = (PROMPT * 30)[:330]
CHUNK = 16
TOKENS = 28


@functools.cache
def _loaded() -> Loaded:
    loaded = load_quietly(small_spec(native_mtp=True, prefill_chunk=CHUNK))
    assert perturb(loaded.model.model, by_rows, size=0.1) > 10
    head: Any = loaded.head
    assert perturb(head, by_rows, size=0.1) > 4
    return loaded


def runner(*, at_times: bool = False) -> TextEngine:
    """One that holds nothing of any request."""
    form = {"prefill_chunk": CHUNK, "prefix_cache_bytes": 1 << 24}
    text_engine = engine_of(_loaded(), small_spec(native_mtp=True, **form))
    if at_times:
        executor: Any = text_engine._engine.executor  # pyright: ignore[reportPrivateUsage]
        executor.policy = Stretches(2, 8, 16)
    return text_engine


def parameters(prompt: Sequence[int], **changes: Any) -> Parameters:
    return request(prompt, 2, TOKENS, ignore_eos=True, top_logprobs=0, **changes)


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_it_drafts_as_before_at_times(share: float) -> None:
    expected = answer(runner(at_times=True), parameters(PROMPT)).rounds
    cut = 1 + int(share * len(expected))
    again = parameters(PROMPT, attempt=2, replay=expected[:cut])
    assert answer(runner(at_times=True), again).rounds == expected[cut:]


def test_a_prompt_that_begins_like_a_kept_one_is_read_after_it() -> None:
    expected, warm = answer(runner(), parameters(LONG)).rounds, runner()
    _ = answer(warm, parameters([*LONG[:320], 5, 6]))
    rest = answer(warm, parameters(LONG, attempt=2, replay=expected[:9]))
    assert rest.rounds == expected[9:]
    assert rest.stats.cached_tokens > 0
