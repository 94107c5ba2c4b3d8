"""What a piece of work gave a request, and how a verdict becomes that."""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, cast

import mlx.core as mx

from ...mtp.batch_verdict import Judged, RowDrafts, judge
from ...mtp.finite import tokens_of
from ...mtp.sampling import greedy_choice
from ...mtp.seams import as_row
from ...mtp.steps import Step
from ...mtp.types import FinishReason, Forward, Round
from .request import Request

SHARED: Final = "a forward that several requests shared failed"


class Outcome(NamedTuple):
    """What a piece of work gave one request."""

    request: Request
    made: Step | None = None
    reason: FinishReason | None = None
    """Why the answer ends with it."""
    fault: BaseException | None = None
    """What went wrong, in place of `made`."""
    again: bool = False
    """Whether the round is computed once more, without drafts."""


class Flight(Protocol):
    """Work that was begun and not read yet."""

    @property
    def requests(self) -> tuple[Request, ...]: ...

    @property
    def may_be_followed(self) -> bool:
        """Whether more work for these requests may be issued before it is read."""
        ...

    @property
    def is_away(self) -> bool:
        """Whether other nodes have it; else this one's device does."""
        ...

    @property
    def is_back(self) -> bool:
        """Whether it was away, and reading it waits for nobody."""
        ...

    @property
    def is_chunk(self) -> bool:
        """Whether it is rows of a prompt or of a log."""
        ...


class Ids(Judged):
    """A verdict of B plain tokens: `table` (B, 1) has nothing else."""

    @property
    def tokens(self) -> mx.array:
        return self.table

    def read(self) -> list[tuple[int, list[int], bool]]:
        return [(0, ids, True) for ids in cast("list[list[int]]", self.table.tolist())]


def judged(
    requests: Sequence[Request],
    logits: mx.array,
    drafts: RowDrafts | None,
    limits: Sequence[int],
    starts: Sequence[int],
) -> Judged:
    """As `judge`; of plain greedy tokens the verdict is the ids alone."""
    plain = drafts is None and all(
        request.sampler.is_argmax and request.top_logprobs is None for request in requests
    )
    if not plain:
        return judge(requests, logits, drafts, limits, starts)
    ids, finite = greedy_choice(logits[:, 0])
    return Ids(tokens_of(finite, ids)[:, None], [None] * len(requests))


def counted(
    request: Request,
    verdict: Judged,
    index: int,
    ids: list[int],
    forward: Forward,
    *,
    drafted: int = 0,
    accepted: int = 0,
) -> Outcome:
    """Adds the ids that a round may emit to the answer: the round, and whether the answer ends.

    `index`: of the request in the verdict. `forward`: the one that gave it.
    """
    try:
        reason, ids = request.cut(ids)
        scores = verdict.scores[index]
        logprobs = () if scores is None else scores.read(ids)
    except BaseException as fault:  # this request's: its stop condition met it
        return Outcome(request, fault=fault)
    made = Round(tuple(ids), drafted, min(accepted, len(ids)), forward, logprobs)
    return Outcome(request, made, reason)


def counted_again(request: Request, rounds: Sequence[Round]) -> FinishReason | None:
    """The next rounds of a log were rebuilt: why the answer ended with them, if it did."""
    reason = None
    for recorded in rounds:
        request.sampler.commit(as_row(recorded.tokens))
        reason, _ = request.cut(list(recorded.tokens))
    request.replayed += len(rounds)
    return reason
