"""Stand-ins for backends whose numbers depend on more than a row's own inputs.

Each wraps every linear layer of a loaded model, experts and routers among them, and so what is
written into the caches too.
"""

# pyright: reportUnknownParameterType=false

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

LINEAR = (nn.Linear, nn.QuantizedLinear)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)

Key = Callable[[mx.array, int], mx.array | float]
"""A layer's input and its number of rows -> what its numbers depend on."""


def perturb(model: nn.Module, key: Key, *, only: str = "", size: float = 1e-3) -> int:
    """Makes the outputs of linear layers whose path has `only` in it depend on `key`.

    Relative, of about `size`, and another for each column; a key of 0 changes nothing. Returns how
    many layers were wrapped.
    """
    wrapped = 0
    for path, module in model.named_modules():
        if only in path and type(module) in (*LINEAR, *EXPERTS):
            module.__class__ = _perturbed(type(module), key, size)
            wrapped += 1
    return wrapped


def _perturbed(kind: Any, key: Key, size: float) -> type[nn.Module]:
    experts = kind in EXPERTS

    class Perturbed(kind):
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            out = super().__call__(x, *args, **kwargs)
            rows = args[0].size if experts else x.size // x.shape[-1]
            columns = mx.arange(1, out.shape[-1] + 1)
            return out * (1 + size * mx.sin(columns * key(x, rows))).astype(out.dtype)

    return Perturbed


def by_rows(x: mx.array, rows: int) -> float:
    """Depends on the number of rows alone, as the choice of kernels on Metal and CUDA does."""
    del x
    return float(rows)


def by_own_rows(x: mx.array, rows: int) -> float:
    """Depends on the rows of one request, however many requests share a forward."""
    del rows
    return float(x.shape[-2])


def at_rows(widths: Sequence[int]) -> Key:
    """Only forwards of these numbers of rows are inexact."""
    return lambda x, rows: float(rows) if rows in widths else 0.0


def by_contents(x: mx.array, rows: int) -> mx.array:
    """A row's numbers depend on the other rows, which no fixed number of rows can cure."""
    del rows
    return x.astype(mx.float32).sum()


def by_call() -> Key:
    """No call repeats another, as with kernels that add in the order in which threads finish."""
    calls = 0

    def key(x: mx.array, rows: int) -> float:
        nonlocal calls
        del x, rows
        calls += 1
        return float(calls)

    return key
