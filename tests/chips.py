"""Apple's chips as far as bits go: MLX on a CPU whose results depend on numbers of rows and keys.

On Metal MLX chooses its kernels by the number of rows and of keys, and two kernels sum in two
orders. Which calls take which kernel was read in the machine code of MLX 0.32.4, and which kernels
agree was computed by running their text on a CPU. Here a call computes what the CPU does, and each
kernel's result differs from it by a relative deviation of its own, the same for every row. So two
calls agree for a row if Metal's would, and never otherwise.

Times are as published: before the M3 two rows of a dense product take 2.9 times as long as one.

`on_chip` patches MLX in this process; in a runner's process `chip_runner.py` does.
"""

# pyright: reportAttributeAccessIssue=false

import sys
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import scaled_dot_product_attention as stock

from exo_node.shard.kernels import install, row_groups
from exo_node.shard.kernels.own_keys import OwnKeys
from exo_node.shard.kernels.row_groups import group_rows
from exo_node.shard.kernels.trial import KernelChoice
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_model import StageModel

RARE: Final = 1e-6
"""A deviation that changes one of some thousand numbers of 16 bits, as the order of a sum does."""
COARSE: Final = 1e-2
"""A deviation that changes tokens of tiny models."""

_HEAD_SIZES: Final = (16, 32, 64, 96, 128, 256)
"""The sizes of heads whose attention of few rows is fused. The first two are not on Metal, but
tiny models have them."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What decides the kernels: `generation` is 13 for M1 to 17 for M5."""

    name: str
    generation: int
    size: str
    """"g": base, "s": Max, "d": Ultra."""

    def row_limit(self, inputs: int, outputs: int) -> int:
        """The number of rows from which a quantised product is one of tiles."""
        largest = max(inputs, outputs)
        bucket = 0 if largest <= 2048 else 1 if largest <= 4096 else 2
        if self.size == "d":
            return (32, 18, 12)[bucket]
        if self.generation <= 14:
            return (14, 10, 7 if (self.generation, self.size) == (13, "s") else 6)[bucket]
        return ((13, 15, 13) if self.generation <= 16 else (33, 25, 13))[bucket]

    def quantised(self, rows: int, inputs: int, outputs: int, mode: str) -> str:
        """The kernel of a product with quantised weights."""
        if rows >= self.row_limit(inputs, outputs):
            return "qmm"
        if inputs == 128 or (inputs == 64 and rows > 1):
            return "qmv_quad"
        wide = rows > 1 and (self.generation >= 15 or mode != "affine")
        return "qmv_wide" if wide else "qmv"

    def dense(self, rows: int, outputs: int, dtype: mx.Dtype) -> str:
        """The kernel of a product with weights as they are."""
        if rows == 1:
            return "gemv"
        if dtype == mx.float32 or outputs == 1:
            return "more rows"
        if self.generation < 15:
            return "steel" if rows <= 16 else "steel, split otherwise"
        if rows >= 16:
            return "steel"
        return "gemv_wide" if rows <= 5 or outputs <= 64 else "gemv_wide of 16 lanes"

    def attention(
        self, rows: int, keys: int, group: int, size: int, *, masked: bool, sinks: bool
    ) -> tuple[str, int]:
        """The kernel, and the number of parts into which it divides the keys in turns."""
        if rows > 8 or rows * group > 32 or size not in _HEAD_SIZES:
            return f"unfused, {rows} rows of {keys} keys", 1
        ends_base = group > 1 and keys >= 4096
        if not (keys >= 1024 if self.size in "sd" else ends_base):
            return "one pass", 32
        own = (size == 128 and group in (8, 12, 16)) or (size == 64 and group == 8)
        kernel = "two passes"
        if own and rows == 1 and keys >= 8192 and not (masked or sinks):
            kernel = "two passes of one row"
        return kernel, self._blocks(keys, group * rows)

    def _blocks(self, keys: int, lanes: int) -> int:
        if self.size == "g":
            return 64 if lanes >= 4 else 32
        if self.size == "s":
            if keys <= 1024 or lanes <= 4:
                return 64
            return 128 if keys <= 8192 else 256 if keys <= 32768 else 512 if keys <= 65536 else 1024
        if lanes <= 2:
            return 256 if keys > 8192 else 128
        if lanes >= 6 and keys >= 16384:
            return 512 if keys < 65536 else 1024
        return 128


M1: Final = Chip("M1", 13, "g")
M3: Final = Chip("M3", 15, "g")
M3_MAX: Final = Chip("M3 Max", 15, "s")
M5: Final = Chip("M5", 17, "g")
CHIPS: Final = {chip.name: chip for chip in (M1, M3, M3_MAX, M5)}


@contextmanager
def on_chip(chip: Chip, deviation: float = COARSE) -> Generator[None]:
    """MLX computes as on `chip` until the end; models that another chip's block loaded do not."""
    places: dict[tuple[Any, str], Callable[..., Any]] = {
        (mx.array, "__matmul__"): mx.array.__matmul__,
        (mx, "addmm"): mx.addmm,
        (mx, "quantized_matmul"): mx.quantized_matmul,
        (mx, "gather_mm"): mx.gather_mm,
        (mx, "gather_qmm"): mx.gather_qmm,
        (mx.fast, "scaled_dot_product_attention"): mx.fast.scaled_dot_product_attention,
        (row_groups, "may_depend_on_rows"): row_groups.may_depend_on_rows,
        (row_groups, "seconds_of"): row_groups.seconds_of,
    }
    outer = _own_keys()
    _set_attention({module: stock for module in outer})
    replace_kernels(chip, deviation)
    try:
        yield
    finally:
        for (owner, name), function in places.items():
            setattr(owner, name, function)
        _set_attention({module: stock for module in _own_keys()} | outer)


@contextmanager
def as_on_a_cpu() -> Generator[None]:
    """Loads put nothing into a model that would make its rows agree."""
    may_depend, row_groups.may_depend_on_rows = row_groups.may_depend_on_rows, lambda: False
    try:
        yield
    finally:
        row_groups.may_depend_on_rows = may_depend


def remedies(stage: StageModel, dtype: mx.Dtype) -> tuple[KernelChoice, ...]:
    """What `install` puts into the model on Metal; its products and its attention."""
    modules = stage.own_modules(outer=True)

    def two_rows() -> mx.array:
        return stage.hidden(mx.zeros((1, 2), mx.int32), None, stage.make_caches())

    return install.group_keys(modules, two_rows) + group_rows(modules, dtype, perf_counter)


def quantised(loaded: Loaded, mode: str = "affine") -> Loaded:
    """A model that was loaded `as_on_a_cpu`, in 4 bits with groups of 32, and with `remedies`."""
    nn.quantize(loaded.model.model, group_size=32, bits=4, mode=mode)
    mx.eval(loaded.model.model.parameters())
    return replace(loaded, kernels=remedies(loaded.model, mx.bfloat16))


def _own_keys() -> dict[Any, Any]:
    """The modules whose attention computes each row over its own keys."""
    attention = {module: vars(module).get(stock.__name__) for module in [*sys.modules.values()]}
    return {module: each for module, each in attention.items() if isinstance(each, OwnKeys)}


def _set_attention(functions: dict[Any, Any]) -> None:
    for module, function in functions.items():
        setattr(module, stock.__name__, function)


# MLX's own, since a chip may begin within the block of another, whose deviations are not its own.
_MATMUL, _QUANTIZED_MATMUL = mx.array.__matmul__, mx.quantized_matmul
_GATHER_MM, _GATHER_QMM = mx.gather_mm, mx.gather_qmm
_ATTENTION = mx.fast.scaled_dot_product_attention


def replace_kernels(chip: Chip, deviation: float) -> None:
    """Replaces MLX's products and attention in this process by those of `chip`.

    Products that are not the same for any number of rows are grouped there, as on Metal.
    """
    row_groups.may_depend_on_rows = lambda: True
    kernels = _Kernels(chip, deviation)
    row_groups.seconds_of = kernels.seconds_of
    mx.array.__matmul__ = lambda x, w: kernels.matmul(_MATMUL, x, w)
    mx.addmm = kernels.addmm
    mx.quantized_matmul = kernels.wrapped_quantised(_QUANTIZED_MATMUL)
    mx.gather_mm = kernels.wrapped_gather(_GATHER_MM)
    mx.gather_qmm = kernels.wrapped_gather_quantised(_GATHER_QMM)
    mx.fast.scaled_dot_product_attention = kernels.wrapped_attention(_ATTENTION)


class _Kernels:
    def __init__(self, chip: Chip, deviation: float) -> None:
        self._chip = chip
        self._deviation = deviation
        self._last = ""
        """The kernel of the last call."""

    def seconds_of(self, run: Callable[[int, int], Any], rows: int, *_: object) -> float:
        """In place of `trial.seconds_of`: those of one product."""
        _ = run(rows, 0)
        return 2.9 if self._last.startswith("steel") else 1.0

    def matmul(self, stock: Callable[..., mx.array], x: mx.array, w: Any) -> mx.array:
        if not isinstance(w, mx.array) or x.ndim < 2 or not _is_modelled(w):
            return stock(x, w)
        dtype = mx.result_type(x, w)
        out = stock(x.astype(mx.float32), w.astype(mx.float32))
        is_one = w.ndim != 3 and w.size == w.shape[-1] * w.shape[-2]
        rows = _rows_of(x) if is_one else x.shape[-2]  # with others for each head or request
        kernel = self._chip.dense(rows, w.shape[-1], dtype)
        return self._deviating(out, kernel).astype(dtype)

    def addmm(self, c: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return c + a @ b

    def wrapped_quantised(self, stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def quantized_matmul(x: mx.array, w: mx.array, *rest: Any, **options: Any) -> mx.array:
            out = stock(x.astype(mx.float32), w, *rest, **options)
            if w.ndim in (2, 3):
                mode = options.get("mode", "affine")
                rows = _rows_of(x) if w.ndim == 2 else x.shape[-2]
                kernel = self._chip.quantised(rows, x.shape[-1], out.shape[-1], mode)
            else:  # of a cache: a sum over values is one over the keys, in parts
                over_keys = "" if options.get("transpose", True) else f" of {x.shape[-1]} keys"
                kernel = f"cache {x.shape[-2] >= 4}{over_keys}"
            return self._deviating(out, kernel).astype(x.dtype)

        return quantized_matmul

    def wrapped_gather(self, stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def gather_mm(x: mx.array, w: mx.array, *rest: Any, **options: Any) -> mx.array:
            out = stock(x.astype(mx.float32), w.astype(mx.float32), *rest, **options)
            kernel = "gather_mm, sorted" if options.get("sorted_indices") else "gather_mv"
            return self._deviating(out, kernel).astype(x.dtype)

        return gather_mm

    def wrapped_gather_quantised(self, stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def gather_qmm(x: mx.array, w: mx.array, *rest: Any, **options: Any) -> mx.array:
            out = stock(x.astype(mx.float32), w, *rest, **options)
            is_many = options["rhs_indices"].size >= 4 * w.shape[0]
            return self._deviating(out, "gather_qmm" if is_many else "qmv").astype(x.dtype)

        return gather_qmm

    def wrapped_attention(self, stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def attend(
            q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **options: Any
        ) -> mx.array:
            out, is_array = stock(q, k, v, mask=mask, **options), isinstance(mask, mx.array)
            kernel, parts = self._chip.attention(
                q.shape[2],
                k.shape[2],
                q.shape[1] // k.shape[1],
                q.shape[3],
                masked=is_array,
                sinks=options.get("sinks") is not None,
            )
            begin = _first_keys(mask) % parts if is_array else 0
            return self._deviating(out, f"{kernel}, {parts} parts", begin).astype(q.dtype)

        return attend

    def _deviating(self, out: mx.array, kernel: str, more: mx.array | int = 0) -> mx.array:
        """`more`: what decides the bits besides, an integer or one for each row, (.., rows, 1)."""
        self._last = kernel
        wave = (1 + zlib.crc32(kernel.encode()) % 9973 + 0.37 * more) * mx.arange(
            1, out.shape[-1] + 1
        )
        return out.astype(mx.float32) * (1 + self._deviation * mx.sin(wave))


def _is_modelled(w: mx.array) -> bool:
    """Whether `w` is weights, for each head perhaps, or keys that all heads of a request share."""
    return w.ndim in (2, 3) or (w.ndim == 4 and w.shape[1] == 1)


def _rows_of(x: mx.array) -> int:
    """Rows of a product: all of `x` if it is contiguous, else those of each request."""
    return x.size // x.shape[-1] if _is_contiguous(x) else x.shape[-2]


def _is_contiguous(x: mx.array) -> bool:
    if x.size == x.shape[-1] * x.shape[-2]:
        return True
    mx.eval(x)
    view = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
    return memoryview(view).c_contiguous  # pyright: ignore[reportArgumentType]


def _first_keys(mask: mx.array) -> mx.array:
    """(.., rows, 1) the first key that each row sees."""
    visible = mask if mask.dtype == mx.bool_ else mask > -1e4
    return mx.argmax(visible, axis=-1, keepdims=True)
