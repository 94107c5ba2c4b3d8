"""Decides the next round of requests: how many tokens the head drafts, and who copies.

Pure: no clock, no arrays. Expected tokens of a request whose round drafts k, with p_j the
probability that draft j is accepted given that those before it were: 1 + p_1 + p_1 p_2 + …
(Leviathan et al. 2022, arXiv 2211.17192). The best round has the most expected tokens of all
requests per second. All of them have the same number of rows, since they share a forward: those
with fewer drafts are padded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Final, NamedTuple

from ..types import MAX_ROUND_ROWS
from .acceptance import Acceptance
from .costs import ENOUGH, CostTable, Form, size_bucket

HYSTERESIS: Final = 1.02
"""Ratio by which another K must be better before it replaces the present one."""
MARGIN: Final = 1.05
"""The same for copies in place of the head's drafts."""
TRIAL_EVERY: Final = 64
"""Minimum of rounds between trials: costs change as contexts grow, and so does the text."""
TRIAL_SHARE: Final = 0.01
"""Expected loss of a trial, at most, as a share of the time since the last one of that form."""
TRIAL_ROUNDS: Final = 5
"""Rounds of a trial: those that a cost needs, and two, since measurements are noisy."""
PLAIN_TRIAL_ROUNDS: Final = 8
"""Rounds of a trial of K = 0: the first is not evaluated ahead, and the median counts."""
WAKE_ROUNDS: Final = 64
"""Rounds of drafting over which the head's reading before them is amortised."""


@dataclass(slots=True)
class DraftDemand:
    """The drafts of the head that one answer asks for."""

    most: int = 0
    """Drafts of a round, at most."""
    source: str = "as requested"
    """The source of `most`, or of `initial`."""
    acceptance: Acceptance | None = None
    """How often its drafts are accepted, or None if it drafts `most` in every round."""
    initial: int = 0
    """K of the first answer of a policy, until enough is known to choose."""
    policy: "RoundPolicy | None" = None
    """A policy of its own, which chooses as long as the answer shares no round. It has the probed
    costs, and no other answer changes it: for verifies that may decide near ties otherwise than
    single steps. There the depths of an answer change its text, and neither the clock nor other
    answers may."""
    rounds: int = 0
    """Rounds that the answer shared with no other."""
    sharers: int = 1
    """Requests of the round that most requests shared with the answer, itself included."""
    limit_reason: str = ""
    """Why `most` is less than what the model may draft, if it is."""

    @property
    def is_known(self) -> bool:
        """Whether enough drafts were observed to choose K by them."""
        return self.acceptance is not None and self.acceptance.is_known

    @property
    def may_rest(self) -> bool:
        """Whether the head may leave its rows unread for long."""
        return self.acceptance is not None and self.policy is None


class Offer(NamedTuple):
    """The drafts that one request may have in the next round."""

    demand: DraftDemand
    limit: int
    """Drafts of the head at most."""
    reached: Sequence[float] = ()
    """Chances that the first 1, 2, … tokens of its copy stand, as many as it may copy."""


class RoundChoice(NamedTuple):
    """The next round of requests."""

    width: int
    """Drafts for which each request has a row."""
    head: int
    """Drafts of the head for requests that do not copy, or 0 if it does not run."""
    is_copied: Sequence[bool]
    """Whether a request copies its drafts, by request."""
    k: int
    """Drafts of the head if no request copied."""
    offers: Sequence[Offer]
    position: int


@dataclass(slots=True)
class _Search:
    """The search for the best K, for one bucket of sizes."""

    k: int
    is_settled: bool = False
    """Whether `k` was compared with its neighbours."""
    rounds: int = 0
    """Rounds since the last trial of another K."""
    trials: int = 0
    tried_k: int = 0
    rounds_left: int = 0
    """Rounds of the trial of `tried_k` in progress."""


class RoundPolicy:
    """Chooses the rounds of all requests of a model, and learns what they cost.

    K is the best of those whose costs are known: probed for one request, for several only measured.
    There a K is tried only next to the best so far, since a round of many drafts can take several
    times as long as a plain one: at once if its cost is unknown, else as soon as its expected loss
    is affordable. At intervals a neighbour is measured again.

    A copy takes the place of a request's own drafts at the same width where more of its tokens are
    expected to stand; that costs nothing. A wider round must pay for everybody's padding.
    """

    def __init__(self, costs: CostTable | None = None, *, follows_clock: bool = True) -> None:
        """`follows_clock`: whether it learns what rounds take, and not just how many there were."""
        self.costs = costs or CostTable()
        self._follows_clock = follows_clock
        self.lengths: Sequence[int] = ()
        """Tokens that a request may copy in rounds that it shares with no other."""
        self.shared_lengths: Sequence[int] = ()
        self.shared_depth = MAX_ROUND_ROWS
        """Drafts of the head at most in rounds that requests share."""
        self.probed_rows = MAX_ROUND_ROWS
        """Rows of such rounds at most, of all requests together: as many as were probed."""
        self.room_rows = MAX_ROUND_ROWS
        """The same for the next round, as many as there is memory for."""
        self._exact_head = 0
        self._removal: Mapping[int, float] = {}
        """Seconds to remove rejected rows of a copy, by its length, in plain rounds."""
        self._searches = dict[int, _Search]()
        self._computed = set[tuple[int, int, int]]()
        self._has_woken = False

    def allow(
        self, lengths: Sequence[int], ratios: Mapping[int, float], removal: Mapping[int, float]
    ) -> None:
        """Allows copies of `lengths`, all of them exact, to requests that are alone.

        `ratios`, `removal`: seconds of such rounds and of removing rejected rows, by length, in
        plain rounds.
        """
        self.lengths, self._removal = sorted(lengths), removal
        self.costs.copy_ratios |= {(1, length): ratio for length, ratio in ratios.items()}

    def allow_shared(
        self, lengths: Sequence[int], ratios: Mapping[tuple[int, int], float], head: int = 0
    ) -> None:
        """The same for requests that share rounds, and copies in place of up to `head` drafts of
        the head. `ratios`: by (requests, length).
        """
        self.shared_lengths = sorted(lengths)
        self._exact_head = head
        for length in self.shared_lengths:
            sizes = [size for size, each in ratios if each == length]
            for bucket in range(2, size_bucket(MAX_ROUND_ROWS)):
                size = min(sizes, key=lambda n: (abs(size_bucket(n) - bucket), -n))
                self.costs.copy_ratios[bucket, length] = ratios[size, length]

    def change_costs(self, costs: CostTable) -> None:
        """Continues with what rounds cost with another drafter. Copies cost the same."""
        costs.copy_ratios = self.costs.copy_ratios
        self.costs, self._searches = costs, {}

    def most_drafts(self, size: int) -> int:
        """Drafts of the head at most in a round of `size` requests."""
        if size == 1:
            return MAX_ROUND_ROWS
        return max(0, min(self.shared_depth, self.most_rows(size) // size - 1))

    def most_rows(self, size: int) -> int:
        """Rows of a round of `size` requests at most, of all of them together."""
        return MAX_ROUND_ROWS if size == 1 else min(self.probed_rows, self.room_rows)

    def choose(
        self, offers: Sequence[Offer], position: int = 0, *, unread: int = 0, running: int = 0
    ) -> RoundChoice:
        """The next round. `position`: rows of a request that is alone. `unread`: rows that the head
        must read before it drafts. `running`: requests in progress, of which some may join soon.
        """
        k = self._choose_depth(offers, position, unread, running)
        choice = RoundChoice(k, k, [False] * len(offers), k, offers, position)
        return self._with_copies(choice) if any(offer.reached for offer in offers) else choice

    def learn(self, size: int, position: int, width: int, head: int, seconds: float) -> None:
        """Records that a round took `seconds`."""
        form = Form.of(size, position, width, head)
        if not self._follows_clock:
            seconds = self.costs.seconds(form) or 0.0
        search = self._searches.get(form.size)
        if search is None or width != head:
            self.costs.add(form, seconds / size)
            return
        # Rounds that were issued before a trial are read during it.
        is_trial = search.rounds_left > 0 and head == search.tried_k
        self.costs.add(form, seconds / size, is_trial=is_trial)
        search.rounds += 1
        if is_trial:
            search.rounds_left -= 1
            search.rounds = 0

    def is_first(self, size: int, width: int, head: int) -> bool:
        """Whether no round of this form was read before, so that kernels may have been compiled in
        it."""
        form, count = (size, width, head), len(self._computed)
        self._computed.add(form)
        return len(self._computed) > count

    def is_resting(self, size: int) -> bool:
        """Whether drafts did not pay off when about `size` requests chose last."""
        settled = any(search.is_settled for bucket, search in self._searches.items() if bucket > 1)
        return settled and self._nearest_k(size_bucket(size)) == 0

    def record_wake(self, rows: int, seconds: float) -> None:
        """Records that the head took `seconds` to read `rows` waiting rows.

        The first time does not count, and of others the quickest: kernels for so many rows may be
        compiled in it, and a head that seems slow to wake is not woken again.
        """
        if self._has_woken:
            self.costs.row_seconds = min(self.costs.row_seconds or inf, seconds / rows)
        self._has_woken = True

    def rates(
        self, offers: Sequence[Offer], position: int, most: int, least: int = 0, more: float = 0.0
    ) -> dict[int, float]:
        """Expected tokens a second by K, from `most` down to `least`, of all whose cost is known.

        `more`: seconds of rounds with drafts beyond that. A round takes at most the seconds of one
        with more drafts: a wider round computes all that a narrower one does, and what else ran
        during a measurement only adds to it. So no round of k drafts seems more than k + 1 times as
        fast as a plain token.
        """
        bucket, context, *_ = Form.of(len(offers), position, 0, 0)
        tokens, costs = _tokens_by_depth(offers, most), self.costs
        rates, shortest = dict[int, float](), inf
        for k in range(most, least - 1, -1):
            if (share := costs.seconds(Form(bucket, context, k, k))) is not None:
                shortest = min(share, shortest)
                rates[k] = tokens[k] / (len(offers) * shortest + (more if k else 0.0))
        return rates

    def speedup(self, demand: DraftDemand) -> float:
        """The best expected speed of an answer in a short context, relative to plain decoding; 0 if
        unknown."""
        rates = self.rates([Offer(demand, demand.most)], 0, demand.most)
        is_complete = demand.is_known and len(rates) > demand.most
        return max(rates.values()) / rates[0] if is_complete else 0.0

    def plain_seconds(self, demand: DraftDemand) -> float | None:
        """Seconds of a plain token in a short context, as rounds of any K show them; None if an
        answer had too few of its own."""
        plain = Form.of(1, 0, 0, 0)
        return self.costs.seconds(plain) if demand.rounds >= ENOUGH else None

    def trial_k(self, size: int) -> int | None:
        """The K of the trial in progress of rounds of `size` requests; None if there is none."""
        search = self._searches.get(size_bucket(size))
        return search.tried_k if search is not None and search.rounds_left else None

    def _choose_depth(
        self, offers: Sequence[Offer], position: int, unread: int, running: int
    ) -> int:
        size, first = len(offers), offers[0].demand
        ceiling = max(offer.limit for offer in offers)
        floor = max((o.limit for o in offers if o.demand.acceptance is None), default=0)
        if floor == ceiling:
            return floor
        bucket = size_bucket(size)
        if (search := self._searches.get(bucket)) is None:
            k = first.initial if size == 1 else self._nearest_k(bucket)
            search = self._searches[bucket] = _Search(k)
        if unread and running > size and self.is_resting(running):
            return floor
        if search.rounds_left and floor <= search.tried_k <= ceiling:
            return search.tried_k
        k = min(max(search.k, floor), ceiling)
        wake = self.costs.row_seconds * unread
        rates = self.rates(offers, position, ceiling, floor, wake / WAKE_ROUNDS)
        measured = [n for n in rates if self.costs.is_measured(Form.of(size, position, n, n))]
        if k not in (choices := rates if size == 1 else measured):
            return k
        if size > 1 or first.is_known:
            best = max(choices, key=rates.__getitem__)
            if rates[best] > HYSTERESIS * rates[k]:
                k = search.k = best
        near = [n for n in (k + 1, k - 1) if floor <= n <= ceiling]
        unknown = (n for n in near if n not in rates)
        if (tried := next(unknown, None)) is None:
            search.is_settled = True
            due = [near[search.trials % len(near)]] if search.rounds >= TRIAL_EVERY else []
            estimated = near if size > 1 else rates if due else ()
            candidates = [*(n for n in estimated if n != k and n not in measured), *due]
            tried = self._affordable_trial(rates, k, candidates, size, position, wake)
        if tried is None:
            return k
        search.tried_k, search.trials = tried, search.trials + 1
        search.rounds_left = TRIAL_ROUNDS if tried else PLAIN_TRIAL_ROUNDS
        self.costs.begin_trial(Form.of(size, position, tried, tried))
        return tried

    def _affordable_trial(
        self,
        rates: Mapping[int, float],
        k: int,
        candidates: Sequence[int],
        size: int,
        position: int,
        wake: float,
    ) -> int | None:
        """The first of the `candidates` whose trial loses little of the recent time."""
        for n in candidates:
            seconds = self.costs.seconds(Form.of(size, position, n, n)) or 0.0
            slower = 1 - rates[n] / rates[k]
            rounds = TRIAL_ROUNDS if n else PLAIN_TRIAL_ROUNDS
            loss = rounds * seconds * slower + (wake / size if n else 0.0)
            if loss <= TRIAL_SHARE * self.costs.seconds_since_trial(size_bucket(size)):
                return n
        return None

    def _nearest_k(self, bucket: int) -> int:
        """The K of the nearest bucket of several requests that has one; 0 if none has."""
        settled = [each for each, s in self._searches.items() if each > 1 and s.is_settled]
        if not settled:
            return 0
        return self._searches[min(settled, key=lambda each: (abs(each - bucket), each))].k

    def _with_copies(self, plain: RoundChoice) -> RoundChoice:
        """The same round, or one in which requests copy, if that has more tokens per second."""
        offers, head, size = plain.offers, plain.head, len(plain.offers)
        form = Form.of(size, plain.position, head, head)
        drafted = [_tokens_by_depth([offer], head) for offer in offers]
        copied = [list(accumulate(offer.reached, initial=1.0)) for offer in offers]
        best, tokens = plain, sum(each[head] for each in drafted)
        if size > 1 and 0 < head <= self._exact_head:
            best, tokens = _filled(plain, copied, drafted, head, head)
        if (share := self.costs.seconds(form)) is None:
            return best
        best_rate = MARGIN * tokens / share
        is_fixed = any(offer.demand.acceptance is None and offer.limit for offer in offers)
        heads = {0} if size == 1 else {head} if is_fixed else {0, head}
        for width in self.lengths if size == 1 else self.shared_lengths:
            is_whole = size > 1 or width <= len(offers[0].reached)  # alone, others are not drafted
            if size * (width + 1) > self.most_rows(size) or not is_whole:
                break
            for k in sorted(k for k in heads if k < width):
                choice, tokens = _filled(plain, copied, drafted, width, k)
                if any(choice.is_copied):
                    rate = self._copy_rate(choice, tokens, best_rate)
                    best, best_rate = (choice, rate) if rate > best_rate else (best, best_rate)
        return best

    def _copy_rate(self, choice: RoundChoice, tokens: float, best_rate: float) -> float:
        """Expected tokens a second of a round that copies, times its requests; 0 if unknown.

        A measured cost that keeps such a round from being chosen, where an estimate would not, is
        forgotten at intervals, so that it is measured again.
        """
        costs, width = self.costs, choice.width
        form = Form.of(len(choice.offers), choice.position, width, choice.head)
        if (share := costs.seconds(form)) is None:
            return 0.0
        if form.size == 1 and tokens > best_rate * share:
            plain = costs.seconds(Form(1, form.context, 0, 0)) or 0.0
            share += (1 - choice.offers[0].reached[width - 1]) * plain * self._removal[width]
        if tokens <= best_rate * share and costs.is_measured(form):
            usual, loss = costs.estimate(form), TRIAL_ROUNDS * (share - tokens / best_rate)
            is_affordable = loss <= TRIAL_SHARE * costs.seconds_since_trial(form.size)
            if usual is not None and tokens > best_rate * usual and is_affordable:
                costs.begin_trial(form)
        return tokens / share


def _tokens_by_depth(offers: Sequence[Offer], most: int) -> list[float]:
    """Expected tokens of all requests, by the K of their round."""
    totals = [float(len(offers))] * (most + 1)
    for demand, limit, _ in offers:
        if demand.acceptance is None:
            continue
        reached, drafted = 1.0, 0.0
        shares = demand.acceptance.shares
        for k in range(1, most + 1):
            if k <= limit:
                reached *= shares[k - 1]
                drafted += reached
            totals[k] += drafted
    return totals


def _filled(
    plain: RoundChoice,
    copied: Sequence[Sequence[float]],
    drafted: Sequence[Sequence[float]],
    width: int,
    head: int,
) -> tuple[RoundChoice, float]:
    """The round of that width in which each request has its better drafts, and its expected tokens.

    `copied`, `drafted`: expected tokens of each request by the number of its drafts of either kind.
    """
    pairs = [(c[min(width, len(c) - 1)], d[head]) for c, d in zip(copied, drafted, strict=True)]
    is_copied = [copied_tokens > drafted_tokens for copied_tokens, drafted_tokens in pairs]
    head = 0 if all(is_copied) else head
    choice = RoundChoice(width, head, is_copied, plain.k, plain.offers, plain.position)
    return choice, sum(max(pair) for pair in pairs)
