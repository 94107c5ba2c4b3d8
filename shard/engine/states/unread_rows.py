"""The rows of a batch that its draft head has not read."""

from collections.abc import Sequence
from itertools import groupby
from typing import Final, NamedTuple

import mlx.core as mx

from ....mtp.schedule import rows_at
from ....mtp.seams import as_ids

READ_ROWS: Final = 512
"""Rows of one pass over waiting rows, of all requests; fewer far into a context."""

Rows = tuple[mx.array, mx.array]
"""Rows of one request: hidden states (1, n, H), and the token (1, n) after each."""


class RowBlock(NamedTuple):
    """Rows of all requests."""

    hidden: mx.array  # (B, n, H)
    tokens: mx.array  # (B, n), the token after each row
    kept_rows: Sequence[int] | mx.array
    """How many of the n rows are committed, by request; an array (B,) if only the device knows."""


class UnreadRows:
    """Rows of each request, and blocks of rows of all requests after them."""

    def __init__(self, of_each: Sequence[Sequence[Rows]]) -> None:
        """`of_each`: by request; at least one has rows."""
        self._of_each = [list(rows) for rows in of_each]
        self._blocks: list[RowBlock] = []

    @property
    def before_last(self) -> int:
        """Rows of all requests, except those of the last block."""
        own = sum(map(_count, self._of_each))
        return own + sum(b.hidden.shape[1] for b in self._blocks[:-1]) * len(self._of_each)

    @property
    def common_rows(self) -> int:
        """Rows of one request in the blocks."""
        return sum(block.hidden.shape[1] for block in self._blocks)

    @property
    def longest(self) -> int:
        """Committed rows of the request with the most; see `of_each`."""
        return max(map(_count, self.of_each()))

    def add(self, block: RowBlock) -> None:
        """Adds rows after all others."""
        self._blocks.append(block)

    def pop_last(self) -> RowBlock:
        """Removes and returns the last block; without one, the last row of each request."""
        if self._blocks:
            return self._blocks.pop()
        last = [_last_of(rows) for rows in self._of_each]
        self._of_each = [_without_last(rows) for rows in self._of_each]
        hidden, tokens = (mx.concatenate([pair[i] for pair in last]) for i in (0, 1))
        return RowBlock(hidden, tokens, [1] * len(last))

    def of_each(self) -> list[list[Rows]]:
        """The committed rows of each request, in arrays of its own: views would keep the rows of
        all requests in memory. Waits for counts that only the device knows."""
        for hidden, tokens, kept_rows in _merge(self._blocks):
            counts = as_ids(kept_rows) if isinstance(kept_rows, mx.array) else kept_rows
            for index, count in enumerate(counts):
                some = slice(index, index + 1)
                pair = hidden[some, :count], tokens[some, :count]
                if hidden.shape[:2] != (1, count):
                    pair = mx.contiguous(pair[0]), mx.contiguous(pair[1])
                self._of_each[index].append(pair)
        self._blocks = []
        mx.async_eval([array for rows in self._of_each for pair in rows for array in pair])
        return self._of_each

    def take(self, rows_before: int) -> list[RowBlock]:
        """Removes all rows and returns them in blocks, each for one pass of the head.

        `rows_before`: that the head has read of the request with the most.
        """
        blocks = [*self._own_blocks(rows_before), *_merge(self._blocks)]
        self._of_each, self._blocks = [[] for _ in self._of_each], []
        return blocks

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        blocks = [array for hidden, tokens, _ in self._blocks for array in (hidden, tokens)]
        return [*(array for rows in self._of_each for pair in rows for array in pair), *blocks]

    def _own_blocks(self, rows_before: int) -> list[RowBlock]:
        """`_of_each` as blocks of at most READ_ROWS rows, each padded to its longest part."""
        counts, size = list(map(_count, self._of_each)), len(self._of_each)
        longest = max(counts)
        if not longest:
            return []
        like = next(pair for rows in self._of_each for pair in rows)
        parts = zip(self._of_each, counts, strict=True)
        padded = [joined([*rows, *_zeros(longest - count, like)]) for rows, count in parts]
        hidden, tokens = (
            mx.concatenate([pair[i] for pair in padded]) if size > 1 else padded[0][i]
            for i in (0, 1)
        )
        blocks, begin = list[RowBlock](), 0
        while begin < longest:
            rows = max(1, rows_at(rows_before + begin, READ_ROWS) // size)
            end = min(longest, begin + rows)
            kept_rows = [min(max(count - begin, 0), end - begin) for count in counts]
            blocks.append(RowBlock(hidden[:, begin:end], tokens[:, begin:end], kept_rows))
            begin = end
        return blocks


def joined(unread: Sequence[Rows]) -> Rows:
    """All rows of one request in two arrays; there is at least one."""
    if len(unread) == 1:
        return unread[0]
    hidden, tokens = (mx.concatenate([pair[i] for pair in unread], axis=1) for i in (0, 1))
    return hidden, tokens


def _count(rows: Sequence[Rows]) -> int:
    return sum(hidden.shape[1] for hidden, _ in rows)


def _zeros(count: int, like: Rows) -> list[Rows]:
    """`count` rows of zeros in one pair; nothing for 0."""
    hidden, tokens = like
    zeros = mx.zeros((1, count, hidden.shape[2]), hidden.dtype)
    return [(zeros, mx.zeros((1, count), tokens.dtype))] if count else []


def _last_of(rows: Sequence[Rows]) -> Rows:
    hidden, tokens = rows[-1]
    return hidden[:, -1:], tokens[:, -1:]


def _without_last(unread: Sequence[Rows]) -> list[Rows]:
    *rest, (hidden, tokens) = unread
    return [*rest, *([(hidden[:, :-1], tokens[:, :-1])] if hidden.shape[1] > 1 else [])]


def _merge(blocks: Sequence[RowBlock]) -> list[RowBlock]:
    """Merges adjacent blocks whose rows are all committed, so that one forward reads them."""
    merged = list[RowBlock]()
    for is_whole, run in groupby(blocks, _is_whole):
        parts = list(run)
        merged += [_concatenate(parts)] if is_whole else parts
    return merged


def _concatenate(blocks: Sequence[RowBlock]) -> RowBlock:
    if len(blocks) == 1:
        return blocks[0]
    hidden = mx.concatenate([block.hidden for block in blocks], axis=1)
    tokens = mx.concatenate([block.tokens for block in blocks], axis=1)
    return RowBlock(hidden, tokens, [hidden.shape[1]] * hidden.shape[0])


def _is_whole(block: RowBlock) -> bool:
    hidden, _, kept_rows = block
    return not isinstance(kept_rows, mx.array) and all(
        count == hidden.shape[1] for count in kept_rows
    )
