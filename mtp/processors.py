"""Penalties, logit bias and barred end tokens, row by row with the prefix that each row has.

A verify's row i follows the committed tokens and the first i drafts. Processing it with exactly
that prefix keeps drafts exact under penalties: row i gets the logits that it has in plain decoding.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from .types import Sampling

Processor = Callable[[mx.array, mx.array], mx.array]
"""mlx-lm's: (tokens, logits) -> logits, which it may write to."""


class Processors:
    """One request's logits processors and the committed tokens that they depend on."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._processors = _processors(sampling, dict(sampling.logit_bias))
        self._narrow: dict[int, list[Processor]] = {}
        self._vocabulary: int | None = None
        self._window = sampling.repetition_context_size
        recent = [token for token in prompt[-self._window :] if token >= 0]  # not of images
        self._recent = mx.array(recent, dtype=mx.int32)

    @property
    def active(self) -> bool:
        return bool(self._processors)

    def apply(self, logits: mx.array, drafts: mx.array | None = None) -> mx.array:
        """(rows, V) logits, of which row i follows the committed tokens and `drafts`[:i]."""
        if not self._processors:
            return logits
        self._vocabulary = logits.shape[-1]
        rows = [self._row(logits[i : i + 1], drafts, i) for i in range(logits.shape[0])]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows)

    def apply_after(self, logits: mx.array, drafts: Sequence[mx.array]) -> mx.array:
        """(1, V') logits that follow the committed tokens and all of `drafts`, each (1,).

        V' may be less than the vocabulary: a drafter may know its first ids only.
        """
        if not self._processors:
            return logits
        joined = mx.concatenate(list(drafts)) if drafts else None
        if logits.shape[-1] == self._vocabulary:
            return self._row(logits[:], joined, len(drafts))
        return self._narrow_row(logits, joined, len(drafts))

    def commit(self, tokens: mx.array) -> None:
        """Adds tokens (n,) to the answer."""
        if self._processors:
            self._recent = mx.concatenate([self._recent, tokens])[-self._window :]

    def _row(self, logits: mx.array, drafts: mx.array | None, count: int) -> mx.array:
        return _applied(self._processors, self._prefix(drafts, count), logits)

    def _narrow_row(self, logits: mx.array, drafts: mx.array | None, count: int) -> mx.array:
        """`_row` for the first ids only: the other ids share an extra column, which is dropped."""
        width = logits.shape[-1]
        if width not in self._narrow:
            bias = {i: b for i, b in self._sampling.logit_bias if i < width}
            self._narrow[width] = _processors(self._sampling, bias)
        prefix = mx.minimum(self._prefix(drafts, count), width)
        widened = mx.pad(logits, [(0, 0), (0, 1)])
        return _applied(self._narrow[width], prefix, widened)[:, :width]

    def _prefix(self, drafts: mx.array | None, count: int) -> mx.array:
        if drafts is None or not count:
            return self._recent
        return mx.concatenate([self._recent, drafts[:count]])


def _processors(s: Sampling, bias: dict[int, float]) -> list[Processor]:
    return make_logits_processors(
        logit_bias=bias or None,
        repetition_penalty=None if s.repetition_penalty == 1 else s.repetition_penalty,
        repetition_context_size=s.repetition_context_size,
        presence_penalty=s.presence_penalty,
        presence_context_size=s.repetition_context_size,
        frequency_penalty=s.frequency_penalty,
        frequency_context_size=s.repetition_context_size,
    )


def _applied(processors: Sequence[Processor], prefix: mx.array, logits: mx.array) -> mx.array:
    for processor in processors:
        logits = processor(prefix, logits)
    return logits


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
