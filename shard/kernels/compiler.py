"""Compiles CUDA texts to machine code with NVRTC, once a machine: the code is kept on disk.

MLX compiles a kernel of others in every process, for one to five seconds each. Here it takes a
fraction of that, since a text includes only what it needs, and nothing the second time.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from .kept_code import keep, kept, private_folder

_LIBRARIES: Final = ("libnvrtc.so.13", "libnvrtc.so.12")


class CannotCompile(RuntimeError):
    """NVRTC is not here, or it refuses a text."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """NVRTC for one kind of GPU."""

    library: ctypes.CDLL
    version: str
    architecture: str
    includes: tuple[Path, ...]
    folder: Path | None
    """Where code is kept; None: nowhere."""

    def compiled(self, text: str) -> bytes:
        """Raises CannotCompile with NVRTC's first complaint."""
        key = "\n".join((self.version, self.architecture, text))
        path = self.folder and self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
        if path and (held := kept(path)):
            return held
        code = self._compile(text)
        if path:
            keep(path, code)
        return code

    def _compile(self, text: str) -> bytes:
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), text.encode(), b"exo.cu", 0, None, None)
        try:
            options = [f"--gpu-architecture={self.architecture}", "--std=c++17"]
            options += [f"--include-path={path}" for path in self.includes]
            given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
            if self.library.nvrtcCompileProgram(program, len(options), given):
                log = self._read(program, "ProgramLog").decode(errors="replace")
                wrong = [line for line in log.splitlines() if "error" in line] or [log[:200]]
                raise CannotCompile(wrong[0])
            return self._read(program, "CUBIN")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        held = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, held)
        return held.raw

    def _call(self, name: str, *arguments: Any) -> None:
        if failed := getattr(self.library, f"nvrtc{name}")(*arguments):
            raise CannotCompile(f"nvrtc{name} failed with code {failed}")


@cache
def compiler() -> Compiler:
    """That of this machine's GPU. Raises CannotCompile where there is none."""
    library = _library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    version = f"NVRTC {major.value}.{minor.value}"
    return Compiler(library, version, _architecture(), includes(), private_folder("kernels"))


def _library() -> ctypes.CDLL:
    """MLX has loaded it already."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CannotCompile(f"none of {', '.join(_LIBRARIES)} can be loaded")


def _architecture() -> str:
    info = mx.device_info()
    major, minor = (info.get(f"compute_capability_{part}") for part in ("major", "minor"))
    if major is None or minor is None:
        raise CannotCompile("MLX does not tell the GPU's compute capability")
    return f"sm_{major}{minor}"


def includes() -> tuple[Path, ...]:
    """Where cuda_bf16.h and what it includes are. Raises CannotCompile."""
    packages = Path(mx.__file__).parent.parent / "nvidia"
    homes = (packages / "cu13", packages / "cuda_runtime", Path("/usr/local/cuda"))
    found = [home / "include" for home in homes if (home / "include" / "cuda_bf16.h").exists()]
    if not found:
        raise CannotCompile(
            "cuda_bf16.h is neither in this environment's NVIDIA packages nor in /usr/local/cuda"
        )
    return Path(mx.__file__).parent / "include" / "cccl", found[0], found[0] / "cccl"


def text_of(file: str, folder: Path) -> str:
    """A kernel file with common.cuh before it, to be compiled by itself."""
    headers: Sequence[str] = ("cuda_bf16.h", "cuda_fp16.h")
    parts = [f"#include <{name}>" for name in headers]
    parts += [
        (folder / name).read_text().replace("#pragma once", "") for name in ("common.cuh", file)
    ]
    return "\n".join(parts)
