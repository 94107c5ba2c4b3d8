"""Draft, verify, accept, roll back: the whole algorithm, for one request.

Plain decoding is the same loop with no drafts. Between rounds the verifier holds prompt + emitted
- 1 rows: the last token's row is written by the next forward.
"""

from collections.abc import Callable, Generator
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from .ahead import Ahead, Flight
from .answer import Answer, check_finite, round_of
from .depth import LONGEST_STRETCH, LOOK_TOKENS, DepthPolicy, FixedDepth, Plan
from .drafters import NativeDrafter, NoDrafter
from .finite import NO_TOKEN
from .logprobs import Scores
from .rebuild import Rebuild
from .sampler import Sampler
from .seams import (
    Block,
    Drafter,
    Drafts,
    RemoteVerifier,
    StopCondition,
    Verifier,
    Wait,
    Want,
    as_ids,
    as_row,
)
from .steps import Prefilled, Step, Steps
from .task import Task
from .types import FinishReason, Forward


class InFlightToken(NamedTuple):
    """A plain token that is being computed, and the forward that gives it."""

    token: mx.array  # (1,)
    hidden: mx.array | None
    scores: Scores | None
    forward: Forward


class NextRound(NamedTuple):
    """The next round: its plan, its drafts under way, and the seconds that issuing them took."""

    plan: Plan
    drafts: Drafts | None
    seconds: float

    @property
    def k(self) -> int:
        return 0 if self.drafts is None else self.drafts.tokens.shape[0]


Next = tuple[mx.array, FinishReason | None]
"""The last emitted token (1,), whose row is not written yet, and why the answer ended, if so."""


def _never() -> bool:
    return False


class Generation:
    """One answer in the making; `steps()` drives it to its end, or to where it leaves."""

    def __init__(
        self,
        task: Task,
        verifier: Verifier,
        drafter: Drafter,
        sampler: Sampler,
        ending: StopCondition,
        depth: DepthPolicy | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        leaves: Callable[[], bool] = _never,
        remote: RemoteVerifier | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """`depth` None: every round drafts as many tokens as the drafter's k.

        `clock` gives the seconds that an adaptive `depth` learns from; no other one needs it.
        `leaves` is asked before each round: whether others are to compute the next ones.
        `remote`: the verifier once more, if its logits come from other nodes.
        `ahead`: where rounds may be built while others run; the sampler is free then.
        """
        self._task = task
        self._verifier = verifier
        self._drafter = drafter
        self._sampler = sampler
        self._depth = FixedDepth(drafter.k) if depth is None else depth
        self._clock = clock
        self._leaves = leaves
        self._remote = remote
        self._overlaps = ahead
        self.answer = Answer(task.max_tokens, task.top_logprobs, sampler, ending)
        self.token: mx.array | None = None
        """(1,) the token behind which an answer that left goes on; its row is not written."""

    def come_back(self, drafter: Drafter, token: mx.array) -> None:
        """`steps()` will go on behind `token` (1,); the verifier holds all rows before it."""
        self._drafter, self.token = drafter, token
        if self.answer.parked_at is not None:
            self._park(self.answer.parked_at)

    @property
    def runs_ahead(self) -> bool:
        """Whether nobody can tell now what verifier and drafter hold."""
        return self._overlaps is not None and self._overlaps.runs

    @property
    def ahead(self) -> Ahead | None:
        """Who has verifier and drafter while rounds run ahead."""
        return self._overlaps if self.runs_ahead else None

    def settle(self) -> Drafter:
        """Between two steps: computes what they left under way. The drafter that goes with it."""
        mx.eval(self._verifier.arrays(), self._drafter.arrays())
        return self._drafter

    def steps(self) -> Steps:
        """Yields what happens; returns why the answer ended, None where it leaves.

        The caches then fit its tokens, where the verifier takes rows back. Raises NotFinite.
        """
        reason: FinishReason | None = None
        if self.token is None:
            token, reason = yield from self._begin()
        else:
            token, self.token = self.token, None
        ahead = None
        while reason is None:
            if self._leaves():
                self.token = token
                return None
            plan = self._plan() if ahead is None else ahead.plan
            if plan.k == 0 and self._verifier.overlaps:
                flight = yield from self._issue(token)
                token, reason = yield from self._plain(flight, plan.rounds)
                ahead = None
            elif (overlaps := self._ahead_of(plan)) is not None:
                token, reason = yield from self._overlapped(overlaps, token, plan)
            else:
                token, reason, ahead = yield from self._round(token, ahead or self._draft(plan))
        return reason

    def _begin(self) -> "Generator[Step, None, Next]":
        """The prompt, and the rounds of an earlier attempt or the first token."""
        logits, last, forward = yield from self._prefill()
        if self._task.replay:
            rebuild = Rebuild(
                self._task,
                self._verifier,
                self._remote,
                self._drafter,
                self._sampler,
                self.answer,
                self._commit,
            )
            return (yield from rebuild.steps(last))
        token, scores = self._choose(logits)
        first = InFlightToken(token, last, scores, forward)
        # Where nothing drafts, the next forward is built while the first token is computed.
        rounds = LONGEST_STRETCH if self._drafter.k == 0 and self._verifier.overlaps else 1
        return (yield from self._plain(first, rounds))

    def _prefill(self) -> Generator[Step, None, tuple[mx.array, mx.array | None, Forward]]:
        """One pass over the prompt: each chunk's hidden also primes the drafter."""
        prompt, ends = self._task.prompt, self._task.prefill_ends
        held = self._verifier.position  # of a prefix that an earlier request read
        yield Prefilled(held, len(prompt))
        for start, end in pairwise((held, *(end for end in ends if end > held))):
            rows = as_row(prompt[start:end])
            ends = end == len(prompt) and not (self._task.replay and self._remote)
            want: Want = "last" if ends else "none"
            block = yield from self._verifier.forward(rows, want=want)
            if end < len(prompt):
                self._drafter.observe(block.hidden, as_row(prompt[start + 1 : end + 1]))
                mx.eval(self._verifier.arrays(), self._drafter.arrays())
                mx.clear_cache()
                yield Prefilled(end, len(prompt))
                continue
            last = block.hidden
            if last is not None and end - start > 1:
                self._drafter.observe(last[:, :-1], as_row(prompt[start + 1 : end]))
                last = last[:, -1:]
            yield Prefilled(end, len(prompt))
            return block.logits, last, Forward(start, end - start)
        raise ValueError("the prompt is empty")

    def _plan(self) -> Plan:
        if self._drafter.rests:
            return Plan(0, LOOK_TOKENS)
        return self._depth.plan(self._verifier.position)

    def _draft(self, plan: Plan) -> NextRound:
        """Drafts for the next round, as far as the budget has room; their evaluation begins."""
        begun, start = self._clock(), self._verifier.position
        k = min(plan.k, self.answer.room - 1)
        drafts = self._drafter.draft(k, start + 1) if k > 0 else None
        return NextRound(plan, drafts, self._clock() - begun)

    def _round(
        self, token: mx.array, ahead: NextRound
    ) -> Generator[Step, None, tuple[mx.array, FinishReason | None, NextRound | None]]:
        """One verify: K drafts and the committed `token` in, 1 to K + 1 tokens out.

        The next round's drafts are under way before these tokens are handed out. Where the logits
        are not finite, a plain step shows whether that is the target's fault or a draft's.
        """
        begun, start = self._clock(), self._verifier.position
        drafts, k = ahead.drafts, ahead.k
        rows = token if drafts is None else mx.concatenate([token, drafts.tokens])
        block = yield from self._verifier.forward(rows, want="all")
        verdict = self._sampler.judge(block.logits, drafts, start + 1)
        scores = self.answer.scores(block.logits, drafts, verdict.tokens)
        accepted, ids, sound = verdict.read_with(None if drafts is None else drafts.finite)
        if not sound:
            self._park(start + 1)
        if k and NO_TOKEN in ids:
            self._verifier.rollback(rows.shape[0])
            return (yield from self._round(token, NextRound(ahead.plan, None, 0.0)))
        check_finite(ids, start + 1)
        if sound and (k or not ahead.plan.k):  # one row where drafts were planned is no step
            self._depth.learn(k, accepted, start, ahead.seconds + self._clock() - begun)
        reason, ids = self.answer.cut(ids)
        self._commit(block, verdict.tokens, rows.shape[0], len(ids))
        forward = Forward(start, rows.shape[0], block.batch)
        following = None
        if reason is None:
            plan = self._plan()
            following = self._draft(plan) if plan.k else NextRound(plan, None, 0.0)
        yield round_of(ids, k, min(accepted, len(ids)), forward, scores)
        return verdict.tokens[len(ids) - 1 : len(ids)], reason, following

    def _ahead_of(self, plan: Plan) -> Ahead | None:
        """What builds rounds ahead, where more than one of `plan` is to follow."""
        ahead, several = self._overlaps, self.answer.room > 2 * (plan.k + 1)
        return ahead if ahead is not None and ahead.may and several else None

    def _overlapped(self, ahead: Ahead, token: mx.array, plan: Plan) -> Generator[Step, None, Next]:
        """Rounds of which each is built before the verdict of the one before it is read.

        Ends where the answer does, where it leaves, and where nothing is to be drafted. Raises
        DraftNotFinite: the round behind is under way, so no row can be taken back.
        """
        position, unsound = self._verifier.position, 0
        assert isinstance(self._drafter, NativeDrafter)
        ahead.begin(token, self._drafter)
        flight: Flight | None = ahead.issue(plan.k)
        while flight is not None:
            begun = self._clock()
            following = None if unsound else self._issued(ahead, flight.k + 1, position)
            accepted, ids, sound = flight.read()
            check_finite(ids, position + 1, flight.k)
            if not sound:
                unsound = unsound or position + 1
            elif flight.k:
                self._depth.learn(flight.k, accepted, position, self._clock() - begun)
            reason, ids = self.answer.cut(ids)
            forward = Forward(position, flight.k + 1)
            position += len(ids)
            ahead.told(position)
            token = as_row(ids[-1:])
            yield round_of(ids, flight.k, min(accepted, len(ids)), forward, None)
            if reason is not None:
                return token, reason
            flight = following or (None if unsound else self._issued(ahead, 0, position))
        ahead.end(position)
        if unsound:
            self._park(unsound)
        return token, None

    def _issued(self, ahead: Ahead, unread: int, position: int) -> Flight | None:
        """The next round, behind `unread` tokens at most that no verdict tells of yet.

        None where the answer leaves, drafts nothing more or may have no room for it.
        """
        if self._leaves() or not ahead.may or not (k := self._depth.plan(position).k):
            return None
        room = self.answer.room - unread
        return ahead.issue(min(k, room - 1)) if room > (unread > 0) else None

    def _park(self, position: int) -> None:
        """Drafts nothing from here on: what the head gives is no distribution."""
        self.answer.parked_at = position
        self._drafter, self._depth = NoDrafter(), FixedDepth(0)

    def _commit(self, block: Block, tokens: mx.array, rows: int, kept: int) -> None:
        """Leaves `kept` of the block's rows in the caches and tells the drafter of them."""
        if kept < rows:
            self._verifier.rollback(rows - kept)
        self._sampler.commit(tokens[:kept])
        hidden = None if block.hidden is None else block.hidden[:, :kept]
        self._drafter.observe(hidden, tokens[:kept])

    def _plain(self, flight: InFlightToken, rounds: int) -> Generator[Step, None, Next]:
        """At most `rounds` tokens, one forward ahead: its graph is built while a token is computed.

        The forward in flight belongs to a token that ended the answer more often than not only at
        the very end; it is rolled back there, or left with caches that nobody reads again. A
        drafter learns of the rows, so that it may go on.
        """
        rounds = min(rounds, self.answer.room)
        for left in range(rounds - 1, -1, -1):
            begun = self._clock()
            token, hidden, scores, forward = flight
            self._drafter.observe(hidden, token)
            goes_on = left > 0 and not self._leaves()
            if goes_on:
                flight = yield from self._issue(token)
            ids = as_ids(token)
            check_finite(ids, forward.position + forward.rows)
            if forward.rows == 1:  # the prompt's own forward says nothing about a plain step
                self._depth.learn(0, 0, forward.position, self._clock() - begun)
            reason = self.answer.count(ids[0])
            if reason is not None and goes_on and self._verifier.takes_back:
                self._verifier.rollback(1)
            yield round_of(ids, 0, 0, forward, scores)
            if reason is not None or not goes_on:
                return token, reason
        raise AssertionError("the last of the rounds does not go on")

    def _issue(self, token: mx.array) -> Generator[Wait, None, InFlightToken]:
        """The token after `token`, under way."""
        start = self._verifier.position
        block = yield from self._verifier.forward(token, want="all")
        upcoming, scores = self._choose(block.logits)
        mx.async_eval(upcoming)
        return InFlightToken(upcoming, block.hidden, scores, Forward(start, 1))

    def _choose(self, logits: mx.array) -> tuple[mx.array, Scores | None]:
        """The target's token (1,) after all rows in the caches: it becomes part of the answer."""
        token = self._sampler.token(logits, self._verifier.position)
        scores = self.answer.scores(logits, None, token)
        self._sampler.commit(token)
        return token, scores
