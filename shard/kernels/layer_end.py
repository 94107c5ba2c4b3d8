"""A decoder layer behind its attention or recurrence in one launch in place of four.

Launches bound a step where the host is slow, and between two of them the GPU's memory waits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import mlx.core as mx
from mlx import nn

from .cuda import ARRIVALS, TYPES, CudaKernel
from .product import Cut, Storage, arrays_of, as_rows, is_alone, sum_with
from .trial import (
    FEW,
    TRIAL_LAYERS,
    Clock,
    KernelChoice,
    Run,
    Trial,
    choice,
    random_rows,
    try_kernel,
)

MAX_ROWS: Final = 16
"""The most rows of all sequences together: more are no faster than in launches of their own."""
_WARPS: Final = 4
_RING_ROWS: Final = 4
"""The most rows that fit into the ring with the weights."""
_STAGES: Final = {True: (3, 2, 3), False: (6, 3, 6)}
"""Stages of the rings of o, of gate and up, and of down, with x in the ring or without: what three
blocks of an H200's multiprocessor have room for."""
_NORM_STEP: Final = 1024
"""A norm's numbers that a block reads at a time, up to eight times."""
_TRIAL_CALLS: Final = 256
"""Zeros that are made at a time: those of a trial's calls, so that it does not time them."""
_TALL: Final = 16
"""Features of a block."""
_MATRICES: Final = ("o", "gate", "up", "down")


class LayerEnd:
    """The kernels for layers whose products are stored alike."""

    def __init__(self, storage: Storage, eps: float) -> None:
        self._storage, self._eps = storage, eps

    def takes(self, x: mx.array) -> bool:
        """Whether the kernels compute as many rows as `x` (B, n, H) has."""
        return x.size <= MAX_ROWS * x.shape[-1] and x.dtype == self._storage.dtype

    def __call__(
        self, o: Any, mixed: mx.array, x: mx.array, zeros: mx.array, norm: Any, mlp: Any
    ) -> mx.array:
        """h + mlp(norm(h)), where h is x + o(mixed): the bits of those by themselves.

        `zeros`: from the launch before, by which the blocks count themselves.
        """
        rows, width = math.prod(x.shape[:-1]), x.shape[-1]
        inner = mlp.gate_proj.weight.shape[0]
        parts = tuple(self._parts(size) for size in (mixed.shape[-1], width, inner))
        kernel, shared = _kernel(self._storage, self._eps, parts, rows)
        blocks = 2 * -(-width // _TALL) + rows + -(-inner // _TALL)
        matrices = (o, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        arrays = [each for layer in matrices for each in arrays_of(layer)]
        dtype = self._storage.dtype
        return kernel(
            [as_rows(mixed), as_rows(x), norm.weight, *arrays, zeros],
            (blocks, 1, 1),
            32 * _WARPS,
            [
                (x.shape, dtype),
                *(((rows, wide), dtype) for wide in (width, width, inner)),
            ],
            shared,
        )[0]

    def _parts(self, inputs: int) -> int:
        return self._storage.cut("added", 1, _TALL, inputs).parts


def end_of(layer: Any, o: Any) -> LayerEnd | str:
    """The kernels for a decoder layer with a `RowsMLP`, or why there are none."""
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    products: list[Any] = [o, mlp.gate_proj, mlp.down_proj]
    if not is_alone(o) or len({each.product.storage for each in products}) > 1:
        return "its products are stored differently"
    storage: Storage = products[0].product.storage
    width = products[0].weight.shape[0]
    if type(norm) is not nn.RMSNorm or norm.weight.dtype != storage.dtype:
        return "its norm is of another kind"
    if width % _NORM_STEP or width > 8 * _NORM_STEP:
        return f"it has {width} numbers, not a multiple of {_NORM_STEP} up to {8 * _NORM_STEP}"
    inputs = [each.weight.shape[1] * 32 // storage.bits for each in products]
    if any(size < _WARPS * storage.step for size in inputs):
        return f"a product has {min(inputs)} inputs, fewer than {_WARPS * storage.step}"
    return LayerEnd(storage, norm.eps)


def choose_end(layers: list[Any], o_of: Callable[[Any], Any], clock: Clock) -> KernelChoice:
    """Gives layers their `end` if it has the bits of its parts and takes no longer.

    The layers have one shape, and a `RowsMLP`. `o_of`: the product behind a layer's attention or
    recurrence.
    """
    name, shape = "layer_end", f"end of a layer of {layers[0].mlp.gate_proj.weight.shape[0]}"
    end = end_of(layers[0], o_of(layers[0]))
    if isinstance(end, str):
        return KernelChoice(name, shape, len(layers), False, end)
    o, dtype = o_of(layers[0]), layers[0].input_layernorm.weight.dtype
    width, mixed_width = o.weight.shape[0], o.weight.shape[1] * 32 // o.bits
    x = random_rows((1, MAX_ROWS, width), dtype, 18)
    mixed = random_rows((1, MAX_ROWS, mixed_width), dtype, 19)
    zeros = list[mx.array]()

    def unused_zeros() -> mx.array:
        if not zeros:
            zeros.extend(mx.zeros(*ARRIVALS) for _ in range(_TRIAL_CALLS))
            mx.eval(zeros)
        return zeros.pop()

    def traced(forward: Callable[[Any, mx.array, mx.array, mx.array], mx.array]) -> Run:
        """Traces an end of each layer, as decoder layers are traced: the host's time counts."""
        traces = [mx.compile(partial(forward, layer)) for layer in layers[:TRIAL_LAYERS]]
        return lambda rows, at: (
            traces[at % len(traces)](mixed[:, :rows], x[:, :rows], unused_zeros()),
        )

    @traced
    def ours(layer: Any, few: mx.array, few_x: mx.array, zeros: mx.array) -> mx.array:
        return end(o_of(layer), few, few_x, zeros, layer.post_attention_layernorm, layer.mlp)

    @traced
    def parts(layer: Any, few: mx.array, few_x: mx.array, _: mx.array) -> mx.array:
        h = sum_with(o_of(layer), few, few_x)
        return layer.mlp(layer.post_attention_layernorm(h), h)

    trial = try_kernel(ours, parts, len(layers), dtype, clock)
    if not trial.fault:
        both = ((ours(rows, 0)[0], parts(rows, 0)[0]) for rows in (1, FEW, 8, MAX_ROWS))
        if not all(mx.array_equal(*each).item() for each in both):
            trial = Trial(len(layers), "its bits are not those of its parts")
    chosen = choice(name, shape, trial)
    for layer in layers if chosen.used else ():
        layer.end = end
    return chosen


@cache
def _kernel(
    storage: Storage, eps: float, parts: tuple[int, ...], rows: int
) -> tuple[CudaKernel, int]:
    """The kernel for some rows, and the bytes of its shared memory.

    `parts`: those of the inputs of o, of gate and up, and of down.
    """
    is_small = rows <= _RING_ROWS
    cuts = [
        Cut(part, _WARPS, 1 + (rows > 8), 1, rows if is_small else 0, stage)
        for part, stage in zip(parts, _STAGES[is_small], strict=True)
    ]
    most = [replace(cut, ring_rows=_RING_ROWS if is_small else 0) for cut in cuts]
    return _kernel_of(storage, eps, tuple(most)), _shared_bytes(storage, cuts)


@cache
def _kernel_of(storage: Storage, eps: float, cuts: tuple[Cut, ...]) -> CudaKernel:
    names = [f"{part}_{name}" for name in _MATRICES for part in ("w", "s", "b")]
    o, gate, up, down = (f"{{w_{name}, s_{name}, b_{name}}}" for name in _MATRICES)
    types = ", ".join(storage.template(cut) for cut in cuts)
    return CudaKernel(
        f"layer_end_{TYPES[storage.dtype]}_{types}_{eps!r}",
        f"exo::layer_end<{types}>(mixed, x, {o}, norm, {gate}, {up}, {down}, "
        f"const_cast<unsigned*>(zeros), y, h, normed, inner, shared, {eps!r}f, "
        "x_shape[0] * x_shape[1], x_shape[2], mixed_shape[2], w_gate_shape[0])",
        ("mixed", "x", "norm", *names, "zeros"),
        ("y", "h", "normed", "inner"),
        file="layer_end.cuh",
        shared_bytes=_shared_bytes(storage, cuts),
    )


def _shared_bytes(storage: Storage, cuts: Sequence[Cut]) -> int:
    return max(
        storage.shared_bytes(cut, matrices) for cut, matrices in zip(cuts, (1, 2, 1), strict=True)
    )
