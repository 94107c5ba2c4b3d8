"""Proposes tokens for the requests of a batch with the checkpoint's own draft head."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...mtp.batch_verdict import RowDrafts
from ...mtp.family import Family, draft_logits
from ...mtp.head import DraftHead
from ...mtp.probe import Draft
from ...mtp.rollback import RowCache, cache_arrays, parts_of, state_arrays
from ...mtp.sampler import Sampler
from ...mtp.sampling import greedy_choice
from ...mtp.schedule import rows_at
from ...mtp.seams import Drafts, as_ids, as_row, joined_drafts
from ...mtp.types import Sampling
from .cache_set import CacheSet
from .state import DraftState

PENDING_ROWS: Final = 64
"""Committed rows that wait for a draft during plain decoding, before the head reads them: one
forward over many rows costs about as much as over one, but they occupy memory."""
RESTING_ROWS: Final = 4096
"""The same limit while drafts do not pay off for the batch, so that the head rests.

It bounds the hidden states of each request. Beyond it the head reads the rows nevertheless: a pass
over many rows is a small share of the target's own work, and a head that skipped rows could not
draft for the rest of the answer.
"""
READ_ROWS: Final = 512
"""Rows of one pass over waiting rows, of all requests; fewer far into a context."""


class DraftModel(NamedTuple):
    """The draft head and what it shares with the target."""

    head: Callable[[mx.array, mx.array, Any], mx.array]
    """Hidden states and embeddings (B, n, H), and the head's cache -> (B, n, H)."""
    embed: Callable[[mx.array], mx.array]
    """Ids (B, n) -> (B, n, H)."""
    logits: Callable[[mx.array], mx.array]
    """(B, n, H) -> (B, n, V), or fewer columns if only the first ids are drafted."""
    make_cache: Callable[[], RowCache] = KVCache
    """The head's cache without rows."""

    @classmethod
    def of(cls, family: Family, head: DraftHead, vocabulary: int = 0) -> "DraftModel":
        """`vocabulary`: the number of ids that are drafted; 0: all."""
        logits = draft_logits(family, head, vocabulary)
        return cls(head, family.embed, logits, head.make_cache)


class _Block(NamedTuple):
    """Rows of all requests that the head has not read."""

    hidden: mx.array  # (B, n, H)
    tokens: mx.array  # (B, n), the token after each row
    kept_rows: Sequence[int] | mx.array
    """How many of the n rows are committed, by request; an array (B,) if only the device knows."""


def new_draft(model: DraftModel) -> Draft:
    """A function that drafts greedily behind one more row per call, for `mtp.probe`."""
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


def read_rows(model: DraftModel, state: DraftState, embeddings: mx.array | None = None) -> None:
    """The head reads all rows of one request that it has not read; lazy.

    `embeddings` (1, n, H): in place of those of the tokens behind the rows, which one forward reads
    then.
    """
    if not state.unread:
        return
    if state.cache is None:
        state.cache = model.make_cache()
    if embeddings is None:
        _ = _read_alone(model, state.cache, state.rows, state.unread)
    else:
        assert state.hidden is not None
        _ = model.head(state.hidden, embeddings, state.cache)
    state.rows, state.unread = state.rows + state.unread_rows, []


class Drafter:
    """The draft head over the states of N requests. All methods run on the compute thread."""

    def __init__(self, model: DraftModel, states: Sequence[DraftState | None]) -> None:
        """`states`: by request; None for a request that never drafts. At least one is not None."""
        self._model = model
        filled = _fill(model.make_cache, states)
        self._set = CacheSet([([state.cache], state.rows) for state in filled])
        self._unread = [list(state.unread) for state in filled]
        """Unread rows in front of `_blocks`, by request."""
        self._blocks: list[_Block] = []

    @property
    def unread(self) -> int:
        """Rows of all requests, except the last round's, that the head reads before it drafts."""
        waiting = sum(hidden.shape[1] for each in self._unread for hidden, _ in each)
        return waiting + sum(b.hidden.shape[1] for b in self._blocks[:-1]) * len(self._unread)

    def observe(
        self,
        hidden: mx.array,
        tokens: mx.array,
        kept_rows: Sequence[int] | mx.array,
        patience: int = PENDING_ROWS,
    ) -> None:
        """Adds a round's rows: hidden (B, n, H), tokens (B, n), and how many are committed.

        `patience`: rows of a request that may wait for a draft before the head reads them.
        """
        self._blocks.append(_Block(hidden, tokens, kept_rows))
        if sum(block.hidden.shape[1] for block in self._blocks) <= PENDING_ROWS:
            return
        last = self._blocks.pop()  # the next draft begins with it
        if patience > PENDING_ROWS:
            self._distribute()
            if max(sum(h.shape[1] for h, _ in each) for each in self._unread) > patience:
                _ = self._read_all()
        else:
            _ = self._read_all()
        mx.async_eval(self.arrays())  # or the lazy graph would grow without bound
        self._blocks = [last]

    def draft(
        self, k: int, limits: Sequence[int], samplers: Sequence[Sampler], positions: Sequence[int]
    ) -> RowDrafts:
        """Drafts `k` tokens for each request, the first at `positions[b]`; lazy.

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
                self._set.positions.advance([1] * len(limits))
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
        """Lets the head read all rows but those of the last round, and waits until it has."""
        last = self._blocks.pop() if self._blocks else None
        if last is None:
            self._blocks = self._read_all_but_last()
        else:
            _ = self._read_all()
            self._blocks = [last]
        mx.eval(self.arrays())

    def count_on_device(self) -> None:
        """See `CacheSet.count_on_device`."""
        self._set.count_on_device()

    def count_here(self, target_rows: int) -> None:
        """Ends `count_on_device`. `target_rows`: rows of the target; nothing is in flight."""
        self._distribute()
        unread = sum(hidden.shape[1] for hidden, _ in self._unread[0])
        self._set.count_here(target_rows - unread)

    def extract(self, index: int) -> DraftState:
        """The state of one request, in arrays of its own."""
        self._distribute()
        caches, rows = self._set.extract(index)
        return DraftState(caches[0], rows, list(self._unread[index]))

    def change(self, order: Sequence[int], joins: Sequence[DraftState | None]) -> None:
        """See `CacheSet.change`."""
        self._distribute()
        like = _first_of(self._set.caches[0], self._model.make_cache())
        filled = _fill(self._model.make_cache, joins, DraftState(like, 0, self._unread[0]))
        self._set.change(order, [([state.cache], state.rows) for state in filled])
        self._unread = [self._unread[index] for index in order]
        self._unread += [list(state.unread) for state in filled]

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        blocks = [array for hidden, tokens, _ in self._blocks for array in (hidden, tokens)]
        unread = [array for each in self._unread for pair in each for array in pair]
        return [*cache_arrays(self._set.caches), *unread, *blocks]

    def _distribute(self) -> None:
        """Moves the rows of `_blocks` to each request's own, as copies: views would keep the rows
        of all requests in memory."""
        for hidden, tokens, kept_rows in _merge(self._blocks):
            counts = as_ids(kept_rows) if isinstance(kept_rows, mx.array) else kept_rows
            for index, count in enumerate(counts):
                some = slice(index, index + 1)
                pair = hidden[some, :count], tokens[some, :count]
                if hidden.shape[:2] != (1, count):
                    pair = mx.contiguous(pair[0]), mx.contiguous(pair[1])
                self._unread[index].append(pair)
        self._blocks = []
        mx.async_eval([array for each in self._unread for pair in each for array in pair])

    def _read_all_but_last(self) -> list[_Block]:
        """Reads all of `_unread` but the last row of each request, which it returns as a block."""
        last = [_last_of(each) for each in self._unread]
        self._unread = [_without_last(each) for each in self._unread]
        _ = self._read_all()
        hidden, tokens = (mx.concatenate([pair[i] for pair in last]) for i in (0, 1))
        return [_Block(hidden, tokens, [1] * len(last))]

    def _read_all(self) -> mx.array | None:
        """Reads all rows. Returns the head's output (B, 1, H) at each request's last row; None if
        there were no rows."""
        out = None
        for block in (*self._unread_blocks(), *_merge(self._blocks)):
            out = self._run_head(block, out)
        self._unread, self._blocks = [[] for _ in self._unread], []
        return out

    def _unread_blocks(self) -> list[_Block]:
        """`_unread` as blocks of at most READ_ROWS rows, each padded to its longest part."""
        counts = [sum(hidden.shape[1] for hidden, _ in each) for each in self._unread]
        longest, size = max(counts), len(counts)
        if not longest:
            return []
        parts = zip(self._unread, counts, strict=True)
        padded = [_join(each, longest - count, self._like) for each, count in parts]
        hidden, tokens = (
            mx.concatenate([pair[i] for pair in padded]) if size > 1 else padded[0][i]
            for i in (0, 1)
        )
        blocks, begin = list[_Block](), 0
        while begin < longest:
            rows = max(1, rows_at(max(self._set.rows) + begin, READ_ROWS) // size)
            end = min(longest, begin + rows)
            kept_rows = [min(max(count - begin, 0), end - begin) for count in counts]
            blocks.append(_Block(hidden[:, begin:end], tokens[:, begin:end], kept_rows))
            begin = end
        return blocks

    @property
    def _like(self) -> tuple[mx.array, mx.array]:
        return next(pair for each in self._unread for pair in each)

    def _run_head(self, block: _Block, before: mx.array | None) -> mx.array | None:
        """Runs the head over a block. Returns its output (B, 1, H) at each request's last row.

        `before`: the output at the last rows so far, for requests that have none in the block.
        """
        hidden, tokens, kept_rows = block
        rows = hidden.shape[1]
        if isinstance(kept_rows, mx.array):
            out = self._model.head(hidden, self._model.embed(tokens), self._set.caches[0])
            self._set.keep(rows, kept_rows)
            return _rows_at(out, kept_rows - 1)
        if self._set.is_own and kept_rows[0] < rows:
            rows = kept_rows[0]
            hidden, tokens = hidden[:, :rows], tokens[:, :rows]
        out = self._model.head(hidden, self._model.embed(tokens), self._set.caches[0])
        self._set.positions.advance(kept_rows)
        if all(count == rows for count in kept_rows):
            return out[:, -1:]
        last = _rows_at(out, as_row([max(count, 1) - 1 for count in kept_rows]))
        if before is None or all(kept_rows):
            return last
        return mx.where(as_row(kept_rows)[:, None, None] > 0, last, before)


def _read_alone(
    model: DraftModel, cache: RowCache, rows: int, unread: Sequence[tuple[mx.array, mx.array]]
) -> mx.array:
    """Runs the head over one request's rows behind `rows`. Returns the last pass (1, n, H)."""
    hidden, tokens = _join(unread, 0, unread[0])
    most, begin, read = hidden.shape[1], 0, hidden
    while begin < most:
        end = min(most, begin + rows_at(rows + begin, READ_ROWS))
        read = model.head(hidden[:, begin:end], model.embed(tokens[:, begin:end]), cache)
        begin = end
    return read


def _fill(
    make_cache: Callable[[], RowCache],
    states: Sequence[DraftState | None],
    template: DraftState | None = None,
) -> list[DraftState]:
    """States for all requests; those of requests that never draft are zeros and never used.

    An empty cache gets arrays with no rows if others have arrays, so that they can be joined.
    """
    present = [state for state in (template, *states) if state is not None]
    caches = [state.cache for state in present if state.cache is not None]
    like = next((cache for cache in caches if state_arrays(cache)), None)
    hidden, tokens = next(state.unread[0] for state in present if state.unread)

    def cache_like() -> RowCache:
        cache = make_cache()
        for part, other in zip(parts_of(cache), parts_of(like or cache), strict=True):
            if other.keys is not None:
                part.keys, part.values = other.keys[:, :, :0], other.values[:, :, :0]
        return cache

    filled = list[DraftState]()
    for state in states:
        if state is None:
            row = mx.zeros_like(hidden[:, :1]), mx.zeros_like(tokens[:, :1])
            filled.append(DraftState(cache_like(), 0, [row]))
        elif state.cache is None or not state_arrays(state.cache):
            filled.append(DraftState(cache_like(), 0, state.unread))
        else:
            filled.append(state)
    return filled


def _first_of(cache: Any, like: RowCache) -> RowCache:
    """`like`, without rows, with the shapes of one request's in the set, for `_fill`."""
    for part, other in zip(parts_of(like), parts_of(cache), strict=True):
        if other.keys is not None:
            part.keys, part.values = other.keys[:1], other.values[:1]
    return like


def _join(
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


def _merge(blocks: Sequence[_Block]) -> list[_Block]:
    """Merges adjacent blocks whose rows are all committed, so that one forward reads them."""
    blocks_out = list[_Block]()
    run = list[_Block]()
    for block in (*blocks, None):
        if block is not None and _is_whole(block):
            run.append(block)
            continue
        if run:
            blocks_out.append(_concatenate(run))
            run = []
        if block is not None:
            blocks_out.append(block)
    return blocks_out


def _concatenate(blocks: Sequence[_Block]) -> _Block:
    if len(blocks) == 1:
        return blocks[0]
    hidden = mx.concatenate([block.hidden for block in blocks], axis=1)
    tokens = mx.concatenate([block.tokens for block in blocks], axis=1)
    return _Block(hidden, tokens, [hidden.shape[1]] * hidden.shape[0])


def _is_whole(block: _Block) -> bool:
    hidden, _, kept_rows = block
    return not isinstance(kept_rows, mx.array) and all(
        count == hidden.shape[1] for count in kept_rows
    )


def _rows_at(rows: mx.array, at: mx.array) -> mx.array:
    """(B, n, H) -> (B, 1, H): the row `at` (B,) of each request."""
    at = at[:, None, None]
    return mx.take_along_axis(rows, mx.broadcast_to(at, (rows.shape[0], 1, rows.shape[2])), axis=1)


def _with_rows(values: mx.array | None, rows: dict[int, mx.array], size: int) -> mx.array:
    """`values` (size,) with the entries of `rows`, each (1,), in their places."""
    if not rows:
        assert values is not None
        return values
    parts = [rows[i] if i in rows else _one(values, i) for i in range(size)]
    dtype = next(iter(rows.values())).dtype
    return mx.concatenate([part.astype(dtype) for part in parts])


def _one(values: mx.array | None, index: int) -> mx.array:
    assert values is not None
    return values[index : index + 1]
