"""The tensors of a draft head as arrays, and how the backbone beside them stores its own."""

from typing import cast

import mlx.core as mx

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.head_tensors import HeadFound


def head_arrays(checkpoint: Checkpoint, head: HeadFound) -> dict[str, mx.array]:
    """The head's arrays by canonical name. Lazy: data is read when it is evaluated."""
    files: dict[str, dict[str, mx.array]] = {}
    arrays: dict[str, mx.array] = {}
    for canonical, tensor in head.tensors.items():
        if tensor.file not in files:  # lazy: opening a file reads its header only
            files[tensor.file] = cast(
                "dict[str, mx.array]", mx.load(str(checkpoint.folder / tensor.file))
            )
        arrays[canonical] = files[tensor.file][tensor.name]
    return arrays


def backbone_is_raw(checkpoint: Checkpoint, head: HeadFound) -> bool | None:
    """Whether conv1d kernels have PyTorch's layout, mlx-lm's sign of an original checkpoint.

    None if the head has a file of its own, whose layout may differ from the backbone's.
    """
    if not head.shares_file_with_backbone:
        return None
    kernels = [t for name, t in checkpoint.tensors.items() if name.endswith("conv1d.weight")]
    return any(kernel.shape[-1] != 1 for kernel in kernels) if kernels else None
