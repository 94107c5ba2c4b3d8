"""Which numbers of rows agree is measured, and layers compute their rows in such groups."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

import mlx.core as mx
import pytest
from chips import CHIPS, COARSE, M1, M3, M3_MAX, M5, Chip, on_chip
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU

from exo_node.shard.kernels import row_groups, row_products, row_sets
from exo_node.shard.kernels.product import stock
from exo_node.shard.kernels.row_groups import group_rows, in_groups
from exo_node.shard.kernels.row_sets import RowRange, agreeing_rows
from exo_node.shard.kernels.trial import random_rows

ALL = RowRange(1, 64)


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse deviation shows in each number, so few are compared."""
    monkeypatch.setattr(row_sets, "VALUES", 64)


def linear(inputs: int, outputs: int, kind: str = "bfloat16", *, bias: bool = False) -> nn.Module:
    """`kind`: a dtype, or a mode of quantisation and its bits, with inputs in bfloat16."""
    mx.random.seed(3)
    layer = nn.Linear(inputs, outputs, bias=bias)
    if kind in ("float32", "bfloat16", "float16"):
        _ = layer.set_dtype(getattr(mx, kind))
        return layer
    mode, bits = kind.split()
    _ = layer.set_dtype(mx.bfloat16)
    return nn.QuantizedLinear.from_linear(layer, group_size=32, bits=int(bits), mode=mode)


def measured(chip: Chip, layer: nn.Module, deviation: float = COARSE) -> RowRange | None:
    dtype = mx.float32 if layer["weight"].dtype == mx.float32 else mx.bfloat16
    inputs = layer["weight"].shape[1] * 32 // getattr(layer, "bits", 32)
    with on_chip(chip, deviation):
        return agreeing_rows(partial(stock, layer), inputs, dtype)


@pytest.mark.usefixtures("few_values")
@pytest.mark.parametrize(
    ("inputs", "kind", "ranges"),
    [
        # 12 rows agree beyond 4,096 inputs, up to the limits of smaller ones.
        (4608, "affine 4", {M1: (1, 5), M3: (2, 12), M3_MAX: (2, 12), M5: (2, 12)}),
        (2560, "affine 8", {M1: (1, 8), M3: (2, 13), M3_MAX: (2, 13), M5: (2, 16)}),
        (512, "affine 4", {M1: (1, 13), M3: (2, 12), M3_MAX: (2, 12), M5: (2, 32)}),
        (128, "affine 4", {M1: (1, 13), M3: (1, 12), M3_MAX: (1, 12), M5: (1, 32)}),
        (512, "mxfp4 4", {M1: (2, 13), M3: (2, 12), M3_MAX: (2, 12), M5: (2, 32)}),
        (512, "bfloat16", {M1: (2, 16), M3: (2, 5), M3_MAX: (2, 5), M5: (2, 5)}),
        (512, "float32", {M1: (2, 64), M3: (2, 64), M3_MAX: (2, 64), M5: (2, 64)}),
    ],
)
def test_the_sets_of_each_chip_are_found(
    inputs: int, kind: str, ranges: dict[Chip, tuple[int, int]]
) -> None:
    layer = linear(inputs, 96, kind)
    found = {chip: measured(chip, layer) for chip in CHIPS.values()}
    assert found == {chip: RowRange(*each) for chip, each in ranges.items()}


@pytest.mark.usefixtures("few_values")
@pytest.mark.parametrize("bias", [False, True])
def test_a_router_of_few_outputs_has_fewer_classes(*, bias: bool) -> None:
    """Up to 64 outputs, 2 to 15 rows of 16 bits take one kernel from the M3 on."""
    layer = linear(512, 64, "bfloat16", bias=bias)
    assert measured(M3, layer) == RowRange(2, 13)


def test_one_number_in_a_hundred_thousand_decides() -> None:
    """100 rows of 1,000 outputs are compared, and the largest row has another number in pairs."""
    outputs = 1000
    largest = mx.max(random_rows((164, 8), mx.float32, 1)[:100, 0])

    def product(x: mx.array) -> mx.array:
        differs = (x[:, :1] == largest) * (mx.arange(outputs) == 3) * (x.shape[0] == 2)
        return mx.broadcast_to(x[:, :1], (x.shape[0], outputs)) + differs

    assert agreeing_rows(product, 8, mx.float32) == RowRange(3, 64)


def test_the_cpu_agrees_and_nothing_is_grouped() -> None:
    layer = linear(64, 96, "float32")
    assert agreeing_rows(partial(stock, layer), 64, mx.float32) == ALL
    assert group_rows([layer], mx.float32, perf_counter) == () and type(layer) is nn.Linear


@pytest.mark.usefixtures("few_values")
def test_a_product_that_never_repeats_itself_is_left_as_it_is() -> None:
    calls = iter(range(1, 10_000))
    assert agreeing_rows(lambda x: x * next(calls), 64, mx.float32) is None


@pytest.fixture(params=CHIPS.values(), ids=list(CHIPS))
def chip(request: pytest.FixtureRequest) -> Iterator[Chip]:
    with on_chip(request.param):
        yield request.param


KINDS = ("affine 4", "mxfp4 4", "bfloat16", "float32")


@pytest.mark.usefixtures("few_values", "chip")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("bias", "with_rows"), [(True, True), (False, False)], ids=["grouped", "as it is"]
)
def test_a_row_has_its_bits_in_every_block(kind: str, *, bias: bool, with_rows: bool) -> None:
    """With groups in each block and batch, strided ones too; without them in few or none."""
    layer: Any = linear(256, 96, kind, bias=bias)
    if with_rows:
        [choice] = group_rows([layer], mx.bfloat16, perf_counter)
        assert choice.used and "rows give the same bits" in choice.reason
    x = random_rows((64, 256), mx.float32 if kind == "float32" else mx.bfloat16, 5)
    expected = mx.concatenate([layer(x[i : i + 1]) for i in range(64)])

    def same(y: mx.array, rows: mx.array) -> bool:
        return bool(mx.array_equal(y.reshape(-1, 96), rows).item())

    equal = [same(layer(x[None, :n]), expected[:n]) for n in range(1, 65)]
    in_batches = [
        same(layer(x[: b * n].reshape(b, n, 256)), expected[: b * n])
        for b, n in ((2, 1), (16, 1), (16, 4), (3, 7), (8, 8))
    ]
    last = same(layer(x.reshape(8, 8, 256)[:, -1:]), expected[7::8])
    assert all([*equal, *in_batches, last]) == with_rows


@pytest.mark.usefixtures("few_values")
def test_more_rows_than_64_of_one_request_are_one_call() -> None:
    calls = list[int]()

    def product(x: mx.array) -> mx.array:
        calls.append(x.size // x.shape[-1])
        return x

    x = mx.zeros((2, 65, 8))
    assert in_groups(product, x, RowRange(2, 12)).shape == x.shape and calls == [130]


@pytest.mark.parametrize(
    ("rows", "agreeing", "calls"),
    [
        (1, (2, 12), [2]),
        (12, (2, 12), [12]),
        (13, (2, 12), [6, 7]),
        (6, (2, 5), [3, 3]),
        (64, (2, 12), [10, 11, 11, 10, 11, 11]),
        (5, (1, 1), [1, 1, 1, 1, 1]),
        (7, (3, 3), [3, 3, 3]),
        (2, (3, 5), [3]),
    ],
)
def test_groups_are_few_and_none_is_below_the_floor(
    rows: int, agreeing: tuple[int, int], calls: list[int]
) -> None:
    seen = list[int]()

    def product(x: mx.array) -> mx.array:
        seen.append(x.shape[0])
        return 2 * x

    x = mx.arange(rows * 3).reshape(1, rows, 3)
    assert mx.array_equal(in_groups(product, x, RowRange(*agreeing)), 2 * x)
    assert seen == calls


@pytest.mark.usefixtures("few_values")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_embeddings_are_grouped_where_they_are_the_lm_head(*, tied: bool, quantised: bool) -> None:
    embeddings: nn.Module = nn.Embedding(96, 64)
    if quantised:
        embeddings = nn.QuantizedEmbedding.from_embedding(embeddings, group_size=32, bits=4)
    ids = mx.array([[1, 5]])
    expected = embeddings(ids)
    modules = [embeddings, linear(32 if tied else 64, 96, "float32")]
    with on_chip(M3):
        assert len(group_rows(modules, mx.float32, perf_counter)) == 1 + tied
    assert mx.array_equal(embeddings(ids), expected)
    assert hasattr(embeddings, "agreeing") == tied


@pytest.mark.parametrize("most", [1, 6])
def test_on_cuda_linear_layers_of_mlx_are_not_computed_row_by_row(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    experts = SwitchGLU(64, 96, 4)
    monkeypatch.setattr(row_groups, "measure", lambda _layer, _kind: RowRange(1, most))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(row_groups, "may_depend_on_rows", lambda: True)
    monkeypatch.setattr(row_groups, "available", lambda: True)
    layers = [linear(64, 96), nn.Embedding(32, 64), experts]
    choices = group_rows(layers, mx.bfloat16, perf_counter)
    assert [choice.used for choice in choices] == [most > 1, most > 1, True]
    assert [hasattr(layer, "agreeing") for layer in layers] == [most > 1, most > 1, True]
    assert cast("Any", experts).agreeing == RowRange(1, most)


@dataclass(frozen=True, slots=True)
class Eleven(Chip):
    """Eleven rows have a kernel of their own, and no others."""

    def dense(self, rows: int, outputs: int, dtype: mx.Dtype) -> str:
        return "of eleven" if rows == 11 else "of all others"


@pytest.mark.usefixtures("few_values")
def test_on_cuda_every_number_of_rows_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_products, "available", lambda: True)
    layer: Any = linear(512, 96)
    with on_chip(Eleven("eleven", 15, "g")):
        [choice] = group_rows([layer], mx.bfloat16, perf_counter)
    assert (choice.used, layer.agreeing) == (True, RowRange(1, 10))


@pytest.mark.usefixtures("few_values")
@pytest.mark.parametrize("chip", [M1, M3], ids=lambda chip: chip.name)
def test_dense_rows_are_single_where_pairs_take_more_than_twice_as_long(chip: Chip) -> None:
    layer: Any = linear(512, 96)
    with on_chip(chip):
        [choice] = group_rows([layer], mx.bfloat16, perf_counter)
    assert (choice.kernel, choice.used, layer.agreeing) == (
        (row_groups.SINGLE, True, RowRange(1, 1))
        if chip is M1
        else (row_groups.NAME, True, RowRange(2, 5))
    )


@pytest.mark.parametrize(("large", "small", "single"), [(2.3, 1.0, False), (2.4, 1.0, True)])
def test_all_layers_together_decide_whether_rows_are_single(
    large: float, small: float, monkeypatch: pytest.MonkeyPatch, *, single: bool
) -> None:
    """Else two machines of one kind might compute other bits where a small layer's times are about
    equal. 3 large layers and a small one; `large`: seconds of two rows of one."""
    layers = [*(linear(64, 96) for _ in range(3)), linear(64, 32)]

    def seconds_of(run: Any, rows: int, *_: object) -> float:
        [product] = run(rows, 0)
        assert product.shape[0] == rows
        return 1.0 if rows == 1 else large if product.shape[1] == 96 else small

    monkeypatch.setattr(row_groups, "measure", lambda _layer, _kind: RowRange(2, 16))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(row_groups, "may_depend_on_rows", lambda: True)
    monkeypatch.setattr(row_groups, "seconds_of", seconds_of)
    known = dict[str, RowRange]()
    choices = group_rows(layers, mx.bfloat16, perf_counter, known)
    assert {each.kernel for each in choices} == {row_groups.SINGLE if single else row_groups.NAME}
    assert set(known.values()) == {RowRange(1, 1) if single else RowRange(2, 16)}
