"""An answer's claim on its model's placement, renewed at one head after another.

The entry node makes it. The head provides a placement and takes no part in the answer: if the head
is lost, the answer continues and its claim is made again at the next head.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from ...placement.errors import NO_HEAD, ExoNodeError, HeadGone, ModelNotFound, PeerLost
from ...placement.ids import ModelId, NodeId, PlacementId
from ...proto import peer_pb2 as pb
from ...proto.bounds import MAX_REAL
from ...proto.fields import filled
from ..machine.tasks import cancel
from ..machine.timing import Timing
from ..runners.runner_client import Endpoint
from .images import as_read
from .requests import GenerationRequest
from .wire import prompt_to_wire

log = logging.getLogger(__name__)


class Heads(Protocol):
    """Calls to the node that is the head."""

    async def head(self) -> NodeId:
        """Waits for the head during an election. Raises HeadGone if that takes too long."""
        ...

    def acquire(
        self, head: NodeId, request: pb.AcquireRequest
    ) -> AsyncGenerator[pb.AcquireEvent, None]:
        """See `claims.Claims.acquire`. Raises HeadGone if another node became the head."""
        ...

    async def report(self, head: NodeId, report: pb.AttemptReport) -> None:
        """Reports the end of an attempt to the head. Raises PeerLost."""
        ...

    def generators(self, model: ModelId) -> Mapping[PlacementId, Endpoint]:
        """The generators of a model's placements that are ready, as heartbeats describe them."""
        ...

    def has_readers(self, model: ModelId) -> bool:
        """Whether runners only read prompts for that model's generators."""
        ...


class Runners(Protocol):
    """The runners as the entry node calls them."""

    def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Generates an answer; closing it cancels. Raises PeerLost, or the runner's own error."""
        ...

    async def encode(self, endpoint: Endpoint, request: pb.EncodeRequest) -> pb.EncodeReply:
        """Tokenises a prompt on the runner. Raises PeerLost, or the runner's own error."""
        ...

    async def find_prefix(self, endpoint: Endpoint, request: pb.GenerateRequest) -> pb.CachedPrefix:
        """How much of a request's prompt the runner has cached; it waits for no computation.

        Raises PeerLost, also where encoding the prompt takes too long, and the runner's refusal.
        """
        ...

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        """The runner's state, within a second. Raises PeerLost."""
        ...

    async def forget(self, stage: Endpoint) -> None:
        """Closes the connection to a runner that is lost."""
        ...

    def near(self, stage: Endpoint) -> Endpoint:
        """The endpoint of a runner, with the address that is quickest from this node."""
        ...


class Claim:
    """The claim of one answer; `close` releases it."""

    def __init__(
        self,
        heads: Heads,
        request: GenerationRequest,
        timing: Timing,
        *,
        prefixes: Sequence[pb.ReplicaPrefix] = (),
        embeds: bool | None = None,
        release: bool = False,
    ) -> None:
        """`prefixes`: what replicas have cached of the prompt. `embeds`: whether it wants
        embeddings or an answer; None: neither. `release`: the claim serves no answer, it has the
        model unloaded."""
        self._heads = heads
        self._profile = request.profile
        stay_s = request.keep_alive_s
        if stay_s is not None:  # the wire has no infinity; its greatest number is as good
            stay_s = min(stay_s, MAX_REAL)
        self._request = filled(
            pb.AcquireRequest,
            request,
            request=request.id,
            background=request.sharing.background,
            keep_alive_s=stay_s,
            release=release,
            prefixes=prefixes,
            embeds=embeds,
        )
        self._timing = timing
        self._head: NodeId | None = None
        self._task: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()

    async def acquire(
        self, resumes: pb.Resumption | None = None
    ) -> AsyncGenerator[str | pb.Placed, None]:
        """Progress texts, which may be empty, and last the placement.

        The first item means that the model is known and the request allowed. `resumes` describes
        the attempt that was lost on the previous placement. Raises what placing raises, and
        PeerLost if no head answers.
        """
        await self._release()
        claim_request = pb.AcquireRequest()
        claim_request.CopyFrom(self._request)
        if resumes is not None:
            claim_request.resumes.CopyFrom(resumes)
        news: asyncio.Queue[str | pb.Placed | ExoNodeError | None] = asyncio.Queue()
        hold = self._hold(claim_request, news.put_nowait)
        task = self._task = asyncio.create_task(hold, name="an answer's claim")
        task.add_done_callback(lambda _: news.put_nowait(None))
        while (item := await news.get()) is not None:
            if isinstance(item, ModelNotFound) and self._profile:
                message = f"the profile '{self._profile}' names it: {item.message}"
                raise ModelNotFound(message, param="model") from item
            if isinstance(item, ExoNodeError):
                raise item
            yield item
            if isinstance(item, pb.Placed):
                return
        task.result()  # raises the defect that ended it

    def send_report(self, report: pb.AttemptReport) -> None:
        """Sends a report to the head if there is one, without waiting for it."""
        if (head := self._head) is not None:
            task = asyncio.create_task(self._report(head, report))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def close(self) -> None:
        await self._release()
        _ = await asyncio.gather(*self._reports, return_exceptions=True)

    async def _hold(
        self,
        claim_request: pb.AcquireRequest,
        tell: Callable[[str | pb.Placed | ExoNodeError], None],
    ) -> None:
        """Claims at one head after another until cancelled or refused."""
        timing = self._timing
        resumes = claim_request.HasField("resumes")
        patience = timing.stall_s if resumes else timing.election_s
        last_event_at = time.monotonic()
        while True:
            try:
                self._head = await self._heads.head()
                async with aclosing(self._heads.acquire(self._head, claim_request)) as events:
                    async for event in events:
                        last_event_at = time.monotonic()
                        if event.WhichOneof("event") == "waiting":
                            tell(event.waiting.step)
                        elif not claim_request.holding:
                            claim_request.holding = event.placed.placement
                            claim_request.ClearField("resumes")
                            tell(event.placed)
                raise HeadGone("the head ended a claim without a word")
            except HeadGone as fault:
                self._head = None
                if not claim_request.holding and time.monotonic() - last_event_at > patience:
                    tell(PeerLost(f"{NO_HEAD} ({fault.message})"))
                    return
            except ExoNodeError as fault:
                if claim_request.holding:
                    log.info("an answer continues without a claim: %s", fault.message)
                else:
                    tell(fault)
                return
            await asyncio.sleep(timing.tick_s)

    async def _report(self, head: NodeId, report: pb.AttemptReport) -> None:
        with contextlib.suppress(PeerLost):  # the next head learns from the next report
            await self._heads.report(head, report)

    async def _release(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await cancel([task])


async def replica_prefixes(
    heads: Heads, runners: Runners, request: GenerationRequest, timing: Timing
) -> list[pb.ReplicaPrefix]:
    """Asks each replica of the model how much of the prompt it has cached; none if no other
    node can read a part of it.

    All of them render the same prompt, so one that takes much longer than the first is not waited
    for. It may be chosen all the same.
    """
    sharing = request.sharing
    generators = heads.generators(request.model)
    is_alone = len(generators) < 2 and not (generators and heads.has_readers(request.model))
    if is_alone or (sharing.HasField("cache") and not sharing.cache):
        return []
    calls = {
        name: asyncio.ensure_future(
            runners.find_prefix(
                runners.near(each),
                prompt_to_wire(as_read(request, each.ready.images)[0], name, each),
            )
        )
        for name, each in generators.items()
    }
    try:
        _ = await asyncio.wait(calls.values(), return_when=asyncio.FIRST_COMPLETED)
        _ = await asyncio.wait(calls.values(), timeout=timing.quiet_s)
    finally:
        for call in calls.values():
            _ = call.cancel()
        outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
    prefixes: list[pb.ReplicaPrefix] = []
    for name, outcome in zip(calls, outcomes, strict=True):
        if isinstance(outcome, pb.CachedPrefix):
            prefixes.append(pb.ReplicaPrefix(placement=name, prefix=outcome))
        elif not isinstance(outcome, ExoNodeError | asyncio.CancelledError):
            raise outcome
    return prefixes
