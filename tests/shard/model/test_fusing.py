"""`mx.compile` on a CPU whose g++ MLX cannot use, as on Ubuntu 24.04: loads must not fail by it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TRY = """
import logging
import mlx.core as mx
before = mx.compile(lambda a: mx.exp(a) * a)
logging.basicConfig(level=logging.INFO, force=True)
from exo_node.shard.model.fusing import prepare_fusing
prepare_fusing()
print(mx.array_equal(before(mx.zeros((8,))), mx.zeros((8,))).item())
"""

BROKEN = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo "x.cpp:1:2: error: redeclaration of C++ built-in type '_Float32'"
exit 1
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="MLX compiles by g++ on Linux"
)


def tried(tmp_path: Path, *, other: bool) -> subprocess.CompletedProcess[str]:
    """In a process whose g++ is broken, beside nothing or one compiler that works."""
    folder, cache = tmp_path / "bin", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    broken = folder / "g++"
    _ = broken.write_text(BROKEN)
    broken.chmod(0o755)
    for name in ("sh", "as", "ld"):
        (folder / name).symlink_to(str(shutil.which(name)))
    if other:
        (folder / "g++-12").symlink_to(str(shutil.which("g++")))
    environment = {**os.environ, "PATH": str(folder), "TMPDIR": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", TRY], env=environment, capture_output=True, text=True, check=True
    )


def test_without_a_compiler_that_mlx_can_use_operations_are_not_fused_and_run(
    tmp_path: Path,
) -> None:
    process = tried(tmp_path, other=False)
    why = process.stderr
    assert "redeclaration of C++ built-in type '_Float32'" in why and "install g++-12" in why
    assert process.stdout == "True\n"


def test_another_compiler_is_used_where_there_is_one(tmp_path: Path) -> None:
    process = tried(tmp_path, other=True)
    assert process.stdout == "True\n"
    assert "g++-12" in process.stderr and "_Float32" in process.stderr
