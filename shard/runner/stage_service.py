"""The gRPC services of stages: what all have in common, and that of the first stage."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable

import grpc

from ...placement.errors import ExoNodeError, InvalidFrame, InvalidRequest, PeerLost
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ..model.stage_limits import StageLimits
from ..pipeline.frames import Assembler, HiddenBlock, check_envelope, members_of
from ..pipeline.link import Key
from ..pipeline.ring import Address, OutgoingStream, Ring
from .refusal import Context, refuse
from .runner_service import EpochFence

log = logging.getLogger(__name__)

Up = asyncio.Queue[pb.Frame | None]
"""Frames for the stage before; None ends the stream."""


CHUNKS_AHEAD = 2
"""Chunks of one stream, beyond one per stage, that may wait for the compute thread.

gRPC's flow control holds back the rest; this project's first stage never sends more.
"""
ROWS_AHEAD = 32
"""Rounds of one stream that may wait for the compute thread; each request has one in flight."""


class NextStage:
    """This runner's stream to the next one; replaced when the placement is connected again."""

    def __init__(self, credentials: grpc.ChannelCredentials, fence: EpochFence) -> None:
        self._credentials = credentials
        self._fence = fence
        self._stream: OutgoingStream | None = None

    async def connect(
        self,
        address: Address,
        epoch: pb.Epoch,
        on_frame: Callable[[pb.Frame], None],
        on_lost: Callable[[PeerLost], None],
    ) -> OutgoingStream:
        """Opens a stream in the runner's epoch. Raises PeerLost, and InvalidRequest for another.

        Another head may take the runner into its epoch while the stream opens.
        """
        self._fence.require(epoch)
        stream = OutgoingStream(address, self._credentials, on_frame, on_lost)
        await stream.open()
        try:
            self._fence.require(epoch)
        except InvalidRequest:
            await stream.close()
            raise
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


class Incoming:
    """One stream from the stage before."""

    def __init__(self, limits: StageLimits, stages: int) -> None:
        self.up: Up = asyncio.Queue()
        self.assembler = Assembler(limits)
        self.chunks_ahead = asyncio.Semaphore(stages + CHUNKS_AHEAD)
        self.rows_ahead = asyncio.Semaphore(ROWS_AHEAD)

    def ahead(self, block: HiddenBlock) -> asyncio.Semaphore:
        """The semaphore that a block holds while it waits."""
        return self.rows_ahead if block.is_round else self.chunks_ahead


class StageService(peer_pb2_grpc.StageServicer):
    """Connects this stage to the next one and reads the streams from the one before."""

    def __init__(self, spec: pb.StageSpec, limits: StageLimits, following: NextStage) -> None:
        self._spec = spec
        self._limits = limits
        self._following = following
        self._incoming: set[Incoming] = set()

    @abstractmethod
    async def take(self, frame: pb.Frame, incoming: Incoming) -> None:
        """Handles a frame whose envelope is checked. Errors are returned as failures."""

    def connected(self, stream: OutgoingStream) -> None:
        """Called with each new stream to the next stage, which `NextStage` uses already."""

    @abstractmethod
    def from_below(self, frame: pb.Frame) -> None:
        """Handles a frame that the next stage sends back: a failure."""

    def lost_below(self, fault: PeerLost) -> None:
        """Called when the next stage is gone, before the streams from the stage before end, which
        notifies the first stage."""

    def end(self) -> None:
        """Ends the streams from the stage before, which would otherwise keep them open."""
        self.send_up(None)

    def send_up(self, frame: pb.Frame | None) -> None:
        """Sends a frame on all streams to the stage before: two may be open after a replacement."""
        for incoming in self._incoming:
            incoming.up.put_nowait(frame)

    async def Connect(
        self,
        request: pb.ConnectRequest,
        context: "Context",
    ) -> pb.ConnectReply:
        if request.placement != self._spec.placement:
            await refuse(context, InvalidFrame("another placement", param="placement"))
        address = Address(request.host, request.port, request.name)
        try:
            stream = await self._following.connect(
                address, request.epoch, self.from_below, self._lost_below
            )
        except (PeerLost, InvalidRequest) as fault:
            await refuse(context, fault)
        self.connected(stream)
        return pb.ConnectReply()

    async def Stream(
        self,
        request_iterator: AsyncIterator[pb.Frame],
        context: "Context",
    ) -> AsyncIterator[pb.Frame]:
        incoming = Incoming(self._limits, self._spec.num_stages)
        self._incoming.add(incoming)
        reader = asyncio.create_task(self._read(request_iterator, incoming))
        try:
            while (frame := await incoming.up.get()) is not None:
                yield frame
        finally:
            self._incoming.discard(incoming)
            reader.cancel()

    async def _read(self, frames: AsyncIterator[pb.Frame], incoming: Incoming) -> None:
        try:
            async for frame in frames:
                try:
                    check_envelope(frame, self._limits)
                    await self.take(frame, incoming)
                except ExoNodeError as fault:
                    self.send_failures(frame, fault, incoming)
        finally:
            incoming.up.put_nowait(None)

    def send_failures(self, frame: pb.Frame, fault: BaseException, incoming: Incoming) -> None:
        """Returns an error for each request of a frame to the stage before."""
        for key in members_of(frame):
            incoming.up.put_nowait(self.failure(key, fault))

    def failure(self, key: Key, fault: BaseException) -> pb.Frame:
        """A request's error as a frame for the first stage."""
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
            request=key[0],
            attempt=key[1],
            failure=failure,
        )

    def _lost_below(self, fault: PeerLost) -> None:
        log.warning("%s", fault.message)
        self.lost_below(fault)
        self.end()  # so the stage before this one notices, and finally the first one


class RingService(StageService):
    """The Stage service of the first stage: passes frames of the last stage to its `Ring`."""

    def __init__(
        self, spec: pb.StageSpec, limits: StageLimits, following: NextStage, ring: Ring
    ) -> None:
        super().__init__(spec, limits, following)
        self._ring = ring

    async def take(self, frame: pb.Frame, incoming: Incoming) -> None:
        match frame.WhichOneof("kind"):
            case "hidden":
                if (block := incoming.assembler.add(frame)) is not None:
                    self._ring.answer(block)
            case "release" | "renew":
                pass  # every stage has processed it
            case "prefix":
                self._ring.prefix(frame)
            case "copies":
                self._ring.copies(frame)
            case "computed":
                self._ring.computed(frame)
            case "failure":
                self._ring.fail(frame)
            case kind:
                raise unknown_kind(kind)

    def connected(self, stream: OutgoingStream) -> None:
        self._ring.connect(stream)

    def from_below(self, frame: pb.Frame) -> None:
        if frame.HasField("failure"):  # the next stage sends nothing else back
            self._ring.fail(frame)

    def lost_below(self, fault: PeerLost) -> None:
        self._ring.lose(fault)


def unknown_kind(kind: str | None) -> InvalidFrame:
    """The error for a frame of a kind that this stage does not handle."""
    return InvalidFrame(f"a stage takes no frame of kind {kind}", param="kind")
