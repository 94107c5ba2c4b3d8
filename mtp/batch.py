"""Several answers, one forward a round: `loop`'s rounds for requests that run at the same time.

Each member has its own sampler, ending, position and number of accepted drafts; they share the
forward, the head's passes and the one read of a round. Whoever asks for a round that is not
computed yet computes one for all: nobody waits for another's turn.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import mlx.core as mx

from .answer import Answer, check_finite, round_of
from .batch_caches import (
    BatchCache,
    Positions,
    batched,
    can_change,
    change_all,
    own,
    take_back,
)
from .batch_depth import BatchDepth, Wish
from .batch_drafter import BatchDrafter, BatchHead, RowDrafts
from .batch_slots import SOON, Change, order_of, padding_of
from .batch_verdict import Judged, judge
from .depth import AdaptiveDepth, DepthPolicy
from .drafters import NativeDrafter
from .finite import DraftNotFinite, NotFinite
from .logprobs import Scores
from .rollback import cache_arrays
from .seams import FORWARD_FAULTS, as_ids, as_row
from .types import FinishReason, Forward, Round


class BatchTarget(Protocol):
    """A whole model over a batch."""

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        """Ids (B, n) appended -> logits (B, n, V), and hidden (B, n, H) where the head wants it."""
        ...


@dataclass(slots=True, eq=False)
class Member:
    """One answer in a batch."""

    answer: Answer
    depth: DepthPolicy
    drafter: NativeDrafter | None
    """Its own, with what waits while the batch's head rests; None: it never drafts."""
    token: int
    """Its last one, whose row is not written."""
    rounds: deque[Round] = field(default_factory=deque[Round])
    """Computed, and not taken yet."""
    reason: FinishReason | None = None
    """Why it ended, with the last of `rounds`."""
    fault: NotFinite | DraftNotFinite | None = None
    """In place of a round behind the last of `rounds`."""

    @property
    def over(self) -> bool:
        return self.reason is not None or self.fault is not None

    @property
    def wish(self) -> Wish:
        drafts = self.drafter is not None and self.answer.parked_at is None
        limit = min(self.drafter.k, self.answer.room - 1) if self.drafter and drafts else 0
        if not isinstance(self.depth, AdaptiveDepth):
            return Wish(limit, None)
        return Wish(limit, self.depth.acceptance.probabilities)


class Held(NamedTuple):
    """A member's state outside the batch: it fits all its tokens but the last."""

    caches: list[Any]
    position: int


class _Flight(NamedTuple):
    """Plain tokens that are being computed, one of each member."""

    tokens: mx.array  # (B,)
    hidden: mx.array | None  # (B, 1, H)
    scores: list[Scores | None]
    starts: list[int]


SHARED: Final = "a forward that several requests shared failed"


class BatchBroken(Exception):
    """A round of the batch did not end: nobody knows what its caches hold."""


def computes_behind() -> bool:
    """Whether what is issued is computed while Python goes on: not on a CPU, where MLX returns from
    `async_eval` behind all but the last ten operations. What is issued first is waited for there.
    """
    return mx.default_device() != mx.Device(mx.cpu)


class Batch:
    """All methods run on the compute thread."""

    def __init__(
        self,
        target: BatchTarget,
        head: BatchHead | None,
        clock: Callable[[], float],
        ahead: bool | None = None,
    ) -> None:
        """`head` None: no member drafts. `ahead`: whether what follows is under way before tokens
        are handed out; None: where the device `computes_behind`."""
        self._target = target
        self._overlaps = computes_behind() if ahead is None else ahead
        self._head = head
        self._clock = clock
        self._depth = BatchDepth()
        self._waiting: dict[Member, Held] = {}
        self._members: list[Member] = []
        self._gone: set[Member] = set()
        self._positions = Positions([])
        self._caches: list[BatchCache] = []
        self._drafter: BatchDrafter | None = None
        self._drafts: tuple[RowDrafts, list[int], float] | None = None
        self._flight: _Flight | None = None
        self._broken = False
        self.running = 0
        """Answers in progress, its members among them: more of them may join soon."""

    def join(self, member: Member, held: Held) -> None:
        """From the next round on."""
        self._waiting[member] = held

    def drop(self, member: Member) -> None:
        """It is no member any more."""
        self._waiting.pop(member, None)
        if member in self._members:  # of one that was about to join as well: it may have failed
            self._gone.add(member)
        if all(each in self._gone for each in self._members):
            self._clear()
            self._broken = False

    def take(self, member: Member) -> Round:
        """Its next round, computed with those of all if it was not yet. Raises NotFinite or
        DraftNotFinite where its logits were no distribution, BatchBroken."""
        while not member.rounds:
            if member.fault is not None:
                raise member.fault
            self._advance()
        return member.rounds.popleft()

    def settle(self) -> None:
        """Lands what is being computed: `leave` may follow once a member took its rounds."""
        if self._flight is not None:
            with self._shared():
                self._land(self._flight, goes_on=False)
        self._drafts = None

    def leave(self, member: Member) -> Held:
        """Its state; it is no member any more. What it was told is taken. Raises BatchBroken."""
        if member not in self._members and member in self._waiting:
            return self._waiting.pop(member)
        self._check()
        assert self._flight is None and not member.rounds
        held = self._held(self._members.index(member))
        self.drop(member)
        return held

    @property
    def size(self) -> int:
        return len(self._members) - len(self._gone) + len(self._waiting)

    def fits(self, rows: int, most: float) -> bool:
        """Whether a request with `rows` rows may join, with no more than `most` of padding."""
        held = [state.position for state in self._waiting.values()]
        here = [
            n
            for m, n in zip(self._members, self._positions.rows, strict=True)
            if m not in self._gone
        ]
        return padding_of([*held, *here, rows]) <= most

    def arrays(self) -> list[mx.array]:
        """What it holds in memory."""
        waiting = [cache_arrays(held.caches) for held in self._waiting.values()]
        waiting += [member.drafter.arrays() for member in self._waiting if member.drafter]
        drafter = self._drafter.arrays() if self._drafter else []
        here = [*cache_arrays(self._caches), *drafter]
        return [*here, *(a for each in waiting for a in each)]

    def _advance(self) -> None:
        """One round of all members."""
        with self._shared():
            changes = self._changes
            if self._flight is not None:
                begun = None if changes else self._clock()
                self._land(self._flight, goes_on=not changes, begun=begun)
            else:
                if changes:
                    self._reform()
                self._round()

    @contextmanager
    def _shared(self) -> Generator[None]:
        """Leaves the batch broken where the work raises."""
        self._check()
        self._broken = True
        try:
            yield
        except FORWARD_FAULTS as fault:
            raise BatchBroken(SHARED) from fault
        self._broken = False

    def _check(self) -> None:
        if self._broken:
            raise BatchBroken(SHARED)

    @property
    def _changes(self) -> bool:
        """Whether other requests than now are to share the next forward."""
        slow = any(member.rounds for member in self._members)
        return slow or self._changes_next

    @property
    def _changes_next(self) -> bool:
        """The same of the forward after, before anybody took what this one tells."""
        joins = any(not member.rounds for member in self._waiting)
        return joins or bool(self._gone) or any(member.over for member in self._members)

    def _reform(self) -> None:
        """The batch without those that ended or do not take their rounds, with who waits."""
        slow, stays = dict[Member, Held](), list[int]()
        for index, member in enumerate(self._members):
            if member in self._gone or member.over:
                continue
            if member.rounds:
                slow[member] = self._held(index)
            else:
                stays.append(index)
        joins = dict[Member, Held]()
        for member, held in self._waiting.items():
            (slow if member.rounds else joins)[member] = held
        self._waiting = slow | joins  # all are known where this fails
        if stays and can_change(self._caches):
            self._change(stays, joins)
        else:
            self._form(stays, joins)
        self._waiting = slow
        mx.eval(self.arrays())

    def _change(self, stays: Sequence[int], joins: dict[Member, Held]) -> None:
        """Nobody's rows are copied but those of who joins, or takes the place of one that left."""
        order, held = order_of(stays), list(joins.values())
        rows = [self._positions.rows[place] for place in order]
        change = Change(order, [*rows, *(each.position for each in held)])
        change_all(self._caches, change, [each.caches for each in held])
        self._positions.become(change.rows)
        self._members = [*(self._members[place] for place in order), *joins]
        self._gone, self._drafts = set(), None
        if self._drafter is not None:
            self._drafter.change(order, [member.drafter for member in joins])
        self._draft_for_members()

    def _form(self, stays: Sequence[int], joins: dict[Member, Held]) -> None:
        """Of copies of all that its members have."""
        if self._drafter is not None:
            self._drafter.rest()
        ready = {self._members[index]: self._viewed(index) for index in stays} | joins
        self._clear()
        self._members = list(ready)
        states = list(ready.values())
        self._positions = Positions([held.position for held in states])
        self._caches = batched([held.caches for held in states], self._positions, SOON)
        self._draft_for_members()

    def _draft_for_members(self) -> None:
        """There is a drafter where any member drafts."""
        drafters = [member.drafter for member in self._members]
        if self._head is None or not any(drafters):
            self._drafter = None
        elif self._drafter is None:
            self._drafter = BatchDrafter(self._head, drafters)

    def _clear(self) -> None:
        self._members, self._gone, self._caches = [], set(), []
        self._positions, self._drafter = Positions([]), None
        self._drafts = self._flight = None

    def _held(self, index: int) -> Held:
        """Copies, so that the batch's own arrays can go."""
        viewed = self._viewed(index)
        for cache in viewed.caches:
            own(cache)
        mx.eval(cache_arrays(viewed.caches))
        if self._drafter is not None:
            self._drafter.leave(index)
        return viewed

    def _viewed(self, index: int) -> Held:
        return Held([cache.of(index) for cache in self._caches], self._positions.rows[index])

    def _round(self) -> None:
        """Drafts where it pays, one verify, one read."""
        begun, seconds = self._clock(), 0.0
        if self._drafts is None:
            k = self._choose()
            begun = self._clock()
            if k == 0:
                flight = self._issue(self._last_tokens())
                begun = self._clock() if self._overlaps else begun
                self._land(flight, goes_on=self._overlaps, begun=begun)
                return
            drafts, limits = self._draft(k)
        else:
            drafts, limits, seconds = self._drafts
            self._drafts = None
        k = drafts.tokens.shape[1]
        starts = list(self._positions.rows)
        tokens = mx.concatenate([self._last_tokens()[:, None], drafts.tokens], axis=1)
        logits, hidden = self._target.forward_batch(tokens, self._caches)
        judged = judge([m.answer for m in self._members], logits, drafts, limits, starts)
        found = judged.read()
        self._depth.learn(len(self._members), k, seconds + self._clock() - begun)
        kept = self._commit(judged, found, limits, starts)
        self._positions.moved(kept)
        take_back(self._caches, k + 1, kept)
        if self._drafter is not None and hidden is not None:
            self._drafter.observe(hidden, judged.tokens, kept)
        self._ahead()

    def _commit(
        self,
        judged: Judged,
        found: list[tuple[int, list[int], bool]],
        limits: list[int],
        starts: list[int],
    ) -> list[int]:
        """Hands out what each member was told; the rows that it keeps."""
        kept = list[int]()
        rows = judged.tokens.shape[1]
        for index, member in enumerate(self._members):
            accepted, ids, sound = found[index]
            drafted, start = limits[index], starts[index]
            if member in self._gone:
                kept.append(1)
                continue
            try:
                check_finite(ids, start + 1, rows - 1)
            except (NotFinite, DraftNotFinite) as fault:
                member.fault = fault
                kept.append(1)
                continue
            if not sound:
                member.answer.parked_at = start + 1
            elif drafted and isinstance(member.depth, AdaptiveDepth):
                member.depth.saw(drafted, accepted)
            member.reason, ids = member.answer.cut(ids)
            member.answer.sampler.commit(judged.tokens[index, : len(ids)])
            kept.append(len(ids))
            member.token = ids[-1]
            forward = Forward(start, rows, len(self._members))
            accepted = min(accepted, len(ids))
            member.rounds.append(round_of(ids, drafted, accepted, forward, judged.scores[index]))
        return kept

    def _ahead(self) -> None:
        """The next round's drafts are under way before these tokens are handed out."""
        if self._changes_next or not self._overlaps:
            return
        k, begun = self._choose(), self._clock()
        if k:
            drafts, limits = self._draft(k)
            self._drafts = drafts, limits, self._clock() - begun

    def _choose(self) -> int:
        """The next round's K; where that is not 0 the head is awake."""
        k = self._wanted_k
        if k and self._drafter is not None and (unread := self._drafter.unread):
            begun = self._clock()
            self._drafter.wake()
            self._depth.woke(unread, self._clock() - begun)
        return k

    @property
    def _wanted_k(self) -> int:
        unread = self._drafter.unread if self._drafter is not None else 0
        return self._depth.choose([each.wish for each in self._members], unread, self._expected)

    @property
    def _expected(self) -> int:
        """Answers in progress without those that do not take their rounds."""
        return self.running - sum(bool(member.rounds) for member in self._waiting)

    @property
    def rests(self) -> bool:
        """Whether drafts would not pay if all answers in progress were here."""
        awake = self._drafter is not None and not self._drafter.rests
        return self._expected > 1 and not awake and self._depth.rests(self._expected)

    def _draft(self, k: int) -> tuple[RowDrafts, list[int]]:
        assert self._drafter is not None
        limits = [min(k, wish.limit) for wish in (member.wish for member in self._members)]
        samplers = [member.answer.sampler for member in self._members]
        positions = [rows + 1 for rows in self._positions.rows]
        return self._drafter.draft(k, limits, samplers, positions), limits

    def _issue(self, tokens: mx.array) -> _Flight:
        """The tokens after `tokens` (B,), under way."""
        starts = list(self._positions.rows)
        logits, hidden = self._target.forward_batch(tokens[:, None], self._caches)
        limits = [0] * len(self._members)
        judged = judge([m.answer for m in self._members], logits, None, limits, starts)
        chosen = judged.tokens[:, 0]
        for index, member in enumerate(self._members):
            member.answer.sampler.commit(chosen[index : index + 1])
        self._positions.moved([1] * len(self._members))
        mx.async_eval(chosen)
        return _Flight(chosen, hidden, judged.scores, starts)

    def _land(self, flight: _Flight, *, goes_on: bool, begun: float | None = None) -> None:
        """Hands out the tokens in flight; with `goes_on` the next ones are issued before.

        `begun`: when the seconds of a round began; None: they were others'.
        """
        self._flight = None
        if self._drafter is not None and flight.hidden is not None:
            self._drafter.observe(flight.hidden, flight.tokens[:, None], [1] * len(self._members))
        if goes_on and self._wanted_k == 0:
            self._flight = self._issue(flight.tokens)
        ids = as_ids(flight.tokens)
        if begun is not None:
            self._depth.learn(len(self._members), 0, self._clock() - begun)
        for index, member in enumerate(self._members):
            if member in self._gone or member.over:
                continue
            start = flight.starts[index]
            try:
                check_finite([ids[index]], start + 1)
            except NotFinite as fault:
                member.fault = fault
                continue
            member.token = ids[index]
            member.reason = member.answer.count(ids[index])
            forward = Forward(start, 1, len(self._members))
            member.rounds.append(round_of([ids[index]], 0, 0, forward, flight.scores[index]))

    def _last_tokens(self) -> mx.array:
        return as_row([member.token for member in self._members])
