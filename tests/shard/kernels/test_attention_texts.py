"""Attention of a few rows over a cache, in the emulator or on the GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from emulated import use
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_next import ModelArgs, Qwen3NextAttention

from exo_node.shard.kernels import row_attention
from exo_node.shard.kernels.cuda import available
from exo_node.shard.kernels.product import JointProducts
from exo_node.shard.kernels.trial import relative_error

ON_GPU = available()
CASES: tuple[tuple[int, int, int, mx.Dtype], ...] = (
    (4, 2, 128, mx.float16),
    (6, 1, 256, mx.bfloat16),
    *(((3, 1, 64, mx.bfloat16), (24, 4, 256, mx.bfloat16)) if ON_GPU else ()),
)
PASTS = (0, 61, 130, *((1, 64, 1100, 4200, 16000) if ON_GPU else ()))


@pytest.fixture(autouse=True)
def kernels_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    row_attention._kernels.cache_clear()  # pyright: ignore[reportPrivateUsage]


def attention_layer(heads: int, key_heads: int, size: int, dtype: mx.Dtype) -> Any:
    values: dict[str, Any] = dict.fromkeys(ModelArgs.__dataclass_fields__, 1)
    values |= {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": size,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
        "attention_bias": False,
        "rope_scaling": None,
    }
    mx.random.seed(size)
    layer: Any = Qwen3NextAttention(ModelArgs(**values))
    for norm in (layer.q_norm, layer.k_norm):
        norm.weight = mx.random.uniform(0.5, 1.5, norm.weight.shape)
    layer.set_dtype(dtype)
    assert row_attention.unfit(layer) == ""
    layer.kernel = row_attention.RowAttention(row_attention.heads_of(layer))
    layer.fixed = row_attention.fixed_of(layer)
    layer.together = JointProducts(row_attention.projections(layer))
    return layer


def cache_of(layer: Any, past: int, batch: int = 1) -> KVCache:
    """`past` random rows, and numbers after them that must never be read."""
    cache, dtype = KVCache(), layer.q_norm.weight.dtype
    if not past:
        return cache
    shape = (batch, layer.num_key_value_heads, past, layer.head_dim)
    arrays = [mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i in (1, 2)]
    poison = mx.full((*shape[:2], 72, shape[3]), float("nan"), dtype=dtype)
    cache.keys, cache.values = (mx.concatenate([each, poison], axis=2) for each in arrays)
    cache.offset = past
    return cache


def run(layer: Any, x: mx.array, cache: KVCache) -> mx.array:
    return row_attention.KernelAttention.__call__(layer, x, None, cache)


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_mlxs_and_bit_for_bit_those_of_single_steps(
    case: tuple[int, int, int, mx.Dtype], past: int
) -> None:
    layer = attention_layer(*case)
    layer.__class__ = row_attention.KernelAttention
    x = (mx.random.normal((1, 5, 64), key=mx.random.key(3)) * 2).astype(case[3])
    block, single, stock = (cache_of(layer, past) for _ in range(3))
    got = layer(x, "causal", block)
    causal: Any = "causal"
    expected = Qwen3NextAttention.__call__(layer, x, causal, stock)
    assert relative_error(expected, got) <= 1.5e-2
    singles: Sequence[mx.array] = [layer(x[:, i : i + 1], None, single) for i in range(5)]
    assert single.offset == block.offset == past + 5
    for name in ("keys", "values"):
        ours, theirs = getattr(block, name), getattr(stock, name)
        rows = slice(past, past + 5)
        assert relative_error(theirs[:, :, rows], ours[:, :, rows]) <= 1e-2
    if ON_GPU:  # the products of this layer are MLX's, whose rows depend on each other there
        return
    assert relative_error(mx.concatenate(singles, axis=1), got) <= 1e-6


@pytest.mark.parametrize("rows", [6, 19, *((32, 64) if ON_GPU else ())])
@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rows_bits_depend_on_no_other_row_nor_sequence(
    case: tuple[int, int, int, mx.Dtype], past: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels alone: rows of two sequences of different lengths, against row by row, and
    against launches of four rows each."""
    heads, key_heads, size, dtype = case
    layer = attention_layer(*case)
    kernel, pasts = layer.kernel, (past, past // 2)
    inputs = [
        mx.random.normal((2, rows, count * size), key=mx.random.key(count)).astype(dtype)
        for count in (2 * heads, key_heads, key_heads)
    ]
    caches = [cache_of(layer, past + 1, batch=2), cache_of(layer, past + 1, batch=2)]
    first = mx.array(pasts, dtype=mx.int32)
    q, k, v = kernel.prepare(*inputs, layer.fixed, first)
    buffers_of_batch = [mx.array(getattr(caches[0], name)) for name in ("keys", "values")]
    for b, at in enumerate(pasts):
        for buffer, new in zip(buffers_of_batch, (k, v), strict=True):
            buffer[b, :, at : at + rows] = new[b]
    together = buffers_of_batch[0], buffers_of_batch[1]
    got = kernel.attend(q, together, inputs[0], first, max(pasts) + rows)
    chunks = -(-(max(pasts) + rows) // row_attention.KEYS)
    monkeypatch.setattr(row_attention, "_PART_BYTES", 4 * 2 * heads * chunks * size * 4)
    pieces = kernel.attend(q, together, inputs[0], first, max(pasts) + rows)
    assert mx.array_equal(pieces, got).item()
    for b, at in enumerate(pasts):
        buffers = (buffers_of_batch[0][b : b + 1], buffers_of_batch[1][b : b + 1])
        for i in range(rows) if rows == 6 else (0, 15, 16, rows - 1):
            one = [each[b : b + 1, i : i + 1] for each in inputs]
            start = mx.array([at + i], dtype=mx.int32)
            q1, k1, v1 = kernel.prepare(*one, layer.fixed, start)
            assert mx.array_equal(q1[:, :, 0], q[b : b + 1, :, i]).item()
            assert mx.array_equal(k1[:, :, 0], k[b : b + 1, :, i]).item()
            assert mx.array_equal(v1[:, :, 0], v[b : b + 1, :, i]).item()
            alone = kernel.attend(q1, buffers, one[0], start, at + i + 1)
            assert mx.array_equal(alone[0, 0], got[b, i]).item()
