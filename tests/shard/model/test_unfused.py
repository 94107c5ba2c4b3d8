"""Operations on a CPU: a load turns fusing off, so that no compiler is called; bits stay."""

import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.model import load as loading

COMPARE = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx import nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.gated_delta import compute_g

def values(a, b):
    if a.dtype == mx.float32:
        return nn.gelu_approx(a), swiglu(a[:, 0:3], b[:, 3:])
    return swiglu(a, b), compute_g(a[0, 0], b, a[0, 0])

for dtype in (mx.float32, mx.bfloat16):
    a, b = (4 * mx.random.normal((3, 6, 133), key=mx.random.key(n)).astype(dtype) for n in (0, 1))
    mx.enable_compile()
    fused = values(a, b)
    mx.eval(fused)
    mx.disable_compile()
    for one, other in zip(fused, values(a, b), strict=True):
        assert mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)).item(), dtype
"""
LIBRARIES = 4
"""The least that MLX compiles for these, which shows that they were fused."""


def nothing(*_: object) -> None:
    pass


def test_a_load_on_a_cpu_makes_mlx_call_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    _ = compiler.write_text('#!/bin/sh\ntest "$1" = --version\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(loading, "_load", nothing)
    monkeypatch.setattr(loading, "_limit_memory", nothing)
    device = mx.default_device()
    number = 1.0 + zlib.crc32(str(tmp_path).encode()) / 2**32  # which no earlier code has

    def function(a: mx.array) -> mx.array:
        return mx.exp(a) * a * number

    fused: Callable[[mx.array], mx.array] = mx.compile(function)
    try:
        mx.set_default_device(mx.cpu)
        mx.enable_compile()
        _ = loading.load(pb.StageSpec(path=str(tmp_path)), nothing)
        assert mx.array_equal(fused(mx.zeros((8,))), mx.zeros((8,))).item()
    finally:
        mx.disable_compile()
        mx.set_default_device(device)


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="MLX compiles by g++ on Linux"
)
def test_fused_and_single_operations_have_the_same_bits(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True
    )
    if "_Float32" in process.stdout + process.stderr:
        pytest.skip("this g++ rejects what MLX writes")
    assert process.returncode == 0, process.stderr
    assert len(list(tmp_path.rglob("*.so"))) >= LIBRARIES
