"""Proposes tokens for the requests of a batch with the checkpoint's own draft head."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...mtp.batch_verdict import RowDrafts
from ...mtp.caches.rollback import RowCache, cache_arrays
from ...mtp.families.family import Family, draft_logits
from ...mtp.families.head import DraftHead
from ...mtp.probe import Draft
from ...mtp.sampler import Sampler
from ...mtp.sampling import greedy_choice
from ...mtp.schedule import rows_at
from ...mtp.seams import Drafts, as_row, joined_drafts
from ...mtp.types import DrafterKind, Sampling
from ..model.block_drafter import BlockDrafter
from ..model.draft_pair import DraftPair, Head
from .states.cache_set import CacheSet, Part
from .states.state import DraftState
from .states.unread_rows import READ_ROWS, RowBlock, Rows, UnreadRows, joined

PENDING_ROWS: Final = 64
"""Committed rows that wait for a draft during plain decoding, before the head reads them: one
forward over many rows costs about as much as over one, but they occupy memory."""
RESTING_ROWS: Final = 4096
"""The same limit while drafts do not pay off for the batch, so that the head rests.

It bounds the hidden states of each request. Beyond it the head reads the rows nevertheless: a pass
over many rows is a small share of the target's own work, and a head that skipped rows could not
draft for the rest of the answer.
"""


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
    block: Callable[[mx.array, int, Any], mx.array] | None = None
    """Drafts in place of more rows of the head: its output (B, 1, H) at the last row, k, and
    its cache, which stays as it is -> (B, k, H). None for a head that drafts row by row."""
    follow: Callable[[mx.array, mx.array, mx.array], mx.array] | None = None
    """The logits of a draft after another one: its output (B, 1, H), its own logits (B, V), and the
    ids (B,) before it -> (B, V). None if only the output decides."""

    @classmethod
    def of(
        cls, family: Family | None, head: DraftHead | BlockDrafter, vocabulary: int = 0
    ) -> "DraftModel":
        """`vocabulary`: the number of ids that are drafted, or 0 for all. A `BlockDrafter` drafts
        all, and needs no family."""
        if isinstance(head, BlockDrafter):
            parts = head.read, head.embed, head.logits, head.make_cache, head.block
            return cls(*parts, head.follow)
        assert family is not None
        logits = draft_logits(family, head, vocabulary)
        return cls(head, family.embed, logits, head.make_cache)

    @classmethod
    def each_of(
        cls, family: Family | None, head: Head | None, vocabulary: int = 0
    ) -> "dict[DrafterKind, DraftModel]":
        """The drafters of which one drafts at a time, over the same rows; the named one first."""
        if isinstance(head, DraftPair):
            pair, own = head, cls.of(head.family, head.head, vocabulary)
            shared: dict[str, Any] = {"head": pair.read, "make_cache": pair.make_cache}

            def head_logits(output: mx.array) -> mx.array:
                return own.logits(pair.of_head(output))

            return {
                "block_drafter": cls.of(None, pair.drafter)._replace(block=pair.block, **shared),
                "native_mtp": own._replace(logits=head_logits, **shared),
            }
        if isinstance(head, BlockDrafter):
            return {"block_drafter": cls.of(None, head)}
        if head is None or family is None:
            return {}
        return {"native_mtp": cls.of(family, head, vocabulary)}


def new_draft(model: DraftModel) -> Draft:
    """A function that drafts greedily after one more row per call, for `mtp.probe`."""
    drafter: Drafter | None = None
    greedy = Sampler(Sampling(), 0)

    def draft(hidden: mx.array, token: mx.array, k: int) -> mx.array:
        nonlocal drafter
        if drafter is None:
            drafter = Drafter(model, [DraftState(unread=[(hidden, token[None])])])
        else:
            drafter.observe(hidden, token[None], [1])
        return drafter.draft(k, [k], [greedy], [1], token).tokens

    return draft


def read_rows(model: DraftModel, state: DraftState, embeddings: mx.array | None = None) -> None:
    """The head reads all rows of one request that it has not read; lazy.

    `embeddings` (1, n, H): in place of those of the tokens after the rows, which one forward reads
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
        unread = next(state.unread for state in states if state is not None)
        filled = _filled(model.make_cache, states, unread)
        self._set = CacheSet([part for part, _ in filled])
        self._unread = UnreadRows([rows for _, rows in filled])

    @property
    def unread(self) -> int:
        """Rows of all requests, except the last round's, that the head reads before it drafts."""
        return self._unread.before_last

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
        last = RowBlock(hidden, tokens, kept_rows)  # the next draft begins with it
        if self._unread.common_rows + hidden.shape[1] > PENDING_ROWS:
            if patience <= PENDING_ROWS or self._unread.longest > patience:
                _ = self._read_all()
            mx.async_eval(self.arrays())  # or the lazy graph would grow without bound
        self._unread.add(last)

    def draft(
        self,
        k: int,
        limits: Sequence[int],
        samplers: Sequence[Sampler],
        positions: Sequence[int],
        last: mx.array | None = None,
    ) -> RowDrafts:
        """Drafts `k` tokens for each request, the first at `positions[b]`; lazy.

        Request b uses the first `limits[b]` of them. `last` (B,): the ids before them, by default
        those of the rows that the head has not read.
        """
        follow = self._model.follow
        if follow is not None and last is None:
            last = mx.concatenate([rows[-1][1][0, -1:] for rows in self._unread.of_each()])
        hidden = self._read_all()
        assert hidden is not None, "a draft needs a row that the head has not read"
        block = self._model.block
        rows = None if block is None else block(hidden, k, self._set.caches[0])
        steps, finite = list[mx.array](), list[mx.array]()
        before: list[list[Drafts]] = [[] for _ in limits]
        for depth in range(k):
            if rows is not None:
                hidden = rows[:, depth : depth + 1]
            elif depth:
                embedding = self._model.embed(steps[-1][:, None])
                hidden = self._model.head(hidden, embedding, self._set.caches[0])
                self._set.positions.advance([1] * len(limits))
            logits = self._model.logits(hidden)[:, 0]
            if follow is not None and last is not None:
                logits = follow(hidden, logits, steps[-1] if depth else last)
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
        if rows is None:
            self._set.drop(k - 1)
        of_each = tuple(joined_drafts(each) if each else None for each in before)
        tokens = mx.stack(steps, axis=1).astype(mx.int32)
        return RowDrafts(tokens, mx.stack(finite, axis=1), of_each)

    def wake(self) -> None:
        """Lets the head read all rows but those of the last round, and waits until it has."""
        last = self._unread.pop_last()
        _ = self._read_all()
        self._unread.add(last)
        mx.eval(self.arrays())

    def count_on_device(self) -> None:
        """See `CacheSet.count_on_device`."""
        self._set.count_on_device()

    def count_here(self, target_rows: int) -> None:
        """Ends `count_on_device`. `target_rows`: rows of the target; nothing is in flight."""
        self._set.count_here(target_rows - self._unread.longest)

    def extract(self, index: int) -> DraftState:
        """The state of one request, in arrays of its own."""
        unread = list(self._unread.of_each()[index])
        caches, rows = self._set.extract(index)
        return DraftState(caches[0], rows, unread)

    def change(self, order: Sequence[int], joins: Sequence[DraftState | None]) -> None:
        """See `CacheSet.change`."""
        unread = self._unread.of_each()
        filled = _filled(self._model.make_cache, joins, unread[0])
        self._set.change(order, [part for part, _ in filled])
        staying = [unread[index] for index in order]
        self._unread = UnreadRows([*staying, *(rows for _, rows in filled)])

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        return [*cache_arrays(self._set.caches), *self._unread.arrays()]

    def _read_all(self) -> mx.array | None:
        """Reads all rows. Returns the head's output (B, 1, H) at each request's last row; None if
        there were no rows."""
        out = None
        for block in self._unread.take(max(self._set.rows)):
            out = self._run_head(block, out)
        return out

    def _run_head(self, block: RowBlock, before: mx.array | None) -> mx.array | None:
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
    """Runs the head over one request's rows after `rows`. Returns the last pass (1, n, H)."""
    hidden, tokens = joined(unread)
    most, begin, read = hidden.shape[1], 0, hidden
    while begin < most:
        end = min(most, begin + rows_at(rows + begin, READ_ROWS))
        read = model.head(hidden[:, begin:end], model.embed(tokens[:, begin:end]), cache)
        begin = end
    return read


def _filled(
    make_cache: Callable[[], RowCache],
    states: Sequence[DraftState | None],
    unread: Sequence[Rows],
) -> list[tuple[Part, Sequence[Rows]]]:
    """Cache, rows and unread rows of each request; those of requests that never draft are zeros and
    never used. `unread`: of any other request."""
    hidden, tokens = unread[0]
    never = [(mx.zeros_like(hidden[:, :1]), mx.zeros_like(tokens[:, :1]))]
    return [
        (([make_cache()], 0), never)
        if state is None
        else (([state.cache or make_cache()], state.rows), state.unread)
        for state in states
    ]


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
