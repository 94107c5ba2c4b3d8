"""Prefill in batches: chunks of several prompts in one forward."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from .batch_caches import BatchTapedCache, LoneCache, detach, left_aligned
from .positions import Positions
from .seams import ForwardOutput, Want


class BatchTarget(Protocol):
    """A whole model, as rounds of a batch use it."""

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        """Appends ids (B, n): logits (B, n, V), and hidden (B, n, H) where it has any; lazy."""
        ...


class PromptTarget(Protocol):
    """A model that gives hidden states, so that logits are computed for the needed rows only."""

    padding: int
    """The id of rows behind a prompt's end."""

    def hidden_batch(self, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        """Appends ids (B, n) -> hidden (B, n, H)."""
        ...

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> ForwardOutput:
        """Appends ids (n,) of one request; lazy."""
        ...

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Hidden (1, n, H) -> logits (n, V)."""
        ...


def prefill_together(
    target: PromptTarget,
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
            # mlx-lm's way to ignore rows behind a request's end; each layer counts them down.
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
