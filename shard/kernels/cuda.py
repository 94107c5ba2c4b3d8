"""CUDA kernels from the source files beside this one.

A kernel's source calls a function of one file with its arrays by name; `x_shape` there is x's
shape. `compiler.py` compiles it. Where that is impossible MLX does, which takes longer, stores
nothing, and copies and hashes the source at every call: so its source includes the file.

MLX finds a loaded module by its name and `std::hash` of its code, and at each launch it copies the
code, hashes it and throws it away: ten microseconds for code of 20 KB. libstdc++'s hash, a
MurmurHash64A, can be inverted, so launches have an alias, eight other bytes with that code's hash.
Each kernel tests whether MLX was built with that hash.
"""

import hashlib
import logging
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from .compiler import CannotCompile, Compiler, compiler, text_of

TYPES: Final = {mx.float32: "float", mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}
"""MLX's names of dtypes in a kernel."""
_ALL_TYPES: Final = TYPES | {mx.uint32: "unsigned", mx.int32: "int"}
_FOLDER: Final = Path(__file__).parent
_LOADING: Final = "if (blockDim.x == 1) return;\n"
"""A block of one thread does nothing, so that launching one only loads the kernel."""
_WORD: Final = 2**64 - 1
_FACTOR: Final = 0xC6A4A7935BD1E995
_INVERSE: Final = pow(_FACTOR, -1, 2**64)
_SEED: Final = 0xC70F6907
_SHARED: Final = "extern __shared__ __align__(128) unsigned char shared[];\n"

Grid = tuple[int, int, int]
Results = Sequence[tuple[tuple[int, ...], mx.Dtype]]

_LAUNCH: Any = mx.fast.precompiled_cuda_kernel

log = logging.getLogger(__name__)


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
        self._name, self._call, self._file = name, call, file
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._shared = shared_bytes
        self._shaped = [i for i, name in enumerate(inputs) if f"{name}_shape" in call]
        self._code: tuple[str, bytes] | None = None
        """The kernel's name, and its code or the alias of that."""
        self._dtypes: list[mx.Dtype] = []
        self._by_mlx: Any = None

    def __call__(
        self,
        arrays: Sequence[mx.array],
        blocks: Grid,
        threads: int,
        results: Results,
        shared: int | None = None,
    ) -> list[mx.array]:
        """Launches the kernel; `results`: shape and dtype of each output; `shared`: the bytes of
        shared memory, at most and by default those that the kernel was made for.

        Lazy: evaluating the outputs raises RuntimeError if the launch fails. Dtypes and numbers of
        axes must be those of the first call; checking them would cost, and launches bound a step.
        """
        if self._code is None:
            own_compiler = _compiler()
            if own_compiler is None:
                return self._call_by_mlx(arrays, blocks, threads, results)
            self._code = self._compiled(own_compiler, arrays, results)
            self._dtypes = [dtype for _, dtype in results]
        return _LAUNCH(
            name=self._code[0],
            compiled_source=self._code[1],
            inputs=arrays,
            output_shapes=[shape for shape, _ in results],
            output_dtypes=self._dtypes,
            scalars=[size for i in self._shaped for size in arrays[i].shape],
            grid=(blocks[0] * threads, blocks[1], blocks[2]),
            threadgroup=(threads, 1, 1),
            shared_memory=self._shared if shared is None else shared,
            ensure_row_contiguous=True,
        )

    def _call_by_mlx(
        self, arrays: Sequence[mx.array], blocks: Grid, threads: int, results: Results
    ) -> list[mx.array]:
        return self._mlx_kernel()(
            inputs=list(arrays),
            grid=(blocks[0] * threads, blocks[1], blocks[2]),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape for shape, _ in results],
            output_dtypes=[dtype for _, dtype in results],
        )

    def _mlx_kernel(self) -> Any:
        if self._by_mlx is None:
            self._by_mlx = mx.fast.cuda_kernel(
                name=f"exo_{self._name}",
                input_names=list(self._inputs),
                output_names=list(self._outputs),
                header=_include("common.cuh") + _include(self._file),
                source=f"{_SHARED if self._shared else ''}{self._call};\n",
                shared_memory=self._shared,
            )
        return self._by_mlx

    def _compiled(
        self, own_compiler: Compiler, arrays: Sequence[mx.array], results: Results
    ) -> tuple[str, bytes]:
        """The kernel's name for these dtypes, and the code or alias by which MLX finds it."""
        text = self._text(arrays, results)
        name = f"exo_{re.sub('[^a-z0-9_]', '_', self._name)}_{_digest(text)}"
        code = own_compiler.compiled(text.replace("EXO_KERNEL", name))
        self._load(name, code, arrays)
        alias = alias_of(code)
        try:
            self._load(name, alias, arrays)
        except RuntimeError as why:
            log.warning("launches copy the kernels' code, and take longer: %s", why)
            return name, code
        return name, alias

    def _load(self, name: str, code: bytes, arrays: Sequence[mx.array]) -> None:
        """Launches one thread. Raises RuntimeError if the kernel cannot be loaded."""
        sizes = sum(arrays[i].ndim for i in self._shaped)
        outputs = _LAUNCH(
            name=name,
            compiled_source=code,
            inputs=[mx.zeros((1,), array.dtype) for array in arrays],
            output_shapes=[(1,)] * len(self._outputs),
            output_dtypes=[mx.float32] * len(self._outputs),
            scalars=[1] * sizes,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            shared_memory=self._shared,
            ensure_row_contiguous=True,
        )
        mx.eval(outputs)

    def _text(self, arrays: Sequence[mx.array], results: Results) -> str:
        parameters = [
            f"const {_ALL_TYPES[array.dtype]}* {name}"
            for name, array in zip(self._inputs, arrays, strict=True)
        ]
        parameters += [
            f"{_ALL_TYPES[dtype]}* {name}"
            for name, (_, dtype) in zip(self._outputs, results, strict=True)
        ]
        shapes = ""
        for i in self._shaped:
            name, sizes = self._inputs[i], range(arrays[i].ndim)
            parameters += [f"int {name}_{axis}" for axis in sizes]
            axes = ", ".join(f"{name}_{axis}" for axis in sizes)
            shapes += f"const int {name}_shape[] = {{{axes}}};\n"
        return (
            f'{text_of(self._file, _FOLDER)}\nextern "C" __global__ void EXO_KERNEL('
            f"{', '.join(parameters)}) {{\n{_LOADING}{_SHARED if self._shared else ''}{shapes}"
            f"{self._call};\n}}\n"
        )


@cache
def _compiler() -> Compiler | None:
    """The compiler of this machine, or None if MLX compiles."""
    if not available():
        return None
    try:
        return compiler()
    except CannotCompile as why:
        log.warning("MLX compiles the kernels, which takes a minute at each load: %s", why)
        return None


def available() -> bool:
    """Whether MLX computes on an NVIDIA GPU here."""
    return mx.cuda.is_available() and mx.default_device() == mx.Device(mx.DeviceType.gpu)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _include(file: str) -> str:
    return f'#include "{_FOLDER / file}"\n'


def alias_of(code: bytes) -> bytes:
    """The only eight bytes with the hash of `code`."""
    word = _mix(_mix(hash_of(code)) * _INVERSE & _WORD)
    block = (word * _INVERSE & _WORD) ^ _SEED ^ (8 * _FACTOR & _WORD)
    return (_mix(block * _INVERSE & _WORD) * _INVERSE & _WORD).to_bytes(8, "little")


def hash_of(code: bytes) -> int:
    """libstdc++'s `std::hash` of a string on a machine of 64 bits."""
    value = _SEED ^ (len(code) * _FACTOR & _WORD)
    whole = len(code) & ~7
    for start in range(0, whole, 8):
        word = int.from_bytes(code[start : start + 8], "little")
        data = _mix(word * _FACTOR & _WORD) * _FACTOR & _WORD
        value = (value ^ data) * _FACTOR & _WORD
    if rest := code[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * _FACTOR & _WORD
    return _mix(_mix(value) * _FACTOR & _WORD)


def _mix(word: int) -> int:
    """The mixing step of MurmurHash64A. It is its own inverse: it shifts by over half a word."""
    return word ^ word >> 47
