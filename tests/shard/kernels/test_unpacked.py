"""Products of many rows with quantised weights: the numbers, and what is in memory at once."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from exo_node.shard.kernels import kernel_choice, product, trial, unpacked

MANY = product.MAX_ROWS + 1


class NoProduct:
    """The product of few rows, which no test here uses."""

    storage = product.Storage(mx.float32, 4, 64)

    def __call__(self, x: mx.array, layer: Any, added: mx.array | None = None) -> mx.array:
        raise AssertionError(x.shape)


def packed(features: int = 32, inputs: int = 128, bits: int = 4) -> Any:
    layer: Any = nn.QuantizedLinear.from_linear(nn.Linear(inputs, features, bias=False), 64, bits)
    product.put_in(layer, NoProduct(), mx.float32)
    return layer


def choose(layers: list[Any]) -> list[Any]:
    return kernel_choice._choose_unpacking(layers)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_are_those_of_the_unpacked_weights(bits: int) -> None:
    layer, x = packed(bits=bits), mx.random.normal((1, MANY, 128), key=mx.random.key(1))
    mlxs = layer(x)
    [chosen] = choose([layer])
    assert chosen.used and (chosen.kernel, chosen.layers) == ("unpacked_product", 1)
    weight = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, bits)
    assert mx.array_equal(layer(x), x @ weight.T).item()
    assert trial.relative_error(mlxs, layer(x)) < 1e-5


def test_another_dtype_is_mlxs() -> None:
    layer = packed()
    x = mx.ones((1, MANY, 128), dtype=mx.bfloat16)
    expected = layer(x)
    _ = choose([layer])
    assert layer(x).dtype == expected.dtype and mx.array_equal(layer(x), expected).item()


def test_what_is_large_unpacked_stays_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = packed(32), packed(64)
    monkeypatch.setattr(unpacked, "MAX_LAYER_BYTES", 32 * 128 * 4)
    [chosen] = choose([small, large])
    assert (small.unpacking is None, large.unpacking is None, chosen.layers) == (False, True, 1)
    assert choose([large]) == []


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="of a CPU")
@pytest.mark.parametrize("bias", [False, True])
def test_on_a_cpu_prompts_are_unpacked_and_fewer_rows_are_those_of_single_ones(
    *, bias: bool
) -> None:
    model: Any = nn.Sequential(nn.Linear(128, 32, bias=bias))
    nn.quantize(model, 64, 4)
    layer, x = model.layers[0], mx.random.normal((2, MANY, 128), key=mx.random.key(1))
    mlxs = layer(x)
    assert unpacked.unpack_prompts([model, model]) == 1
    few = layer(x[:, : MANY - 1])  # more than MANY of both sequences together
    assert mx.array_equal(few, mlxs[:, : MANY - 1]).item()
    many = layer(x)
    weight = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, 4)
    assert mx.array_equal(many, x @ weight.T + (layer.bias if bias else 0)).item()
    assert mx.array_equal(many[1:], layer(x[1:])).item()
    assert 0 < trial.relative_error(mlxs, many) < 1e-5


def test_on_a_cpu_16_bits_stay_packed() -> None:
    model: Any = nn.Sequential(nn.Linear(128, 32, bias=False))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    assert unpacked.unpack_prompts([model, model]) == 0
