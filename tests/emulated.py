"""`mx.fast.cuda_kernel` on a CPU: compiles a kernel's own text for the emulator and runs it.

Outputs start as NaN, so that missing writes show.
"""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from exo_node.shard.kernels.cuda import available

# Fibers switch stacks by longjmp, which a fortified build treats as an error.
_OPTIONS = ("-O1", "-std=c++17", "-w", "-U_FORTIFY_SOURCE")
EMULATOR = Path(__file__).parent / "emulator" / "emulator.h"
_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.uint32: "unsigned",
    mx.int32: "int",
}


def use(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Kernels of a test run on the GPU where MLX computes on one, else in the emulator."""
    if available():
        return
    if compiler() is None:
        pytest.skip("neither an NVIDIA GPU under MLX nor g++ for the emulator is here")
    patch.setattr(mx.fast, "cuda_kernel", emulated(folder))

    def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    patch.setattr(mx, "compile", as_it_is)  # traced arrays have no numbers


def compiler() -> str | None:
    return shutil.which("g++")


def emulated(folder: Path) -> Callable[..., Any]:
    """A stand-in for `mx.fast.cuda_kernel` that runs in `folder`."""

    def cuda_kernel(
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        header: str,
        source: str,
        shared_memory: int = 0,
    ) -> Callable[..., list[mx.array]]:
        def run(
            *,
            inputs: Sequence[mx.array],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
        ) -> list[mx.array]:
            assert shared_memory <= 227 * 1024
            assert threadgroup[0] <= 1024 and threadgroup[1:] == (1, 1)
            assert grid[0] % threadgroup[0] == 0
            text = _program(
                header, source, input_names, [x.dtype for x in inputs], output_names, output_dtypes
            )
            blocks = (grid[0] // threadgroup[0], grid[1], grid[2])
            sizes = [int(np.prod(shape)) for shape in output_shapes]
            return _ran(
                built(text),
                Path(tempfile.mkdtemp(prefix=name, dir=folder)),
                dict(zip(input_names, inputs, strict=True)),
                [str(n) for n in (*blocks, threadgroup[0], shared_memory, *sizes)],
                list(zip(output_names, output_shapes, output_dtypes, strict=True)),
            )

        return run

    return cuda_kernel


def _program(
    header: str,
    source: str,
    input_names: Sequence[str],
    input_types: Sequence[mx.Dtype],
    output_names: Sequence[str],
    output_types: Sequence[mx.Dtype],
) -> str:
    ins = list(zip(input_names, (_TYPES[t] for t in input_types), strict=True))
    outs = list(zip(output_names, (_TYPES[t] for t in output_types), strict=True))
    source = source.replace(
        "extern __shared__ __align__(128) unsigned char shared[];",
        "unsigned char* shared = dynamic_shared;",
    )
    parameters = [f"const {t}* {n}, const Shape& {n}_shape" for n, t in ins]
    parameters += [f"{t}* {n}" for n, t in outs]
    arguments = [f"{n}.data(), {n}_shape" for n, _ in ins] + [f"{n}.data()" for n, _ in outs]
    reads = [
        f'const auto {n} = read<{t}>("{n}.bin"); const Shape {n}_shape{{read<int>("{n}.shape")}};'
        for n, t in ins
    ]
    makes = [
        f"std::vector<{t}> {n}(atoi(arguments[{6 + i}]));"
        f"memset((void*){n}.data(), 0xff, {n}.size() * sizeof({t}));"
        for i, (n, t) in enumerate(outs)
    ]
    writes = [f'write("{n}.out", {n});' for n, _ in outs]
    lines = [
        f'#include "{EMULATOR.name}"',
        header,
        f"void kernel_text({', '.join(parameters)}) {{ {source} }}",
        "int main(int, char** arguments) {",
        *reads,
        *makes,
        "launch({atoi(arguments[1]), atoi(arguments[2]), atoi(arguments[3])}, atoi(arguments[4]), "
        f"atoi(arguments[5]), [&] {{ kernel_text({', '.join(arguments)}); }});",
        *writes,
        "}",
    ]
    return "\n".join(lines) + "\n"


@cache
def _programs() -> Path:
    """Where programs are built, once for all sessions on a machine: the emulator in advance.

    Another emulator, compiler or option has another folder; a program's name is the hash of its
    text and of the files that this includes by their paths.
    """
    version = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    made_by = hashlib.sha256(version + repr(_OPTIONS).encode() + EMULATOR.read_bytes()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"exo-emulator-{os.getuid()}-{made_by[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    assert status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
    header = folder / EMULATOR.name
    if not header.with_suffix(".h.gch").exists():
        made = Path(tempfile.mkdtemp(dir=folder))
        _ = shutil.copy(EMULATOR, made)
        _compile(made, ["-x", "c++-header", EMULATOR.name, "-o", "emulator.h.gch"])
        for name in (EMULATOR.name, "emulator.h.gch"):
            _ = (made / name).rename(folder / name)
        made.rmdir()
    return folder


def built(text: str) -> Path:
    """The program of a text that includes the emulator, compiled once on a machine."""
    digest = hashlib.sha256(text.encode())
    for path in re.findall(r'#include "(/[^"]+)"', text):
        digest.update(Path(path).read_bytes())
    program = _programs() / digest.hexdigest()
    if not program.exists():
        folder = Path(tempfile.mkdtemp(dir=program.parent))
        _ = (folder / "kernel.cpp").write_text(text)
        _compile(folder, ["-I", "..", "kernel.cpp", "-o", "kernel"])
        _ = (folder / "kernel").rename(program)
        shutil.rmtree(folder)
    return program


def _compile(folder: Path, arguments: Sequence[str]) -> None:
    subprocess.run(["g++", *_OPTIONS, *arguments], cwd=folder, check=True)


def _ran(
    program: Path,
    folder: Path,
    inputs: dict[str, mx.array],
    arguments: list[str],
    outputs: list[tuple[str, tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    for name, array in inputs.items():
        narrow = array.dtype in (mx.bfloat16, mx.float16)
        raw: Any = np.array(array.view(mx.uint16) if narrow else array)
        raw.tofile(folder / f"{name}.bin")
        np.array(array.shape, dtype=np.int32).tofile(folder / f"{name}.shape")
    subprocess.run([str(program), *arguments], cwd=folder, check=True)
    made: list[mx.array] = []
    for name, shape, dtype in outputs:
        kind: Any = np.float32 if dtype == mx.float32 else np.uint16
        bits: Any = np.fromfile(folder / f"{name}.out", dtype=kind)
        raw = mx.array(bits)
        made.append(mx.reshape(raw if dtype == mx.float32 else raw.view(dtype), shape))
    return made
