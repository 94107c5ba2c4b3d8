"""What drafts: nothing, or the checkpoint's own multi-token-prediction head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .rollback import cache_arrays
from .sampler import Sampler
from .schedule import rows_at
from .seams import Drafts, as_row

PENDING_ROWS = 64
"""Committed rows that wait for a draft, while plain decoding goes on, before the head reads them.

One forward over many costs about what one row does; waiting longer would only hold more hiddens.
"""
RESTING_ROWS = 4096
"""The same while drafts do not pay for the requests that are answered together: their head rests.

Hidden states of so many rows are held at most, for each request. Beyond that the head reads them
all the same: a pass over many rows is a small share of the target's own, and a head that skipped
rows could not draft for the rest of the answer.
"""
READ_ROWS = 512
"""Rows of one pass over those that waited; fewer far into a context, see `rows_at`."""


class NoDrafter:
    """Plain decoding."""

    k = 0
    rests = False

    def draft(self, k: int, position: int) -> Drafts:
        raise AssertionError("a drafter with k = 0 was asked for drafts")

    def observe(self, hidden: mx.array | None, tokens: mx.array) -> None:
        del hidden, tokens

    def catch_up(self) -> None:
        pass

    def arrays(self) -> list[mx.array]:
        return []


class Head(Protocol):
    """The part of `head.MtpHead` that drafting needs."""

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: KVCache) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class DrafterState:
    """What a `NativeDrafter` holds of an answer: another one goes on from it with the same bits.

    Rows [0, rows) are in the cache, those of `pending` follow.
    """

    cache: KVCache
    rows: int
    """Committed ones in the cache; the others are those of drafts."""
    read: mx.array | None  # (1, 1, H)
    """The head's output at the last of them, where the next draft begins with it."""
    pending: mx.array | None  # (1, n, H)
    """The target's hidden of rows that the head is yet to read."""

    @property
    def observed(self) -> int:
        return self.rows + rows_of(self.pending)


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
        sampler: Sampler,
        k: int,
        *,
        overlap: bool,
        patience: Callable[[], int] = lambda: PENDING_ROWS,
    ) -> None:
        """`embed` maps ids (1, n) to (1, n, H), `logits` maps (1, n, H) to (1, n, V).

        `overlap`: the drafts are evaluated while the verifier's graph is built.
        `patience`: how many committed rows may wait now before the head reads them undrafted.
        """
        self.k = k
        self.cache = KVCache()
        self._head = head
        self._embed = embed
        self._logits = logits
        self._sampler = sampler
        self._evaluate = mx.async_eval if overlap else mx.eval
        self._patience = patience
        self._pending: list[tuple[mx.array, mx.array]] = []
        self._pending_rows = 0
        self._speculative = 0
        self._read: mx.array | None = None

    def take_up(self, state: DrafterState, ids: Sequence[int]) -> None:
        """Goes on where another drafter was; `ids` are the prompt's and the answer's so far."""
        self.cache, self._read = state.cache, state.read
        if state.pending is not None:
            after = as_row(ids[state.rows + 1 : state.observed + 1])
            self._pending.append((state.pending, after[None]))
            self._pending_rows = after.shape[0]

    @property
    def state(self) -> DrafterState:
        """Of the rows that it was told of; its cache goes on changing."""
        rows = self.cache.offset - self._speculative
        return DrafterState(self.cache, rows, self._read, self._hidden() if self._pending else None)

    def observe(self, hidden: mx.array | None, tokens: mx.array) -> None:
        if hidden is None:
            raise AssertionError("the verifier gave no hidden for its drafter")
        if self._pending_rows >= self._patience():
            self.catch_up()
        self._read = None  # it is not of the last row any more
        self._pending.append((hidden, tokens[None]))
        self._pending_rows += tokens.shape[0]

    @property
    def unread(self) -> int:
        """Committed rows that the head has not read."""
        return self._pending_rows

    @property
    def rests(self) -> bool:
        """Whether the head is to read what waits only where drafts will pay for long."""
        return self._pending_rows > PENDING_ROWS and self._patience() > PENDING_ROWS

    def draft(self, k: int, position: int) -> Drafts:
        self.catch_up()
        hidden = self._read
        if hidden is None or self._speculative:
            raise AssertionError("nothing was committed since the last draft")
        drafts: list[Drafts] = []
        for depth in range(k):
            if depth:
                embedding = self._embed(drafts[-1].tokens[None])
                hidden = self._head(hidden, embedding, self.cache)
                self._speculative += 1
            logits = self._logits(hidden)[0]
            drafts.append(self._sampler.draft(logits, position + depth, drafts))
        joined = join(drafts)
        self._evaluate(joined.tokens)
        return joined

    def catch_up(self) -> None:
        if self._pending:
            self._read = self._append_pending()

    def settled(self) -> DrafterState:
        """Its state with nothing pending: the head has read all rows, and no drafts are left."""
        self.catch_up()
        _ = self.cache.trim(self._speculative)
        self._speculative = 0
        return self.state

    def hand_over(self) -> DrafterState:
        """As `settled`; nothing of it is here until `take_up`."""
        state = self.settled()
        self.cache, self._read = KVCache(), None
        return state

    def drop(self) -> None:
        """The answer is over: nothing of it is held any more."""
        self.cache, self._read = KVCache(), None
        self._pending, self._pending_rows, self._speculative = [], 0, 0

    def arrays(self) -> list[mx.array]:
        return [*cache_arrays([self.cache]), *(hidden for hidden, _ in self._pending)]

    def _append_pending(self) -> mx.array:
        """Reads the rows committed since the last; the head's output at the last one (1, 1, H)."""
        _ = self.cache.trim(self._speculative)
        hidden, tokens = self._hidden(), [tokens for _, tokens in self._pending]
        after = tokens[0] if len(tokens) == 1 else mx.concatenate(tokens, axis=1)
        self._pending, self._pending_rows, self._speculative = [], 0, 0
        rows, begin, read = after.shape[1], 0, hidden
        while begin < rows:
            end = min(rows, begin + rows_at(self.cache.offset, READ_ROWS))
            read = self._head(hidden[:, begin:end], self._embed(after[:, begin:end]), self.cache)
            begin = end
        return read[:, -1:]

    def _hidden(self) -> mx.array:
        if len(self._pending) == 1:
            return self._pending[0][0]
        return mx.concatenate([hidden for hidden, _ in self._pending], axis=1)


def rows_of(hidden: mx.array | None) -> int:
    return 0 if hidden is None else hidden.shape[1]


def join(drafts: Sequence[Drafts]) -> Drafts:
    """One round's, one after the other."""
    if len(drafts) == 1:
        return drafts[0]
    tokens = mx.concatenate([draft.tokens for draft in drafts])
    rows = [d.log_probabilities for d in drafts if d.log_probabilities is not None]
    ids = [d.support for d in drafts if d.support is not None]
    finite = [d.finite for d in drafts if d.finite is not None]
    return Drafts(tokens, *(mx.concatenate(each) if each else None for each in (rows, ids, finite)))
