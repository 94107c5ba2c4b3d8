"""`mx.compile` on a CPU whose g++ MLX cannot use, as on Ubuntu 24.04: loads must not fail by it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from broken_compiler import BROKEN, needs_gxx

from exo_node.shard.engine.measuring import Measuring
from exo_node.shard.kernels.fused_code import COMPILING, VERSION, FusedCode

TRY = """
import logging
import mlx.core as mx
before = mx.compile(lambda a: mx.exp(a) * a)
logging.basicConfig(level=logging.INFO, force=True)
from exo_node.shard.model.fusing import prepare_fusing
prepare_fusing()
print(mx.array_equal(before(mx.zeros((8,))), mx.zeros((8,))).item())
"""

pytestmark = needs_gxx


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


def test_nothing_is_measured_or_saved_while_a_thread_compiles(tmp_path: Path) -> None:
    done, code = list[int](), FusedCode(tmp_path)

    def pieces() -> Generator[None]:
        yield
        done.append(1)

    measuring = Measuring(pieces, time.monotonic)
    measuring.is_held = COMPILING.locked
    library = code.folder / "mlx" / VERSION / "cpu" / "libhalf.so"
    _ = library.write_bytes(b"ha")
    kept = tmp_path / "kept" / "cpu" / library.name
    with COMPILING:
        assert not measuring.step(idle=True) and not done
        code.save()
        assert not kept.exists(), "half of it would be loaded by the next process"
    code.save()
    assert kept.exists() and measuring.step(idle=True) and done
    code.remove()
