"""A grammar over logits: what may not follow gets probability 0, before anything is chosen.

Drafts stay exact under it: a row of a verify is masked by what the committed tokens and the drafts
before it allow, as plain decoding would be there. A draft that the grammar does not allow has no
probability, so it falls, and with it all that was drafted behind it.
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol, cast

import mlx.core as mx

from .seams import as_ids

BITS: Final = 32
Mask = bytes
"""A bit for each id, the lowest first, in little-endian words of 32 bits; missing ones are 0."""


class Grammar(Protocol):
    """One answer's, in step with its committed tokens. Called on the compute thread alone."""

    @property
    def failed(self) -> str:
        """Why it can tell no more of what may follow; empty while it can."""
        ...

    def take(self, tokens: Sequence[int]) -> None:
        """They became part of the answer."""
        ...

    def masks(self, drafts: Sequence[int]) -> list[Mask | None]:
        """For each of the `drafts`, and behind the last: what may stand there; None: anything.

        Behind a draft that may not stand, nothing matters any more.
        """
        ...


class GrammarMask:
    """One request's grammar, applied. Tokens are read only when the next mask is wanted: the
    forward behind them is under way by then, and masks are made while it is computed.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._unread: list[mx.array] = []

    def commit(self, tokens: mx.array) -> None:
        """(n,) tokens became part of the answer."""
        self._unread.append(tokens)

    def apply(self, logits: mx.array, drafts: mx.array | None = None) -> mx.array:
        """(rows, V) logits, of which row i follows the committed tokens and `drafts`[:i]."""
        mx.async_eval(logits)
        self._read()
        ids = [] if drafts is None else as_ids(drafts)
        return masked(logits, self._grammar.masks(ids)[: logits.shape[0]])

    def apply_draft(self, logits: mx.array, before: Sequence[mx.array] = ()) -> mx.array:
        """(1, V') logits of the draft behind those `before` in its round, (1,) each.

        Left alone where no id below V' is allowed. The drafts before it are read, which waits for
        them: what the grammar does not allow would fall anyway, and all that is behind it.
        """
        mx.async_eval(logits)
        self._read()
        ids = [id for tokens in before for id in as_ids(tokens)]
        mask = self._grammar.masks(ids)[-1]
        if mask is None or not any(mask[: logits.shape[1] // 8]):
            return logits
        return masked(logits, [mask])

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for tokens in unread:
            self._grammar.take(as_ids(tokens))


def masked(logits: mx.array, masks: Sequence[Mask | None]) -> mx.array:
    """(n, V) logits with -inf where a row's mask has no bit."""
    if all(mask is None for mask in masks):
        return logits
    vocabulary = logits.shape[-1]
    size = -(-vocabulary // BITS) * (BITS // 8)
    free = b"\xff" * size
    rows = b"".join(free if m is None else m[:size].ljust(size, b"\0") for m in masks)
    words = mx.array(cast("mx.array", memoryview(rows).cast("I"))).reshape(len(masks), -1, 1)
    bits = (words >> mx.arange(BITS, dtype=mx.uint32)) & 1
    allowed = bits.reshape(len(masks), -1)[:, :vocabulary] != 0
    return mx.where(allowed, logits, mx.array(-math.inf, dtype=logits.dtype))
