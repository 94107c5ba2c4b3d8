"""Puts the kernels of our own under a loaded model: the one way in for the loader."""

import time
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
from mlx import nn

from ...mtp.rollback import MAX_TAPE_ROWS
from .chunked_delta import take_chunks
from .cpu_products import choose_products
from .kernel_choice import Mode, choose_kernels
from .trial import Choice


def install(
    model: nn.Module, parts: Sequence[nn.Module], mode: Mode, note: Callable[[str], None]
) -> tuple[Choice, ...]:
    """Chooses what computes `parts`, a stage's modules of `model`; `used` names what was chosen.

    Before anything is probed or timed: a kernel's first use compiles it, which takes a while.
    `note` hears a line before what may take a minute at first.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        # By CPU time: on a busy machine a clock's would choose what others left room for.
        choices = (choose_products(mode, time.process_time),)
    else:
        choices = choose_kernels(parts, mode, time.perf_counter, note)
    # The whole model's: what a stage names must not change with the layers that it has of it.
    if mode == "auto" and (layers := take_chunks([model])):
        rows = f"more than {MAX_TAPE_ROWS} rows of gated delta"
        choices += (Choice("chunked_delta", rows, layers, True, "MLX would loop over the rows"),)
    return choices


def used(choices: Iterable[Choice]) -> tuple[str, ...]:
    """The names of the kernels that run, each once."""
    return tuple(sorted({choice.kernel for choice in choices if choice.used}))
