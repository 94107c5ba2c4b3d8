"""Requests that share forwards, and their rounds of draft, verify and accept."""

from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

from ...mtp.batch_verdict import RowDrafts
from ...mtp.caches.batch_slots import order_of
from ...mtp.caches.rollback import cache_arrays
from ...mtp.drafting.round_policy import RoundPolicy
from ...mtp.families.taped_gated_delta import MAX_STATE_ROWS
from ...mtp.seams import as_row
from ...mtp.targets import Target
from ...mtp.types import Round
from .drafter import PENDING_ROWS, RESTING_ROWS, Drafter, DraftModel
from .issued_round import IssuedRound, kept_rows_of, outcome_of
from .request import Request
from .round_plan import RoundPlan, plan_round
from .states.cache_set import CacheSet
from .states.state import DraftState, State
from .step_outcome import StepOutcome, verdict_of

DEVICE_POSITIONS: Final = 2**40
"""First of the positions that seed the noise of rounds whose own position only the device knows; no
other round uses them."""
POSITIONS_PER_ROUND: Final = 16
"""Such positions of one round: more than it has rows."""
MAX_DEVICE_ROWS: Final = 16_384
"""Longest context whose rows the device counts. MLX copies the KV buffers of a round that is still
running, which in longer contexts costs more than waiting for the round."""


class Batch:
    """One or more requests that share forwards. All methods run on the compute thread."""

    def __init__(
        self,
        target: Target,
        draft_model: DraftModel | None,
        joins: dict[Request, State],
        policy: RoundPolicy,
        clock: Callable[[], float],
        *,
        counts_on_device: bool = False,
    ) -> None:
        """`policy`: chooses the rounds. `counts_on_device`: whether rounds with drafts may be
        issued before earlier ones are read, with row counts that only the device knows.
        """
        self._target = target
        self._draft_model = draft_model
        self._policy = policy
        self._clock = clock
        self._counts_rows = counts_on_device
        self.requests: tuple[Request, ...] = tuple(joins)
        states = list(joins.values())
        self.caches = CacheSet([(state.caches, state.rows) for state in states])
        self.drafter = self._new_drafter([state.draft for state in states])
        self.in_flight = 0
        """Number of rounds in flight."""
        self._rows = 1
        """Rows of each request in the last round."""
        self._seconds = 0.0
        """Seconds that were spent on rounds since the last one was read."""
        self._running = 1
        """Requests in progress, of this batch and others."""
        self._tokens = _last_tokens(self.requests)
        self._drafted_last = False
        """Whether the head drafted for the last round."""
        self._is_changed = True
        """Whether no round was read since the members changed. The first one does not show what
        others cost: its members joined in it."""

    def issue(self, running: int) -> IssuedRound | None:
        """Builds the next round and begins its evaluation, or None if one in flight must be read.

        `running`: requests in progress, of which some may join soon.
        """
        self._running = running
        began_at = self._clock()
        self._set_positions()
        plan = self._plan()
        if plan is None:
            return None
        on_device = plan.head > 0 and self._can_count_on_device(plan.head)
        if on_device != self.caches.on_device and self.in_flight:
            return None
        began_at += self._wake() if plan.head else 0.0  # the policy counts it by itself
        self._switch_counting(on_device=on_device)
        flight = self._decode(plan, on_device=on_device)
        for request, limit in zip(self.requests, flight.drafted, strict=True):
            request.pending_tokens += limit + 1
            request.issued_rounds += 1
        self.in_flight += 1
        self._drafted_last, self._rows = plan.head > 0, plan.width + 1
        mx.async_eval(flight.verdict.table)
        self._seconds += self._clock() - began_at
        return flight

    def land(self, flight: IssuedRound, running: int) -> list[StepOutcome]:
        """Reads a round, counts its tokens, commits the accepted rows and records the cost."""
        self._running, began_at = running, self._clock()
        self._set_positions()
        verdicts = flight.verdict.read()
        self.in_flight -= 1
        kept_rows, outcomes = list[int](), list[StepOutcome]()
        for index, request in enumerate(flight.requests):
            outcome = outcome_of(flight, index, *verdicts[index])
            outcomes.append(outcome)
            kept_rows.append(kept_rows_of(outcome, verdicts[index][0]))
            if not flight.may_be_followed and kept_rows[-1]:
                request.sampler.commit(flight.verdict.tokens[index, : kept_rows[-1]])
        if not flight.may_be_followed:
            self._commit(flight, kept_rows)
            self._tokens = _last_tokens(self.requests)
        self._learn(flight, outcomes, self._seconds + self._clock() - began_at)
        self._seconds, self._is_changed = 0.0, False
        return outcomes

    def _learn(self, flight: IssuedRound, outcomes: Sequence[StepOutcome], seconds: float) -> None:
        plan, size, position = flight.plan, len(flight.requests), 0
        for drafted, (request, round_, *_) in zip(flight.drafted, outcomes, strict=True):
            drafts = request.drafts
            if not isinstance(round_, Round) or drafts.parked_at == round_.forward.position + 1:
                if size == 1:
                    return
                continue
            if drafted and not round_.is_copied and drafts.demand.acceptance is not None:
                drafts.demand.acceptance.add(drafted, round_.accepted)
            if size == 1:
                position, drafts.demand.rounds = round_.forward.position, drafts.demand.rounds + 1
                if (own := drafts.demand.policy) is not None:
                    own.learn(1, position, plan.width, plan.head, seconds)
        is_first = self._policy.is_first(size, plan.width, plan.head)
        if size == 1 or not (is_first or self._is_changed):
            self._policy.learn(size, position, plan.width, plan.head, seconds)

    def change(self, leaves: Sequence[Request], joins: dict[Request, State]) -> None:
        """Replaces members while nothing is in flight. Evaluates all arrays, so that no lazy graph
        spans a change."""
        assert not self.in_flight
        self._switch_counting(on_device=False)
        order = order_of([i for i, r in enumerate(self.requests) if r not in leaves])
        drafts = [state.draft for state in joins.values()]
        if self.drafter is not None and order:
            self.drafter.change(order, drafts)
        else:
            self.drafter = self._new_drafter([*([None] * len(order)), *drafts])
        self.caches.change(order, [(state.caches, state.rows) for state in joins.values()])
        members = (*(self.requests[index] for index in order), *joins)
        if not any(request.k and request.drafts.parked_at is None for request in members):
            self.drafter = None
        self._tokens = _last_tokens(members)
        mx.eval(self.arrays())
        self.requests = members  # only now: until then who leaves is lost with the others
        self._seconds, self._is_changed, self._rows = 0.0, True, 1

    def extract(self, request: Request) -> State:
        """The state of one request, which stays here until `change`. Nothing is in flight."""
        assert not self.in_flight
        self._switch_counting(on_device=False)
        index = self.requests.index(request)
        drafts = self.drafter is not None and request.k and request.drafts.parked_at is None
        draft = self.drafter.extract(index) if drafts and self.drafter is not None else None
        caches, rows = self.caches.extract(index)
        return State(list(caches), rows, draft)

    def append(self, tokens: Sequence[int], following: Sequence[int], kept_rows: int) -> None:
        """Runs one forward of one request over `tokens` and keeps its first `kept_rows` rows.

        `following`: the token after each of those rows. Evaluates all arrays.
        """
        self._set_positions()
        _, hidden = self._target.forward_batch(as_row(tokens)[None], self._caches)
        self.caches.keep(len(tokens), [kept_rows])
        if self.drafter is not None and hidden is not None:
            after = as_row(following)[None]
            self.drafter.observe(hidden[:, :kept_rows], after, [kept_rows])
        self._tokens = as_row(following[-1:])
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every array that it holds."""
        drafter = self.drafter.arrays() if self.drafter is not None else []
        return [*cache_arrays(self._caches), *drafter]

    @property
    def state_rows(self) -> int:
        """Rows of all requests whose states may be in memory; those of the next round replace
        them."""
        rows = self._rows if self._rows <= MAX_STATE_ROWS else 1
        return len(self.requests) * (rows + self.in_flight)

    @property
    def _caches(self) -> Sequence[object]:
        return self.caches.caches

    def _set_positions(self) -> None:
        """Sets them for the forwards of the target and the head until others build theirs."""
        self._target.rope_positions.set_deltas([request.delta for request in self.requests])

    def _new_drafter(self, states: Sequence[DraftState | None]) -> Drafter | None:
        if self._draft_model is None or not any(states):
            return None
        return Drafter(self._draft_model, states)

    def _plan(self) -> RoundPlan | None:
        """The drafts of the next round, or None if one in flight must be read first."""
        return plan_round(
            self.requests,
            self._policy,
            drafts=self.drafter is not None,
            unread=self._unread,
            running=self._running,
            in_flight=self.in_flight > 0,
        )

    @property
    def _unread(self) -> int:
        """Rows that the head would have to read before it drafts. Of a request that is alone, it
        reads a few as it drafts."""
        unread = 0 if self.drafter is None or self._drafted_last else self.drafter.unread
        return 0 if len(self.requests) == 1 and unread <= PENDING_ROWS else unread

    def _wake(self) -> float:
        """Lets the head read what it has to, and waits until it has. Returns the seconds."""
        if not (unread := self._unread) or self.drafter is None:
            return 0.0
        began_at = self._clock()
        self.drafter.wake()
        seconds = self._clock() - began_at
        self._policy.record_wake(unread, seconds)
        return seconds

    def _patience(self) -> int:
        """Rows that may wait for the head: many if drafts do not pay off at the present load."""
        is_resting = self._running > 1 and not self._drafted_last
        is_resting = is_resting and all(request.drafts.demand.may_rest for request in self.requests)
        is_resting = is_resting and self._policy.is_resting(self._running)
        return RESTING_ROWS if is_resting else PENDING_ROWS

    def _can_count_on_device(self, k: int) -> bool:
        """Whether the device may count the rows that a round of `k` drafts keeps, so that the next
        round can be issued before this one is read."""
        if not self._counts_rows or len(self.requests) > 1:
            return False
        request = next(iter(self.requests))
        fits = request.position <= MAX_DEVICE_ROWS and request.top_logprobs is None
        fits = fits and not request.alone
        several = self.caches.on_device or request.remaining_tokens > 2 * (k + 1)
        return fits and several and request.drafts.overlap and request.sampler.is_free

    def _switch_counting(self, *, on_device: bool) -> None:
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

    def _decode(self, plan: RoundPlan, *, on_device: bool) -> IssuedRound:
        starts = [self._start(request, on_device=on_device) for request in self.requests]
        k, limits, rows = plan.width, plan.limits(self.requests), self._tokens[:, None]
        of_head = self._draft(plan, starts) if plan.head else None
        drafts = plan.drafts(self.requests, of_head)
        if drafts is not None:
            rows = mx.concatenate([rows, drafts.tokens], axis=1)
        logits, hidden = self._target.forward_batch(rows, self._caches)
        verdict = verdict_of(self.requests, logits, drafts, limits, starts)
        flight = IssuedRound(
            self.requests, plan, limits, verdict, self, hidden, may_be_followed=not k or on_device
        )
        if k == 0:  # each request keeps its one row
            self._commit_unread(verdict.tokens, [1] * len(self.requests), hidden, verdict.tokens)
        elif on_device:
            kept_rows = verdict.table[:, 0] + 1
            last = mx.take_along_axis(verdict.tokens, kept_rows[:, None] - 1, axis=1)
            self._commit_unread(last, kept_rows, hidden, verdict.tokens)
        return flight

    def _start(self, request: Request, *, on_device: bool) -> int:
        return (
            DEVICE_POSITIONS + POSITIONS_PER_ROUND * request.issued_rounds
            if on_device
            else request.position
        )

    def _draft(self, plan: RoundPlan, starts: Sequence[int]) -> RowDrafts:
        assert self.drafter is not None
        samplers = [request.sampler for request in self.requests]
        limits, positions = plan.head_limits(self.requests), [start + 1 for start in starts]
        drafts = self.drafter.draft(plan.head, limits, samplers, positions, self._tokens)
        overlap = all(request.drafts.overlap for request in self.requests)
        (mx.async_eval if overlap else mx.eval)(drafts.tokens)
        return drafts

    def _commit_unread(
        self,
        last: mx.array,
        kept_rows: Sequence[int] | mx.array,
        hidden: mx.array | None,
        tokens: mx.array,
    ) -> None:
        """Commits a round before it is read. `last` (B, 1): the tokens that the next one begins
        with."""
        self.caches.keep(tokens.shape[1], kept_rows)
        if self.drafter is not None and hidden is not None:
            self.drafter.observe(hidden, tokens, kept_rows, self._patience())
        self._tokens = last[:, 0]
        if tokens.shape[1] == 1:
            for index, request in enumerate(self.requests):
                request.sampler.commit(tokens[index])

    def _commit(self, flight: IssuedRound, kept_rows: Sequence[int]) -> None:
        self.caches.keep(flight.width, kept_rows)
        if self.drafter is None or flight.hidden is None or not all(kept_rows):
            return
        self.drafter.observe(flight.hidden, flight.verdict.tokens, kept_rows, self._patience())


def _last_tokens(requests: Sequence[Request]) -> mx.array:
    return as_row([request.token for request in requests])
