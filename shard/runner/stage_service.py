"""The gRPC services of a runner: Stage for its neighbours, Runner for nodes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import grpc
import grpc.aio

from ...placement.errors import ExoNodeError, InvalidFrame, InvalidRequest, PeerLost
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ..engine.compute import ComputeThread
from ..model.stage_limits import StageLimits
from ..pipeline.frames import Assembler, HiddenBlock, check_envelope, cut
from ..pipeline.stage import Adopted, StageWorker
from ..pipeline.streams import Address, OutgoingStream, Ring

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

BLOCKS_AHEAD = 4
"""Blocks of one stream that may wait for the compute thread; gRPC's flow control holds the rest."""


async def refuse(context: "Context", fault: ExoNodeError) -> NoReturn:
    """Ends a call with an error of the tree, which `placement.errors.from_code` rebuilds."""
    invalid = isinstance(fault, InvalidRequest | InvalidFrame)
    status = grpc.StatusCode.INVALID_ARGUMENT if invalid else grpc.StatusCode.UNAVAILABLE
    metadata = (("exo-code", fault.code), ("exo-param", fault.param or ""))
    await context.abort(status, fault.message, metadata)


class NextStage:
    """This runner's stream to the next one; replaced when the placement is connected anew."""

    def __init__(self, credentials: grpc.ChannelCredentials) -> None:
        self._credentials = credentials
        self._stream: OutgoingStream | None = None

    async def connect(
        self,
        address: Address,
        on_frame: Callable[[pb.Frame], None],
        on_lost: Callable[[PeerLost], None],
    ) -> OutgoingStream:
        stream = OutgoingStream(address, self._credentials, on_frame, on_lost)
        await stream.open()
        previous, self._stream = self._stream, stream
        if previous is not None:
            await previous.close()
        return stream

    def send(self, frames: list[pb.Frame]) -> None:
        if self._stream is not None:
            self._stream.send(frames)

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()


class StageService(peer_pb2_grpc.StageServicer):
    """Frames in, frames on. On the generator the frames that come in are answers."""

    def __init__(
        self,
        spec: pb.StageSpec,
        expected: StageLimits,
        compute: ComputeThread,
        following: NextStage,
        worker: StageWorker | None,
        ring: Ring | None,
    ) -> None:
        """`worker` on every stage but the generator's, which has `ring`."""
        self._spec = spec
        self._expected = expected
        self._compute = compute
        self._following = following
        self._worker = worker
        self._ring = ring
        self._upstream: set[asyncio.Queue[pb.Frame | None]] = set()

    def end(self) -> None:
        """Ends the streams from above, each of which a neighbour would keep open for ever."""
        for up in self._upstream:
            up.put_nowait(None)

    async def Connect(
        self,
        request: pb.ConnectRequest,
        context: "Context",
    ) -> pb.ConnectReply:
        if request.placement != self._spec.placement:
            await refuse(context, InvalidFrame("another placement", param="placement"))
        address = Address(request.host, request.port, request.name)
        try:
            stream = await self._following.connect(address, self._from_below, self._lost_below)
        except PeerLost as fault:
            await refuse(context, fault)
        if self._ring is not None:
            self._ring.connect(stream)
        return pb.ConnectReply()

    async def Stream(
        self,
        request_iterator: AsyncIterator[pb.Frame],
        context: "Context",
    ) -> AsyncIterator[pb.Frame]:
        up: asyncio.Queue[pb.Frame | None] = asyncio.Queue()
        self._upstream.add(up)
        reader = asyncio.create_task(self._read(request_iterator, up))
        try:
            while (frame := await up.get()) is not None:
                yield frame
        finally:
            self._upstream.discard(up)
            reader.cancel()

    async def _read(
        self, frames: AsyncIterator[pb.Frame], up: "asyncio.Queue[pb.Frame | None]"
    ) -> None:
        assembler = Assembler(self._expected)
        ahead = asyncio.Semaphore(BLOCKS_AHEAD)
        try:
            async for frame in frames:
                try:
                    await self._take(frame, assembler, ahead, up)
                except ExoNodeError as fault:
                    up.put_nowait(self._failure(frame, fault))
        finally:
            up.put_nowait(None)

    async def _take(
        self,
        frame: pb.Frame,
        assembler: Assembler,
        ahead: asyncio.Semaphore,
        up: "asyncio.Queue[pb.Frame | None]",
    ) -> None:
        check_envelope(frame, self._expected)
        match frame.WhichOneof("kind"):
            case "hidden":
                block = assembler.add(frame)
                if block is None:
                    return
                if self._ring is not None:
                    self._ring.answer(block)
                    return
                _ = await ahead.acquire()
                self._forward(block, frame, ahead, up)
            case "rollback" | "release":
                assembler.forget(frame.request)
                self._tell_worker(frame, up)
            case "renew":
                self._tell_worker(frame, up)
            case "adopt":
                assembler.forget(frame.request)
                self._adopt(frame, up)
            case "failure" if self._ring is not None:
                self._ring.fail(frame)
            case kind:
                raise InvalidFrame(f"a stage takes no frame of kind {kind}", param="kind")

    def _forward(
        self,
        block: HiddenBlock,
        frame: pb.Frame,
        ahead: asyncio.Semaphore,
        up: "asyncio.Queue[pb.Frame | None]",
    ) -> None:
        assert self._worker is not None
        worker, loop = self._worker, asyncio.get_running_loop()

        def finished(future: "Future[list[HiddenBlock]]") -> None:
            ahead.release()
            fault = future.exception()
            if fault is not None:
                up.put_nowait(self._failure(frame, fault))
                return
            self._send_on(future.result())

        future = self._compute.submit(lambda: worker.forward(block))
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(finished, done))

    def _send_on(self, blocks: Sequence[HiddenBlock]) -> None:
        e, s = self._expected, self._spec
        for block in blocks:
            frames = cut(block, s.placement, s.stage + 1, e.dtype, e.hidden_size)
            self._following.send(list(frames))

    def _adopt(self, frame: pb.Frame, up: "asyncio.Queue[pb.Frame | None]") -> None:
        """A new attempt goes on with what stages hold; up the stream goes what this one lacks."""
        if self._worker is None:
            return  # it came round the ring
        worker, loop = self._worker, asyncio.get_running_loop()
        name, attempt, position = frame.request, int(frame.attempt), int(frame.adopt.position)

        def finished(future: "Future[Adopted]") -> None:
            if (fault := future.exception()) is not None:
                up.put_nowait(self._failure(frame, fault))
                return
            if self._spec.stage + 1 < self._spec.num_stages:
                self._following.send([frame])
            adopted = future.result()
            if adopted.answer is not None:
                self._send_on([adopted.answer])
            if adopted.held < position:
                lacked = pb.Missing(position=position, held=adopted.held)
                up.put_nowait(
                    pb.Frame(
                        placement=frame.placement, request=name, attempt=attempt, missing=lacked
                    )
                )

        adopt, answer = worker.adopt, frame.adopt.answer
        future = self._compute.submit(lambda: adopt(name, attempt, position, answer=answer))
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(finished, done))

    def _missing_below(self, frame: pb.Frame) -> None:
        """The next stage was replaced: it gets what this one sent the lost one."""
        assert self._worker is not None
        worker, loop = self._worker, asyncio.get_running_loop()
        name, attempt = frame.request, int(frame.attempt)
        held, position = int(frame.missing.held), int(frame.missing.position)

        def finished(future: "Future[list[HiddenBlock]]") -> None:
            if (fault := future.exception()) is not None:
                for up in self._upstream:
                    up.put_nowait(self._failure(frame, fault))
                return
            self._send_on(future.result())

        future = self._compute.submit(lambda: worker.missing(name, attempt, held, position))
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(finished, done))

    def _tell_worker(self, frame: pb.Frame, up: "asyncio.Queue[pb.Frame | None]") -> None:
        """Rollback, release and renew: here first, then at the stages behind this one."""
        if self._worker is None:
            return  # it came round the ring: every stage has seen it
        worker, loop = self._worker, asyncio.get_running_loop()
        name, attempt = frame.request, int(frame.attempt)

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
                up.put_nowait(self._failure(frame, fault))
            if self._spec.stage + 1 < self._spec.num_stages:
                self._following.send([frame])

        future = self._compute.submit(apply)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(finished, done))

    def _failure(self, frame: pb.Frame, fault: BaseException) -> pb.Frame:
        if not isinstance(fault, ExoNodeError):
            log.error("stage %d failed", self._spec.stage, exc_info=fault)
            # Not PeerLost: the stage lives, and the same frame would fail again.
            kind = type(fault).__name__
            fault = ExoNodeError(f"stage {self._spec.stage} failed: {kind}; see its node's log")
        failure = pb.Failure(
            code=fault.code,
            message=fault.message,
            param=fault.param or "",
            stage=self._spec.stage,
        )
        return pb.Frame(
            placement=self._spec.placement,
            request=frame.request,
            attempt=frame.attempt,
            failure=failure,
        )

    def _from_below(self, frame: pb.Frame) -> None:
        """What the next stage sends up: what it lacks, or a failure, which the generator gets."""
        kind = frame.WhichOneof("kind")
        if kind == "missing":
            if self._ring is not None:
                self._ring.missing(frame)
            else:
                self._missing_below(frame)
            return
        if kind != "failure":
            return
        if self._ring is not None:
            self._ring.fail(frame)
            return
        for up in self._upstream:
            up.put_nowait(frame)

    def _lost_below(self, fault: PeerLost) -> None:
        log.warning("%s", fault.message)
        if self._ring is not None:
            self._ring.lose(fault)
        self.end()  # which tells the stage before this one, and so the generator


class RunnerService(peer_pb2_grpc.RunnerServicer):
    """Says that this process lives, and what it did last."""

    def __init__(self, spec: pb.StageSpec, state: Callable[[], pb.RunnerState]) -> None:
        """`state` must not wait for the compute thread."""
        self._spec = spec
        self._state = state

    async def Ping(self, request: pb.PingRequest, context: "Context") -> pb.RunnerState:
        if (request.placement, request.stage) != (self._spec.placement, self._spec.stage):
            # The port of a runner that is gone may be another's by now.
            await refuse(context, PeerLost("another stage listens here now"))
        return self._state()
