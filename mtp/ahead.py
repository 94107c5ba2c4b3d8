"""Rounds of one answer that are built while the round before them runs.

`loop` reads a round's verdict before it builds the next round, and meanwhile the device has nothing
to do. Here how many drafts stood stays on the device: positions are arrays, caches are those of a
batch of one (`batch_caches`), recurrent layers go on from the row that the device says
(`rollback.Chosen`), and a verdict is read while the next round runs. A round that runs where the
answer turns out to have ended is dropped with the caches.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .batch import BatchTarget
from .batch_caches import BatchCache, BatchKVCache, BatchTapedCache, Positions, keep_of
from .batch_drafter import BatchHead
from .drafters import DrafterState, NativeDrafter, join
from .rollback import TapedCache, cache_arrays
from .sampler import Sampler
from .seams import Drafts, as_ids

NAMED: Final = 2**40
"""Added to the positions that name these rounds' noise. Known is only the most rows that there may
be: rounds that are computed otherwise may begin there, and must not see the same noise."""


AHEAD_BY: Final = frozenset({"traced_layer", "row_attention"})
"""Kernels that take positions, and states of several rows, from the device: with them rounds that
are built ahead are computed as the others are, bit for bit."""
LONGEST: Final = 16_384
"""Rows of context: MLX copies the buffers of keys and values of a round that still runs, which
costs more than waiting for it far behind that."""


class OwnVerifier(Protocol):
    """A verifier whose caches can be lent; see `LocalVerifier`."""

    @property
    def position(self) -> int: ...

    def hand_over(self) -> list[Any]: ...

    def take_over(self, caches: Sequence[Any], position: int) -> None: ...


class Flight(NamedTuple):
    """A round that is being computed."""

    k: int
    told: mx.array
    """(K + 3,): accepted drafts, whether the drafter's logits were finite, the tokens."""

    def read(self) -> tuple[int, list[int], bool]:
        """Waits for it: accepted, the ids that may be emitted, and whether all was finite."""
        accepted, finite, *tokens = as_ids(self.told)
        return accepted, tokens[: accepted + 1], bool(finite)


class AheadPositions(Positions):
    """One request's rows: `array` is how many there are, and `rows` the most that there may be."""

    on_device = True

    def __init__(self, rows: int) -> None:
        super().__init__([rows])
        self._array = mx.array([rows], dtype=mx.int32)

    def moved(self, rows: Sequence[int]) -> None:
        self.kept(rows[0], rows[0])

    def kept(self, rows: "mx.array | int", most: int) -> None:
        """`rows` (1,) more, which are `most` at most."""
        array = self.array
        super().moved([most])
        self._array = array + rows

    def known(self, rows: int) -> None:
        """What was read of `array`, with nothing under way."""
        super().moved([rows - self.rows[0]])
        self._array = mx.array([rows], dtype=mx.int32)


class Ahead:
    """The rounds of one answer, from `begin` to `end`. All methods run on the compute thread."""

    def __init__(
        self,
        target: BatchTarget,
        head: BatchHead,
        verifier: OwnVerifier,
        sampler: Sampler,
    ) -> None:
        """`verifier` and `sampler` are the answer's."""
        self._target = target
        self._head = head
        self._verifier = verifier
        self._sampler = sampler
        self._drafter: NativeDrafter | None = None
        self._positions = AheadPositions(0)
        self._caches: list[BatchCache] = []
        self._token = mx.zeros((1,), dtype=mx.int32)
        self._drafts: _Drafting | None = None

    @property
    def may(self) -> bool:
        """Whether the rows are few enough for rounds that are built ahead to pay."""
        return self._verifier.position <= LONGEST

    @property
    def runs(self) -> bool:
        """Whether verifier and drafter are lent, so that nobody else may use them."""
        return self._drafter is not None

    def begin(self, token: mx.array, drafter: NativeDrafter) -> None:
        """Behind `token` (1,), whose row is not written."""
        position, state = self._verifier.position, drafter.hand_over()
        self._drafter = drafter
        caches = self._verifier.hand_over()
        self._positions = AheadPositions(position)
        self._caches = [alone(cache, self._positions) for cache in caches]
        self._drafts = _Drafting(self._head, state)
        self._token = token
        self._verifier.take_over(self._caches, position)

    def rows(self) -> tuple[list[KVCache | None], KVCache]:
        """By layer and of the draft head, what attention holds, in views; the last rows of each may
        be none."""
        assert self._drafts is not None
        caches = [c.of(0) if isinstance(c, BatchKVCache) else None for c in self._caches]
        return caches, self._drafts.rows()

    def issue(self, k: int) -> Flight:
        """A round of `k` drafts, or 0, behind all before it; its evaluation begins."""
        assert self._drafts is not None
        position = NAMED + self._positions.rows[0] + 1
        drafts = self._drafts.draft(k, self._sampler, position) if k else None
        rows = self._token if drafts is None else mx.concatenate([self._token, drafts.tokens])
        logits, hidden = self._target.forward_batch(rows[None], self._caches)
        verdict = self._sampler.judge(logits[0], drafts, position)
        kept = verdict.accepted[None] + 1
        if k:
            keep_of(self._caches, kept)
        self._positions.kept(kept, k + 1)
        assert hidden is not None
        self._drafts.observe(hidden, verdict.tokens, kept)
        self._token = verdict.tokens[verdict.accepted][None]
        sound = mx.array(1) if drafts is None or drafts.finite is None else drafts.finite.all()
        told = [verdict.accepted[None], sound[None].astype(mx.int32), verdict.tokens]
        flight = Flight(k, mx.concatenate(told))
        mx.async_eval(flight.told)
        return flight

    def drop(self) -> None:
        """The answer is over: nothing of it is held any more."""
        self._caches, self._drafts, self._drafter = [], None, None

    def told(self, position: int) -> None:
        """A verdict was read: the answer has `position` rows."""
        self._verifier.take_over(self._caches, position)

    def end(self, position: int) -> None:
        """Gives verifier and drafter back behind `position` rows; nothing is under way."""
        assert self._drafts is not None and self._drafter is not None
        self._positions.known(position)
        caches = [cache.of(0) for cache in self._caches]
        self._verifier.take_over(caches, position)
        state = self._drafts.settled(position)
        mx.eval(cache_arrays(caches), cache_arrays([state.cache]), state.read)
        self._drafter.take_up(state, ())
        self._caches, self._drafts, self._drafter = [], None, None


class _Drafting:
    """As `NativeDrafter`, over rows of which the device knows how many were kept."""

    def __init__(self, head: BatchHead, state: DrafterState) -> None:
        """Nothing is pending in `state`."""
        self._head = head
        self._positions = AheadPositions(state.rows)
        self._cache = alone(state.cache, self._positions)
        assert state.read is not None
        self._read = state.read
        self._pending: list[tuple[mx.array, mx.array, mx.array]] = []

    def observe(self, hidden: mx.array, tokens: mx.array, kept: mx.array) -> None:
        """Of the rows `hidden` (1, n, H), followed by `tokens` (n,), the first `kept` (1,)."""
        self._pending.append((hidden, tokens, kept))

    def draft(self, k: int, sampler: Sampler, position: int) -> Drafts:
        self._catch_up()
        hidden, drafts = self._read, list[Drafts]()
        for depth in range(k):
            if depth:
                embedding = self._head.embed(drafts[-1].tokens[None])
                hidden = self._head.head(hidden, embedding, self._cache)
                self._positions.moved([1])
            logits = self._head.logits(hidden)[0]
            drafts.append(sampler.draft(logits, position + depth, drafts))
        self._positions.moved([1 - k])
        joined = join(drafts)
        mx.async_eval(joined.tokens)
        return joined

    def rows(self) -> KVCache:
        """As `Ahead.rows`."""
        assert isinstance(self._cache, BatchKVCache)
        return self._cache.of(0)

    def settled(self, rows: int) -> DrafterState:
        """Behind `rows` rows, which is what is kept by now."""
        self._catch_up()
        self._positions.known(rows)
        cache = self._cache.of(0)
        assert isinstance(cache, KVCache)
        return DrafterState(cache, rows, self._read, None)

    def _catch_up(self) -> None:
        for hidden, tokens, kept in self._pending:
            read = self._head.head(hidden, self._head.embed(tokens[None]), self._cache)
            self._positions.kept(kept, tokens.shape[0])
            self._read = mx.take(read, kept - 1, axis=1)
        self._pending = []


def alone(cache: Any, positions: Positions) -> BatchCache:
    """A batch's cache of this one request, over the same arrays."""
    if isinstance(cache, TapedCache):
        joined = BatchTapedCache(cache)
        joined.cache = list(cache.cache)
        return joined
    assert type(cache) is KVCache
    return BatchKVCache(cache.keys, cache.values, positions)


def can_run_ahead(caches: Sequence[object]) -> bool:
    """Whether each layer's cache is of a kind of which the device may say what is kept."""
    return all(isinstance(c, TapedCache) or type(c) is KVCache for c in caches)
