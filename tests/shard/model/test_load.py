"""Limits that a load sets for its process."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engines import load_quietly, spec

from exo_node.placement.errors import InvalidCheckpoint

USUAL, PLANNED = 1 << 40, 1 << 39
"""Bytes, more than any test takes."""


@pytest.mark.parametrize(
    ("device", "limit", "expected"),
    [(mx.gpu, PLANNED, PLANNED), (mx.gpu, 0, USUAL), (mx.cpu, PLANNED, USUAL)],
)
def test_a_load_may_take_the_memory_of_its_plan_from_its_beginning(
    device: mx.DeviceType, limit: int, expected: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Freed memory that MLX keeps is another limit. A plan without one leaves it as it was, and so
    does a CPU, where operations beyond it would wait for each other."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    before = mx.set_memory_limit(USUAL)
    cache_before = mx.set_cache_limit(USUAL)
    try:
        with pytest.raises(InvalidCheckpoint, match="is missing"):
            _ = load_quietly(spec(tmp_path, memory_limit_bytes=limit))
    finally:
        memory, cache = mx.set_memory_limit(before), mx.set_cache_limit(cache_before)
    assert (memory, cache) == (expected, USUAL)
