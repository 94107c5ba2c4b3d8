"""Compares one kernel with MLX's own on this device.

A kernel passes if its numbers are the same within a tolerance, its rows do not depend on each
other, and it takes no more time. The clock is a parameter.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import mlx.core as mx
from mlx import nn

Key = TypeVar("Key", bound=Hashable)
Clock = Callable[[], float]
Run = Callable[[int, int], Sequence[mx.array]]
"""Computes some rows (axis 1) with one of several equal layers: run(rows, layer). Lazy."""

FEW: Final = 4
"""Rows of the verify that is compared beside a single step."""
_CALLS: Final = 16
_REPEATS: Final = 5
SLACK: Final = 1.05
"""The most time relative to MLX's: rows that equal single steps bit for bit are worth 5 %."""
EXACT_SLACK: Final = 1.5
"""The same where MLX's own rows depend on each other: without the kernel no draft and no neighbour
is exact."""
_TOLERANCE: Final = {mx.float32: 2e-3, mx.float16: 5e-3, mx.bfloat16: 2e-2}
"""The most relative error. MLX multiplies float32 in TF32 on CUDA and adds 4-bit products in
bfloat16."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Whether `kernel` or MLX computes some layers of one shape, and the reason."""

    kernel: str
    shape: str
    layers: int
    used: bool
    reason: str

    def __str__(self) -> str:
        by = self.kernel if self.used else "MLX"
        return f"{self.layers} x {self.shape}: {by} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Trial:
    """One kernel on layers of one shape: a fault, or the seconds for 1 and FEW rows."""

    layers: int
    fault: str = ""
    own: tuple[float, float] = (0.0, 0.0)
    other: tuple[float, float] = (0.0, 0.0)
    slack: float = SLACK

    @property
    def figures(self) -> str:
        return f"{_text(self.own)} us for 1 and {FEW} rows, MLX {_text(self.other)}"


def try_kernel(ours: Run, stock: Run, layers: int, dtype: mx.Dtype, clock: Clock) -> Trial:
    """Compiles, compares and times one kernel. An error of the device is a fault of the kernel."""
    try:
        difference = _difference(ours, stock, dtype)
    except RuntimeError as fault:
        first = str(fault).strip().splitlines() or ["no message"]
        return Trial(layers, f"it cannot be compiled or started here: {first[0][:200]}")
    if difference:
        return Trial(layers, difference)
    own, other = (
        (seconds_of(run, 1, layers, clock), seconds_of(run, FEW, layers, clock))
        for run in (ours, stock)
    )
    return Trial(layers, "", own, other)


def pays(trials: Sequence[Trial]) -> bool:
    """Whether to use a kernel on the shapes where it has no fault: on all of a model's or on none.

    A verify equals single steps bit for bit only if every layer's rows are independent.
    """
    sound = [each for each in trials if not each.fault]
    own = sum(each.layers * sum(each.own) for each in sound)
    slack = max((each.slack for each in sound), default=0.0)
    return bool(sound) and own <= slack * sum(each.layers * sum(each.other) for each in sound)


def choice(kernel: str, shape: str, trial: Trial, *, used: bool | None = None) -> KernelChoice:
    """The choice that follows from a trial. `used`: whether it `pays` beside others, if any."""
    if trial.fault:
        return KernelChoice(kernel, shape, trial.layers, False, trial.fault)
    used = pays([trial]) if used is None else used
    slower = "" if used else "slower over the model's layers: "
    return KernelChoice(kernel, shape, trial.layers, used, slower + trial.figures)


def group_modules(
    modules: Sequence[nn.Module], key: Callable[[Any], Key | None]
) -> dict[Key, list[Any]]:
    """Groups the modules by their key; those whose key is None are left out."""
    groups: dict[Key, list[Any]] = {}
    for module in modules:
        if (kind := key(module)) is not None:
            groups.setdefault(kind, []).append(module)
    return groups


def relative_error(expected: mx.array, actual: mx.array) -> float:
    """The relative error in the L2 norm; NaN if either array contains NaN."""
    a, b = expected.astype(mx.float32), actual.astype(mx.float32)
    error = mx.linalg.norm(a - b) / mx.maximum(mx.linalg.norm(a), 1e-30)
    return cast("float", error.item())


def random_rows(shape: tuple[int, ...], dtype: mx.Dtype, key: int) -> mx.array:
    """Normally distributed numbers, the same for the same `key`."""
    rows = mx.random.normal(shape, key=mx.random.key(key)).astype(dtype)
    mx.eval(rows)
    return rows


def _difference(ours: Run, stock: Run, dtype: mx.Dtype) -> str:
    """How a kernel's numbers differ from MLX's; empty if they do not."""
    few, one = ours(FEW, 0), ours(1, 0)
    for expected, actual in zip(stock(FEW, 0), few, strict=True):
        error = relative_error(expected, actual)
        if not error <= _TOLERANCE[dtype]:
            return f"its numbers are {error:.1e} from MLX's, over {_TOLERANCE[dtype]:.0e}"
    if not mx.array_equal(few[0][:, :1], one[0]).item():
        return "its numbers for a row depend on the rows beside it"
    return ""


def seconds_of(run: Run, rows: int, layers: int, clock: Clock) -> float:
    """Seconds of one call: the minimum of some repeats over several layers, after a warm-up."""
    best = float("inf")
    for _ in range(_REPEATS + 1):
        start = clock()
        mx.eval([list(run(rows, i % layers)) for i in range(_CALLS)])
        best = min(best, clock() - start)
    return best / _CALLS


def _text(seconds: Sequence[float]) -> str:
    return " and ".join(f"{each * 1e6:.0f}" for each in seconds)
