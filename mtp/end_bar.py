"""End tokens get probability 0 until an answer has enough tokens.

Row by row, with the number of tokens that each row has before it: drafts stay exact.
"""

import math
from collections.abc import Iterable

import mlx.core as mx


class EndBar:
    """Bars the `ends` while an answer has fewer than `least` tokens.

    Where nothing else is allowed, as at the end of a grammar, the ends stay.
    """

    def __init__(self, ends: Iterable[int], least: int) -> None:
        self._ends = mx.array(sorted(ends), dtype=mx.int32)
        self._missing = least
        self._masks: dict[int, mx.array] = {}

    def commit(self, tokens: mx.array) -> None:
        """Adds tokens (n,) to the answer."""
        self._missing -= tokens.shape[0]

    def apply(self, logits: mx.array, before: int = 0) -> mx.array:
        """(rows, V) logits, of which row i follows the committed tokens and `before` + i more."""
        barred = min(logits.shape[0], self._missing - before)
        if barred <= 0:
            return logits
        rows = logits[:barred]
        nothing = mx.array(-math.inf, dtype=logits.dtype)
        others = mx.where(self._mask(logits.shape[-1]), nothing, rows)
        has_none = mx.all(others == nothing, axis=-1, keepdims=True)
        rows = mx.where(has_none, rows, others)
        return rows if barred == logits.shape[0] else mx.concatenate([rows, logits[barred:]])

    def _mask(self, vocabulary: int) -> mx.array:
        """(V,) whether an id is an end. A drafter may know the vocabulary's first ids only."""
        if vocabulary not in self._masks:
            ids = mx.arange(vocabulary, dtype=mx.int32)
            self._masks[vocabulary] = mx.any(ids[:, None] == self._ends, axis=-1)
        return self._masks[vocabulary]
