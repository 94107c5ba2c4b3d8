"""Products whose rows have the same bits however many rows a forward has.

Where MLX's product of one row differs from that of several, as on Metal, a single row is repeated
and more rows are computed in groups, so that each call has a number of rows that was measured to
agree. Nothing but the product sees a repeated row: no cache, mask, expert or attention.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from .cuda import available
from .row_products import (
    EMBEDDINGS,
    EXPERTS,
    LINEAR,
    PER_HEAD,
    ProductKind,
    by_heads,
    by_rows,
    kind_of,
    not_grouped,
    plain_product,
)
from .row_sets import WIDTHS, RowRange, agreeing_rows
from .trial import Clock, KernelChoice, group_modules, random_rows, seconds_of

NAME: Final = "row_groups"
SINGLE: Final = "single_rows"
"""Products whose rows are computed one by one. It is named beside NAME: elsewhere the same products
may be in groups, and have other bits."""
_ONE: Final = RowRange(1, 1)
MeasuredRows = dict[str, RowRange]
"""The numbers of rows that agree, by `ProductKind.key`."""


def in_groups(product: Callable[..., Any], x: mx.array, agreeing: RowRange, *more: mx.array) -> Any:
    """The product of x (.., rows, inputs), in calls whose numbers of rows agree.

    Rows of a prompt, more than 64 of one request, are one call: no single step has their bits.
    `more`: what else the product takes for each row. It may give several arrays.
    """
    *before, _ = x.shape
    if len(before) and before[-1] > WIDTHS[-1]:
        return product(x, *more)
    flat = [each.reshape(-1, each.shape[-1]) for each in (x, *more)]
    bounds = _bounds(flat[0].shape[0], agreeing)
    parts = [_product_of(product, [each[a:b] for each in flat], agreeing.floor) for a, b in bounds]
    outs = [
        each[0] if len(parts) == 1 else mx.concatenate(list(each))
        for each in zip(*parts, strict=True)
    ]
    first, *others = (each.reshape(*before, *each.shape[1:]) for each in outs)
    return (first, *others) if others else first


def _bounds(rows: int, agreeing: RowRange) -> list[tuple[int, int]]:
    """The first row and the end of each group: as few groups as possible, of about equal size."""
    count = -(-rows // agreeing.ceiling)
    ends = [rows * i // count for i in range(count + 1)]
    return list(pairwise(ends))


def _product_of(
    product: Callable[..., Any], group: Sequence[mx.array], floor: int
) -> Sequence[mx.array]:
    """The product of a group, whose first row is repeated if the group has fewer than `floor`."""
    rows = group[0].shape[0]
    if rows < floor:
        group = [mx.concatenate([each, *[each[:1]] * (floor - rows)]) for each in group]
    out = product(*group)
    return [each[:rows] for each in (out if isinstance(out, tuple) else (out,))]


@cache
def _grouped(kind: type[Any]) -> type[Any]:
    """A class of layers as `kind` is, which compute in groups of rows, of their `agreeing`."""

    def call(self: Any, x: mx.array) -> Any:
        return in_groups(partial(compute, self), x, self.agreeing)

    def call_experts(self: Any, x: mx.array, indices: mx.array) -> Any:
        most = indices.shape[-1]  # of one row; `agreeing` counts those of all
        floor, ceiling = -(-self.agreeing.floor // most), self.agreeing.ceiling // most
        rows = RowRange(floor, max(floor, ceiling))
        return in_groups(partial(compute, self), x, rows, indices)

    def call_heads(self: Any, x: mx.array, transpose: bool = True) -> Any:
        heads = x.shape[1]
        if not transpose or heads != self.weight.shape[0]:  # all keys and values, for a prompt
            return compute(self, x, transpose)

        def product(flat: mx.array) -> mx.array:
            return by_rows(compute(self, by_heads(flat[None], heads)))[0]

        return by_heads(in_groups(product, by_rows(x), self.agreeing), heads)

    method = "as_linear" if kind in EMBEDDINGS else "__call__"
    compute = getattr(kind, method)
    calls = call_experts if kind in EXPERTS else call_heads if kind in PER_HEAD else call
    return type(f"Grouped{kind.__name__}", (kind,), {method: calls})


def may_depend_on_rows() -> bool:
    """Whether MLX chooses the kernels of products by rows here.

    On CPUs it does not, and there a measurement would take minutes.
    """
    return mx.default_device() != mx.Device(mx.cpu)


def products_of(modules: Sequence[nn.Module], dtype: mx.Dtype) -> dict[ProductKind, list[Any]]:
    """The layers of each kind of product that MLX computes. `dtype`: that of hidden states."""
    kinds = group_modules(modules, partial(kind_of, dtype=dtype))
    # Embeddings are a product where they serve as the lm_head, in place of a layer of their size.
    linear = {kind.size for kind in kinds if not issubclass(kind.layer, EMBEDDINGS)}
    return {
        kind: layers
        for kind, layers in kinds.items()
        if not issubclass(kind.layer, EMBEDDINGS) or kind.size not in linear
    }


def measure(layer: Any, kind: ProductKind) -> RowRange | None:
    """The numbers of rows of a product that agree; see `agreeing_rows`."""
    return agreeing_rows(partial(plain_product, layer), kind.inputs, kind.dtype, kind.widths)


def group_rows(
    modules: Sequence[nn.Module],
    dtype: mx.Dtype,
    clock: Clock,
    earlier: MeasuredRows | None = None,
) -> tuple[KernelChoice, ...]:
    """Groups the rows of each kind of product in `modules` where one row and more differ.

    `dtype`: that of hidden states. `earlier`: what earlier loads measured, by `ProductKind.key`;
    what it lacks is measured and added. Returns what was found of each kind, and the kinds that no
    grouping makes exact.
    """
    if not may_depend_on_rows():
        return ()
    # Before any class is replaced by its grouped one.
    unknown = [
        KernelChoice(NAME, f"product in {name}", 1, False, "this class computes it by itself")
        for name in sorted(not_grouped(modules))
    ]
    earlier, kinds = {} if earlier is None else earlier, products_of(modules, dtype)
    measured = {k: measure(kinds[k][0], k) for k in kinds if k.key not in earlier}
    floors = {k: rows.floor for k, rows in measured.items() if rows is not None and rows.floor > 1}
    # All alike, so that times which are close to each other decide nothing.
    if sum(_lost_s(k, kinds[k], floor, clock) for k, floor in floors.items()) > 0:
        measured |= dict.fromkeys(floors, _ONE)
    earlier |= {kind.key: rows for kind, rows in measured.items() if rows is not None}
    return (*(_group(k, layers, earlier.get(k.key)) for k, layers in kinds.items()), *unknown)


def _lost_s(kind: ProductKind, layers: Sequence[Any], floor: int, clock: Clock) -> float:
    """Seconds that calls of `floor` rows take more than as many calls of one row, in all layers."""
    x = random_rows((floor, kind.inputs), kind.dtype, 1)

    def run(rows: int, layer: int) -> list[Any]:
        return [plain_product(layers[layer], x[:rows])]

    one, together = (seconds_of(run, rows, len(layers), clock) for rows in (1, floor))
    return len(layers) * (together - floor * one)


def _group(kind: ProductKind, layers: Sequence[Any], agreeing: RowRange | None) -> KernelChoice:
    if agreeing is None:
        why = "no number of rows gives the same bits twice"
        return KernelChoice(NAME, str(kind), len(layers), False, why)
    if available() and agreeing == _ONE and issubclass(kind.layer, LINEAR + EMBEDDINGS):
        # Experts are read for each row anyway.
        why = "only single rows give the same bits, and MLX reads all weights for each call"
        return KernelChoice(NAME, str(kind), len(layers), False, why)
    is_grouped, name = agreeing != RowRange(1, kind.widths[-1]), NAME
    if is_grouped:
        name = SINGLE if agreeing == _ONE else NAME
        for layer in layers:
            layer.agreeing = agreeing
            layer.__class__ = _grouped(type(layer))
    return KernelChoice(name, str(kind), len(layers), is_grouped, f"{agreeing} give the same bits")
