"""The end of a decoder layer in one launch: the bits of its parts by themselves.

In the emulator or on the GPU, as `test_kernel_texts.py`. The emulator runs blocks in their order,
and ends the test where one would wait for a later one.
"""

import copy
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from emulated import use
from kernel_cases import exact_norm, product_case
from mlx import nn

from exo_node.shard.kernels import layer_end, product, trial
from exo_node.shard.kernels.cuda import ARRIVALS, available
from exo_node.shard.kernels.fused import RowsMLP
from exo_node.shard.kernels.product import put_in, sum_with

ON_GPU = available()
KINDS = (
    (mx.bfloat16, 4, 64),
    *(((mx.float16, 4, 128), (mx.bfloat16, 4, 32), (mx.bfloat16, 8, 64)) if ON_GPU else ()),
)
SIZES = ((1024, 1280, 2304), *(((5120, 6144, 17408),) if ON_GPU else ()))
"""A layer's width, that of its attention and that of its MLP; the last one has eight parts."""
ROWS = (1, 6, 16)


@pytest.fixture(autouse=True)
def kernels_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    if not ON_GPU:
        monkeypatch.setattr(nn.RMSNorm, "__call__", exact_norm)


@cache
def product_of(weights: product.Weights) -> nn.Module:
    return product_case(weights, rows=1)[0]


def layer_of(kind: tuple[mx.Dtype, int, int], size: tuple[int, int, int]) -> Any:
    """A decoder layer's norm and MLP, and its product `o`, with their kernels."""
    width, mixed, inner = size
    layer: Any = nn.Module()
    layer.mlp = RowsMLP(width, inner)
    parts = {"o": (width, mixed), "down_proj": (width, inner)}
    parts |= dict.fromkeys(("gate_proj", "up_proj"), (inner, width))
    for name, shape in parts.items():
        part = copy.copy(product_of(product.Weights(*shape, *kind)))
        put_in(part, product.QuantizedProduct(product.Storage(*kind)), kind[0])
        setattr(layer if name == "o" else layer.mlp, name, part)
    up: Any = layer.mlp.up_proj
    up.scales = up.scales * 0.5
    layer.post_attention_layernorm = nn.RMSNorm(width, eps=1e-6)
    weight = mx.random.uniform(0.5, 1.5, (width,), key=mx.random.key(3))
    layer.post_attention_layernorm.weight = weight.astype(kind[0])
    return layer


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_end_of_a_layer_has_the_bits_of_its_parts(
    kind: tuple[mx.Dtype, int, int], size: tuple[int, int, int]
) -> None:
    layer = layer_of(kind, size)
    norm, end = layer.post_attention_layernorm, layer_end.end_of(layer, layer.o)
    assert isinstance(end, layer_end.LayerEnd)
    x, mixed = (
        mx.random.normal((1, 16, wide), key=mx.random.key(wide)).astype(kind[0])
        for wide in size[:2]
    )
    assert end.takes(x) and not end.takes(mx.concatenate([x, x], axis=1))
    h = sum_with(layer.o, mixed, x)
    expected = layer.mlp(norm(h), h)
    for rows in ROWS:
        few, few_x = mixed[:, :rows], x[:, :rows]
        got = end(layer.o, few, few_x, mx.zeros(*ARRIVALS), norm, layer.mlp)
        assert mx.array_equal(got, expected[:, :rows]).item()
    two, two_x = (part[:, :6].reshape(2, 3, -1) for part in (mixed, x))
    got = end(layer.o, two, two_x, mx.zeros(*ARRIVALS), norm, layer.mlp)
    assert mx.array_equal(got.reshape(1, 6, -1), expected[:, :6]).item()


@pytest.mark.parametrize("factor", [1.0, 1.0 + 2**-7])
def test_an_end_is_used_if_it_has_the_bits_of_its_parts(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the products."""

    def plain(self: object, x: mx.array, layer: Any, added: Any = 0) -> mx.array:
        del self
        return mx.mean(x, axis=-1, keepdims=True) * layer.scales[:, 0] + added

    def gated(self: object, x: mx.array, gate: Any, up: Any) -> mx.array:
        return nn.silu(plain(self, x, gate)) * plain(self, x, up)

    def end(
        self: object, o: Any, mixed: mx.array, x: mx.array, zeros: mx.array, norm: Any, mlp: Any
    ) -> mx.array:
        assert id(zeros) not in seen
        seen.add(id(zeros))
        kept.append(zeros)
        h = sum_with(o, mixed, x)
        return mlp(norm(h), h) * mx.array(factor, dtype=x.dtype)

    seen, kept, ticks = set[int](), list[mx.array](), itertools.count()
    monkeypatch.setattr(product.QuantizedProduct, "__call__", plain)
    monkeypatch.setattr(product.QuantizedProduct, "gated", gated)
    monkeypatch.setattr(layer_end.LayerEnd, "__call__", end)
    monkeypatch.setattr(trial, "TRIAL_LAYERS", 2)
    layer = layer_of(KINDS[0], SIZES[0])
    layer.input_layernorm, layer.end = layer.post_attention_layernorm, None
    chosen = layer_end.choose_end([layer], lambda each: each.o, lambda: float(next(ticks)))
    assert chosen.used == (layer.end is not None) == (factor == 1.0)
    assert "us for 1 and 4 rows" in chosen.reason or "bits are not those" in chosen.reason


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("post_attention_layernorm", nn.LayerNorm(1024), "norm is of another kind"),
        ("o", nn.Linear(1280, 1024, bias=False), "stored differently"),
    ],
)
def test_an_end_of_another_kind_says_why_it_has_no_kernel(
    name: str, value: nn.Module, reason: str
) -> None:
    layer = layer_of(KINDS[0], SIZES[0])
    setattr(layer, name, value)
    assert reason in str(layer_end.end_of(layer, layer.o))


@pytest.mark.parametrize("size", [(1040, 1280, 2304), (1024, 768, 2304)])
def test_an_end_of_other_sizes_has_no_kernel(size: tuple[int, int, int]) -> None:
    layer = layer_of(KINDS[0], (1024, 1280, 2304))
    width, mixed, _ = size
    layer.o.weight = mx.zeros((width, mixed // 8), dtype=mx.uint32)
    reason = layer_end.end_of(layer, layer.o)
    assert isinstance(reason, str) and str(min(size[:2] if width != 1024 else (mixed,))) in reason
