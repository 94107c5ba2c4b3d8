"""The state of one request: its caches by layer, and the draft head's part."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ....mtp.caches.rollback import RowCache, cache_arrays
from ....mtp.seams import as_row
from ....mtp.types import CacheTier


@dataclass(slots=True, eq=False)
class DraftState:
    """The draft head's cache of one request, and the target's rows that the head has not read.

    The cache pairs the target's hidden state of row i with the token at i + 1. Rows that drafting
    itself wrote are dropped before others are appended, so all hidden states in it are the
    target's. A draft starts from an unread row.
    """

    cache: RowCache | None = None
    """None before its first rows."""
    rows: int = 0
    """Rows in the cache."""
    unread: list[tuple[mx.array, mx.array]] = field(default_factory=list[tuple[mx.array, mx.array]])
    """The following rows: hidden states (1, n, H), and the token (1, n) after each."""
    last: mx.array | None = None
    """The hidden state (1, 1, H) of the prompt's last row, until its next token is sampled."""

    @classmethod
    def with_unread(
        cls, cache: RowCache | None, rows: int, hidden: mx.array | None, ids: Sequence[int]
    ) -> "DraftState":
        """A state whose unread rows have `hidden` (1, n, H). `ids`: the prompt's, beyond them."""
        state = cls(cache, rows)
        if hidden is not None:
            state.observe(hidden, as_row(ids[rows + 1 : rows + 1 + hidden.shape[1]]))
        return state

    def observe(self, hidden: mx.array, tokens: mx.array) -> None:
        """Adds committed rows: hidden (1, n, H), and the token (n,) after each."""
        self.unread.append((hidden, tokens[None]))

    def complete(self, tokens: mx.array) -> None:
        """Adds the prompt's last row, whose next token (1,) is now sampled."""
        assert self.last is not None
        self.observe(self.last, tokens)
        self.last = None

    @property
    def unread_rows(self) -> int:
        """Number of rows that the head has not read."""
        return sum(hidden.shape[1] for hidden, _ in self.unread)

    @property
    def hidden(self) -> mx.array | None:
        """The hidden states (1, n, H) of the unread rows, or None if there are none."""
        parts = [hidden for hidden, _ in self.unread]
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        caches = [] if self.cache is None else [self.cache]
        last = [] if self.last is None else [self.last]
        return [*cache_arrays(caches), *(a for pair in self.unread for a in pair), *last]


@dataclass(slots=True, eq=False)
class State:
    """The state of one request, as it moves into a batch and out of it."""

    caches: list[Any]
    """One of mlx-lm's caches, or a `TapedCache`, for each layer."""
    rows: int = 0
    """Rows in the caches."""
    draft: DraftState | None = None
    """None if the request does not draft."""
    tier: CacheTier = ""
    """The tier of the prefix that it began as."""
    first_turn: int = 0
    """The row after the prompt's first turn, if it is among the rows of that prefix; else 0."""

    @property
    def all_caches(self) -> list[Any]:
        """The caches by layer, and the draft head's."""
        draft = None if self.draft is None else self.draft.cache
        return self.caches if draft is None else [*self.caches, draft]

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        return [*cache_arrays(self.caches), *(self.draft.arrays() if self.draft else [])]
