"""A stage behind the generator: frames in, frames on, and back up what failed."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ...placement.errors import PeerLost
from ...proto import peer_pb2 as pb
from ..engine.compute import ComputeThread, as_job
from ..engine.stage import Passed, StageWorker
from ..model.stage_limits import StageLimits
from ..pipeline.frames import HiddenBlock, cut
from ..pipeline.stage_queue import StageQueue
from ..pipeline.streams import OutgoingStream
from .next_stage import NextStage
from .stage_service import Incoming, StageService, unknown_kind

T = TypeVar("T")


class WorkerService(StageService):
    """The Stage service of any stage but the generator: its `StageWorker` computes the frames."""

    def __init__(
        self,
        spec: pb.StageSpec,
        limits: StageLimits,
        following: NextStage,
        compute: ComputeThread,
        worker: StageWorker,
    ) -> None:
        super().__init__(spec, limits, following)
        self._compute = compute
        self._worker = worker
        self._queue = StageQueue()

    async def take(self, frame: pb.Frame, incoming: Incoming) -> None:
        match frame.WhichOneof("kind"):
            case "hidden":
                if (block := incoming.assembler.add(frame)) is not None:
                    _ = await incoming.ahead(block).acquire()
                    self._forward(block, frame, incoming)
            case "release" | "renew":
                if frame.HasField("release"):
                    _ = self._queue.drop(frame.request, int(frame.attempt))
                self._apply(frame, incoming)
            case "prefix":
                self._answer_prefix(frame, incoming)
            case kind:
                raise unknown_kind(kind)

    def connected(self, stream: OutgoingStream) -> None:
        """`NextStage` sends on it from now on."""

    def from_below(self, frame: pb.Frame) -> None:
        if frame.HasField("failure"):  # the next stage sends nothing else back
            self.send_up(frame)

    def lost_below(self, fault: PeerLost) -> None:
        """The generator learns of it from the streams that end."""

    def _compute_then(
        self,
        work: Callable[[], T],
        then: Callable[["Future[T]"], None],
        block: HiddenBlock | None = None,
    ) -> None:
        """`then` hears of the result on the event loop, or that it was dropped: cancelled.

        `block`: what `work` computes; None: nothing.
        """
        loop, (run, future) = asyncio.get_running_loop(), as_job(work)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(then, done))
        if block is None or block.is_round:
            members = () if block is None else [member.key for member in block.members]
            self._queue.add_round(members, run)
        else:
            self._queue.add_chunk(block.members[0].key, run, future.cancel)
        self._compute.post(self._run_next)

    def _run_next(self) -> None:
        """As many times as something was added; what was dropped is not there any more."""
        if (run := self._queue.next()) is not None:
            run()

    def _forward(self, block: HiddenBlock, frame: pb.Frame, incoming: Incoming) -> None:
        def finished(future: "Future[Passed]") -> None:
            incoming.ahead(block).release()
            if future.cancelled():
                return  # the request is over
            if (fault := future.exception()) is not None:
                self.send_failures(frame, fault, incoming)
                return
            passed = future.result()
            for key, fault in passed.faults:
                incoming.up.put_nowait(self.failure(key, fault))
            if passed.leaving is not None:
                self._send_on(passed.leaving)

        self._compute_then(lambda: self._worker.forward(block), finished, block)

    def _send_on(self, block: HiddenBlock) -> None:
        limits, spec = self._limits, self._spec
        wire = spec.placement, spec.stage + 1, limits.dtype, limits.hidden_size
        self._following.send(list(cut(block, *wire)))

    def _answer_prefix(self, frame: pb.Frame, incoming: Incoming) -> None:
        """Where a new attempt may begin: what this stage lacks goes no further."""
        key, query = (frame.request, int(frame.attempt)), frame.prefix
        tokens, schedule, held = list(query.tokens), list(query.schedule), list(query.held)

        def finished(future: "Future[list[int]]") -> None:
            if (fault := future.exception()) is not None:
                self.send_failures(frame, fault, incoming)
                return
            query.held[:] = future.result()
            self._following.send([frame])

        self._compute_then(lambda: self._worker.held(key, tokens, schedule, held), finished)

    def _apply(self, frame: pb.Frame, incoming: Incoming) -> None:
        """Release and renew: here first, then at the stages behind this one."""
        key = frame.request, int(frame.attempt)
        work = self._worker.release if frame.HasField("release") else self._worker.renew

        def finished(future: "Future[None]") -> None:
            if (fault := future.exception()) is not None:
                self.send_failures(frame, fault, incoming)
            if self._spec.stage + 1 < self._spec.num_stages:  # behind the last is the generator
                self._following.send([frame])

        self._compute_then(lambda: work(key), finished)
