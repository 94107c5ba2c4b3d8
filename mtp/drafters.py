"""What drafts: nothing, or the checkpoint's own multi-token-prediction head."""

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .chooser import Chooser
from .rollback import cache_arrays
from .seams import Drafts

PENDING_ROWS = 64
"""Committed rows that wait for a draft, while plain decoding goes on, before the head reads them.

One forward over many costs about what one row does; waiting longer would only hold more hiddens.
"""


class NoDrafter:
    """Plain decoding."""

    k = 0

    def draft(self, k: int, position: int) -> Drafts:
        raise AssertionError("a drafter with k = 0 was asked for drafts")

    def observe(self, hidden: mx.array | None, tokens: mx.array) -> None:
        del hidden, tokens

    def arrays(self) -> list[mx.array]:
        return []


class Head(Protocol):
    """The part of `head.MtpHead` that drafting needs."""

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: KVCache) -> mx.array: ...


class NativeDrafter:
    """Drafts with the head over its own cache of committed rows.

    The cache pairs the target's hidden of position i with the token at i + 1. Rows that drafting
    itself writes are dropped again before the committed ones are appended, so that it never holds a
    hidden that the target did not compute, and has no hole when every draft is accepted.
    """

    def __init__(
        self,
        head: Head,
        embed: Callable[[mx.array], mx.array],
        logits: Callable[[mx.array], mx.array],
        chooser: Chooser,
        k: int,
        *,
        overlap: bool,
    ) -> None:
        """`embed` maps ids (1, n) to (1, n, H), `logits` maps (1, n, H) to (1, n, V).

        `overlap`: the drafts are evaluated while the verifier's graph is built.
        """
        self.k = k
        self.cache = KVCache()
        self._head = head
        self._embed = embed
        self._logits = logits
        self._chooser = chooser
        self._evaluate = mx.async_eval if overlap else mx.eval
        self._pending: list[tuple[mx.array, mx.array]] = []
        self._pending_rows = 0
        self._speculative = 0

    def observe(self, hidden: mx.array | None, tokens: mx.array) -> None:
        if hidden is None:
            raise AssertionError("the verifier gave no hidden for its drafter")
        if self._pending_rows >= PENDING_ROWS:
            _ = self._append_pending()
        self._pending.append((hidden, tokens[None]))
        self._pending_rows += tokens.shape[0]

    def draft(self, k: int, position: int) -> Drafts:
        hidden = self._append_pending()
        if hidden is None:
            raise AssertionError("nothing was committed since the last draft")
        drafts: list[Drafts] = []
        for depth in range(k):
            if depth:
                embedding = self._embed(drafts[-1].tokens[None])
                hidden = self._head(hidden, embedding, self.cache)
                self._speculative += 1
            logits = self._logits(hidden)[0]
            drafts.append(self._chooser.draft(logits, position + depth, drafts))
        joined = _join(drafts)
        self._evaluate(joined.tokens)
        return joined

    def arrays(self) -> list[mx.array]:
        return [*cache_arrays([self.cache]), *(hidden for hidden, _ in self._pending)]

    def _append_pending(self) -> mx.array | None:
        """One forward over the rows committed since the last; its last row (1, 1, H), if any."""
        if not self._pending:
            return None
        hidden, tokens = self._pending[0]
        if len(self._pending) > 1:
            hidden = mx.concatenate([hidden for hidden, _ in self._pending], axis=1)
            tokens = mx.concatenate([tokens for _, tokens in self._pending], axis=1)
        self._pending, self._pending_rows = [], 0
        _ = self.cache.trim(self._speculative)
        self._speculative = 0
        return self._head(hidden, self._embed(tokens), self.cache)[:, -1:]


def _join(drafts: list[Drafts]) -> Drafts:
    if len(drafts) == 1:
        return drafts[0]
    tokens = mx.concatenate([draft.tokens for draft in drafts])
    rows = [d.log_probabilities for d in drafts if d.log_probabilities is not None]
    ids = [d.support for d in drafts if d.support is not None]
    finite = [d.finite for d in drafts if d.finite is not None]
    return Drafts(tokens, *(mx.concatenate(each) if each else None for each in (rows, ids, finite)))
