"""The Stage service of a stage after the first one: computes frames and passes them on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ...proto import peer_pb2 as pb
from ..engine.compute import ComputeThread, as_job
from ..engine.stage import StageOutput, StageWorker
from ..model.stage_limits import StageLimits
from ..pipeline.copy_query import ExactCopies
from ..pipeline.frames import HiddenBlock, cut
from ..pipeline.stage_queue import StageQueue
from .stage_service import Incoming, NextStage, StageService, unknown_kind

T = TypeVar("T")


class WorkerService(StageService):
    """The Stage service of all stages but the first: its `StageWorker` computes the frames."""

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
            case "copies":
                self._answer_copies(frame, incoming)
            case kind:
                raise unknown_kind(kind)

    def from_below(self, frame: pb.Frame) -> None:
        if frame.HasField("failure"):  # the next stage sends nothing else back
            self.send_up(frame)

    def _compute_then(
        self,
        work: Callable[[], T],
        then: Callable[["Future[T]"], None],
        block: HiddenBlock | None = None,
    ) -> None:
        """Runs `work` on the compute thread, then `then` on the event loop with its future, which
        is cancelled if the job was dropped.

        `block`: the block that `work` computes, or None.
        """
        loop, (run, future) = asyncio.get_running_loop(), as_job(work)
        future.add_done_callback(lambda result: loop.call_soon_threadsafe(then, result))
        if block is None or block.is_round:
            members = () if block is None else [member.key for member in block.members]
            self._queue.add_round(members, run)
        else:
            self._queue.add_chunk(block.members[0].key, run, future.cancel)
        self._compute.post(self._run_next)

    def _run_next(self) -> None:
        """Runs the next job, if there is one. Called once for each job that was added, of which
        some may have been dropped."""
        if (run := self._queue.next()) is not None:
            run()

    def _forward(self, block: HiddenBlock, frame: pb.Frame, incoming: Incoming) -> None:
        def finished(future: "Future[StageOutput]") -> None:
            incoming.ahead(block).release()
            if future.cancelled():
                return  # the request has ended
            if (fault := future.exception()) is not None:
                self.send_failures(frame, fault, incoming)
                return
            passed = future.result()
            for key, fault in passed.faults:
                incoming.up.put_nowait(self.failure(key, fault))
            if passed.block is not None:
                self._send_on(passed.block)

        self._compute_then(lambda: self._worker.forward(block), finished, block)

    def _send_on(self, block: HiddenBlock) -> None:
        limits, spec = self._limits, self._spec
        wire = spec.placement, spec.stage + 1, limits.dtype, limits.hidden_size
        self._following.send(list(cut(block, *wire)))

    def _answer_prefix(self, frame: pb.Frame, incoming: Incoming) -> None:
        """Answers a prefix query: passes on the ends that this stage has cached, too."""
        key, query = (frame.request, int(frame.attempt)), frame.prefix
        tokens, schedule, ends = list(query.tokens), list(query.schedule), list(query.held)

        def finished(future: "Future[list[int]]") -> None:
            if (fault := future.exception()) is not None:
                self.send_failures(frame, fault, incoming)
                return
            query.held[:] = future.result()
            self._following.send([frame])

        self._compute_then(lambda: self._worker.cached_ends(key, tokens, schedule, ends), finished)

    def _answer_copies(self, frame: pb.Frame, incoming: Incoming) -> None:
        """Answers a query for copies: passes on those that this stage computes exactly, too."""
        key, copies = (frame.request, int(frame.attempt)), ExactCopies.from_wire(frame.copies)

        def finished(future: "Future[ExactCopies]") -> None:
            if (fault := future.exception()) is not None:
                self.send_failures(frame, fault, incoming)
                return
            frame.copies.CopyFrom(future.result().to_wire())
            self._following.send([frame])

        self._compute_then(lambda: self._worker.agree_on_copies(key, copies), finished)

    def _apply(self, frame: pb.Frame, incoming: Incoming) -> None:
        """Releases or renews a request here, and then at the next stages."""
        key = frame.request, int(frame.attempt)
        work = self._worker.release if frame.HasField("release") else self._worker.renew

        def finished(future: "Future[None]") -> None:
            if (fault := future.exception()) is not None:
                self.send_failures(frame, fault, incoming)
            if self._spec.stage + 1 < self._spec.num_stages:  # after the last is the generator
                self._following.send([frame])

        self._compute_then(lambda: work(key), finished)
