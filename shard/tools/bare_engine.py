"""An engine over a model without text, for measurements and tests."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ...mtp.drafting.lookup_drafts import PromptLookup
from ...mtp.drafting.round_policy import DraftDemand, RoundPolicy
from ...mtp.sampler import Sampler
from ...mtp.schedule import prefill_ends
from ...mtp.seams import StopCondition
from ...mtp.targets import Target
from ...mtp.types import FinishReason, Round, Sampling, Step
from ...proto import peer_pb2 as pb
from ..engine.drafter import DraftModel
from ..engine.engine import Engine
from ..engine.executor import LocalExecutor
from ..engine.request import DraftProgress, Parameters, Request
from ..engine.round_forms import RoundForms
from ..engine.scheduler import Scheduler

ROWS = 1 << 20
"""Rows of all requests together: more than any caller needs."""


class NoStopCondition:
    """The stop condition of an answer that only its budget ends."""

    def push(self, token: int) -> FinishReason | None:
        """Never ends the answer."""
        del token
        return None


def bare_engine(
    target: Target,
    make_caches: Callable[[], list[Any]],
    draft_model: DraftModel | None = None,
    *,
    chunk: int = 512,
    runs_ahead: bool = False,
    policy: RoundPolicy | None = None,
) -> Engine:
    """An engine without prefixes, whose clock stands still so that its schedule is deterministic.

    `runs_ahead`: rounds are issued before the earlier ones are read. `policy`: chooses them.
    """

    def clock() -> float:
        return 0.0

    executor = LocalExecutor(
        target,
        make_caches,
        draft_model,
        clock,
        policy=policy,
        forms=RoundForms.of(make_caches(), runs_ahead),
    )
    depth = 2 if runs_ahead else 1
    scheduler = Scheduler(ROWS, chunk, depth=depth)
    return Engine(executor, scheduler, clock)


def bare_request(
    prompt: Sequence[int],
    max_tokens: int,
    chunk: int = 512,
    k: int = 0,
    *,
    sampler: Sampler | None = None,
    stop_condition: StopCondition | None = None,
    lookup: PromptLookup | None = None,
    top_logprobs: int | None = None,
    name: str = "",
    alone: bool = False,
    turn_ends: Collection[int] = (),
    **fields: Any,
) -> Request:
    """A request that drafts `k` tokens each round; without `sampler` greedily."""
    ends = prefill_ends(prompt, chunk, turn_ends)
    chooser = sampler or Sampler(Sampling(), 0, (), prompt)
    parameters = Parameters(
        name,
        1,
        prompt,
        Sampling(),
        pb.Limits(max_tokens=max_tokens),
        pb.Drafting(num_draft_tokens=k),
        pb.Output(top_logprobs=top_logprobs),
        pb.Sharing(alone=alone),
    )
    drafts = DraftProgress(DraftDemand(k), lookup)
    return Request(parameters, ends, chooser, stop_condition or NoStopCondition(), drafts, **fields)


def steps_of(engine: Engine, requests: Sequence[Request]) -> list[list[Step]]:
    """Answers all requests at the same time; returns the steps of each.

    Raises the error of any of them.
    """
    steps_by_request: list[list[Step]] = [[] for _ in requests]
    ends = list[FinishReason | BaseException]()
    for request, steps in zip(requests, steps_by_request, strict=True):
        request.deliver, request.finish = steps.append, ends.append
        engine.add(request)
    while engine.step():
        for steps, request in zip(steps_by_request, requests, strict=True):
            request.events_read = len(steps)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return steps_by_request


def rounds_of(engine: Engine, requests: Sequence[Request]) -> list[tuple[Round, ...]]:
    """Answers all requests like `steps_of`; returns only the rounds of each."""
    steps_by_request = steps_of(engine, requests)
    return [tuple(step for step in steps if isinstance(step, Round)) for steps in steps_by_request]


def ids_of(rounds: Sequence[Round]) -> tuple[int, ...]:
    """The tokens of an answer."""
    return tuple(token for each in rounds for token in each.tokens)
