"""The gated delta rule in chunks against mlx-lm's loop over rows, and which layers use it."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops, normalize_qk
from small import small_spec
from tiny import row_of_ids, taped_qwen

from exo_node.mtp.caches.rollback import cache_arrays, with_tapes
from exo_node.mtp.caches.window import MAX_ROLLBACK_ROWS
from exo_node.shard.kernels.chunked_delta import CHUNK, chunked_delta, log_decay, use_chunks
from exo_node.shard.kernels.trial import relative_error
from exo_node.shard.model.load import load

MANY = MAX_ROLLBACK_ROWS + 7


def rows_of(rows: int, batch: int = 1, k_heads: int = 2, heads: int = 4) -> dict[str, mx.array]:
    """Random inputs; the last head forgets at once, the first nearly nothing."""
    mx.random.seed(rows)
    normal = mx.random.normal
    q, k = normal((batch, rows, k_heads, 16)), normal((batch, rows, k_heads, 16))
    q, k = normalize_qk(q, k, inv_scale=16**-0.5, eps=1e-6)
    return {
        "q": q,
        "k": k,
        "v": normal((batch, rows, heads, 24)),
        "a": normal((batch, rows, heads)),
        "b": 3 * normal((batch, rows, heads)),
        "a_log": mx.linspace(-9, 5, heads),
        "dt_bias": normal((heads,)),
        "state": normal((batch, heads, 24, 16)),
    }


def both(x: dict[str, mx.array], **changes: Any) -> tuple[Any, Any]:
    q, k, v, beta = x["q"], x["k"], x["v"], mx.sigmoid(x["b"])
    g = compute_g(x["a_log"], x["a"], x["dt_bias"])
    decay = log_decay(x["a_log"], x["a"], x["dt_bias"])
    return (
        gated_delta_ops(q, k, v, g, beta, x["state"]),
        chunked_delta(q, k, v, decay, beta, x["state"], **changes),
    )


@pytest.mark.parametrize("rows", [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
@pytest.mark.parametrize(("batch", "k_heads"), [(1, 2), (2, 4)])
def test_chunks_compute_what_the_loop_does(rows: int, batch: int, k_heads: int) -> None:
    loop, chunks = both(rows_of(rows, batch, k_heads))
    for expected, got in zip(loop, chunks, strict=True):
        assert got.shape == expected.shape and relative_error(expected, got) < 2e-6


def test_rows_that_repeat_a_key_are_solved_as_well() -> None:
    """Powers of the triangle would lose float32's precision for such rows."""
    x = rows_of(4 * CHUNK)
    x["k"] = mx.broadcast_to(x["k"][:, :1], x["k"].shape)
    x["b"] = mx.full(x["b"].shape, 9.0)
    loop, chunks = both(x, size=4 * CHUNK)
    for expected, got in zip(loop, chunks, strict=True):
        assert relative_error(expected, got) < 1e-5


def test_the_dtype_of_the_rows_stays_and_the_state_is_float32() -> None:
    x = rows_of(CHUNK)
    x |= {name: x[name].astype(mx.bfloat16) for name in ("q", "k", "v", "a", "b")}
    loop, (y, state) = both(x)
    assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    assert relative_error(loop[0], y) < 1e-2 and relative_error(loop[1], state) < 1e-2


def test_a_prompt_by_chunks_is_the_models_and_leaves_its_caches() -> None:
    loop, chunks = taped_qwen(dtype="float32"), taped_qwen(dtype="float32")
    layers: list[Any] = [layer for layer in chunks.layers if layer.is_linear]
    assert use_chunks([chunks]) == len(layers) > 0
    ids, after = row_of_ids(MANY)[None], mx.array([[3, 5]])
    caches: list[Any] = [with_tapes(model.make_cache()) for model in (loop, chunks)]
    for part in (ids, after):
        a, b = (m(part, cache=c) for m, c in zip((loop, chunks), caches, strict=True))
        assert relative_error(a, b) < 1e-5
    for a, b in zip(*map(cache_arrays, caches), strict=True):
        assert a.shape == b.shape and relative_error(a, b) < 1e-5


def test_rows_that_may_be_taken_back_are_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row's bits must not depend on how many rows are with it in a verify."""
    model = taped_qwen(dtype="float32")
    _ = use_chunks([model])
    monkeypatch.setattr(
        "exo_node.shard.kernels.chunked_delta.chunked_delta", None
    )  # cannot be called
    caches = with_tapes(model.make_cache())
    mx.eval(model(row_of_ids(MAX_ROLLBACK_ROWS)[None], cache=caches))
    with pytest.raises(TypeError, match="not callable"):
        _ = model(row_of_ids(MANY)[None], cache=caches)


def test_metal_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert use_chunks([taped_qwen(dtype="float32")]) == 0


def test_a_stage_names_it_whatever_layers_it_has() -> None:
    """Answers that are resumed over another split are exact: the names are compared by layer."""
    layers = range(small_spec().end_layer)
    named = {
        tuple(choice.kernel for choice in load(stage, lambda _: None).kernels if choice.used)
        for stage in (
            small_spec(first_layer=i, end_layer=i + 1, stage=int(i > 0), num_stages=len(layers))
            for i in layers
        )
    }
    assert len(named) == 1 and "chunked_delta" in named.pop()
