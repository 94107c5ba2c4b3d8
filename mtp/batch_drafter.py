"""Drafts for all requests of a batch by one pass of the head at each depth."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .batch_caches import BatchKVCache, Positions, batched, change_all
from .batch_slots import SOON, Change
from .drafters import PENDING_ROWS, DrafterState, join
from .sampler import Sampler
from .sampling import greedy_choice
from .seams import Drafts, as_row

NO_DRAFT: Final = 0
"""The id where a request drafts fewer tokens than its batch; it is never accepted."""


class RowDrafts(NamedTuple):
    """K drafts of each request; lazy."""

    tokens: mx.array  # (B, K) int32
    finite: mx.array  # (B, K) whether the logits of each were
    drawn: tuple[Drafts | None, ...]
    """By request: as its sampler wants them back; None: `tokens` tell all, or there are none."""


class _Block(NamedTuple):
    """Rows that were committed and that the head is yet to read."""

    hidden: mx.array  # (B, n, H)
    tokens: mx.array  # (B, n) what follows each
    kept: list[int]
    """Of the n rows, by request."""


class BatchHead(NamedTuple):
    """The draft head and what it shares with the model; see `NativeDrafter`."""

    head: Callable[[mx.array, mx.array, Any], mx.array]
    embed: Callable[[mx.array], mx.array]
    logits: Callable[[mx.array], mx.array]
    overlap: bool = True


class BatchDrafter:
    """As `NativeDrafter`, for several requests."""

    def __init__(self, head: BatchHead, states: Sequence[DrafterState | None]) -> None:
        """`states`: by request, nothing pending in them; None where a request never drafts.

        At least one does.
        """
        self._head = head
        some = next(state for state in states if state is not None)
        given = [state or _nothing_like(some) for state in states]
        self._positions = Positions([state.rows for state in given])
        (cache,) = batched([[state.cache] for state in given], self._positions, SOON)
        assert isinstance(cache, BatchKVCache)
        self.cache = cache
        self._read = mx.concatenate([state.read for state in given if state.read is not None])
        self._pending: list[_Block] = []

    def observe(self, hidden: mx.array, tokens: mx.array, kept: Sequence[int]) -> None:
        """Of the rows `hidden` (B, n, H), `kept` were committed; `tokens` (B, n) follow them."""
        self._pending.append(_Block(hidden, tokens, list(kept)))
        if sum(block.hidden.shape[1] for block in self._pending) >= PENDING_ROWS:
            self.catch_up()

    def catch_up(self) -> None:
        """Reads what is pending."""
        for hidden, tokens, kept in _merged(self._pending):
            rows = hidden.shape[1]
            read = self._head.head(hidden, self._head.embed(tokens), self.cache)
            self._positions.moved(kept)
            self._read = read[:, -1:] if all(n == rows for n in kept) else _last_of_each(read, kept)
        self._pending = []

    def draft(
        self, k: int, limits: Sequence[int], samplers: Sequence[Sampler], positions: Sequence[int]
    ) -> RowDrafts:
        """`k` tokens for each request's positions from `positions` on; evaluation begins.

        Request b wants `limits[b]` of them; the others are NO_DRAFT or not used.
        """
        self.catch_up()
        hidden, size = self._read, len(limits)
        steps: list[mx.array] = []
        finite: list[mx.array] = []
        before: list[list[Drafts]] = [[] for _ in limits]
        for depth in range(k):
            if depth:
                embedding = self._head.embed(steps[-1][:, None])
                hidden = self._head.head(hidden, embedding, self.cache)
                self._positions.moved([1] * size)
            logits = self._head.logits(hidden)[:, 0]
            ids, sound = greedy_choice(logits)
            tokens = ids.astype(mx.int32)
            drawn = {
                row: sampler.draft(logits[row : row + 1], positions[row] + depth, before[row])
                for row, sampler in enumerate(samplers)
                if depth < limits[row] and not sampler.is_argmax
            }
            for row, drafts in drawn.items():
                before[row].append(drafts)
            steps.append(_with_rows(tokens, {row: d.tokens for row, d in drawn.items()}))
            flags = {row: d.finite for row, d in drawn.items() if d.finite is not None}
            finite.append(_with_rows(sound, flags))
        self._positions.moved([1 - k] * size)
        of_each = tuple(join(each) if each else None for each in before)
        drafts = RowDrafts(mx.stack(steps, axis=1), mx.stack(finite, axis=1), of_each)
        (mx.async_eval if self._head.overlap else mx.eval)(drafts.tokens)
        return drafts

    def change(self, order: Sequence[int], joins: Sequence[DrafterState | None]) -> None:
        """Those that stay are at other places, see `Change`, and `joins` come behind."""
        self.catch_up()
        given = [state or _nothing_like(self.state(0)) for state in joins]
        rows = [self._positions.rows[place] for place in order]
        change = Change(order, [*rows, *(state.rows for state in given)])
        change_all([self.cache], change, [[state.cache] for state in given])
        self._positions.become(change.rows)
        read = [self._read[place : place + 1] for place in order]
        read += [state.read for state in given if state.read is not None]
        self._read = mx.concatenate(read)

    def state(self, index: int) -> DrafterState:
        """One request's; views."""
        self.catch_up()
        return DrafterState(
            self.cache.of(index), self._positions.rows[index], self._read[index : index + 1], None
        )

    def arrays(self) -> list[mx.array]:
        cache = self.cache
        held = [a for a in (cache.keys, cache.values, self._read) if a is not None]
        return held + [block.hidden for block in self._pending]


def _nothing_like(state: DrafterState) -> DrafterState:
    """For a request that never drafts: what the head computes for it is not used."""
    cache = KVCache()
    assert (
        state.cache.keys is not None and state.cache.values is not None and state.read is not None
    )
    cache.keys, cache.values = (mx.zeros_like(a) for a in (state.cache.keys, state.cache.values))
    return DrafterState(cache, 0, mx.zeros_like(state.read), None)


def _merged(blocks: Sequence[_Block]) -> list[_Block]:
    """Neighbours of which all rows were kept become one, so that the head reads them at once."""
    merged: list[_Block] = []
    for block in blocks:
        whole = all(n == block.hidden.shape[1] for n in block.kept)
        last = merged[-1] if merged else None
        if last is not None and whole and all(n == last.hidden.shape[1] for n in last.kept):
            hidden = mx.concatenate([last.hidden, block.hidden], axis=1)
            tokens = mx.concatenate([last.tokens, block.tokens], axis=1)
            merged[-1] = _Block(hidden, tokens, [hidden.shape[1]] * len(block.kept))
        else:
            merged.append(block)
    return merged


def _last_of_each(rows: mx.array, kept: Sequence[int]) -> mx.array:
    """(B, 1, H): of (B, n, H) each request's last row that was kept."""
    at = as_row([n - 1 for n in kept])[:, None, None]
    return mx.take_along_axis(rows, mx.broadcast_to(at, (*at.shape[:2], rows.shape[2])), axis=1)


def _with_rows(values: mx.array, rows: dict[int, mx.array]) -> mx.array:
    """(B,) values with those of `rows`, each (1,), in their places."""
    if not rows:
        return values
    parts = [rows.get(i, values[i : i + 1]) for i in range(values.shape[0])]
    return mx.concatenate([part.astype(values.dtype) for part in parts])
