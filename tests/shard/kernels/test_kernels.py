"""The host side of the kernels on a CPU, with stand-ins that compute in plain operations."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import qwen3_5
from plain_gated_delta import PlainGatedDelta, give_kernel

from exo_node.mtp.caches.rollback import TapedCache, with_tapes
from exo_node.mtp.families.table import prepare
from exo_node.shard.kernels import (
    gated_delta,
    kernel_choice,
    layers,
    product,
    row_attention,
    trial,
)
from exo_node.shard.kernels.install import used

TEXT = {
    "model_type": "qwen3_5",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}


class PlainProduct:
    """A product in MLX's own operations that remembers its calls."""

    def __init__(self) -> None:
        self.rows_seen: list[int] = []

    def __call__(self, x: mx.array, layer: Any) -> mx.array:
        self.rows_seen.append(x.size // x.shape[-1])
        return x @ layer.weight.T


@pytest.fixture
def model() -> qwen3_5.Model:
    mx.random.seed(3)
    small_model = qwen3_5.Model(
        qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": TEXT})
    )
    small_model.eval()
    prepare(small_model)
    mx.eval(small_model.parameters())
    return small_model


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is a parameter: 96 calls of a trial prove no more than four."""
    monkeypatch.setattr(trial, "_CALLS", 2)
    monkeypatch.setattr(trial, "_REPEATS", 1)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Makes MLX look as if it ran on CUDA; the kernels are stand-ins."""
    kernels: dict[str, Any] = {"product": PlainProduct()}
    monkeypatch.setattr(kernel_choice, "available", lambda: True)

    def delta(sizes: gated_delta.Sizes) -> PlainGatedDelta:
        return kernels.setdefault("delta", PlainGatedDelta(sizes))

    def dense(_: product.Weights) -> PlainProduct:
        return kernels["product"]

    monkeypatch.setattr(gated_delta, "GatedDelta", delta)

    monkeypatch.setattr(product, "product_for", dense)
    return kernels


def clock(seconds: Sequence[float] = (1.0,)) -> Callable[[], float]:
    """Each reading is later than the one before by the next of `seconds`, in turns."""
    at, count = 0.0, 0

    def read() -> float:
        nonlocal at, count
        at += seconds[count % len(seconds)]
        count += 1
        return at

    return read


def test_nothing_is_chosen_where_mlx_is_not_on_cuda(model: qwen3_5.Model) -> None:
    kinds = [type(module) for _, module in model.named_modules()]
    notes: list[str] = []
    assert (
        kernel_choice.choose_kernels([model], "auto", clock(), notes.append) == () and notes == []
    )
    assert [type(module) for _, module in model.named_modules()] == kinds


def test_the_setting_turns_them_off_and_says_so(
    model: qwen3_5.Model, on_gpu: dict[str, Any]
) -> None:
    del on_gpu
    [chosen] = kernel_choice.choose_kernels([model], "mlx", clock(), lambda _: None)
    assert not chosen.used and "EXO_KERNELS" in chosen.reason
    assert not any(
        isinstance(module, product.RowsLinear | row_attention.KernelAttention)
        for _, module in model.named_modules()
    )


def test_every_layer_of_a_model_gets_its_kernel_with_its_figures(
    model: qwen3_5.Model, on_gpu: dict[str, Any]
) -> None:
    notes: list[str] = []
    chosen = kernel_choice.choose_kernels([model], "auto", clock(), notes.append)
    assert notes == [kernel_choice.COMPILING]
    assert {"gated_delta", "product"} <= set(used(chosen))
    assert all("us for 1 and 4 rows" in c.reason for c in chosen if "attention" not in c.kernel)
    layers = [m for _, m in model.named_modules() if type(m).__name__ == "TapedGatedDeltaNet"]
    assert [layer.kernel for layer in layers] == [on_gpu["delta"]] * 3  # pyright: ignore


def test_a_recurrence_whose_many_rows_are_others_is_not_used(
    model: qwen3_5.Model, on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    del on_gpu
    stock = PlainGatedDelta.rows

    def other(self: PlainGatedDelta, *inputs: Any, ends: mx.array | None = None) -> Any:
        y, window, last = stock(self, *inputs, ends=ends)
        return y, window, last if ends is None else last * (1 + 1e-6)

    monkeypatch.setattr(PlainGatedDelta, "rows", other)
    chosen = kernel_choice.choose_kernels([model], "auto", clock(), lambda _: None)
    [delta] = [each for each in chosen if each.kernel == "gated_delta"]
    assert not delta.used and "its 17 rows" in delta.reason


@pytest.mark.parametrize(("rows_differ", "is_used"), [(False, False), (True, True)])
def test_a_slower_product_is_used_where_mlxs_rows_depend_on_each_other(
    on_gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    rows_differ: bool,
    is_used: bool,
) -> None:
    del on_gpu

    def stock(layer: Any, x: mx.array) -> mx.array:
        """MLX's, which has a kernel of its own from eight rows on."""
        return layer(x) + (1e-6 if rows_differ and x.shape[1] >= 8 else 0.0)

    monkeypatch.setattr(product, "stock", stock)
    ours_then_mlxs = clock([0.0, 1.3] * 4 + [0.0, 1.0] * 4)
    [chosen] = kernel_choice.choose_kernels(
        [nn.Linear(64, 32, bias=False)], "auto", ours_then_mlxs, lambda _: None
    )
    assert chosen.kernel == "product" and chosen.used == is_used, chosen


def as_it_is(function: Any) -> Any:
    """In place of `mx.compile`, which rounds elsewhere on a CPU."""
    return function


def delta_layers(model: qwen3_5.Model) -> list[Any]:
    layers: list[Any] = [layer for layer in model.layers if layer.is_linear]
    for layer in layers:
        give_kernel(layer.linear_attn)
    return layers


def test_layers_are_traced_where_their_mixer_has_kernels(
    model: qwen3_5.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "compile", as_it_is)
    ids = mx.array([[5, 9, 2, 44]])
    expected = model(ids, with_tapes(model.make_cache()))
    deltas = delta_layers(model)
    attention_layer: Any = model.layers[3]
    attention_layer.self_attn.kernel = object()  # of a trial that our attention lost
    [chosen] = layers.trace_layers([*model.layers], clock())
    assert chosen.used and chosen.layers == len(deltas) == 3
    assert all(type(layer) is layers.RowsLayer35 for layer in deltas)
    assert type(attention_layer) is qwen3_5.DecoderLayer
    got = model(ids, with_tapes(model.make_cache()))
    assert mx.allclose(expected, got, rtol=1e-4, atol=1e-4).item()


def test_a_trace_with_other_bits_is_not_used(
    model: qwen3_5.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(function: Any) -> Any:
        def run(*inputs: mx.array) -> Any:
            first, *more = function(*inputs)
            return first + 1e-6, *more

        return run

    monkeypatch.setattr(mx, "compile", other)
    deltas = delta_layers(model)
    [chosen] = layers.trace_layers([*model.layers], clock())
    assert not chosen.used and "bits" in chosen.reason
    assert all(type(layer) is qwen3_5.DecoderLayer for layer in deltas)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 40, 70])
def test_a_layer_by_its_kernel_computes_what_mlx_lm_does(model: qwen3_5.Model, rows: int) -> None:
    layer: Any = model.language_model.model.layers[0].linear_attn
    x = mx.random.normal((1, rows, 64))
    before = mx.random.normal((1, 6, 64))
    stock, ours = TapedCache(2), TapedCache(2)
    expected = [layer(before, None, stock), layer(x, None, stock)]
    give_kernel(layer)
    got = [layer(before, None, ours), layer(x, None, ours)]
    for a, b in zip((*expected, *stock.cache), (*got, *ours.cache), strict=True):
        assert a is not None and b is not None
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 20, 64])
def test_rows_are_taken_back_to_the_state_of_single_steps(model: qwen3_5.Model, rows: int) -> None:
    layer: Any = model.language_model.model.layers[0].linear_attn
    give_kernel(layer)
    x = mx.random.normal((1, rows, 64))
    whole, part = TapedCache(2), TapedCache(2)
    for cache in (whole, part):
        layer(mx.ones((1, 3, 64)), None, cache)
    layer(x, None, whole)
    for count in range(rows + 1):
        if count:
            layer(x[:, count - 1 : count], None, part)
        taken_back = copy.deepcopy(whole)
        taken_back.rollback(rows - count)
        for a, b in zip(taken_back.cache, part.cache, strict=True):
            assert a is not None and b is not None and a.shape == b.shape
            assert mx.allclose(a, b, rtol=1e-4, atol=1e-5).item()


def test_few_rows_take_the_product_and_many_take_mlxs() -> None:
    layer, kernel = nn.Linear(64, 32, bias=False), PlainProduct()
    expected = layer(mx.ones((1, 65, 64)))
    product.put_in(layer, kernel, mx.float32)
    assert mx.array_equal(layer(mx.ones((1, 65, 64))), expected).item() and kernel.rows_seen == []
    layer(mx.ones((16, 4, 64)))
    assert kernel.rows_seen == [64]
    layer(mx.ones((1, 1, 64), dtype=mx.bfloat16))
    assert kernel.rows_seen == [64]


def test_embeddings_that_serve_as_lm_head_take_it_too() -> None:
    layer, kernel = nn.Embedding(32, 64), PlainProduct()
    product.put_in(layer, kernel, mx.float32)
    layer.as_linear(mx.ones((1, 3, 64)))
    assert kernel.rows_seen == [3]
    assert layer(mx.array([[1, 2]])).shape == (1, 2, 64)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (product.Weights(32, 256, mx.bfloat16, 6, 64), "6 bits"),
        (product.Weights(32, 256, mx.bfloat16, 4, 16), "groups of 16"),
        (product.Weights(32, 320, mx.bfloat16, 4, 64), "multiple of 256"),
        (product.Weights(32, 320, mx.bfloat16, 8, 64), "multiple of 128"),
        (product.Weights(33, 384, mx.bfloat16, 8, 128), "odd"),
        (product.Weights(32, 256, mx.float32, 4, 64), "float32"),
        (product.Weights(32, 40, mx.bfloat16), "multiple of 32"),
    ],
)
def test_a_shape_without_a_kernel_says_why(weights: product.Weights, says: str) -> None:
    assert says in product.unfit(weights)


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_a_bias_is_in_no_launch_of_several(*, bias: bool) -> None:
    layer = cast("Any", nn.Linear(64, 32, bias=bias).to_quantized(group_size=32, bits=4))
    x, launches = mx.ones((1, 3, 64)), list[int]()
    expected, plain = layer(x), type(layer).__call__

    class Product:
        storage = None

        def __call__(self, x: mx.array, layer: Any, added: mx.array | None = None) -> mx.array:
            launches.append(0 if added is None else 1)
            return plain(layer, x) - (layer.bias if bias else 0) + (0 if added is None else added)

        def several(self, x: mx.array, layers: Sequence[Any]) -> list[mx.array]:
            launches.append(len(layers))
            return [plain(each, x) for each in layers]

    product.put_in(layer, cast("Any", Product()), mx.float32)
    for each in product.JointProducts([layer, layer])(x):
        assert mx.allclose(each, expected, rtol=1e-4).item()
    assert mx.allclose(product.sum_with(layer, x, x[..., :32]), expected + 1, rtol=1e-4).item()
    assert launches == ([0, 0, 0] if bias else [2, 1])


def runs(error: float = 0.0, neighbours: float = 0.0) -> trial.Run:
    def run(rows: int, layer: int) -> Sequence[mx.array]:
        del layer
        return (mx.ones((1, rows, 8)) * (1 + error) + neighbours * rows,)

    return run


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        (runs(error=0.1), "from MLX's"),
        (runs(error=float("nan")), "from MLX's"),
        (runs(neighbours=1e-4), "depend on the rows beside it"),
    ],
)
def test_a_kernel_that_is_wrong_is_not_used(ours: trial.Run, says: str) -> None:
    tried = trial.try_kernel(ours, runs(), 1, mx.float32, clock())
    assert says in tried.fault and not trial.pays([tried])
    chosen = trial.choice("product", "x", tried, used=False)
    assert not chosen.used and "MLX" in str(chosen)


def test_a_kernel_that_does_not_start_is_not_used_and_says_so() -> None:
    def broken(rows: int, layer: int) -> Sequence[mx.array]:
        raise RuntimeError("cudaErrorLaunchOutOfResources: too many resources\nand more")

    tried = trial.try_kernel(broken, runs(), 1, mx.float32, clock())
    assert "too many resources" in tried.fault and "and more" not in tried.fault


def test_a_kernel_is_used_for_all_shapes_or_for_none() -> None:
    quick = trial.Trial(1, "", (1.0, 1.0), (2.0, 2.0))
    slow = trial.Trial(1, "", (2.0, 2.0), (1.0, 1.0))
    assert trial.pays([quick, quick, slow]) and not trial.pays([quick, slow, slow])
    assert trial.pays([replace(quick, layers=9), slow, slow])
    slower = replace(slow, own=(1.4, 1.4))
    assert not trial.pays([slower])
    assert trial.pays([replace(slower, slack=trial.EXACT_SLACK)])
    assert not trial.pays([]) and not trial.pays([trial.Trial(3, "it is broken")])
    chosen = trial.choice("product", "x", quick, used=False)
    assert chosen.reason.startswith("slower over the model's layers")


def test_kernels_that_run_are_named_once_and_refused_ones_not_at_all() -> None:
    shapes = [("product", True), ("attention", True), ("product", True), ("traced", False)]
    choices = [trial.KernelChoice(kernel, "x", 1, used, "") for kernel, used in shapes]
    assert used(choices) == ("attention", "product")
    assert used(choices[3:]) == ()
