"""CUDA kernels from the texts beside this file, through MLX's compiler.

MLX copies and hashes a kernel's text at every call, so a kernel's own text is one line that calls a
function of an included file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

TYPES: Final = {mx.float32: "float", mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}
"""What MLX calls these dtypes in a kernel."""

Grid = tuple[int, int, int]


class CudaKernel:
    """One kernel for one choice of types and constants; compiled at its first launch."""

    def __init__(
        self,
        name: str,
        call: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        file: str,
        shared_bytes: int = 0,
    ) -> None:
        """`name` is unique for `call`, which names the arrays; `x_shape` there is x's shape."""
        declared = (
            "extern __shared__ __align__(128) unsigned char shared[];\n" if shared_bytes else ""
        )
        self._launch: Any = mx.fast.cuda_kernel(
            name=f"exo_{name}",
            input_names=list(inputs),
            output_names=list(outputs),
            header=_include("common.cuh") + _include(file),
            source=f"{declared}{call};\n",
            shared_memory=shared_bytes,
        )

    def __call__(
        self,
        arrays: Sequence[mx.array],
        blocks: Grid,
        threads: int,
        results: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        """`results`: shape and dtype of each output. Lazy; raises RuntimeError when evaluated."""
        return self._launch(
            inputs=list(arrays),
            grid=(blocks[0] * threads, blocks[1], blocks[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape for shape, _ in results],
            output_dtypes=[dtype for _, dtype in results],
        )


def available() -> bool:
    """Whether MLX computes on an NVIDIA GPU here."""
    return mx.cuda.is_available() and mx.default_device() == mx.Device(mx.DeviceType.gpu)


def _include(file: str) -> str:
    return f'#include "{Path(__file__).with_name(file)}"\n'
