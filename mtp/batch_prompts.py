"""Prefill in batches: chunks of several prompts in one forward."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from .caches.batch_caches import BatchTapedCache, LoneCache, detach, left_aligned
from .caches.positions import Positions
from .targets import FamilyTarget


def prefill_together(
    target: FamilyTarget,
    tokens: Sequence[mx.array],
    caches: Sequence[Sequence[Any]],
    positions: Sequence[int],
) -> list[mx.array]:
    """Appends each (n,) of `tokens` to its own `caches`, which hold `positions` rows; lazy.

    Either all caches are empty or none is. Returns the hidden (1, n, H) of each.
    """
    counts = [ids.shape[0] for ids in tokens]
    width = max(counts)
    padded = mx.stack(
        [mx.pad(ids, [(0, width - ids.shape[0])], constant_values=target.padding) for ids in tokens]
    )
    places = Positions(positions)
    together = left_aligned(caches, places)
    for cache in together:
        if isinstance(cache, BatchTapedCache):
            # mlx-lm's way to ignore rows after a request's end; each layer counts them down.
            cache.lengths = mx.array(counts, dtype=mx.int32)
    hidden = target.hidden_batch(padded, together)
    places.advance(counts)
    for index, theirs in enumerate(caches):
        for mine, cache in zip(theirs, together, strict=True):
            _fill(mine, cache.of(index))
    return [hidden[index : index + 1, :count] for index, count in enumerate(counts)]


def _fill(mine: Any, read: LoneCache) -> None:
    detach(read)
    if isinstance(read, ArraysCache):
        mine.cache = read.cache
    elif isinstance(read, CacheList):
        for own, theirs in zip(mine.caches, read.caches, strict=True):
            _fill(own, theirs)
    else:
        vars(mine).update(vars(read))
