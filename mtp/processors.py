"""Penalties and logit bias, replayed row by row on the prefix that each row would have had.

A verify's row i follows the committed tokens and the first i drafts. Processing it with exactly
that prefix keeps drafts on under penalties: the target of row i is what plain decoding would see.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from .types import Penalties


class Processors:
    """One request's processors and the committed tokens that they look at."""

    def __init__(self, penalties: Penalties, prompt: Sequence[int]) -> None:
        p = penalties
        self._processors = make_logits_processors(
            logit_bias=dict(p.logit_bias) or None,
            repetition_penalty=None if p.repetition == 1 else p.repetition,
            repetition_context_size=p.context_size,
            presence_penalty=p.presence,
            presence_context_size=p.context_size,
            frequency_penalty=p.frequency,
            frequency_context_size=p.context_size,
        )
        self._window = p.context_size
        self._recent = mx.array(list(prompt[-self._window :]), dtype=mx.int32)

    def apply(self, logits: mx.array, drafts: mx.array | None = None) -> mx.array:
        """(rows, V) logits, of which row i follows the committed tokens and `drafts`[:i]."""
        if not self._processors:
            return logits
        rows = [self._row(logits[i : i + 1], drafts, i) for i in range(logits.shape[0])]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows)

    def apply_after(self, logits: mx.array, drafts: Sequence[mx.array]) -> mx.array:
        """(1, V) logits that follow the committed tokens and all of `drafts`, each (1,)."""
        if not self._processors:
            return logits
        joined = mx.concatenate(list(drafts)) if drafts else None
        return self._row(logits, joined, len(drafts))

    def commit(self, tokens: mx.array) -> None:
        """(n,) tokens became part of the answer."""
        if self._processors:
            self._recent = mx.concatenate([self._recent, tokens])[-self._window :]

    def _row(self, logits: mx.array, drafts: mx.array | None, count: int) -> mx.array:
        prefix = self._recent
        if drafts is not None and count:
            prefix = mx.concatenate([prefix, drafts[:count]])
        for processor in self._processors:
            logits = processor(prefix, logits)
        return logits
