"""Finds a compiler with which MLX can fuse operations on this CPU.

On a CPU `mx.compile` writes C++ and calls `g++` on it. The source starts with the preprocessed
headers of the compiler that built MLX, which another compiler may reject: g++ 13 rejects those of
MLX 0.32.4 (it declares `_Float32` by itself), and then every model of mlx-lm fails at its first
forward. So this is tested before a model is loaded.
"""

import logging
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Final

import mlx.core as mx

log = logging.getLogger(__name__)

OTHERS: Final = ("g++-12", "g++-11", "clang++", *(f"clang++-{n}" for n in range(20, 13, -1)))
"""Compilers to try if `g++` fails, by the names of their packages."""

_links: "list[tempfile.TemporaryDirectory[str]]" = []
"""Folders in PATH, removed at the end of the process."""


def prepare_fusing() -> None:
    """Makes `mx.compile` work on a CPU, or turns it off with a warning.

    Without it each operation runs by itself, with the same results. Runs on MLX's thread.
    """
    if mx.default_device() != mx.Device(mx.cpu) or not (fault := _fault()):
        return
    for name in OTHERS:
        if (path := shutil.which(name)) is not None and _works_as_gxx(Path(path)):
            log.info("MLX fuses operations with %s, since it cannot use g++: %s", path, fault)
            return
    mx.disable_compile()
    log.warning(
        "MLX cannot compile for this CPU (%s), so operations are not fused, which may cost some "
        "speed; install g++-12 or clang, and load the model again",
        fault,
    )


def _works_as_gxx(compiler: Path) -> bool:
    """Puts `compiler` in PATH as `g++`, which MLX calls, if MLX can use it."""
    folder = tempfile.TemporaryDirectory(prefix="exo-node-compiler-")
    (Path(folder.name) / "g++").symlink_to(compiler)
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{folder.name}{os.pathsep}{before}"
    if not _fault():
        _links.append(folder)
        return True
    os.environ["PATH"] = before
    folder.cleanup()
    return False


def _fault() -> str:
    """Compiles a test function with `g++`; returns a short error, "" if it works.

    MLX stores compiled functions for later processes, by their operations. The number in this one
    makes it another function for each compiler.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no g++"
    path = Path(compiler).resolve()
    identity = f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
    number = 1.0 + zlib.crc32(identity.encode()) / 2**32
    fused = mx.compile(lambda a: mx.sigmoid(a) * a * number)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    try:
        mx.eval(fused(mx.zeros((8,))))
    except RuntimeError as fault:
        errors = (line for line in str(fault).splitlines() if "error:" in line)
        message = next(errors, str(fault).splitlines()[-1])
        return f"{compiler}: {message.rpartition('error:')[2].strip()[:200]}"
    return ""
