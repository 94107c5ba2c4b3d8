"""A round in flight, and its outcome when it is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ...mtp.batch_verdict import BatchVerdict
from ...mtp.finite import NO_TOKEN, DraftNotFinite, NotFinite
from ...mtp.types import Forward, Round
from .request import Request
from .round_plan import RoundPlan
from .scheduler import Flight
from .step_outcome import StepOutcome, count_round

if TYPE_CHECKING:
    from .batch import Batch


@dataclass(slots=True, eq=False)
class JudgedRound(Flight):
    """A round whose logits are judged."""

    plan: RoundPlan
    drafted: Sequence[int]
    """Number of drafts of each request."""
    verdict: BatchVerdict

    @property
    def width(self) -> int:
        """Rows of each request in the forward."""
        return self.verdict.tokens.shape[1]


@dataclass(slots=True, eq=False)
class IssuedRound(JudgedRound):
    """A round in flight on this node's device.

    It `may_be_followed` if caches and drafter have the accepted rows already.
    """

    batch: "Batch"
    hidden: mx.array | None = None


def kept_rows_of(outcome: StepOutcome, accepted: int) -> int:
    """Rows of a round that stay in the caches; 0 if it is repeated without drafts."""
    return 0 if outcome.is_retried else _num_emitted(outcome) or accepted + 1


def outcome_of(
    flight: JudgedRound, index: int, accepted: int, ids: list[int], sound: bool
) -> StepOutcome:
    """The outcome of a round that is read, for one of its requests.

    `accepted`, `ids`, `sound`: from `BatchVerdict.read`.
    """
    request, drafted = flight.requests[index], flight.drafted[index]
    start = request.rows
    request.pending_tokens -= drafted + 1
    if request.phase == "finished":
        request.rows += accepted + 1
        return StepOutcome(request)
    if NO_TOKEN in ids:
        return _not_finite(flight, request, start + 1 + ids.index(NO_TOKEN))
    request.checks_target = False
    if not sound:
        request.drafts.parked_at = start + 1
    forward = Forward(start, flight.width, len(flight.requests))
    outcome = count_round(
        request,
        flight.verdict,
        index,
        ids,
        forward,
        drafted=drafted,
        accepted=accepted,
        is_copied=bool(flight.plan.copies[index]),
    )
    request.rows += _num_emitted(outcome) or accepted + 1
    return outcome


def _not_finite(flight: JudgedRound, request: Request, position: int) -> StepOutcome:
    """The outcome if logits are not finite, which the target or a draft's row may have caused.

    Masked attention multiplies the rows of later drafts by 0, and 0 times NaN is NaN.
    """
    if flight.width == 1:
        return StepOutcome(request, fault=NotFinite(position))
    if len(flight.requests) > 1 or flight.may_be_followed:
        request.rows += 1
        return StepOutcome(request, fault=DraftNotFinite(request.rows))
    request.checks_target = True
    return StepOutcome(request, is_retried=True)


def _num_emitted(outcome: StepOutcome) -> int:
    """Tokens of its round, at least one; 0 if it has no round."""
    return len(outcome.step.tokens) if isinstance(outcome.step, Round) else 0
