"""Whole answers with drafts: what must not differ from those without, nor from each other."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engines import ORACLE, Answer, answer, load_quietly, request, spec, whole_engine
from long_runs import watched_heads
from mlx import nn
from models import make_checkpoint
from small import PROMPT as SMALL_PROMPT
from small import small_engine

from exo_node.mtp.sampler import Sampler
from exo_node.mtp.sampling import greedy_token
from exo_node.mtp.seams import as_ids
from exo_node.mtp.types import Sampling
from exo_node.shard.engine.answers.events import Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.states.cache_set import CacheSet
from exo_node.shard.engine.states.state import DraftState

OTHER_PROMPT: list[int] = ORACLE[0]["prompt_ids"]


@pytest.fixture(scope="module")
def engine() -> TextEngine:
    return small_engine()


@pytest.fixture(scope="module")
def demo() -> TextEngine:
    """Faults that only acceptance shows, which takes trained weights."""
    return whole_engine()


@functools.cache
def undisturbed(engine: TextEngine) -> Answer:
    return answer(engine, request(SMALL_PROMPT, 2, 60))


def accepted(engine: TextEngine, k: int, answers: int = 4) -> int:
    """Drafts that stood, over the oracle's longest answers, which are given all the same."""
    total = 0
    for row in sorted(ORACLE, key=lambda row: len(row["greedy_ids"]))[-answers:]:
        got = answer(engine, request(row["prompt_ids"], k, 24))
        assert list(got.ids) == row["greedy_ids"][:24], "an answer never shows it"
        total += got.stats.accepted_draft_tokens
    return total


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


def test_the_head_is_fed_the_normed_hidden(demo: TextEngine) -> None:
    """mlx-lm#990: only acceptance shows it."""
    family: Any = demo.drafting._family  # pyright: ignore[reportPrivateUsage]
    norm, hidden, logits = family._body.norm, family.hidden, family.logits

    def unnormed(tokens: mx.array, caches: Any) -> mx.array:
        family._body.norm = nn.Identity()
        try:
            return hidden(tokens, caches)
        finally:
            family._body.norm = norm

    def normed(x: mx.array) -> mx.array:
        return logits(norm(x))

    right = accepted(demo, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "hidden", unnormed)
        patch.setattr(family, "logits", normed)
        wrong = accepted(demo, 3)
    assert wrong < right


@pytest.mark.parametrize("k", [0, pytest.param(3, marks=pytest.mark.smoke)])
def test_processors_see_the_prompt(engine: TextEngine, k: int) -> None:
    """mlx-lm#990: the penalty's context began with the answer."""
    # The small model says nothing of its prompt: its first two ids stand for one.
    prompt = [*SMALL_PROMPT, *undisturbed(engine).ids[:2], *SMALL_PROMPT]
    plain = answer(engine, request(prompt, k, 16, ignore_eos=True)).ids
    assert not set(prompt).isdisjoint(plain)
    never_again = Sampling(presence_penalty=1000.0, repetition_context_size=100)
    ids = answer(engine, request(prompt, k, 16, sampling=never_again, ignore_eos=True)).ids
    assert len({*ids, *prompt}) == 16 + len(set(prompt))
    chooser = Sampler(Sampling(repetition_penalty=9.0), 0, prompt=(3,))
    logits = mx.zeros((1, 8)).at[:, 3].add(1.0).at[:, 5].add(0.5)
    assert as_ids(greedy_token(logits)) == [3]
    assert as_ids(chooser.token(logits, 1)) == [5]


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


@pytest.mark.smoke
def test_deferred_drafts_come_in_order(engine: TextEngine) -> None:
    """vllm-mlx#82: evaluating drafts later must not change which belong to which round."""
    waiting = request(SMALL_PROMPT, 3, 32, async_draft_eval=False)
    overlapping = request(SMALL_PROMPT, 3, 32, async_draft_eval=True)
    assert answer(engine, waiting).rounds == answer(engine, overlapping).rounds


def test_norms_are_shifted_once(tmp_path: Path) -> None:
    """mlx-lm#1442. Without the shift acceptance falls to nothing, and no error says so; a second
    one hardly shows, so the weights are compared: those of a converted head need no shift."""
    heads = [
        load_quietly(spec(folder, 0, 4, num_layers=4, native_mtp=True)).head
        for folder in (
            make_checkpoint(
                tmp_path / str(raw), "qwen3_5", dtype="float32", vocab=4096, raw=raw, seed=3
            )
            for raw in (True, False)
        )
    ]
    raw, converted = (
        {name: module.weight for name, module in head.named_modules() if "norm" in name}
        for head in heads
    )
    assert len(raw) == 7
    assert all(mx.allclose(raw[name], converted[name], atol=1e-6) for name in converted)
    engine = whole_engine()
    for name, module in engine.drafting._head.named_modules():  # pyright: ignore
        if "norm" in name:
            module.weight = module.weight - 1.0
    assert accepted(engine, 1, answers=2) == 0


@pytest.mark.smoke
def test_an_answer_that_is_dropped_inside_a_block_leaves_nothing(engine: TextEngine) -> None:
    """exo#2110: nothing handled the generator's close."""
    steps = engine.generate(request(SMALL_PROMPT, 3))
    while not (isinstance(step := next(steps), Delta) and step.round.accepted):
        pass
    steps.close()
    assert (engine.live_requests, engine.cache_bytes()) == (0, 0)
    assert answer(engine, request(SMALL_PROMPT, 3, 12)).ids == undisturbed(engine).ids[:12]


@pytest.mark.smoke
def test_the_head_is_primed_with_the_prompt(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-mlx#82 ran the head without a cache; MTPLX measured 0.90 against 0.26.

    When the first draft is made, the head's cache holds every row of the prompt.
    """
    observe, rows = DraftState.observe, len(SMALL_PROMPT)

    def first() -> tuple[int, int]:
        with watched_heads() as heads:
            _ = answer(engine, request(SMALL_PROMPT, 1, 8))
        return heads[0]

    def unprimed(self: DraftState, hidden: mx.array, tokens: mx.array) -> None:
        if tokens.shape[0] + 1 != rows:
            observe(self, hidden, tokens)

    assert first() == (rows, rows)
    monkeypatch.setattr(DraftState, "observe", unprimed)
    cached, committed = first()
    assert cached < committed == rows, "a fault that this would not show"
