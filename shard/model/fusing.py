"""Whether MLX can fuse operations on this CPU, which it does with a compiler that it looks for.

On a CPU `mx.compile` writes C++ and calls `g++` on it. The text begins with the headers of the
compiler that built MLX, preprocessed, and another one may refuse them: g++ 13 does those of MLX
0.32.4 (it declares `_Float32` by itself), and with that every model of mlx-lm fails at its first
forward. So this is tried before a model is loaded.
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
"""Compilers that may do where `g++` does not, under the names of their packages."""

_links: "list[tempfile.TemporaryDirectory[str]]" = []
"""Folders in PATH; they go with the process."""


def prepare_fusing() -> str:
    """Makes `mx.compile` work on a CPU, or turns it off; returns why it is off, else "".

    Off, each operation runs by itself, with the same results. On MLX's thread.
    """
    if mx.default_device() != mx.Device(mx.cpu) or not (fault := _fault()):
        return ""
    for name in OTHERS:
        if (found := shutil.which(name)) is not None and _works_as_gxx(Path(found)):
            log.info("MLX fuses operations with %s, since it cannot use g++: %s", found, fault)
            return ""
    mx.disable_compile()
    why = (
        f"MLX cannot compile for this CPU ({fault}), so operations are not fused, which may "
        "cost some speed; install g++-12 or clang, and load the model again"
    )
    log.warning("%s", why)
    return why


def _works_as_gxx(compiler: Path) -> bool:
    """Puts it in PATH under the name that MLX calls, if MLX can use it."""
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
    """Why a function of its own for this compiler cannot be compiled, shortly; "" if it can.

    MLX keeps what it compiled for later processes, by what the function computes: the number in it
    makes another compiler's attempt another function.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no g++"
    found = Path(compiler).resolve()
    known = f"{found} {found.stat().st_size} {found.stat().st_mtime_ns}"
    number = 1.0 + zlib.crc32(known.encode()) / 2**32
    fused = mx.compile(lambda a: mx.sigmoid(a) * a * number)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    try:
        mx.eval(fused(mx.zeros((8,))))
    except RuntimeError as fault:
        errors = (line for line in str(fault).splitlines() if "error:" in line)
        said = next(errors, str(fault).splitlines()[-1])
        return f"{compiler}: {said.rpartition('error:')[2].strip()[:200]}"
    return ""
