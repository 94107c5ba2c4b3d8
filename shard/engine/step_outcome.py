"""The outcome of a piece of work for a request, and how a verdict becomes one."""

from collections.abc import Sequence
from typing import Final, NamedTuple, cast

import mlx.core as mx

from ...mtp.batch_verdict import BatchVerdict, RowDrafts, judge
from ...mtp.finite import tokens_of
from ...mtp.logprobs import score
from ...mtp.sampling import greedy_choice
from ...mtp.seams import as_row
from ...mtp.types import FinishReason, Forward, Prefilled, Round, Step, TokenLogprobs
from .request import Request

SHARED: Final = "a forward that several requests shared failed"


class StepOutcome(NamedTuple):
    """The outcome of a piece of work for one request."""

    request: Request
    step: Step | None = None
    reason: FinishReason | None = None
    """Why the answer ends with it."""
    fault: BaseException | None = None
    """The error, in place of `step`."""
    is_retried: bool = False
    """Whether the round is computed once more, without drafts."""


class Ids(BatchVerdict):
    """A verdict of B plain tokens: `table` (B, 1) holds nothing else."""

    @property
    def tokens(self) -> mx.array:
        return self.table

    def read(self) -> list[tuple[int, list[int], bool]]:
        return [(0, ids, True) for ids in cast("list[list[int]]", self.table.tolist())]


def verdict_of(
    requests: Sequence[Request],
    logits: mx.array,
    drafts: RowDrafts | None,
    limits: Sequence[int],
    starts: Sequence[int],
) -> BatchVerdict:
    """The verdict of `judge`; for plain greedy tokens it consists of the ids alone."""
    is_plain = drafts is None and all(
        request.sampler.is_argmax and request.top_logprobs is None for request in requests
    )
    if not is_plain:
        return judge(requests, logits, drafts, limits, starts)
    ids, finite = greedy_choice(logits[:, 0])
    return Ids(tokens_of(finite, ids)[:, None], [None] * len(requests))


def count_round(
    request: Request,
    verdict: BatchVerdict,
    index: int,
    ids: list[int],
    forward: Forward,
    *,
    drafted: int = 0,
    accepted: int = 0,
    is_copied: bool = False,
) -> StepOutcome:
    """Adds the ids that a round may emit to the answer, which may end with one of them.

    `index`: the request's in the verdict. `forward`: the forward that the verdict is about.
    """
    try:
        reason, ids = request.extend(ids)
        scores = verdict.scores[index]
        logprobs = () if scores is None else scores.read(ids)
    except BaseException as fault:  # its stop condition's: it ends this request alone
        return StepOutcome(request, fault=fault)
    accepted = min(accepted, len(ids))
    request.round_size = forward.batch
    round_ = Round(tuple(ids), drafted, accepted, forward, logprobs, is_copied)
    return StepOutcome(request, round_, reason)


def count_replayed(request: Request, rounds: Sequence[Round]) -> FinishReason | None:
    """Counts rounds of a log that were rebuilt. Returns why the answer ends with them, if so."""
    reason = None
    for round_ in rounds:
        request.sampler.commit(as_row(round_.tokens))
        reason, _ = request.extend(list(round_.tokens))
    request.replay.rebuilt += len(rounds)
    return reason


def scored(request: Request, logits: mx.array, begin: int) -> StepOutcome:
    """Progress with the log-probabilities of the tokens after a forward's rows, which begin at
    `begin` and gave `logits` (n, V). In front of them all, the prompt's first token.

    The distribution is the model's own, without the request's penalties and bias.
    """
    prompt, end = request.prompt, request.rows
    following = prompt[begin + 1 : end + 1]
    first = (TokenLogprobs(prompt[0], 0.0),) if begin == 0 else ()
    entries = tuple[TokenLogprobs, ...]()
    if following:
        x = logits[: len(following)].astype(mx.float32)
        x = x - mx.logsumexp(x, axis=-1, keepdims=True)
        entries = score(x, as_row(following), request.top_logprobs or 0).read(following)
    return StepOutcome(request, Prefilled(end, len(prompt), (*first, *entries)))
