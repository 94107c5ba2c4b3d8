"""Compiles CUDA source to machine code with NVRTC, once per machine: the code is stored on disk.

MLX compiles a custom kernel in every process, for one to five seconds each. Here it takes a
fraction of that, since a source includes only what it needs, and no time at all once it is stored.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from .code_store import load_code, private_folder, store_code

_LIBRARIES: Final = ("libnvrtc.so.13", "libnvrtc.so.12")


class CannotCompile(RuntimeError):
    """NVRTC is missing, or it rejects a source."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """NVRTC for one kind of GPU."""

    library: ctypes.CDLL
    version: str
    architecture: str
    includes: tuple[Path, ...]
    folder: Path | None
    """The folder of compiled code, or None if code is not stored."""

    def compiled(self, text: str) -> bytes:
        """The machine code of `text`. Raises CannotCompile with NVRTC's first error."""
        key = "\n".join((self.version, self.architecture, text))
        path = self.folder and self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
        if path and (code_on_disk := load_code(path)):
            return code_on_disk
        code = self._compile(text)
        if path:
            store_code(path, code)
        return code

    def _compile(self, text: str) -> bytes:
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), text.encode(), b"exo.cu", 0, None, None)
        try:
            options = [f"--gpu-architecture={self.architecture}", "--std=c++17"]
            options += [f"--include-path={path}" for path in self.includes]
            option_array = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
            if self.library.nvrtcCompileProgram(program, len(options), option_array):
                log = self._read(program, "ProgramLog").decode(errors="replace")
                errors = [line for line in log.splitlines() if "error" in line] or [log[:200]]
                raise CannotCompile(errors[0])
            return self._read(program, "CUBIN")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, item: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{item}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{item}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: Any) -> None:
        if failed := getattr(self.library, f"nvrtc{name}")(*arguments):
            raise CannotCompile(f"nvrtc{name} failed with code {failed}")


@cache
def compiler() -> Compiler:
    """The compiler for this machine's GPU. Raises CannotCompile if there is none."""
    library = _library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    version = f"NVRTC {major.value}.{minor.value}"
    return Compiler(library, version, _architecture(), includes(), private_folder("kernels"))


def _library() -> ctypes.CDLL:
    """NVRTC, which MLX has loaded already. Raises CannotCompile."""
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
    """The folders of cuda_bf16.h and of the headers that it includes. Raises CannotCompile."""
    packages = Path(mx.__file__).parent.parent / "nvidia"
    homes = (packages / "cu13", packages / "cuda_runtime", Path("/usr/local/cuda"))
    folders = [home / "include" for home in homes if (home / "include" / "cuda_bf16.h").exists()]
    if not folders:
        raise CannotCompile(
            "cuda_bf16.h is neither in this environment's NVIDIA packages nor in /usr/local/cuda"
        )
    return Path(mx.__file__).parent / "include" / "cccl", folders[0], folders[0] / "cccl"


def text_of(file: str, folder: Path) -> str:
    """The source of a kernel file with common.cuh in front of it, which compiles by itself."""
    headers: Sequence[str] = ("cuda_bf16.h", "cuda_fp16.h")
    parts = [f"#include <{name}>" for name in headers]
    parts += [
        (folder / name).read_text().replace("#pragma once", "") for name in ("common.cuh", file)
    ]
    return "\n".join(parts)
