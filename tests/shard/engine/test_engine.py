"""One stage: the oracle's numbers, endings, drafts, and what stays in the caches."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from engines import ORACLE, STORY, Answer, answer, load_quietly, request, spec, whole_engine
from long_runs import watched_heads
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType]
from small import PROMPT as SMALL_PROMPT
from small import small_checkpoint, small_engine

from exo_node.mtp.types import Sampling
from exo_node.placement.errors import ContextLengthExceeded, InvalidRequest
from exo_node.shard.engine.answers.events import Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.states.cache_set import CacheSet

PROMPT: list[int] = STORY["prompt_ids"]


@pytest.fixture(scope="module")
def demo() -> TextEngine:
    return whole_engine(dtype="float32")


@pytest.fixture(scope="module")
def exact() -> TextEngine:
    return small_engine(dtype="float32")


@functools.cache
def answer_of(engine: TextEngine, k: int, max_tokens: int = 60) -> Answer:
    """The answer as nothing disturbs it, once for all tests that share the engine."""
    return answer(engine, request(PROMPT, k, max_tokens))


def speculative(got: Answer) -> tuple[int, int, int]:
    s = got.stats
    return s.spec_decode_rounds, s.proposed_draft_tokens, s.accepted_draft_tokens


@pytest.mark.parametrize(
    ("k", "row"),
    [
        *((0, row) for row in ORACLE[::4]),
        *(
            pytest.param(k, row, marks=pytest.mark.smoke if row in ORACLE[:3] else ())
            for k, row in zip(itertools.cycle([1, 2, 3]), ORACLE, strict=False)
        ),
    ],
)
def test_float32_reproduces_the_oracle(demo: TextEngine, row: dict[str, Any], k: int) -> None:
    """Each of its answers with drafts, which change no id, and some without."""
    got = answer(demo, request(row["prompt_ids"], k, len(row["greedy_ids"]) + k))
    assert list(got.ids) == row["greedy_ids"]
    assert got.text == row["text"]
    assert got.end.reason == "stop"
    assert got.stats.completion_tokens == len(got.ids)
    if k:
        counts = row["K"][str(k)]
        assert speculative(got) == (counts["rounds"], counts["drafted"], counts["accepted"])


def test_the_oracles_prompt_ids_are_those_of_the_chat_template(demo: TextEngine) -> None:
    for row in ORACLE:
        assert (
            demo.codec.encode_chat([{"role": "user", "content": row["prompt"]}])
            == row["prompt_ids"]
        )


@pytest.mark.parametrize(("k", "chunk"), [(0, 1), (0, 7), (1, 12), (2, 1), (3, 7), (3, 13)])
def test_the_prefill_chunk_does_not_change_the_answer(
    exact: TextEngine, k: int, chunk: int
) -> None:
    engine = small_engine(dtype="float32", prefill_chunk=chunk)
    got, whole = answer(engine, request(PROMPT, k, 60)), answer_of(exact, k)
    assert (got.ids[0], got.rounds[1:]) == (whole.ids[0], whole.rounds[1:])


def test_sampling_without_a_seed_differs_from_answer_to_answer(exact: TextEngine) -> None:
    sampling = Sampling(temperature=1.0)
    engine_request = request(PROMPT, 2, 24, sampling=sampling, ignore_eos=True)
    first = answer(exact, engine_request).ids
    assert any(answer(exact, engine_request).ids != first for _ in range(3))


@pytest.fixture(scope="module")
def small_context() -> Iterator[TextEngine]:
    yield small_engine(dtype="float32", context_length=32)


def test_only_a_prompt_that_leaves_no_room_is_refused_and_in_anthropics_words(
    small_context: TextEngine,
) -> None:
    """Claude Code reads the numbers: it asks again with less, or shortens the conversation."""
    limits = small_context.limits
    with pytest.raises(ContextLengthExceeded) as caught:
        _ = limits.budget(33, 0)
    assert caught.value.message.startswith("prompt is too long: 33 tokens > 32 maximum")
    assert caught.value.param == "prompt"
    for requested_k, effective_k in ((0, 1), (3, 3)):
        with pytest.raises(ContextLengthExceeded) as caught:
            _ = limits.budget(32, requested_k)
        words = f"input length and `max_tokens` exceed context limit: 32 + {effective_k} > 32"
        assert caught.value.message.startswith(words)
    assert [limits.budget(30, requested_k) for requested_k in (0, 1, 2, 3, 32_000)] == [
        2,
        1,
        2,
        2,
        2,
    ]


@pytest.mark.parametrize("k", [0, 3])
def test_an_answer_may_fill_the_context(
    exact: TextEngine, small_context: TextEngine, k: int
) -> None:
    budget = small_context.limits.budget(len(PROMPT), 0)
    got = answer(small_context, request(PROMPT, k, budget))
    assert got.ids == answer_of(exact, 0).ids[:budget]
    assert got.end.reason == "length"


def test_more_drafts_than_the_runner_was_loaded_for_are_refused(exact: TextEngine) -> None:
    with pytest.raises(InvalidRequest, match="num_draft_tokens"):
        _ = answer(exact, request(PROMPT, 4))


def test_without_native_mtp_the_heads_weights_are_not_read() -> None:
    with_head = load_quietly(spec(native_mtp=True))
    without = load_quietly(spec(native_mtp=False, mtp_off_reason="EXO_NATIVE_MTP_ENABLED=0"))
    assert with_head.head_state == "loaded"
    assert without.head is None
    assert without.head_state == "EXO_NATIVE_MTP_ENABLED=0"
    # The checkpoint's head has 1.3 million parameters of two bytes, and nothing else differs.
    saved = with_head.checkpoint_bytes_read - without.checkpoint_bytes_read
    assert saved >= with_head.head_bytes // 2 > 1_000_000


def _mlx_lm_greedy(prompt: list[int], sampling: Sampling, tokens: int) -> list[int]:
    """mlx-lm's own loop over its own model, in float32."""
    model: Any = load_model(small_checkpoint())[0]
    model.set_dtype(mx.float32)
    processors = make_logits_processors(
        logit_bias=dict(sampling.logit_bias) or None,
        repetition_penalty=None
        if sampling.repetition_penalty == 1
        else sampling.repetition_penalty,
        repetition_context_size=sampling.repetition_context_size,
        presence_penalty=sampling.presence_penalty,
        presence_context_size=sampling.repetition_context_size,
        frequency_penalty=sampling.frequency_penalty,
        frequency_context_size=sampling.repetition_context_size,
    )
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens, logits_processors=processors)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize(
    "penalties",
    [
        Sampling(repetition_penalty=0.7),
        Sampling(presence_penalty=-0.8, frequency_penalty=0.6, repetition_context_size=40),
        Sampling(logit_bias=((605, -100.0), (1402, 1.0)), repetition_penalty=1.1),
    ],
    ids=str,
)
def test_penalties_give_mlx_lms_ids_at_every_k(exact: TextEngine, penalties: Sampling) -> None:
    expected = _mlx_lm_greedy(PROMPT, penalties, 48)
    assert expected != list(answer_of(exact, 0).ids[:48])
    for k in range(4):
        engine_request = request(PROMPT, k, 48, sampling=penalties, ignore_eos=True)
        got = answer(exact, engine_request)
        assert list(got.ids) == expected
        assert k == 0 or got.stats.accepted_draft_tokens > 0


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
