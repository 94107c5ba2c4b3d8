"""The tensors of a draft head as arrays, and how the backbone beside them stores its own."""

from typing import cast

import mlx.core as mx

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.head_tensors import HeadFound


def head_arrays(checkpoint: Checkpoint, found: HeadFound) -> dict[str, mx.array]:
    """By canonical name; nothing is read before it is used."""
    files: dict[str, dict[str, mx.array]] = {}
    arrays: dict[str, mx.array] = {}
    for canonical, tensor in found.tensors.items():
        if tensor.file not in files:  # lazy: opening a file reads its header only
            files[tensor.file] = cast(
                "dict[str, mx.array]", mx.load(str(checkpoint.folder / tensor.file))
            )
        arrays[canonical] = files[tensor.file][tensor.name]
    return arrays


def backbone_is_raw(checkpoint: Checkpoint, found: HeadFound) -> bool | None:
    """mlx-lm's own sign of an original checkpoint: conv1d kernels in PyTorch's layout.

    None where the head lies in a file of its own, of which the backbone says nothing.
    """
    if not found.shares_file_with_backbone:
        return None
    kernels = [t for name, t in checkpoint.tensors.items() if name.endswith("conv1d.weight")]
    return any(kernel.shape[-1] != 1 for kernel in kernels) if kernels else None
