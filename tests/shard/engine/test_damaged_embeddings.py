"""A token whose embedding is no number harms the answers that choose it, and no other ones."""

import functools
from typing import Any

import mlx.core as mx
import pytest
from engines import answer, changed, engine_of, load_quietly, request
from plain_gated_delta import give_kernels
from readers import Reader, together
from small import PROMPT, small_spec

from exo_node.mtp.seams import as_ids
from exo_node.mtp.types import Sampling
from exo_node.placement.errors import NumericError, StateLost
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.drafter import Drafter
from exo_node.shard.model.load import Loaded

TOKENS = 24
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=0.9, top_p=0.95, seed=11),
}


@functools.cache
def loaded(*, kernels: bool = False) -> Loaded:
    """Its embeddings are damaged, so no other test has it."""
    loaded_model = load_quietly(small_spec(native_mtp=True))
    assert not kernels or give_kernels(loaded_model.model.model)
    return loaded_model


def engine(*, ahead: bool = False, **changes: Any) -> TextEngine:
    text_engine = engine_of(
        loaded(kernels=ahead), small_spec(native_mtp=True, **changes), runs_ahead=ahead
    )
    text_engine.measurements.batch_identity = "bitwise"
    text_engine.measurements.shares_prompts = True
    return text_engine


def refused_draft(monkeypatch: pytest.MonkeyPatch, sampling: Sampling, k: int) -> int:
    """A token that the head first drafts in the middle of the answer, and the target neither reads
    nor chooses."""
    drafted = list[int]()
    draft = Drafter.draft

    def noted(self: Drafter, *args: Any) -> Any:
        drafts = draft(self, *args)
        drafted.extend(as_ids(drafts.tokens[0]))
        return drafts

    with monkeypatch.context() as patched:
        patched.setattr(Drafter, "draft", noted)
        got = answer(engine(), request(PROMPT, k, TOKENS, sampling=sampling, ignore_eos=True))
    refused = [each for each in dict.fromkeys(drafted) if each not in {*got.ids, *PROMPT}]
    return refused[len(refused) // 2]


def damage(monkeypatch: pytest.MonkeyPatch, token: int, *, kernels: bool = False) -> None:
    model: Any = loaded(kernels=kernels).model.model
    table = model.language_model.model.embed_tokens
    broken = mx.where(mx.arange(table.weight.shape[0])[:, None] == token, mx.nan, table.weight)
    monkeypatch.setitem(table, "weight", broken)  # a Module keeps its arrays as a dict does


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_refused_draft_without_numbers_ends_no_answer(
    monkeypatch: pytest.MonkeyPatch, name: str, k: int
) -> None:
    """Masked attention multiplies the draft's row by 0, which is NaN in every row before it."""
    damage(monkeypatch, refused_draft(monkeypatch, SAMPLINGS[name], k))
    plain, drafted = (
        answer(engine(), request(PROMPT, n, TOKENS, sampling=SAMPLINGS[name], ignore_eos=True))
        for n in (0, k)
    )
    assert drafted.ids == plain.ids and len(plain.ids) == TOKENS


@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.smoke)])
def test_a_chosen_token_without_numbers_ends_the_answer_where_plain_decoding_ends(
    monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    ids = answer(engine(), request(PROMPT, 0, TOKENS, ignore_eos=True)).ids
    token = next(t for t in ids[8:] if t not in PROMPT)
    damage(monkeypatch, token)
    readers = [Reader(request(PROMPT, n, TOKENS, ignore_eos=True)) for n in (0, k)]
    for reader in readers:
        together(engine(), [reader])
        assert isinstance(reader.fault, NumericError)
    plain, drafted = readers
    assert drafted.ids == plain.ids == list(ids[: ids.index(token) + 1])
    assert str(drafted.fault) == str(plain.fault)


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_an_answer_of_a_batch_or_of_rounds_ahead_resumes_alone_and_ends(
    monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    token = refused_draft(monkeypatch, Sampling(), 2)
    damage(monkeypatch, token, kernels=ahead)
    served = engine(ahead=ahead)
    others = [1 + t % 4000 for t in PROMPT]
    readers = [Reader(request(ids, 2, TOKENS, ignore_eos=True)) for ids in (PROMPT, others)]
    together(served, readers[:1] if ahead else readers)
    assert isinstance(readers[0].fault, StateLost)
    again = changed(readers[0].request, attempt=2, replay=tuple(readers[0].rounds), alone=True)
    after = Reader(again)
    together(served, [after])
    assert after.fault is None
    plain = answer(engine(batching=False), request(PROMPT, 0, TOKENS, ignore_eos=True))
    assert tuple(readers[0].ids + after.ids) == plain.ids
    if not ahead:
        expected = answer(engine(batching=False), request(others, 0, TOKENS, ignore_eos=True))
        assert readers[1].fault is None and tuple(readers[1].ids) == expected.ids
    assert served.live_requests == 0
