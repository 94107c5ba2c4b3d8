"""A stage behind the generator: frames in, frames on, and back up what failed."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from ...placement.errors import PeerLost
from ...proto import peer_pb2 as pb
from ..engine.compute import ComputeThread, as_job
from ..model.stage_limits import StageLimits
from ..pipeline.frames import HiddenBlock, cut_all
from ..pipeline.stage import Outcome, StageWorker
from ..pipeline.stage_queue import Kind, StageQueue, kind_of
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
                    _ = await incoming.ahead(kind_of(block)).acquire()
                    self._forward(block, frame, incoming)
            case "together":
                if parts := self.parts(frame, incoming):
                    _ = await incoming.ahead("row").acquire()
                    self._forward_all(parts, incoming)
            case "rollback" | "release":
                incoming.assembler.forget(frame.request)
                if frame.HasField("release"):
                    _ = self._queue.drop(frame.request, int(frame.attempt))
                self._apply(frame, incoming)
            case "renew":
                self._apply(frame, incoming)
            case "prefix":
                incoming.assembler.forget(frame.request)
                self._ask_prefix(frame, incoming)
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
        requests: Sequence[str],
        work: Callable[[], T],
        then: Callable[["Future[T]"], None],
        *,
        attempt: int = 0,
        kind: Kind = "word",
    ) -> None:
        """`then` hears of the result on the event loop, or that it was dropped: cancelled."""
        loop, (run, future) = asyncio.get_running_loop(), as_job(work)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(then, done))
        self._queue.add(requests, attempt, kind, run, future.cancel)
        self._compute.post(self._run_next)

    def _run_next(self) -> None:
        """As many times as something was added; what was dropped is not there any more."""
        if (run := self._queue.next()) is not None:
            run()

    def _forward(self, block: HiddenBlock, frame: pb.Frame, incoming: Incoming) -> None:
        kind = kind_of(block)

        def finished(future: "Future[list[HiddenBlock]]") -> None:
            incoming.ahead(kind).release()
            if future.cancelled():
                return  # the request is over
            if (fault := future.exception()) is not None:
                incoming.up.put_nowait(self.failure(frame, fault))
                return
            self._send_on(future.result())

        forward, attempt = self._worker.forward, block.attempt
        self._compute_then(
            [block.request], lambda: forward(block), finished, attempt=attempt, kind=kind
        )

    def _forward_all(
        self, parts: Sequence[tuple[pb.Frame, HiddenBlock]], incoming: Incoming
    ) -> None:
        def finished(future: "Future[list[Outcome]]") -> None:
            incoming.ahead("row").release()
            if (fault := future.exception()) is not None:
                for frame, _ in parts:
                    incoming.up.put_nowait(self.failure(frame, fault))
                return
            going = list[HiddenBlock]()
            for (frame, _), outcome in zip(parts, future.result(), strict=True):
                if isinstance(outcome, Exception):
                    incoming.up.put_nowait(self.failure(frame, outcome))
                else:
                    going += outcome
            self._send_on(going)

        blocks = [block for _, block in parts]
        requests = [block.request for block in blocks]
        self._compute_then(requests, lambda: self._worker.forward_all(blocks), finished, kind="row")

    def _send_on(self, blocks: Sequence[HiddenBlock]) -> None:
        limits, spec = self._limits, self._spec
        following = spec.stage + 1
        frames = cut_all(blocks, spec.placement, following, limits.dtype, limits.hidden_size)
        if frames:
            self._following.send(frames)

    def _pass_on(self, frame: pb.Frame) -> None:
        """To the next stage; behind the last one is the generator, where it comes from."""
        if self._spec.stage + 1 < self._spec.num_stages:
            self._following.send([frame])

    def _ask_prefix(self, frame: pb.Frame, incoming: Incoming) -> None:
        """Where a new attempt may begin: what this stage lacks goes no further."""
        name, attempt, asked = frame.request, int(frame.attempt), frame.prefix
        tokens, schedule, held = list(asked.tokens), list(asked.schedule), list(asked.held)

        def finished(future: "Future[list[int]]") -> None:
            if (fault := future.exception()) is not None:
                incoming.up.put_nowait(self.failure(frame, fault))
                return
            asked.held[:] = future.result()
            self._following.send([frame])

        look = self._worker.held
        self._compute_then([name], lambda: look(name, attempt, tokens, schedule, held), finished)

    def _apply(self, frame: pb.Frame, incoming: Incoming) -> None:
        """Rollback, release and renew: here first, then at the stages behind this one."""
        worker, name, attempt = self._worker, frame.request, int(frame.attempt)

        def apply() -> None:
            match frame.WhichOneof("kind"):
                case "rollback":
                    worker.rollback(name, attempt, int(frame.rollback.position))
                case "renew":
                    worker.renew(name, attempt)
                case _:
                    worker.release(name, attempt)

        def finished(future: "Future[None]") -> None:
            if (fault := future.exception()) is not None:
                incoming.up.put_nowait(self.failure(frame, fault))
            self._pass_on(frame)

        # A renewal need not wait for what is queued of its request.
        ordered = [] if frame.HasField("renew") else [name]
        self._compute_then(ordered, apply, finished)
