"""An answer's claim on its model's placement, kept over one head after another.

Made on the node whose client asked. The head is asked for a placement and for no part of the
answer: where it is lost the answer runs on, and its claim is made again at the next head.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from ...placement.errors import ExoNodeError, HeadGone, PeerLost
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ...proto.bounds import MAX_REAL
from ..machine.timing import ChatTiming
from .requests import GenerationRequest

log = logging.getLogger(__name__)


class Heads(Protocol):
    """The head, whichever node it is."""

    async def head(self) -> NodeId:
        """Waits for it while there is an election. Raises HeadGone where that takes too long."""
        ...

    def acquire(
        self, head: NodeId, asked: pb.AcquireRequest
    ) -> AsyncGenerator[pb.AcquireEvent, None]:
        """See `claims.Claims.acquire`. HeadGone says that another head is to be asked."""
        ...

    async def report(self, head: NodeId, told: pb.AttemptReport) -> None:
        """Raises PeerLost."""
        ...


class Claim:
    """One answer's. `close` gives it up."""

    def __init__(
        self,
        heads: Heads,
        request: GenerationRequest,
        timing: ChatTiming,
        clock: Callable[[], float] = time.monotonic,
        *,
        release: bool = False,
    ) -> None:
        """`release`: for no answer, but to have the model unloaded."""
        self._heads = heads
        self._asked = pb.AcquireRequest(
            model=request.model,
            request=request.id,
            num_draft_tokens=request.num_draft_tokens,
            draft_policy=request.draft_policy or "",
            background=request.background,
            keep_alive_s=_keep_alive(request),
            trusted=request.trusted,
            client=request.client,
            release=release,
        )
        self._timing = timing
        self._clock = clock
        self._head: NodeId | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()

    async def acquire(
        self, resumes: pb.Resumption | None = None
    ) -> AsyncGenerator[str | pb.Placed, None]:
        """What is waited for, in words that may be empty; then the placement, last.

        The first item says that the model is known and the request allowed. `resumes`: the answer
        was lost on the placement that is held so far. Raises what placing raises, and PeerLost
        where no head answers.
        """
        await self._release()
        asked = pb.AcquireRequest()
        asked.CopyFrom(self._asked)
        if resumes is not None:
            asked.resumes.CopyFrom(resumes)
        news: asyncio.Queue[str | pb.Placed | ExoNodeError] = asyncio.Queue()
        self._keeping = asyncio.create_task(self._keep(asked, news), name="an answer's claim")
        while True:
            said = await self._next(news)
            if isinstance(said, ExoNodeError):
                raise said
            yield said
            if isinstance(said, pb.Placed):
                return

    def tell(self, told: pb.AttemptReport) -> None:
        """For the head, as far as there is one; nothing waits for it."""
        if (head := self._head) is not None:
            task = asyncio.create_task(self._report(head, told))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def close(self) -> None:
        await self._release()
        _ = await asyncio.gather(*self._reports, return_exceptions=True)

    async def _next(
        self, news: "asyncio.Queue[str | pb.Placed | ExoNodeError]"
    ) -> str | pb.Placed | ExoNodeError:
        """What the keeping task says, or the defect that it ended by."""
        assert self._keeping is not None
        following = asyncio.ensure_future(news.get())
        try:
            first = asyncio.FIRST_COMPLETED
            _ = await asyncio.wait([following, self._keeping], return_when=first)
            if not following.done() and news.empty():
                self._keeping.result()
            return await following
        finally:
            _ = following.cancel()

    async def _keep(
        self, asked: pb.AcquireRequest, news: "asyncio.Queue[str | pb.Placed | ExoNodeError]"
    ) -> None:
        """Asks one head after another, until it is cancelled or refused."""
        timing = self._timing
        resumes = asked.HasField("resumes")
        patience = timing.resume_within_s if resumes else timing.fresh_within_s
        heard = self._clock()
        while True:
            try:
                self._head = await self._heads.head()
                async with aclosing(self._heads.acquire(self._head, asked)) as events:
                    async for event in events:
                        heard = self._clock()
                        self._take(event, asked, news)
                raise HeadGone("the head ended a claim without a word")
            except HeadGone as fault:
                self._head = None
                if not asked.holding and self._clock() - heard > patience:
                    news.put_nowait(_headless(fault))
                    return
            except ExoNodeError as fault:
                if asked.holding:
                    log.info("an answer goes on without a claim: %s", fault.message)
                else:
                    news.put_nowait(fault)
                return
            await asyncio.sleep(timing.again_s)

    def _take(
        self,
        event: pb.AcquireEvent,
        asked: pb.AcquireRequest,
        news: "asyncio.Queue[str | pb.Placed | ExoNodeError]",
    ) -> None:
        if event.WhichOneof("event") == "waiting":
            news.put_nowait(event.waiting.step)
        elif not asked.holding:
            asked.holding = event.placed.placement
            asked.ClearField("resumes")
            news.put_nowait(event.placed)

    async def _report(self, head: NodeId, told: pb.AttemptReport) -> None:
        with contextlib.suppress(PeerLost):  # the next head learns from the next report
            await self._heads.report(head, told)

    async def _release(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            _ = keeping.cancel()
            _ = await asyncio.gather(keeping, return_exceptions=True)


def _keep_alive(request: GenerationRequest) -> float | None:
    """The wire has no infinity; its greatest number is as good."""
    return None if request.keep_alive_s is None else min(request.keep_alive_s, MAX_REAL)


def _headless(fault: HeadGone) -> PeerLost:
    return PeerLost(
        "the cluster has no head that answers; `exo-node status` shows which nodes do. "
        f"Try again in a few seconds ({fault.message})"
    )
