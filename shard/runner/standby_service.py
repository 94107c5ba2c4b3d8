"""The gRPC service and the calls by which a runner's spare follows it; see `state_store.py`."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from functools import partial

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ...placement.errors import ExoNodeError, InvalidFrame
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.grpc_options import CHANNEL_OPTIONS
from ..engine.compute import ComputeThread
from ..model.stage_limits import StageLimits
from ..model.stage_model import StageModel
from ..pipeline.frames import MAX_DATA
from ..pipeline.state_sender import MAX_COPY, StateSender
from ..pipeline.state_store import StateStore
from ..pipeline.streams import RENEW_S, Address
from .refusal import Context, refuse

log = logging.getLogger(__name__)

KEEP_TIMEOUT_S = 30.0
HOLD_TIMEOUT_S = 5.0


class StateReplicator:
    """Sends a spare what the copier has for it. Made and closed on the event loop."""

    def __init__(
        self,
        model: StageModel,
        expected: StageLimits,
        compute: ComputeThread,
        credentials: grpc.ChannelCredentials,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._compute = compute
        self._credentials = credentials
        self._placement = expected.placement
        self._copies: asyncio.Queue[pb.StateCopy] = asyncio.Queue()
        self._held: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self._channel: grpc.aio.Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reached = False
        """Whether the spare answers; while it does not, nothing is copied for it."""
        self.state_sender = StateSender(
            model,
            expected,
            time.monotonic,
            lambda copy: loop.call_soon_threadsafe(self._copies.put_nowait, copy),
            lambda names: loop.call_soon_threadsafe(self._held.put_nowait, names),
        )

    async def follow(self, address: Address) -> None:
        """From now on that spare is sent copies, and no other one."""
        await self.close()
        name = ("grpc.ssl_target_name_override", address.name)
        self._channel = grpc.aio.secure_channel(
            f"{address.host}:{address.port}", self._credentials, options=[*CHANNEL_OPTIONS, name]
        )
        stub = peer_pb2_grpc.StandbyStub(self._channel)
        self._copies, self._held = asyncio.Queue(), asyncio.Queue()
        self._tasks = [
            asyncio.create_task(self._send(stub)),
            asyncio.create_task(self._hold(stub)),
        ]
        self._follows(reached=True)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        _ = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._follows(reached=False)
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _send(self, stub: "peer_pb2_grpc.StandbyStub") -> None:
        while True:
            copy = await self._copies.get()
            begun = time.monotonic()
            try:
                _ = await stub.Keep(_pieces(copy), timeout=KEEP_TIMEOUT_S)
            except grpc.aio.AioRpcError as fault:
                log.info("the spare did not keep a copy: %s", fault.details())
                if fault.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    self._tell(partial(self.state_sender.refused, copy.request))
                else:
                    self._follows(reached=False)
                continue
            self._tell(partial(self.state_sender.delivered, time.monotonic() - begun))

    async def _hold(self, stub: "peer_pb2_grpc.StandbyStub") -> None:
        """Says which requests live: at once where one ended, else now and then."""
        while True:
            try:
                async with asyncio.timeout(RENEW_S):
                    names = await self._held.get()
            except TimeoutError:
                names = self.state_sender.names
            request = pb.HoldRequest(placement=self._placement, requests=names)
            try:
                _ = await stub.Hold(request, timeout=HOLD_TIMEOUT_S)
            except grpc.aio.AioRpcError as fault:
                log.debug("the spare does not answer: %s", fault.details())
                continue
            if not self._reached:
                self._follows(reached=True)

    def _follows(self, *, reached: bool) -> None:
        self._reached = reached
        self._tell(partial(self.state_sender.follow, following=reached))

    def _tell(self, job: Callable[[], None]) -> None:
        """The copier belongs to the compute thread, and nobody waits for it: it may be busy."""
        self._compute.submit(job).add_done_callback(_look)


def _look(told: "Future[None]") -> None:
    if not told.cancelled() and (fault := told.exception()) is not None:
        log.error("copying to the spare failed", exc_info=fault)


def _pieces(copy: pb.StateCopy) -> Iterator[pb.CopyPiece]:
    data = copy.SerializeToString()
    for begin in range(0, len(data), MAX_DATA):
        yield pb.CopyPiece(data=data[begin : begin + MAX_DATA])


class StandbyService(peer_pb2_grpc.StandbyServicer):
    """Both sides: a runner at work follows instructions, a spare keeps what it is sent."""

    def __init__(
        self, expected: StageLimits, follower: StateReplicator, copies: StateStore
    ) -> None:
        self._expected = expected
        self._follower = follower
        self._copies = copies

    async def Follow(self, request: pb.FollowRequest, context: "Context") -> pb.FollowReply:
        if request.placement != self._expected.placement:
            await refuse(context, InvalidFrame("another placement", param="placement"))
        if why := self._copies.why_not:
            return pb.FollowReply(why_not=why)
        await self._follower.follow(Address(request.host, request.port, request.name))
        return pb.FollowReply()

    async def Keep(
        self, request_iterator: AsyncIterator[pb.CopyPiece], context: "Context"
    ) -> pb.KeepReply:
        pieces, size = list[bytes](), 0
        async for piece in request_iterator:
            pieces.append(piece.data)
            size += len(piece.data)
            if size > 2 * MAX_COPY:
                await refuse(context, InvalidFrame("a copy is too long", param="copy"))
        try:
            # Beside the event loop: a long prompt's first copy has many megabytes.
            await asyncio.to_thread(self._keep, b"".join(pieces))
        except ExoNodeError as fault:
            await refuse(context, fault)
        return pb.KeepReply()

    def _keep(self, data: bytes) -> None:
        try:
            copy = pb.StateCopy.FromString(data)
        except DecodeError as fault:
            raise InvalidFrame("the pieces are no StateCopy", param="copy") from fault
        self._copies.keep(copy)

    async def Hold(self, request: pb.HoldRequest, context: "Context") -> pb.HoldReply:
        if request.placement != self._expected.placement:
            await refuse(context, InvalidFrame("another placement", param="placement"))
        self._copies.hold(request.requests)
        return pb.HoldReply()
