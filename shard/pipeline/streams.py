"""The gRPC streams between the runners of neighbouring stages."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
import grpc.aio

from ...placement.errors import PeerLost
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.grpc_options import CHANNEL_OPTIONS

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a runner; `name` must be in its certificate."""

    host: str
    port: int
    name: str


class OutgoingStream:
    """Frames to the next stage, in order. All methods run on the event loop."""

    def __init__(
        self,
        address: Address,
        credentials: grpc.ChannelCredentials,
        on_frame: Callable[[pb.Frame], None],
        on_lost: Callable[[PeerLost], None],
    ) -> None:
        """`on_frame` takes frames that the next stage sends back; `on_lost` is called once, when
        the stream breaks."""
        name = ("grpc.ssl_target_name_override", address.name)
        self._channel = grpc.aio.secure_channel(
            f"{address.host}:{address.port}", credentials, options=[*CHANNEL_OPTIONS, name]
        )
        self._address = address
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._frames: asyncio.Queue[pb.Frame] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._call: grpc.aio.StreamStreamCall[pb.Frame, pb.Frame] | None = None

    async def open(self, timeout_s: float = 5.0) -> None:
        """Connects. Raises PeerLost if the next stage is out of reach or of another cluster."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError as fault:
            await self._channel.close()  # or it would keep trying to connect
            raise PeerLost(f"the next stage at {self._where} does not answer") from fault
        self._call = peer_pb2_grpc.StageStub(self._channel).Stream()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    def send(self, frames: Iterable[pb.Frame]) -> None:
        """Queues frames, to be sent in order."""
        for frame in frames:
            self._frames.put_nowait(frame)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        _ = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    @property
    def _where(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    async def _write(self) -> None:
        assert self._call is not None
        while True:
            frame = await self._frames.get()
            try:
                await self._call.write(frame)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader sees the same end, with its status

    async def _read(self) -> None:
        assert self._call is not None
        try:
            async for frame in self._call:
                self._on_frame(frame)
        except grpc.aio.AioRpcError as fault:
            _LOG.info("%s: %s: %s", self._where, fault.code().name, fault.details())
        self._on_lost(PeerLost(f"the next stage at {self._where} is gone"))
