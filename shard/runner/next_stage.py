"""The stream from this runner to the next one of its placement."""

from collections.abc import Callable

import grpc

from ...placement.errors import InvalidRequest, PeerLost
from ...proto import peer_pb2 as pb
from ..pipeline.streams import Address, OutgoingStream
from .epoch_fence import EpochFence


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
        """Raises PeerLost, and InvalidRequest unless `epoch` is the runner's own.

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
