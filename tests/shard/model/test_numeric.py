"""NaN and infinity: in the target they end the answer, in a draft head they end its drafting."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engines import answer, request
from mlx_lm.models.cache import KVCache
from pipelines import pipeline_of
from small import PROMPT as IDS
from small import small_checkpoint, small_engine
from tables import PROMPT, Logits, TableHead, TableTarget, random_table, tell

from exo_node.mtp.finite import DraftNotFinite, NotFinite
from exo_node.mtp.types import Sampling
from exo_node.placement.errors import NumericError
from exo_node.shard.engine.answers.events import Delta
from exo_node.shard.engine.answers.text_engine import AFTER_FAULT, TextEngine
from exo_node.shard.model.tensors import DTYPES, last_row_is_finite, to_bytes
from exo_node.shard.tools.bare_engine import bare_engine, bare_request, ids_of, rounds_of

V = 8
TARGET = random_table(V, seed=1)
SAMPLINGS = {
    "greedy": Sampling(),
    "plain": Sampling(temperature=1.0),
    "filters": Sampling(temperature=0.8, top_k=3, top_p=0.9),
    "seed": Sampling(temperature=1.0, seed=4),
}
BAD = [float("nan"), float("inf"), -float("inf")]


def bad_at(position: int, value: float) -> Logits:
    """The target, with no distribution for the token at `position`."""
    table = TARGET.copy()
    table[position - 1] = value
    return table


@pytest.mark.parametrize(("k", "runs_ahead"), [(0, True), (1, False), (2, True), (3, False)])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("value", BAD)
def test_the_first_token_without_a_distribution_ends_the_answer(
    runs_ahead: bool, k: int, name: str, value: float
) -> None:
    """An attempt that shares no forward names the stage at fault; others may leave that open."""
    for position in (len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 6):
        changes: dict[str, Any] = {"sampling": SAMPLINGS[name], "runs_ahead": runs_ahead}
        table, draft = bad_at(position, value), TARGET if k else None
        result = tell(table, draft, k, **changes)
        if not isinstance(result.end, DraftNotFinite):
            assert isinstance(result.end, NotFinite) and result.end.position == position
        alone = tell(table, draft, k, batching_reason=AFTER_FAULT, alone=True, **changes)
        assert isinstance(alone.end, NotFinite) and alone.end.position == position


@pytest.mark.parametrize("k", [1, 2, 3])
def test_rows_after_a_draft_that_falls_do_not_matter(k: int) -> None:
    """The target is no distribution after tokens that it never chooses itself."""
    plain = tell(TARGET).ids
    table = np.full_like(TARGET, np.nan)
    for at, token in enumerate([*PROMPT, *plain]):
        table[at, token] = TARGET[at, token]
    assert tell(table, -TARGET, k).ids == plain


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_head_without_a_distribution_is_asked_no_more(
    name: str, k: int, runs_ahead: bool
) -> None:
    """Only the round that shows it drafts, and one that was already in flight."""
    draft = TARGET.copy()
    draft[8:] = np.nan
    s = SAMPLINGS[name]
    result = tell(TARGET, draft, k, sampling=s, max_tokens=30, runs_ahead=runs_ahead)
    rounds = result.rounds
    assert len(result.ids) == 30
    ends = [r.forward.position + len(r.tokens) for r in rounds if r.drafted]
    assert ends[-1] <= 9 + (1 + runs_ahead) * (k + 1)
    assert all(r.drafted == 0 for r in rounds[len(ends) + 1 :])


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_answers_together_continue_without_a_head_that_broke(runs_ahead: bool) -> None:
    """Also when it is alone again, after the others have ended."""
    draft = TARGET.copy()
    draft[8:] = np.nan
    engine = bare_engine(
        TableTarget(TARGET), lambda: [KVCache()], TableHead(draft).model, runs_ahead=runs_ahead
    )
    budgets = (30, 9, 20)
    answers = rounds_of(engine, [bare_request(PROMPT, budget, k=2) for budget in budgets])
    for rounds, budget in zip(answers, budgets, strict=True):
        assert ids_of(rounds) == tell(TARGET, max_tokens=budget).ids
        drafted = [r.drafted for r in rounds]
        assert drafted[1] == 2
        assert not any(drafted[6:])


# ---------------------------------------------------------------- an engine


def broken_head() -> TextEngine:
    engine = small_engine()
    head: Any = engine.drafting.models["native_mtp"].head
    weight = head.eh_proj.weight
    weight[0, 0] = float("nan")
    head.eh_proj.weight = weight
    return engine


@pytest.fixture(scope="module")
def plain() -> TextEngine:
    return small_engine()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_broken_head_leaves_the_answer_and_is_parked_with_its_reason(
    plain: TextEngine, k: int
) -> None:
    engine = broken_head()
    expected = answer(plain, request(IDS, 0, 12, ignore_eos=True))
    first = answer(engine, request(IDS, k, 12, ignore_eos=True))
    assert first.ids == expected.ids
    stats = first.stats
    assert (stats.drafter_kind, stats.spec_decode_rounds, stats.head_parked) == (
        "native_mtp",
        1,
        True,
    )
    assert f"not finite at position {len(IDS) + 1}" in stats.drafting_reason
    second = answer(engine, request(IDS, k, 12, ignore_eos=True))
    assert second.ids == expected.ids
    assert (second.stats.drafter_kind, second.stats.spec_decode_rounds) == ("none", 0)
    assert second.stats.drafting_reason == stats.drafting_reason
    assert second.stats.head_parked
    assert not expected.stats.head_parked


def poisoned(weight: Any) -> None:
    weight.weight = weight.weight * float("nan")


def fails(engine: TextEngine, **changes: Any) -> NumericError:
    with pytest.raises(NumericError) as raised:
        for event in engine.generate(request(IDS, max_tokens=12, **changes)):
            assert not isinstance(event, Delta)
    assert engine.live_requests == 0
    return raised.value


@pytest.mark.parametrize("k", [0, 2])
def test_a_broken_model_ends_its_answer_with_stage_position_and_dtype(k: int) -> None:
    engine = small_engine()
    poisoned(engine._target._family._body.norm)  # pyright: ignore
    fault = fails(engine, k=k)
    assert fault.code == "numeric_error"
    assert f"stage 0 gave logits that are not finite for the token at position {len(IDS)}, " in (
        fault.message
    )
    assert "in float32" in fault.message


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (1, "stage 0 (layers 0-1) gave hidden states"),
        (2, "stage 1 (layers 2-3) gave hidden states"),
        (5, "stage 2 (layers 4-5) gave hidden states"),
        (None, "stage 0 (its norm and lm_head, after the last stage) gave logits"),
    ],
)
def test_the_stage_of_a_pipeline_that_broke_first_is_named(layer: int | None, message: str) -> None:
    pipeline = pipeline_of([0, 2, 4, 6], small_checkpoint(6))
    number = 0 if layer is None else layer // 2
    body: Any = pipeline.parts[number].model.model
    model = body.language_model.model
    poisoned(model.norm if layer is None else model.layers[layer].input_layernorm)
    assert message in fails(pipeline.engine).message
    assert [worker.live_requests for worker in pipeline.workers] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", BAD)
def test_the_last_row_of_the_wire_is_looked_at(dtype: str, value: float) -> None:
    def of(change: Callable[[Any], None]) -> bool:
        rows: Any = mx.array([[-65504.0, 1e-7, 0.0], [65504.0, 1.0, -2.0]]).astype(DTYPES[dtype])
        change(rows)
        return last_row_is_finite(to_bytes(rows), dtype, 2)

    def write_to(row: int) -> Callable[[Any], None]:
        return lambda rows: rows.__setitem__((row, 1), value)

    assert of(lambda _: None)
    assert of(write_to(0))
    assert not of(write_to(1))
