"""Reading a prompt takes the weights, its caches, and what one and a half chunks take beside them.

A chunk's own peak is measured by itself: a forward of as many rows over caches as long.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from engines import engine_of, load_quietly, request, spec
from small import small_checkpoint

from exo_node.mtp.caches.rollback import cache_arrays, holds_rows
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.model.load import Loaded

CHUNK, ROWS, LAYERS = 128, 3072, 6
IDS = [7 * i % 4000 + 3 for i in range(ROWS)]


def whole() -> pb.StageSpec:
    folder = small_checkpoint(LAYERS)
    return spec(folder, 0, LAYERS, num_layers=LAYERS, prefill_chunk=CHUNK)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    loaded_model = load_quietly(whole())
    mx.eval(loaded_model.model.model.parameters())
    return loaded_model


def chunk_alone(loaded: Loaded) -> int:
    """Bytes beside weights and caches, for the last chunk's rows over a context as long."""
    caches = loaded.model.make_caches()
    for cache in (c for c in caches if holds_rows(c)):
        _ = cache.update_and_fetch(*(mx.ones((1, 2, ROWS - CHUNK, 16)) for _ in range(2)))
    mx.eval(cache_arrays(caches))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    out = loaded.model.hidden(mx.array([IDS[-CHUNK:]]), None, caches)
    mx.eval(out, cache_arrays(caches))
    return mx.get_peak_memory() - before


def peak_of(engine: TextEngine, prompt: Sequence[int]) -> int:
    """Bytes beside the weights until the first token is there; the caches are among them."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    _ = list(engine.generate(request(prompt, 0, 1)))
    return mx.get_peak_memory() - before


@pytest.fixture(scope="module")
def limits(loaded: Loaded) -> tuple[int, int]:
    """Bytes of a chunk alone, and of caches that hold the whole prompt."""
    return chunk_alone(loaded), sum(array.nbytes for array in cache_arrays(_read(loaded)))


def test_a_prompts_peak_is_its_caches_and_at_most_one_and_a_half_chunks(
    loaded: Loaded, limits: tuple[int, int]
) -> None:
    engine = engine_of(loaded, whole())
    _ = peak_of(engine, IDS[:CHUNK])  # what is made once
    alone, caches = limits
    assert peak_of(engine, IDS) <= caches + 1.5 * alone
    assert alone > 4 * CHUNK * ROWS * 4 / 2, "else nothing of a chunk was measured"


def _read(loaded: Loaded) -> list[Any]:
    caches = loaded.model.make_caches()
    for start in range(0, ROWS, CHUNK):
        ids = mx.array([IDS[start : start + CHUNK]])
        mx.eval(loaded.model.hidden(ids, None, caches), cache_arrays(caches))
    return caches
