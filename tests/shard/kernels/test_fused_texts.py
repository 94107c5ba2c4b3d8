"""Products that compute several things in a launch: the bits of the products by themselves.

In the emulator or on the GPU, as `test_kernel_texts.py`.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from emulated import use
from kernel_cases import product_case
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from exo_node.shard.kernels import fused, product
from exo_node.shard.kernels.cuda import available
from exo_node.shard.kernels.trial import relative_error

ON_GPU = available()
ROWS = (1, 3, 9, *((17, 33) if ON_GPU else ()))
KINDS = (
    (mx.bfloat16, 4, 64),
    *(((mx.bfloat16, 8, 64), (mx.bfloat16, 4, 32), (mx.float16, 8, 128)) if ON_GPU else ()),
)
SIZES = ((20, 1024), *(((1740, 5120),) if ON_GPU else ()))


@pytest.fixture(autouse=True)
def kernels_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    product._quantized.cache_clear()  # pyright: ignore[reportPrivateUsage]


def layers_of(kind: tuple[mx.Dtype, int, int], *sizes: tuple[int, int]) -> list[Any]:
    return [product_case(product.Weights(*size, *kind), rows=1)[0] for size in sizes]


def rows_of(width: int, dtype: mx.Dtype, rows: int = 33) -> mx.array:
    return mx.random.normal((1, rows, width), key=mx.random.key(rows)).astype(dtype)


def kernel_of(kind: tuple[mx.Dtype, int, int]) -> product.QuantizedProduct:
    return product.QuantizedProduct(product.Storage(*kind))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_in_one_launch_are_those_by_themselves(
    kind: tuple[mx.Dtype, int, int], size: tuple[int, int]
) -> None:
    features, width = size
    layers = layers_of(kind, (features, width), (2, width), (48, width), (features + 2, width))
    kernel, x = kernel_of(kind), rows_of(width, kind[0])
    for rows in ROWS:
        part = x[:, :rows]
        for layer, got in zip(layers, kernel.several(part, layers), strict=True):
            assert mx.array_equal(got, kernel(part, layer)).item()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_added_is_added_to_the_rounded_product(
    kind: tuple[mx.Dtype, int, int], size: tuple[int, int]
) -> None:
    [layer], kernel = layers_of(kind, size), kernel_of(kind)
    x, added = rows_of(size[1], kind[0]), rows_of(size[0], kind[0])
    for rows in ROWS:
        got = kernel(x[:, :rows], layer, added[:, :rows])
        assert mx.array_equal(got, kernel(x[:, :rows], layer) + added[:, :rows]).item()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_gated_product_is_that_of_two_products(
    kind: tuple[mx.Dtype, int, int], size: tuple[int, int]
) -> None:
    gate, up = layers_of(kind, size, size)
    up.scales = up.scales * 0.5
    kernel, x = kernel_of(kind), rows_of(size[1], kind[0]) * 4
    whole = kernel.gated(x, gate, up)
    expected = nn.silu(kernel(x, gate)) * kernel(x, up)
    assert relative_error(expected, whole) <= 4e-3
    for rows in ROWS:
        assert mx.array_equal(kernel.gated(x[:, :rows], gate, up), whole[:, :rows]).item()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_experts_are_mlxs_and_a_rows_do_not_depend_on_the_rows_beside_it(
    kind: tuple[mx.Dtype, int, int],
) -> None:
    count, hidden, width = (256, 512, 2048) if ON_GPU else (5, 256, 512)
    layer, dtype = experts(kind, count, hidden, width), kind[0]
    x = mx.random.normal((2, 6, width), key=mx.random.key(4)).astype(dtype)
    scores = mx.random.uniform(shape=(2, 6, count), key=mx.random.key(5))
    chosen = mx.argsort(scores, axis=-1)[..., :3]
    expected = in_float32(layer, kind, x, chosen)
    assert x.dtype == dtype and SwitchGLU.__call__(layer, x, chosen).shape == expected.shape
    layer.__class__ = fused.RowsSwitchGLU
    got = layer(x, chosen)
    assert got.shape == expected.shape == (2, 6, 3, width)
    assert relative_error(expected, got) <= 1e-2
    for b in range(2):
        for i in range(6):
            one = layer(x[b : b + 1, i : i + 1], chosen[b : b + 1, i : i + 1])
            assert mx.array_equal(one[0, 0], got[b, i]).item()


def in_float32(
    layer: Any, kind: tuple[mx.Dtype, int, int], x: mx.array, chosen: mx.array
) -> mx.array:
    def by(part: Any, rows: mx.array) -> mx.array:
        scales, biases = (each.astype(mx.float32) for each in (part.scales, part.biases))
        whole = mx.dequantize(part.weight, scales, biases, kind[2], kind[1])
        return (whole[chosen] * rows[..., None, :]).sum(axis=-1)

    rows = x.astype(mx.float32)[:, :, None]
    return by(layer.down_proj, nn.silu(by(layer.gate_proj, rows)) * by(layer.up_proj, rows))


def experts(kind: tuple[mx.Dtype, int, int], count: int, hidden: int, width: int) -> Any:
    """A SwitchGLU of quantised experts, with the kernels that `fuse` would give it."""
    dtype, bits, group = kind
    mx.random.seed(9)
    layer: Any = SwitchGLU(width, hidden, count)
    for name in ("gate_proj", "up_proj", "down_proj"):
        dense: SwitchLinear = layer[name]
        dense.weight = dense.weight.astype(dtype)
        layer[name] = dense.to_quantized(group, bits)
    stored = fused.experts_of(layer)
    assert not isinstance(stored, str)
    layer.kernels = tuple(product.QuantizedProduct(each) for each in stored)
    layer.rows_dtype = dtype
    return layer
