"""Requests that share forwards, and the rounds in which they do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from ...mtp.batch_depth import BatchDepth, Wish
from ...mtp.batch_slots import order_of
from ...mtp.batch_verdict import Judged, RowDrafts
from ...mtp.depth import LOOK_TOKENS, AdaptiveDepth, Plan
from ...mtp.finite import NO_TOKEN, DraftNotFinite, NotFinite
from ...mtp.probe import PADDING_ID
from ...mtp.rollback import cache_arrays
from ...mtp.seams import as_row
from ...mtp.types import Forward, Round
from .cache_set import CacheSet
from .drafter import PENDING_ROWS, RESTING_ROWS, Drafter, DraftModel
from .outcome import Outcome, counted, judged
from .request import Request
from .state import DraftState, State
from .targets import Target

NAMED: Final = 2**40
"""Added to the positions that name the noise of rounds whose position only the device knows: other
rounds must not see the same noise."""
NAMES: Final = 16
"""Positions that one such round names: more than it has rows."""
LONGEST_COUNTED: Final = 16_384
"""Rows behind which the device counts no rows: MLX copies the buffers of keys and values of a round
that still runs, which costs more than waiting for it far behind that."""


@dataclass(slots=True, eq=False)
class IssuedRound:
    """A round that is being computed."""

    batch: "Batch"
    requests: tuple[Request, ...]
    drafted: Sequence[int]
    """Tokens that each request drafted."""
    planned: bool
    """Whether its number of drafts is what the depth policy decided."""
    verdict: Judged
    hidden: mx.array | None = None
    is_committed: bool = True
    """Whether caches and drafter know what is kept; else the host must read the round first."""

    is_away: bool = False
    is_back: bool = False
    is_chunk: bool = False

    @property
    def width(self) -> int:
        """Rows of each request."""
        return self.verdict.tokens.shape[1]

    @property
    def may_be_followed(self) -> bool:
        """Whether another round of these requests may be issued behind it."""
        return self.is_committed


class Batch:
    """One or more requests that share forwards. All methods run on the compute thread."""

    def __init__(
        self,
        target: Target,
        draft_model: DraftModel | None,
        joins: dict[Request, State],
        depth: BatchDepth,
        clock: Callable[[], float],
        *,
        fixed_rows: int = 0,
        counts_on_device: bool = False,
    ) -> None:
        """`depth`: what rounds of several requests cost. `fixed_rows`: strict mode's rows of a
        forward, or 0. `counts_on_device`: whether rounds with drafts may follow each other unread.
        """
        self._target = target
        self._draft_model = draft_model
        self._depth = depth
        self._clock = clock
        self._fixed_rows = fixed_rows
        self._may_count = counts_on_device
        self.requests: tuple[Request, ...] = tuple(joins)
        states = list(joins.values())
        self.caches = CacheSet([(state.caches, state.rows) for state in states])
        self.drafter = self._new_drafter([state.draft for state in states])
        self.in_flight = 0
        """Rounds that are not read yet."""
        self._seconds = 0.0
        """What its rounds took since the last one was read."""
        self._running = 1
        self._tokens = self._last_tokens()
        self._drafted = False
        """Whether its last round drafted."""

    def issue(self, running: int) -> IssuedRound | None:
        """Builds the next round and begins its evaluation; None: one in flight must be read first.

        `running`: answers in progress, of which some may join soon.
        """
        self._running = running
        k, planned = self._choose()
        begun = self._clock()
        on_device = k > 0 and self._counts_on_device(k)
        if on_device != self.caches.on_device:
            if self.in_flight:
                return None
            self._count(on_device=on_device)
        limits = [min(k, request.draft_limit) for request in self.requests]
        flight = self._decode(k, limits, planned, on_device=on_device)
        for request, limit in zip(self.requests, limits, strict=True):
            request.pending += limit + 1
            request.issued += 1
            _took_round(request, k)
        self.in_flight += 1
        self._drafted = k > 0
        mx.async_eval(flight.verdict.table)
        self._seconds += self._clock() - begun
        return flight

    def land(self, flight: IssuedRound, running: int) -> list[Outcome]:
        """Reads a round, counts its tokens, commits what is kept and learns what it cost."""
        self._running, begun = running, self._clock()
        read = flight.verdict.read()
        self.in_flight -= 1
        kept, outcomes = list[int](), list[Outcome]()
        for index, request in enumerate(flight.requests):
            outcome = self._outcome(flight, index, *read[index])
            outcomes.append(outcome)
            kept.append(self._kept(outcome, flight, read[index][0]))
            if not flight.is_committed and kept[-1]:
                request.sampler.commit(flight.verdict.tokens[index, : kept[-1]])
        if not flight.is_committed:
            self._commit(flight, kept)
            self._tokens = self._last_tokens()
        self._learn(flight, outcomes, self._seconds + self._clock() - begun)
        self._seconds = 0.0
        return outcomes

    def _learn(self, flight: IssuedRound, outcomes: Sequence[Outcome], seconds: float) -> None:
        if len(flight.requests) > 1:
            self._depth.learn(len(flight.requests), max(flight.drafted), seconds)
        for outcome, drafted in zip(outcomes, flight.drafted, strict=True):
            request, found = outcome.request, outcome.made
            if not isinstance(found, Round) or request.parked_at == found.forward.position + 1:
                continue
            if len(flight.requests) == 1:
                if flight.planned:
                    start = found.forward.position
                    request.depth.learn(drafted, found.accepted, start, seconds)
            elif drafted and isinstance(request.depth, AdaptiveDepth):
                request.depth.saw(drafted, found.accepted)

    def change(self, leaves: Sequence[Request], joins: dict[Request, State]) -> None:
        """Nothing is in flight. Afterwards all is evaluated: no graph spans a change."""
        assert not self.in_flight
        self._count(on_device=False)
        order = order_of([i for i, r in enumerate(self.requests) if r not in leaves])
        drafts = [state.draft for state in joins.values()]
        if self.drafter is not None and order:
            self.drafter.change(order, drafts)
        else:
            self.drafter = self._new_drafter([*([None] * len(order)), *drafts])
        self.caches.change(order, [(state.caches, state.rows) for state in joins.values()])
        self.requests = (*(self.requests[index] for index in order), *joins)
        for request in self.requests:
            request.plan = None
        if not any(request.k and request.parked_at is None for request in self.requests):
            self.drafter = None
        self._tokens = self._last_tokens()
        mx.eval(self.arrays())
        self._seconds = 0.0

    def extract(self, request: Request) -> State:
        """The state of one request, which stays here until `change`. Nothing is in flight."""
        assert not self.in_flight
        self._count(on_device=False)
        index = self.requests.index(request)
        drafts = self.drafter is not None and request.k and request.parked_at is None
        draft = self.drafter.extract(index) if drafts and self.drafter is not None else None
        caches, rows = self.caches.extract(index)
        return State(list(caches), rows, draft)

    def append(self, tokens: Sequence[int], following: Sequence[int], kept: int) -> None:
        """One forward of one request over known ids, of which the first `kept` rows stay.

        `following` are the tokens after those rows. Evaluated.
        """
        padding = [PADDING_ID] * max(0, self._fixed_rows - len(tokens))
        _, hidden = self._target.forward_batch(as_row([*tokens, *padding])[None], self._caches)
        self.caches.keep(len(tokens) + len(padding), [kept])
        if self.drafter is not None and hidden is not None:
            after = as_row(following)[None]
            self.drafter.observe(hidden[:, :kept], after, [kept])
        self._tokens = as_row(following[-1:])
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        drafter = self.drafter.arrays() if self.drafter is not None else []
        return [*cache_arrays(self._caches), *drafter]

    @property
    def _caches(self) -> Sequence[object]:
        return self.caches.caches

    def _new_drafter(self, states: Sequence[DraftState | None]) -> Drafter | None:
        if self._draft_model is None or not any(states):
            return None
        return Drafter(self._draft_model, states)

    def _last_tokens(self) -> mx.array:
        return as_row([request.token for request in self.requests])

    def _choose(self) -> tuple[int, bool]:
        """The next round's number of drafts, and whether a depth policy decided it."""
        if self.drafter is None:
            return 0, True
        unread = 0 if self._drafted else self.drafter.unread
        if len(self.requests) > 1:
            wishes = [_wish(request) for request in self.requests]
            k = self._depth.choose(wishes, unread, self._running)
            if k and unread:
                begun = self._clock()
                self.drafter.wake()
                self._depth.woke(unread, self._clock() - begun)
            return k, True
        request = next(iter(self.requests))
        if request.plan is None:
            rests = unread > PENDING_ROWS and self._patience() > PENDING_ROWS
            request.plan = Plan(0, LOOK_TOKENS) if rests else request.depth.plan(request.position)
        k = min(request.plan.k, request.draft_limit)
        return k, k > 0 or request.plan.k == 0

    def _patience(self) -> int:
        """Rows that may wait for the head: many where drafts do not pay for all that run now."""
        adaptive = all(isinstance(request.depth, AdaptiveDepth) for request in self.requests)
        rests = self._running > 1 and adaptive and not self._drafted
        rests = rests and self._depth.rests(self._running)
        return RESTING_ROWS if rests else PENDING_ROWS

    def _counts_on_device(self, k: int) -> bool:
        """Whether the device counts what a round of `k` drafts keeps: another may then follow."""
        if not self._may_count or len(self.requests) > 1:
            return False
        request = next(iter(self.requests))
        fits = request.position <= LONGEST_COUNTED and request.top_logprobs is None
        fits = fits and not request.after_fault
        several = self.caches.on_device or request.room > 2 * (k + 1)
        return fits and several and request.overlap and request.sampler.is_free

    def _count(self, *, on_device: bool) -> None:
        if on_device == self.caches.on_device:
            return
        if on_device:
            self.caches.count_on_device()
            if self.drafter is not None:
                self.drafter.count_on_device()
            return
        request = self.requests[0]
        self.caches.count_here(request.rows)
        if self.drafter is not None:
            self.drafter.count_here(request.rows)

    def _decode(
        self, k: int, limits: Sequence[int], planned: bool, *, on_device: bool
    ) -> IssuedRound:
        starts = [self._start(request, on_device=on_device) for request in self.requests]
        drafts, rows = None, self._tokens[:, None]
        if k:
            drafts = self._draft(k, limits, starts)
            rows = mx.concatenate([rows, drafts.tokens], axis=1)
        padding = max(0, self._fixed_rows - k - 1)
        logits, hidden = self._target.forward_batch(_padded(rows, padding), self._caches)
        if padding:
            logits, hidden = logits[:, : k + 1], None if hidden is None else hidden[:, : k + 1]
        verdict = judged(self.requests, logits, drafts, limits, starts)
        flight = IssuedRound(self, self.requests, limits, planned, verdict, hidden)
        if k == 0:  # one row of each is kept, whatever it says
            self._follow(verdict.tokens, [1] * len(self.requests), hidden, verdict.tokens)
        elif on_device:
            kept = verdict.table[:, 0] + 1
            last = mx.take_along_axis(verdict.tokens, kept[:, None] - 1, axis=1)
            self._follow(last, kept, hidden, verdict.tokens)
        else:
            flight.is_committed = False
        return flight

    def _start(self, request: Request, *, on_device: bool) -> int:
        return NAMED + NAMES * request.issued if on_device else request.position

    def _draft(self, k: int, limits: Sequence[int], starts: Sequence[int]) -> RowDrafts:
        assert self.drafter is not None
        samplers = [request.sampler for request in self.requests]
        drafts = self.drafter.draft(k, limits, samplers, [start + 1 for start in starts])
        overlap = all(request.overlap for request in self.requests)
        (mx.async_eval if overlap else mx.eval)(drafts.tokens)
        return drafts

    def _follow(
        self,
        last: mx.array,
        kept: Sequence[int] | mx.array,
        hidden: mx.array | None,
        tokens: mx.array,
    ) -> None:
        """Commits a round before it is read. `last` (B, 1): what the next one begins with."""
        width = max(tokens.shape[1], self._fixed_rows)
        self.caches.keep(width, kept)
        if self.drafter is not None and hidden is not None:
            self.drafter.observe(hidden, tokens, kept, self._patience())
        self._tokens = last[:, 0]
        if tokens.shape[1] == 1:
            for index, request in enumerate(self.requests):
                request.sampler.commit(tokens[index])

    def _commit(self, flight: IssuedRound, kept: Sequence[int]) -> None:
        width = max(flight.width, self._fixed_rows)
        self.caches.keep(width, kept)
        if self.drafter is None or flight.hidden is None or not all(kept):
            return
        self.drafter.observe(flight.hidden, flight.verdict.tokens, kept, self._patience())

    def _kept(self, outcome: Outcome, flight: IssuedRound, accepted: int) -> int:
        """Rows of a round that stay; 0 where it is to be computed once more without drafts."""
        return 0 if outcome.again else _emitted(outcome) or accepted + 1

    def _outcome(
        self, flight: IssuedRound, index: int, accepted: int, ids: list[int], sound: bool
    ) -> Outcome:
        request, drafted = flight.requests[index], flight.drafted[index]
        start = request.rows
        request.pending -= drafted + 1
        if request.phase == "finished":
            request.rows += accepted + 1
            return Outcome(request)
        if NO_TOKEN in ids:
            return self._not_finite(flight, request, start + 1 + ids.index(NO_TOKEN))
        request.checks = False
        if not sound:
            request.parked_at = start + 1
        forward = Forward(start, flight.width, len(flight.requests))
        counts = {"drafted": drafted, "accepted": accepted}
        outcome = counted(request, flight.verdict, index, ids, forward, **counts)
        request.rows += _emitted(outcome) or accepted + 1
        return outcome

    def _not_finite(self, flight: IssuedRound, request: Request, position: int) -> Outcome:
        """The logits are no distribution: the target's fault, or that of a draft's row.

        Masked attention multiplies the rows of later drafts by 0, and 0 times NaN is NaN.
        """
        if flight.width == 1:
            return Outcome(request, fault=NotFinite(position))
        if len(flight.requests) > 1 or flight.is_committed:
            request.rows += 1
            return Outcome(request, fault=DraftNotFinite(request.rows))
        request.checks = True
        return Outcome(request, again=True)


def _emitted(outcome: Outcome) -> int:
    """Tokens of its round, which has one at least; 0 where it has none."""
    return len(outcome.made.tokens) if isinstance(outcome.made, Round) else 0


def _wish(request: Request) -> Wish:
    if not isinstance(request.depth, AdaptiveDepth):
        return Wish(request.draft_limit, None)
    return Wish(request.draft_limit, request.depth.acceptance.probabilities)


def _took_round(request: Request, k: int) -> None:
    """Of what the depth policy decided, a round of `k` drafts is done."""
    plan = request.plan
    if plan is None:
        return
    request.plan = Plan(0, plan.rounds - 1) if plan.k == k == 0 and plan.rounds > 1 else None


def _padded(rows: mx.array, padding: int) -> mx.array:
    if not padding:
        return rows
    rest = mx.full((rows.shape[0], padding), PADDING_ID, dtype=rows.dtype)
    return mx.concatenate([rows, rest], axis=1)
