"""Limits that a load sets for its process."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from engines import load_quietly, spec

from exo_node.placement.errors import InvalidCheckpoint
from exo_node.shard.model.load import LEAST_KEPT, limit_cache

USUAL, PLANNED = 1 << 40, 1 << 39
"""Bytes, more than any test takes."""


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    before, cache_before = mx.set_memory_limit(USUAL), mx.set_cache_limit(USUAL)
    yield
    _ = mx.set_memory_limit(before), mx.set_cache_limit(cache_before)


@pytest.mark.parametrize(
    ("cuda", "limit", "expected"),
    [(True, PLANNED, PLANNED), (True, 0, USUAL), (False, PLANNED, USUAL)],
)
def test_a_load_on_cuda_may_take_the_memory_of_its_plan_from_its_beginning(
    cuda: bool, limit: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan without a limit leaves it as it was, and so does a machine where operations beyond it
    would wait for each other."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    with pytest.raises(InvalidCheckpoint, match="is missing"):
        _ = load_quietly(spec(tmp_path, memory_limit_bytes=limit))
    assert (mx.set_memory_limit(USUAL), mx.set_cache_limit(USUAL)) == (expected, USUAL)


@pytest.mark.parametrize(
    ("loaded", "limit", "expected"),
    [(PLANNED // 4, PLANNED, PLANNED * 3 // 4), (PLANNED, PLANNED, LEAST_KEPT), (1, 0, USUAL)],
)
def test_a_load_on_metal_keeps_as_much_freed_memory_as_its_plan_leaves_beside_weights(
    loaded: int, limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "get_active_memory", lambda: loaded)
    limit_cache(limit)
    assert (mx.set_memory_limit(USUAL), mx.set_cache_limit(USUAL)) == (USUAL, expected)
