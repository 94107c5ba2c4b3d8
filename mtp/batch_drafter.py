"""Drafts for all requests of a batch by one pass of the head at each depth."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .batch_caches import BatchKVCache, Positions, batched, change_all, own
from .batch_slots import SOON, Change
from .drafters import PENDING_ROWS, DrafterState, NativeDrafter, join
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
    """As `NativeDrafter`, for several requests.

    Where nothing is drafted for a while the head rests: it reads nothing, and committed rows wait
    with each request's own drafter. Before the next draft each of these catches up by itself.
    """

    def __init__(self, head: BatchHead, drafters: Sequence[NativeDrafter | None]) -> None:
        """`drafters`: by request; None where one never drafts. It rests at first."""
        self._head = head
        self._drafters = list(drafters)
        self._joint: _Joint | None = None
        self._pending: list[_Block] = []

    def observe(self, hidden: mx.array, tokens: mx.array, kept: Sequence[int]) -> None:
        """Of the rows `hidden` (B, n, H), `kept` were committed; `tokens` (B, n) follow them."""
        self._pending.append(_Block(hidden, tokens, list(kept)))
        if sum(block.hidden.shape[1] for block in self._pending) >= PENDING_ROWS:
            self.rest()

    @property
    def rests(self) -> bool:
        return self._joint is None

    @property
    def unread(self) -> int:
        """Rows of all requests that must be read before the next draft, if it rests."""
        if self._joint is not None:
            return 0
        waiting = sum(sum(block.kept) for block in self._pending)
        return waiting + sum(drafter.unread for drafter in self._drafters if drafter)

    def rest(self) -> None:
        """Each request's own drafter has its rows from here on."""
        joint, self._joint = self._joint, None
        if joint is not None:
            for index, drafter in enumerate(self._drafters):
                if drafter is not None:
                    drafter.take_up(joint.copied(index), ())
        for block in _merged(self._pending):
            for index, (drafter, rows) in enumerate(zip(self._drafters, block.kept, strict=True)):
                if drafter is not None:
                    # Copies: views would hold the rows of requests that left.
                    hidden = mx.contiguous(block.hidden[index : index + 1, :rows])
                    tokens = mx.contiguous(block.tokens[index, :rows])
                    mx.async_eval(hidden, tokens)
                    drafter.observe(hidden, tokens)
        self._pending = []

    def wake(self) -> None:
        """Drafts follow: all rows are read, and requests share the head's passes again."""
        if self._joint is None:
            self.rest()  # what is pending goes to where its past is
            states = [drafter.hand_over() if drafter else None for drafter in self._drafters]
            self._joint = _Joint(self._head, states)
            mx.eval(self._joint.arrays())

    def draft(
        self, k: int, limits: Sequence[int], samplers: Sequence[Sampler], positions: Sequence[int]
    ) -> RowDrafts:
        """`k` tokens for each request's positions from `positions` on; evaluation begins.

        Request b wants `limits[b]` of them; the others are NO_DRAFT or not used.
        """
        self.wake()
        return self._caught_up().draft(k, limits, samplers, positions)

    def change(self, order: Sequence[int], joins: Sequence[NativeDrafter | None]) -> None:
        """Those that stay are at other places, see `Change`, and `joins` come behind."""
        if self._joint is None or len(self._pending) > 1:  # nothing was drafted last
            self.rest()
        else:
            states = [drafter.hand_over() if drafter else None for drafter in joins]
            self._caught_up().change(order, states)
        self._drafters = [*(self._drafters[place] for place in order), *joins]

    def leave(self, index: int) -> None:
        """One request's own drafter has its rows from here on; it is to go with the next change."""
        drafter = self._drafters[index]
        if self._joint is None:
            self.rest()
        elif drafter is not None:
            drafter.take_up(self._caught_up().copied(index), ())
        self._drafters[index] = None

    def arrays(self) -> list[mx.array]:
        joint = self._joint.arrays() if self._joint else []
        lone = [array for drafter in self._drafters if drafter for array in drafter.arrays()]
        return [*joint, *lone, *(block.hidden for block in self._pending)]

    def _caught_up(self) -> "_Joint":
        assert self._joint is not None
        for block in _merged(self._pending):
            self._joint.read_rows(block)
        self._pending = []
        return self._joint


class _Joint:
    """What the head has read of all requests, in one cache."""

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

    def read_rows(self, block: _Block) -> None:
        hidden, tokens, kept = block
        rows = hidden.shape[1]
        read = self._head.head(hidden, self._head.embed(tokens), self.cache)
        self._positions.moved(kept)
        self._read = read[:, -1:] if all(n == rows for n in kept) else _last_of_each(read, kept)

    def draft(
        self, k: int, limits: Sequence[int], samplers: Sequence[Sampler], positions: Sequence[int]
    ) -> RowDrafts:
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
        """As `BatchDrafter.change`; nothing is pending in `joins`."""
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
        read = self._read[index : index + 1]
        return DrafterState(self.cache.of(index), self._positions.rows[index], read, None)

    def copied(self, index: int) -> DrafterState:
        """The same in arrays of its own."""
        state = self.state(index)
        own(state.cache)
        read = mx.contiguous(self._read[index : index + 1])
        mx.async_eval(state.cache.keys, state.cache.values, read)
        return replace(state, read=read)

    def arrays(self) -> list[mx.array]:
        held = (self.cache.keys, self.cache.values, self._read)
        return [array for array in held if array is not None]


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
    for whole, some in groupby(blocks, lambda b: all(n == b.hidden.shape[1] for n in b.kept)):
        group = list(some)
        if not whole or len(group) == 1:
            merged += group
            continue
        hidden = mx.concatenate([block.hidden for block in group], axis=1)
        tokens = mx.concatenate([block.tokens for block in group], axis=1)
        merged.append(_Block(hidden, tokens, [hidden.shape[1]] * hidden.shape[0]))
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
