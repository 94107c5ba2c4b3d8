"""MLX's headers for `mx.compile` on a CPU, compiled once a machine and not for each function.

There MLX calls `g++` on a few lines after its headers, and those take most of the second that
it costs. In front of PATH lies a `g++` that uses them precompiled, with the same output.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

_OPTIONS = ("-std=c++17", "-O3", "-Wall", "-fPIC")
"""MLX's own options: GCC ignores a precompiled header that was built with others."""
_HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
_NAME = f"exo-headers-{os.getuid()}-"


def use() -> None:
    """Prepares this process and its children; does nothing if MLX calls no GCC."""
    gxx, headers = shutil.which("g++"), _headers()
    if sys.platform != "linux" or gxx is None or headers is None:
        return
    if Path(gxx).parent.name.startswith(_NAME):
        return  # a worker: the process that started it has done this
    os.environ["PATH"] = os.pathsep.join((str(compiler_folder(gxx, headers)), os.environ["PATH"]))


def _headers() -> Path | None:
    mlx = find_spec("mlx")
    homes = mlx.submodule_search_locations if mlx is not None else None
    folders = (Path(home) / "include" for home in homes or ())
    return next((path for path in folders if (path / _HEADER).exists()), None)


def compiler_folder(gxx: str, headers: Path) -> Path:
    """The folder that goes in front of PATH, one for each version of compiler and MLX."""
    version = subprocess.run([gxx, "--version"], capture_output=True, check=True).stdout
    of = (version, gxx, _OPTIONS, headers, (headers / _HEADER).stat().st_mtime_ns)
    name = hashlib.sha256(repr(of).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"{_NAME}{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    assert status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other workers of this session wait for the first
        if not (folder / "g++").exists():
            _make(folder, gxx, headers)
    return folder


def _make(folder: Path, gxx: str, headers: Path) -> None:
    out = folder / _HEADER.with_suffix(".h.gch")
    out.parent.mkdir(parents=True, exist_ok=True)
    text = ["-w", "-I", str(headers), "-x", "c++-header", str(headers / _HEADER)]
    subprocess.run([gxx, *_OPTIONS, *text, "-o", str(out)], check=True)
    script = folder / "script"
    _ = script.write_text(f'#!/bin/sh\nexec "{gxx}" -I "{folder}" "$@"\n')
    script.chmod(0o700)
    _ = script.rename(folder / "g++")
