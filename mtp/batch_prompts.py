"""Chunks of several prompts in one forward, each behind its own request's rows."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .batch_caches import BatchTapedCache, LoneCache, Positions, batched, own
from .seams import Block, Want


class BatchTarget(Protocol):
    """A whole model over a batch."""

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        """Appends ids (B, n): logits (B, n, V), and hidden (B, n, H) where it has any; lazy."""
        ...


class PromptTarget(Protocol):
    """A model that gives hidden states, so that logits are computed for the wanted rows only."""

    def hidden_batch(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Ids (B, n) appended -> (B, n, H)."""
        ...

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        """One request's."""
        ...

    def logits_of(self, hidden: mx.array) -> mx.array:
        """(1, n, H) -> (n, V)."""
        ...


def read_together(
    target: PromptTarget,
    tokens: Sequence[mx.array],
    caches: Sequence[Sequence[Any]],
    positions: Sequence[int],
) -> list[mx.array]:
    """Appends each (n,) of `tokens` to its own `caches`, which hold `positions` rows; lazy.

    All of the caches are empty or none is. The hidden (1, n, H) of each.
    """
    counts = [ids.shape[0] for ids in tokens]
    width = max(counts)
    padded = mx.stack([mx.pad(ids, [(0, width - ids.shape[0])]) for ids in tokens])
    places = Positions(positions)
    together = batched(caches, places)
    for cache in together:
        if isinstance(cache, BatchTapedCache):
            # mlx-lm's way to leave out what is right of a request's end; each layer counts its own.
            cache.lengths = mx.array(counts, dtype=mx.int32)
    hidden = target.hidden_batch(padded, together)
    places.moved(counts)
    for index, theirs in enumerate(caches):
        for mine, cache in zip(theirs, together, strict=True):
            _fill(mine, cache.of(index))
    return [hidden[index : index + 1, :count] for index, count in enumerate(counts)]


def _fill(mine: Any, read: LoneCache) -> None:
    own(read)
    if isinstance(read, ArraysCache):
        mine.cache = read.cache
    else:
        mine.keys, mine.values, mine.offset = read.keys, read.values, read.offset
