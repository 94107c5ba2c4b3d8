"""What every stage's gRPC service does: frames from the stage above are read, failures go back."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator

from ...placement.errors import ExoNodeError, InvalidFrame, PeerLost
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ..model.stage_limits import StageLimits
from ..pipeline.frames import Assembler, HiddenBlock, check_envelope, members_of
from ..pipeline.link import Key
from ..pipeline.streams import Address, OutgoingStream
from .next_stage import NextStage
from .refusal import Context, refuse

log = logging.getLogger(__name__)

Up = asyncio.Queue[pb.Frame | None]
"""What goes back to the stage above; None ends the stream."""


CHUNKS_AHEAD = 2
"""Chunks of one stream, beyond one for each stage, that may wait for the compute thread.

gRPC's flow control holds the rest: there is one only where a generator sends more than ours does.
"""
ROWS_AHEAD = 32
"""The same for rounds, of which each request in flight has one."""


class Incoming:
    """One stream from the stage above."""

    def __init__(self, limits: StageLimits, stages: int) -> None:
        self.up: Up = asyncio.Queue()
        self.assembler = Assembler(limits)
        self.chunks_ahead = asyncio.Semaphore(stages + CHUNKS_AHEAD)
        self.rows_ahead = asyncio.Semaphore(ROWS_AHEAD)

    def ahead(self, block: HiddenBlock) -> asyncio.Semaphore:
        """What a block takes while it waits."""
        return self.rows_ahead if block.is_round else self.chunks_ahead


class StageService(peer_pb2_grpc.StageServicer):
    """Connects this stage to the next one and reads the streams from the one above."""

    def __init__(self, spec: pb.StageSpec, limits: StageLimits, following: NextStage) -> None:
        self._spec = spec
        self._limits = limits
        self._following = following
        self._incoming: set[Incoming] = set()

    @abstractmethod
    async def take(self, frame: pb.Frame, incoming: Incoming) -> None:
        """A frame from above, its envelope checked. What is raised goes back up as a failure."""

    @abstractmethod
    def connected(self, stream: OutgoingStream) -> None:
        """There is another stream to the next stage."""

    @abstractmethod
    def from_below(self, frame: pb.Frame) -> None:
        """What the next stage sends back: a failure."""

    @abstractmethod
    def lost_below(self, fault: PeerLost) -> None:
        """The next stage is gone; the streams from above end after this."""

    def end(self) -> None:
        """Ends the streams from above, each of which a neighbour would keep open for ever."""
        self.send_up(None)

    def send_up(self, frame: pb.Frame | None) -> None:
        """To every stage above: after it was replaced, two streams may be open for a while."""
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
            stream = await self._following.connect(address, self.from_below, self._lost_below)
        except PeerLost as fault:
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
        """Back up: what went wrong with all that a frame is about."""
        for key in members_of(frame):
            incoming.up.put_nowait(self.failure(key, fault))

    def failure(self, key: Key, fault: BaseException) -> pb.Frame:
        """What went wrong with a request, for the generator."""
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
        self.end()  # which tells the stage before this one, and so the generator


def unknown_kind(kind: str | None) -> InvalidFrame:
    """The error of a frame that no stage of this sort takes."""
    return InvalidFrame(f"a stage takes no frame of kind {kind}", param="kind")
