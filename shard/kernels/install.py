"""Installs our kernels in a loaded model: the loader's only entry point."""

import time
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
from mlx import nn

from ...mtp.caches.window import MAX_ROLLBACK_ROWS
from .chunked_delta import use_chunks
from .cpu_products import OWN, choose_products
from .kernel_choice import Mode, choose_kernels
from .own_keys import group_keys
from .row_groups import MeasuredRows, group_rows
from .trial import KernelChoice
from .unpacked import unpack_prompts


def install(
    model: nn.Module,
    parts: Sequence[nn.Module],
    mode: Mode,
    note: Callable[[str], None],
    products: Sequence[nn.Module] = (),
    dtype: mx.Dtype = mx.float32,
    agreeing: MeasuredRows | None = None,
    two_rows: Callable[[], object] | None = None,
) -> tuple[KernelChoice, ...]:
    """Chooses the kernels of `parts`, a stage's modules of `model`; `used` gives their names.

    Call it before anything is probed or timed: a kernel's first use compiles it.
    `note` gets a line before work that may take a minute the first time. `products`: modules whose
    rows must not depend on each other, those that a step of the target computes. `dtype`: that of
    hidden states. `agreeing`: see `group_rows`. `two_rows` builds the graph of a forward of two
    rows through `products`, from which the kinds of their attention are taken.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        # By CPU time: on a busy machine, wall time depends on the other processes.
        choices = (choose_products(mode, time.process_time),)
    else:
        choices = choose_kernels(parts, mode, time.perf_counter, note)
    # Of the whole model: the kernels that a stage names must not depend on its layers.
    if mode == "auto" and (layers := use_chunks([model])):
        rows = f"more than {MAX_ROLLBACK_ROWS} rows of gated delta"
        choices += (
            KernelChoice("chunked_delta", rows, layers, True, "MLX would loop over the rows"),
        )
    if mode == "auto" and two_rows is not None:
        choices += group_keys(products, two_rows)
    if mode == "auto":
        choices += group_rows(products, dtype, time.perf_counter, agreeing)
    # At last: what groups rows goes by the classes of layers.
    if OWN in used(choices) and (layers := unpack_prompts([model, *parts])):
        rows, why = f"product of more than {MAX_ROLLBACK_ROWS} rows", "MLX loops over the rows"
        choices += (KernelChoice("unpacked_product", rows, layers, True, why),)
    return choices


def used(choices: Iterable[KernelChoice]) -> tuple[str, ...]:
    """The names of the kernels that run, each once."""
    return tuple(sorted({choice.kernel for choice in choices if choice.used}))
