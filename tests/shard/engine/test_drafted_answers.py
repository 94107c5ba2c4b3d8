"""Whole answers with drafts: what must not differ from those without, nor from each other."""

import functools

import pytest
from engines import ORACLE, Answer, answer, request
from long_runs import watched_heads
from small import PROMPT as SMALL_PROMPT
from small import small_engine

from exo_node.shard.engine.answers.events import Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.states.cache_set import CacheSet

OTHER_PROMPT: list[int] = ORACLE[0]["prompt_ids"]


@pytest.fixture(scope="module")
def engine() -> TextEngine:
    return small_engine()


@functools.cache
def undisturbed(engine: TextEngine) -> Answer:
    return answer(engine, request(SMALL_PROMPT, 2, 60))


@pytest.mark.smoke
def test_what_the_draft_head_holds_is_counted_with_the_caches(engine: TextEngine) -> None:
    def bytes_of(k: int) -> int:
        """In the middle of an answer."""
        steps = engine.generate(request(SMALL_PROMPT, k, 60, ignore_eos=True))
        deltas = (event for event in steps if isinstance(event, Delta))
        _ = [next(deltas) for _ in range(3)]
        bytes_before = engine.cache_bytes()
        steps.close()
        return bytes_before

    assert bytes_of(2) > bytes_of(0) > 0
    assert engine.cache_bytes() == 0


def test_an_error_of_cache_repair_ends_the_answer(engine: TextEngine) -> None:
    """exo#2110 logged them and went on with the stale cache; here they end the answer."""
    steps = engine.generate(request(SMALL_PROMPT, 2, 60, ignore_eos=True))
    with pytest.MonkeyPatch.context() as patch:

        def broken(*_: object) -> None:
            raise RuntimeError("the cache cannot be repaired")

        patch.setattr(CacheSet, "keep", broken)
        with pytest.raises(RuntimeError, match="cannot be repaired"):
            _ = list(steps)
    assert engine.live_requests == 0
    assert answer(engine, request(SMALL_PROMPT, 2, 12)).ids == undisturbed(engine).ids[:12]


@pytest.mark.smoke
def test_no_state_of_an_earlier_request_is_used_again(engine: TextEngine) -> None:
    """vllm-mlx#82. Log-probabilities show what a memorised answer would hide."""
    fields = {"k": 2, "max_tokens": 20, "top_logprobs": 0}
    fresh = answer(small_engine(), request(SMALL_PROMPT, **fields))
    _ = answer(engine, request(OTHER_PROMPT, 3, 12))
    with watched_heads() as heads:
        got = answer(engine, request(SMALL_PROMPT, **fields))
    assert got.rounds == fresh.rounds
    assert [cached for cached, _ in heads] == [committed for _, committed in heads]
