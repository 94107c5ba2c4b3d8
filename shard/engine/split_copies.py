"""Copied drafts over several nodes: of an answer that is alone, in lengths that all stages compute
exactly, where they pay by measured costs, links included."""

from collections.abc import Callable, Sequence
from typing import Final

from ...mtp.drafting.costs import CostTable
from ...mtp.drafting.round_policy import RoundPolicy
from ...placement.errors import ExoNodeError, InvalidFrame
from ..pipeline.copy_query import ExactCopies
from ..pipeline.link import Trip
from .request import Request
from .round_plan import NONE, RoundPlan, plan_round

UNKNOWN_KIND: Final = "kind"
"""The field that a stage of an older version names when it refuses a query."""
OLDER: Final = (
    "a stage of this model runs an older version of exo-node, which verifies no copied drafts; "
    "install the same version on its node"
)


class SplitCopies:
    """Decides what the rounds of a split model copy. All methods run on the compute thread."""

    def __init__(self, own: Callable[[], ExactCopies]) -> None:
        """`own`: the copies that the first stage computes exactly, by what is measured now."""
        self.own = own
        self._costs = CostTable()
        """Seconds of rounds from their first row to their verdict, through all stages and links."""
        self._plain = RoundPolicy(self._costs)
        self._policies: dict[Request, RoundPolicy] = {}
        """The policy of each request for which the stages agreed on lengths, or on none."""
        self._timed: tuple[Request, int, int, float] | None = None
        """The last round that `timed` recorded, until its seconds are learned."""

    def should_ask(self, request: Request) -> bool:
        """Whether the other stages are to be asked now, at a request's first copy."""
        lookup = request.drafts.lookup
        if lookup is None or request in self._policies:
            return False
        return bool(lookup.reached(request.copy_limit))

    def agree(self, request: Request, trip: Trip, seconds: float) -> ExoNodeError | None:
        """Takes the stages' answer, which was `seconds` on its way. Returns the error that ends the
        request, if any; a stage that does not know the query ends its copies alone."""
        fault, copies = trip.faults.get(request.key), trip.copies
        if fault is not None and fault.param != UNKNOWN_KIND:
            return fault
        if fault is not None or copies is None:
            copies = ExactCopies.none(OLDER)
        if not set(copies.lengths) <= set(self.own().lengths):
            return InvalidFrame(
                "copies.lengths has lengths that the first stage did not ask for",
                param="copies.lengths",
            )
        self._policies[request] = policy = RoundPolicy(self._costs)
        if not copies.lengths:
            request.drafts.lookup, request.drafts.lookup_reason = None, copies.reason
            return None
        plain, *verify = (seconds + each for each in copies.verify_s)
        ratios = {n: s / plain for n, s in zip(copies.lengths, verify, strict=True)}
        removal = {n: s / plain for n, s in zip(copies.lengths, copies.removal_s, strict=True)}
        policy.allow(copies.lengths, ratios, removal)
        return None

    def plan(self, requests: Sequence[Request], *, is_alone: bool) -> RoundPlan:
        """The next round: plain, unless a request that is alone copies."""
        policy = self._policies.get(requests[0]) if is_alone else None
        if policy is None or not policy.lengths:
            return RoundPlan(0, 0, [NONE] * len(requests))
        plan = plan_round(requests, policy, drafts=False, unread=0, running=1, in_flight=False)
        assert plan is not None, "nothing of it is in flight"
        return plan

    def timed(self, request: Request, position: int, width: int, seconds: float) -> None:
        """Records what a round of a request that was alone took; see `learn`."""
        if request.drafts.lookup is not None:
            self._timed = request, position, width, seconds

    def learn(self) -> None:
        """Learns the cost of the last timed round, while other stages compute the next one."""
        if self._timed is not None:
            request, position, width, seconds = self._timed
            self._timed = None
            self._policies.get(request, self._plain).learn(1, position, width, 0, seconds)

    def release(self, request: Request) -> None:
        """Forgets an ended request, once its last round is learned."""
        self.learn()
        _ = self._policies.pop(request, None)
