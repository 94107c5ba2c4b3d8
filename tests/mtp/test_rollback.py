"""Rolled back caches are, bit for bit, those of rows that were never written."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import mamba
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.qwen3_5 import Model
from tiny import row_of_ids, taped_qwen, tiny_qwen

from exo_node.mtp.caches.rollback import (
    cache_arrays,
    can_roll_back,
    rollback,
    takes_tapes,
    with_tapes,
)
from exo_node.mtp.caches.window import MAX_ROLLBACK_ROWS
from exo_node.shard.model.stage_model import StageModel

KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "4 bits": {"dtype": "bfloat16", "bits": 4},
    "experts": {"dtype": "float32", "moe": True},
}
PROMPT = 20


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """A stock model and a taped one of the same weights."""
    kind: dict[str, Any] = KINDS[request.param]
    return tiny_qwen(**kind), taped_qwen(**kind)


def forward(model: Model, caches: Sequence[object], tokens: mx.array) -> mx.array:
    logits: mx.array = model(tokens[None], cache=caches)[0]
    mx.eval(logits, cache_arrays(caches))
    return logits


def taped_caches(model: Model) -> list[object]:
    return with_tapes(model.make_cache())


def state(caches: Sequence[Any]) -> list[mx.array]:
    """The state that a next forward reads: the rows of attention, the recurrences."""
    arrays: list[mx.array] = []
    for cache in caches:
        if isinstance(cache, KVCache):
            kv_rows: Any = cache.keys_and_values() if cache.keys is not None else []
            arrays += [rows[..., : cache.offset, :] for rows in kv_rows]
        else:
            arrays += cache.cache
    return arrays


def assert_same_state(got: Sequence[Any], expected: Sequence[Any]) -> None:
    for a, b in zip(state(got), state(expected), strict=True):
        assert a.dtype == b.dtype
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("blocks", [[1, 2, 4, 1], [PROMPT, 4, 3, 1], [MAX_ROLLBACK_ROWS + 6, 2]])
def test_a_taped_model_is_the_stock_one_bit_for_bit(
    models: tuple[Model, Model], blocks: list[int]
) -> None:
    stock, taped = models
    theirs, ours = stock.make_cache(), taped_caches(taped)
    for number, rows in enumerate(blocks):
        ids = row_of_ids(rows, seed=number)
        assert mx.array_equal(forward(stock, theirs, ids), forward(taped, ours, ids))
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_any_number_of_rows_can_be_taken_back(models: tuple[Model, Model], rows: int) -> None:
    _, model = models
    prompt, block, after = row_of_ids(PROMPT), row_of_ids(rows, seed=4), row_of_ids(2, seed=5)
    for dropped in range(rows + 1):
        rolled, never = taped_caches(model), taped_caches(model)
        for caches in (rolled, never):
            _ = forward(model, caches, prompt)
        _ = forward(model, rolled, block)
        rollback(rolled, dropped)
        if rows > dropped:
            _ = forward(model, never, block[: rows - dropped])
        assert_same_state(rolled, never)
        assert mx.array_equal(forward(model, rolled, after), forward(model, never, after))


@pytest.fixture(scope="module")
def taped() -> Model:
    return taped_qwen()


def after_blocks(model: Model, *blocks: int) -> list[object]:
    caches = taped_caches(model)
    for rows in blocks:
        _ = forward(model, caches, row_of_ids(rows))
    return caches


@pytest.mark.parametrize("rows", [1, 4])
def test_a_forward_is_rolled_back_once(taped: Model, rows: int) -> None:
    caches = after_blocks(taped, PROMPT, rows)
    rollback(caches, 1)
    with pytest.raises(AssertionError, match="cannot take 1 rows back"):
        rollback(caches, 1)


@pytest.mark.parametrize(("rows", "dropped"), [(1, 2), (4, 5), (4, -1), (MAX_ROLLBACK_ROWS + 1, 1)])
def test_rows_out_of_the_last_forwards_reach_are_refused(
    taped: Model, rows: int, dropped: int
) -> None:
    with pytest.raises(AssertionError, match=f"cannot take {dropped} rows back"):
        rollback(after_blocks(taped, PROMPT, rows), dropped)


def test_attention_alone_cannot_lose_more_rows_than_it_holds() -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
    with pytest.raises(AssertionError, match="drop 5 rows"):
        rollback([cache], 5)


@pytest.mark.parametrize(
    "cache",
    [RotatingKVCache(max_size=8), ArraysCache(2)],
    ids=lambda cache: type(cache).__name__,
)
def test_caches_of_other_kinds_are_refused_by_name(cache: object) -> None:
    assert not can_roll_back([KVCache(), cache])
    with pytest.raises(AssertionError, match=f"{type(cache).__name__} cannot be rolled back"):
        rollback([cache], 1)


def test_the_caches_of_a_taped_model_can_be_rolled_back(taped: Model) -> None:
    assert can_roll_back(taped_caches(taped))
    assert not can_roll_back(taped.make_cache())


def test_layers_that_record_no_tape_get_no_cache_that_wants_one() -> None:
    """Else plain decoding would run ahead of itself and could not go back."""
    args = mamba.ModelArgs(
        model_type="mamba",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        state_size=4,
        num_hidden_layers=4,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=4,
    )
    for model, taped in ((mamba.Model(args), False), (tiny_qwen(), False), (taped_qwen(), True)):
        assert takes_tapes(model) == taped
        assert can_roll_back(StageModel(model, 0, 4).make_caches()) == taped


def test_a_tape_is_replaced_by_the_next_forwards(taped: Model) -> None:
    """Rows are taken back from the last forward, not from one before it."""
    caches = after_blocks(taped, PROMPT, 4, 2)
    rollback(caches, 2)
    assert_same_state(caches, after_blocks(taped, PROMPT, 4))
