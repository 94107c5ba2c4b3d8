"""Proposes tokens for the requests of a batch with the checkpoint's own draft head."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...mtp.batch_verdict import RowDrafts
from ...mtp.probe import Draft
from ...mtp.rollback import cache_arrays
from ...mtp.sampler import Sampler
from ...mtp.sampling import greedy_choice
from ...mtp.schedule import rows_at
from ...mtp.seams import Drafts, as_ids, as_row, joined_drafts
from ...mtp.types import Sampling
from .cache_set import CacheSet
from .state import DraftState

PENDING_ROWS: Final = 64
"""Committed rows that wait for a draft, while plain decoding goes on, before the head reads them.

One forward over many costs about what one row does; waiting longer would only hold more hiddens.
"""
RESTING_ROWS: Final = 4096
"""The same while drafts do not pay for the requests that are answered together: the head rests.

Hidden states of so many rows are held at most, for each request. Beyond that the head reads them
all the same: a pass over many rows is a small share of the target's own, and a head that skipped
rows could not draft for the rest of the answer.
"""
READ_ROWS: Final = 512
"""Rows of one pass over those that waited, of all requests; fewer far into a context."""


class DraftModel(NamedTuple):
    """The draft head and what it shares with the target."""

    head: Callable[[mx.array, mx.array, Any], mx.array]
    """Hidden states and embeddings (B, n, H), and its cache: (B, n, H)."""
    embed: Callable[[mx.array], mx.array]
    """Ids (B, n): (B, n, H)."""
    logits: Callable[[mx.array], mx.array]
    """(B, n, H): (B, n, V), or fewer ids where only some are drafted."""


class _Block(NamedTuple):
    """Rows of all requests that the head has not read."""

    hidden: mx.array  # (B, n, H)
    tokens: mx.array  # (B, n), the token after each
    kept: Sequence[int] | mx.array
    """How many of the n rows are committed, by request; an array (B,) if only the device knows."""


def new_draft(model: DraftModel) -> Draft:
    """One draft after the other, greedily, behind rows that are told one at a time."""
    drafter: Drafter | None = None
    greedy = Sampler(Sampling(), 0)

    def draft(hidden: mx.array, token: mx.array, k: int) -> mx.array:
        nonlocal drafter
        if drafter is None:
            drafter = Drafter(model, [DraftState(unread=[(hidden, token[None])])])
        else:
            drafter.observe(hidden, token[None], [1])
        return drafter.draft(k, [k], [greedy], [1]).tokens

    return draft


def read_rows(model: DraftModel, state: DraftState) -> None:
    """The head reads all rows of one request that it has not read; lazy."""
    if state.unread:
        _ = _read_alone(model, state.cache, state.rows, state.unread)
        state.rows, state.unread = state.rows + state.unread_rows, []


class Drafter:
    """The draft head over the states of N requests. All methods run on the compute thread."""

    def __init__(self, model: DraftModel, states: Sequence[DraftState | None]) -> None:
        """`states`: by request; None for one that never drafts. At least one is a state."""
        self._model = model
        given = _filled(states)
        self._set = CacheSet([([state.cache], state.rows) for state in given])
        self._unread = [list(state.unread) for state in given]
        """By request, in front of `_blocks`."""
        self._blocks: list[_Block] = []

    @property
    def unread(self) -> int:
        """Rows of all requests that the head reads before it drafts, those of a round excepted."""
        waiting = sum(hidden.shape[1] for each in self._unread for hidden, _ in each)
        return waiting + sum(b.hidden.shape[1] for b in self._blocks[:-1]) * len(self._unread)

    def observe(
        self,
        hidden: mx.array,
        tokens: mx.array,
        kept: Sequence[int] | mx.array,
        patience: int = PENDING_ROWS,
    ) -> None:
        """Rows of a round: hidden (B, n, H), tokens (B, n), and how many of them are committed.

        `patience`: how many rows of a request may wait before the head reads them undrafted.
        """
        self._blocks.append(_Block(hidden, tokens, kept))
        if sum(block.hidden.shape[1] for block in self._blocks) <= PENDING_ROWS:
            return
        last = self._blocks.pop()  # a draft begins with it
        if patience > PENDING_ROWS:
            self._lay_by()
            if max(sum(h.shape[1] for h, _ in each) for each in self._unread) > patience:
                _ = self._read_all()
        else:
            _ = self._read_all()
        mx.async_eval(self.arrays())  # no graph goes on for long
        self._blocks = [last]

    def draft(
        self, k: int, limits: Sequence[int], samplers: Sequence[Sampler], positions: Sequence[int]
    ) -> RowDrafts:
        """Drafts `k` tokens for each request, for the positions from `positions` on; lazy.

        Request b uses the first `limits[b]` of them.
        """
        hidden = self._read_all()
        assert hidden is not None, "a draft needs a row that the head has not read"
        steps, finite = list[mx.array](), list[mx.array]()
        before: list[list[Drafts]] = [[] for _ in limits]
        for depth in range(k):
            if depth:
                embedding = self._model.embed(steps[-1][:, None])
                hidden = self._model.head(hidden, embedding, self._set.caches[0])
                self._set.positions.moved([1] * len(limits))
            logits = self._model.logits(hidden)[:, 0]
            drawn = {
                row: sampler.draft(logits[row : row + 1], positions[row] + depth, before[row])
                for row, sampler in enumerate(samplers)
                if depth < limits[row] and not sampler.is_argmax
            }
            for row, drafts in drawn.items():
                before[row].append(drafts)
            ids, sound = greedy_choice(logits) if len(drawn) < len(limits) else (None, None)
            steps.append(_with_rows(ids, {row: d.tokens for row, d in drawn.items()}, len(limits)))
            flags = {row: d.finite for row, d in drawn.items() if d.finite is not None}
            finite.append(_with_rows(sound, flags, len(limits)))
        self._set.drop(k - 1)
        of_each = tuple(joined_drafts(each) if each else None for each in before)
        tokens = mx.stack(steps, axis=1).astype(mx.int32)
        return RowDrafts(tokens, mx.stack(finite, axis=1), of_each)

    def wake(self) -> None:
        """The head reads all rows but those of the last round, and waits for that."""
        last = self._blocks.pop() if self._blocks else None
        if last is None:
            self._blocks = self._cut_last()
        else:
            _ = self._read_all()
            self._blocks = [last]
        mx.eval(self.arrays())

    def count_on_device(self) -> None:
        """As `CacheSet.count_on_device`."""
        self._set.count_on_device()

    def count_here(self, target_rows: int) -> None:
        """Ends `count_on_device`: the target has `target_rows` rows, and nothing is in flight."""
        self._lay_by()
        unread = sum(hidden.shape[1] for hidden, _ in self._unread[0])
        self._set.count_here(target_rows - unread)

    def extract(self, index: int) -> DraftState:
        """The state of one request, in arrays of its own."""
        self._lay_by()
        caches, rows = self._set.extract(index)
        return DraftState(caches[0], rows, list(self._unread[index]))

    def change(self, order: Sequence[int], joins: Sequence[DraftState | None]) -> None:
        """As `CacheSet.change`."""
        self._lay_by()
        given = _filled(joins, DraftState(_head_of(self._set.caches[0]), 0, self._unread[0]))
        self._set.change(order, [([state.cache], state.rows) for state in given])
        self._unread = [self._unread[index] for index in order]
        self._unread += [list(state.unread) for state in given]

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        blocks = [array for hidden, tokens, _ in self._blocks for array in (hidden, tokens)]
        unread = [array for each in self._unread for pair in each for array in pair]
        return [*cache_arrays(self._set.caches), *unread, *blocks]

    def _lay_by(self) -> None:
        """The rows of `_blocks` become each request's own, in copies: views hold the others'."""
        for hidden, tokens, kept in _merged(self._blocks):
            counts = as_ids(kept) if isinstance(kept, mx.array) else kept
            for index, count in enumerate(counts):
                some = slice(index, index + 1)
                pair = hidden[some, :count], tokens[some, :count]
                if hidden.shape[:2] != (1, count):
                    pair = mx.contiguous(pair[0]), mx.contiguous(pair[1])
                self._unread[index].append(pair)
        self._blocks = []
        mx.async_eval([array for each in self._unread for pair in each for array in pair])

    def _cut_last(self) -> list[_Block]:
        """Reads all of `_unread` but the last row of each request, which is left as a block."""
        last = [_last_of(each) for each in self._unread]
        self._unread = [_without_last(each) for each in self._unread]
        _ = self._read_all()
        hidden, tokens = (mx.concatenate([pair[i] for pair in last]) for i in (0, 1))
        return [_Block(hidden, tokens, [1] * len(last))]

    def _read_all(self) -> mx.array | None:
        """Reads all rows; the head's output at each request's last one (B, 1, H), if any was."""
        out = None
        for block in (*self._waiting(), *_merged(self._blocks)):
            out = self._read(block, out)
        self._unread, self._blocks = [[] for _ in self._unread], []
        return out

    def _waiting(self) -> list[_Block]:
        """`_unread` as blocks of no more than READ_ROWS rows, each padded to its longest part."""
        counts = [sum(hidden.shape[1] for hidden, _ in each) for each in self._unread]
        most, size = max(counts), len(counts)
        if not most:
            return []
        parts = zip(self._unread, counts, strict=True)
        padded = [_joined(each, most - count, self._like) for each, count in parts]
        hidden, tokens = (
            mx.concatenate([pair[i] for pair in padded]) if size > 1 else padded[0][i]
            for i in (0, 1)
        )
        blocks, begin = list[_Block](), 0
        while begin < most:
            rows = max(1, rows_at(max(self._set.rows) + begin, READ_ROWS) // size)
            end = min(most, begin + rows)
            kept = [min(max(count - begin, 0), end - begin) for count in counts]
            blocks.append(_Block(hidden[:, begin:end], tokens[:, begin:end], kept))
            begin = end
        return blocks

    @property
    def _like(self) -> tuple[mx.array, mx.array]:
        return next(pair for each in self._unread for pair in each)

    def _read(self, block: _Block, before: mx.array | None) -> mx.array | None:
        """`before`: the output at the last rows so far, of requests that have none in the block."""
        hidden, tokens, kept = block
        rows = hidden.shape[1]
        if isinstance(kept, mx.array):
            read = self._model.head(hidden, self._model.embed(tokens), self._set.caches[0])
            self._set.keep(rows, kept)
            return _rows_at(read, kept - 1)
        if self._set.is_own and kept[0] < rows:
            rows = kept[0]
            hidden, tokens = hidden[:, :rows], tokens[:, :rows]
        read = self._model.head(hidden, self._model.embed(tokens), self._set.caches[0])
        self._set.positions.moved(kept)
        if all(count == rows for count in kept):
            return read[:, -1:]
        last = _rows_at(read, as_row([max(count, 1) - 1 for count in kept]))
        if before is None or all(kept):
            return last
        return mx.where(as_row(kept)[:, None, None] > 0, last, before)


def _read_alone(
    model: DraftModel, cache: KVCache, rows: int, unread: Sequence[tuple[mx.array, mx.array]]
) -> mx.array:
    """The head's output (1, n, H) of the last pass over one request's rows behind `rows`."""
    hidden, tokens = _joined(unread, 0, unread[0])
    most, begin, read = hidden.shape[1], 0, hidden
    while begin < most:
        end = min(most, begin + rows_at(rows + begin, READ_ROWS))
        read = model.head(hidden[:, begin:end], model.embed(tokens[:, begin:end]), cache)
        begin = end
    return read


def _filled(
    states: Sequence[DraftState | None], template: DraftState | None = None
) -> list[DraftState]:
    """States for all: those of requests that never draft are of zeros, and nobody uses them.

    A cache without rows gets arrays of no rows where others have some, so that they can be joined.
    """
    some = [state for state in (template, *states) if state is not None]
    held = next((state.cache for state in some if state.cache.keys is not None), None)
    hidden, tokens = next(state.unread[0] for state in some if state.unread)

    def cache_like() -> KVCache:
        cache = KVCache()
        if held is not None and held.keys is not None and held.values is not None:
            cache.keys, cache.values = held.keys[:, :, :0], held.values[:, :, :0]
        return cache

    filled = list[DraftState]()
    for state in states:
        if state is None:
            row = mx.zeros_like(hidden[:, :1]), mx.zeros_like(tokens[:, :1])
            filled.append(DraftState(cache_like(), 0, [row]))
        elif state.cache.keys is None:
            filled.append(DraftState(cache_like(), 0, state.unread))
        else:
            filled.append(state)
    return filled


def _head_of(cache: Any) -> KVCache:
    """A cache that has the shapes of a request's of the set, for `_filled`."""
    like = KVCache()
    if cache.keys is not None:
        like.keys, like.values = cache.keys[:1], cache.values[:1]
    return like


def _joined(
    unread: Sequence[tuple[mx.array, mx.array]], padding: int, like: tuple[mx.array, mx.array]
) -> tuple[mx.array, mx.array]:
    """Hidden (1, n, H) and tokens (1, n) of all pairs, with `padding` rows of zeros behind them."""
    pairs = list(unread)
    if padding:
        hidden, tokens = like
        zeros = mx.zeros((1, padding, hidden.shape[2]), hidden.dtype)
        pairs.append((zeros, mx.zeros((1, padding), tokens.dtype)))
    if len(pairs) == 1:
        return pairs[0]
    hidden, tokens = (mx.concatenate([pair[i] for pair in pairs], axis=1) for i in (0, 1))
    return hidden, tokens


def _last_of(unread: Sequence[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    hidden, tokens = unread[-1]
    return hidden[:, -1:], tokens[:, -1:]


def _without_last(
    unread: Sequence[tuple[mx.array, mx.array]],
) -> list[tuple[mx.array, mx.array]]:
    *rest, (hidden, tokens) = unread
    return [*rest, *([(hidden[:, :-1], tokens[:, :-1])] if hidden.shape[1] > 1 else [])]


def _merged(blocks: Sequence[_Block]) -> list[_Block]:
    """Neighbours of which every row is committed become one block, read by one forward."""
    merged = list[_Block]()
    run = list[_Block]()
    for block in (*blocks, None):
        if block is not None and _is_whole(block):
            run.append(block)
            continue
        if run:
            merged.append(_concatenated(run))
            run = []
        if block is not None:
            merged.append(block)
    return merged


def _concatenated(blocks: Sequence[_Block]) -> _Block:
    if len(blocks) == 1:
        return blocks[0]
    hidden = mx.concatenate([block.hidden for block in blocks], axis=1)
    tokens = mx.concatenate([block.tokens for block in blocks], axis=1)
    return _Block(hidden, tokens, [hidden.shape[1]] * hidden.shape[0])


def _is_whole(block: _Block) -> bool:
    hidden, _, kept = block
    return not isinstance(kept, mx.array) and all(count == hidden.shape[1] for count in kept)


def _rows_at(rows: mx.array, at: mx.array) -> mx.array:
    """(B, 1, H): of (B, n, H) the row `at` (B,) of each request."""
    at = at[:, None, None]
    return mx.take_along_axis(rows, mx.broadcast_to(at, (rows.shape[0], 1, rows.shape[2])), axis=1)


def _with_rows(values: mx.array | None, rows: dict[int, mx.array], size: int) -> mx.array:
    """(size,) `values` with those of `rows`, each (1,), in their places."""
    if not rows:
        assert values is not None
        return values
    parts = [rows[i] if i in rows else _one(values, i) for i in range(size)]
    dtype = next(iter(rows.values())).dtype
    return mx.concatenate([part.astype(dtype) for part in parts])


def _one(values: mx.array | None, index: int) -> mx.array:
    assert values is not None
    return values[index : index + 1]
