"""Grammar masks: tokens that may not follow get probability 0 before a token is chosen.

Drafts stay exact: a row of a verify is masked by the committed tokens and the drafts before it, as
in plain decoding. A draft that the grammar does not allow has probability 0, so it is rejected with
all drafts after it.
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol, cast

import mlx.core as mx

from .seams import as_ids

BITS: Final = 32
Mask = bytes
"""One bit per id, the lowest first, in little-endian words of 32 bits; missing bits are 0."""


class GrammarMatcher(Protocol):
    """The state of one answer's grammar. Called on the compute thread alone."""

    @property
    def failed(self) -> str:
        """Why it can give no more masks; empty while it can."""
        ...

    def take(self, tokens: Sequence[int]) -> None:
        """Advances by tokens that became part of the answer."""
        ...

    def masks(self, drafts: Sequence[int]) -> list[Mask | None]:
        """The masks at each of the `drafts` and after the last one, or None where any id is.

        Masks after a draft that is not allowed are arbitrary.
        """
        ...


class GrammarMask:
    """Applies one request's grammar to logits. Tokens are read only when the next mask is needed,
    so that masks are made while the next forward is computed.
    """

    def __init__(self, grammar: GrammarMatcher) -> None:
        self._grammar = grammar
        self._unread: list[mx.array] = []

    def commit(self, tokens: mx.array) -> None:
        """Adds tokens (n,) to the answer."""
        self._unread.append(tokens)

    def apply(self, logits: mx.array, drafts: mx.array | None = None) -> mx.array:
        """Masks logits (rows, V), of which row i follows the committed tokens and `drafts[:i]`."""
        mx.async_eval(logits)
        self._read()
        ids = [] if drafts is None else as_ids(drafts)
        return masked(logits, self._grammar.masks(ids)[: logits.shape[0]])

    def apply_draft(self, logits: mx.array, before: Sequence[mx.array] = ()) -> mx.array:
        """Masks logits (1, V') of the draft after those `before` in its round, (1,) each.

        Logits are not masked if no id below V' is allowed: any draft is then rejected. Reading the
        drafts waits for them, which saves drafts that the grammar would reject.
        """
        mx.async_eval(logits)
        self._read()
        ids = [id for tokens in before for id in as_ids(tokens)]
        mask = self._grammar.masks(ids)[-1]
        if mask is None or not any(mask[: logits.shape[1] // 8]):
            return logits
        return masked(logits, [mask])

    def allowed_count(self, tokens: Sequence[int]) -> int:
        """The number of `tokens` in front of the first one that the grammar does not allow, after
        the committed tokens."""
        self._read()
        masks = self._grammar.masks(tokens)
        for count, (token, mask) in enumerate(zip(tokens, masks, strict=False)):
            if mask is not None and not _has(mask, token):
                return count
        return len(tokens)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for tokens in unread:
            self._grammar.take(as_ids(tokens))


def _has(mask: Mask, token: int) -> bool:
    byte = token // 8
    return byte < len(mask) and bool(mask[byte] >> token % 8 & 1)


def masked(logits: mx.array, masks: Sequence[Mask | None]) -> mx.array:
    """Logits (n, V) with -inf where a row's mask has no bit."""
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
