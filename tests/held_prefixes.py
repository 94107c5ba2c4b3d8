"""The contents of a prefix cache, counted from its arrays, and whether it fits what it says."""

from collections.abc import Iterator

import mlx.core as mx

from exo_node.mtp.caches.rollback import cache_arrays
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.prefixes.memory import PrefixCache
from exo_node.shard.engine.prefixes.tree import PrefixNode
from exo_node.shard.engine.request import Parameters
from exo_node.shard.engine.stage import StageWorker
from exo_node.shard.engine.states.state import State
from exo_node.shard.text.stop_strings import StopStrings


def cache_of(engine: TextEngine) -> PrefixCache:
    return engine._prefixes.memory  # pyright: ignore[reportPrivateUsage]


def nodes(cache: PrefixCache) -> list[PrefixNode]:
    return list(cache._root.below)  # pyright: ignore[reportPrivateUsage]


def cache_of_stage(worker: StageWorker) -> PrefixCache:
    return worker._prefixes.memory  # pyright: ignore[reportPrivateUsage]


def held_bytes(engine: TextEngine) -> int:
    """Bytes of cached prefixes and requests in progress; asserts that the tree is in order."""
    return counted(cache_of(engine)) + engine.cache_bytes()


def prefix_of(engine: TextEngine, engine_request: Parameters) -> State | None:
    """The prefix that the engine of a whole model has cached for a request."""
    text = engine.codec.stream(StopStrings(()), ignore_end=True)
    request = engine._new_request(engine_request, text)  # pyright: ignore[reportPrivateUsage]
    store = engine._prefixes  # pyright: ignore[reportPrivateUsage]
    return store.find(request.path, engine.cache_bytes()) if request.uses_cache else None


def counted(cache: PrefixCache) -> int:
    """Bytes of kept prefixes; asserts that the tree is in order."""
    arrays = [array for node in nodes(cache) for array in _arrays(node)]
    num_bytes = sum(array.nbytes for array in arrays)
    assert num_bytes == cache.size
    return num_bytes


def _arrays(node: PrefixNode) -> Iterator[mx.array]:
    for span in node.spans:
        for rows in span.layers:
            if rows is not None:
                assert rows.count == span.end - span.begin
                yield from rows.arrays
    yield from cache_arrays(node.states or ())
    if node.drafter is not None and node.drafter.pending is not None:
        yield node.drafter.pending
