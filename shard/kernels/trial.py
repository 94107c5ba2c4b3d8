"""One kernel against MLX's own on this device: the same numbers within a tolerance, rows that do
not depend on each other, and no more time. Time is handed in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import mlx.core as mx

Clock = Callable[[], float]
Run = Callable[[int, int], Sequence[mx.array]]
"""Results for so many rows, of the given one of several equal layers; lazy. Rows are axis 1."""

FEW: Final = 4
"""Rows of the verify that is tried beside a single step."""
_CALLS: Final = 16
_REPEATS: Final = 5
SLACK: Final = 1.05
"""Of MLX's time: rows that are bit for bit those of single steps are worth this much."""
_TOLERANCE: Final = {mx.float32: 2e-3, mx.float16: 5e-3, mx.bfloat16: 2e-2}
"""Of the norm. MLX multiplies float32 in TF32 there and adds 4-bit products in bfloat16."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What computes some layers of one shape: `kernel` where `used`, else MLX, and why."""

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
    """One kernel on layers of one shape: a fault, or seconds for 1 and FEW rows, ours and MLX's."""

    layers: int
    fault: str = ""
    own: tuple[float, float] = (0.0, 0.0)
    other: tuple[float, float] = (0.0, 0.0)

    @property
    def figures(self) -> str:
        return f"{_text(self.own)} us for 1 and {FEW} rows, MLX {_text(self.other)}"


def try_kernel(ours: Run, stock: Run, layers: int, dtype: mx.Dtype, clock: Clock) -> Trial:
    """Compiles, compares and times one kernel. What the device refuses is a fault of the kernel."""
    try:
        wrong = _wrong(ours, stock, dtype)
    except RuntimeError as fault:
        first = str(fault).strip().splitlines() or ["no message"]
        return Trial(layers, f"it cannot be compiled or started here: {first[0][:200]}")
    if wrong:
        return Trial(layers, wrong)
    own, other = ((_time(r, 1, layers, clock), _time(r, FEW, layers, clock)) for r in (ours, stock))
    return Trial(layers, "", own, other)


def pays(trials: Sequence[Trial]) -> bool:
    """Whether a kernel is used where it has no fault: for all shapes of a model or for none.

    A verify is single steps bit for bit only if every layer's rows are independent.
    """
    sound = [each for each in trials if not each.fault]
    own = sum(each.layers * sum(each.own) for each in sound)
    return bool(sound) and own <= SLACK * sum(each.layers * sum(each.other) for each in sound)


def choice(kernel: str, shape: str, trial: Trial, *, used: bool) -> Choice:
    """What became of a trial, `used` being the word of `pays`."""
    if trial.fault:
        return Choice(kernel, shape, trial.layers, False, trial.fault)
    slower = "" if used else "slower over the model's layers: "
    return Choice(kernel, shape, trial.layers, used, slower + trial.figures)


def relative_error(wanted: mx.array, got: mx.array) -> float:
    """Of the norm; NaN where a number is."""
    a, b = wanted.astype(mx.float32), got.astype(mx.float32)
    apart = mx.linalg.norm(a - b) / mx.maximum(mx.linalg.norm(a), 1e-30)
    return cast("float", apart.item())


def random_rows(shape: tuple[int, ...], dtype: mx.Dtype, key: int) -> mx.array:
    """Normally distributed numbers, the same for the same `key`."""
    made = mx.random.normal(shape, key=mx.random.key(key)).astype(dtype)
    mx.eval(made)
    return made


def _wrong(ours: Run, stock: Run, dtype: mx.Dtype) -> str:
    """What is wrong with a kernel's numbers; empty: nothing."""
    few, one = ours(FEW, 0), ours(1, 0)
    for wanted, got in zip(stock(FEW, 0), few, strict=True):
        error = relative_error(wanted, got)
        if not error <= _TOLERANCE[dtype]:
            return f"its numbers are {error:.1e} from MLX's, over {_TOLERANCE[dtype]:.0e}"
    if not mx.array_equal(few[0][:, :1], one[0]).item():
        return "its numbers for a row depend on the rows beside it"
    return ""


def _time(run: Run, rows: int, layers: int, clock: Clock) -> float:
    """Seconds of one call: the least of some repeats over several layers, after a first one."""
    least = float("inf")
    for _ in range(_REPEATS + 1):
        begun = clock()
        mx.eval([list(run(rows, i % layers)) for i in range(_CALLS)])
        least = min(least, clock() - begun)
    return least / _CALLS


def _text(seconds: Sequence[float]) -> str:
    return " and ".join(f"{each * 1e6:.0f}" for each in seconds)
