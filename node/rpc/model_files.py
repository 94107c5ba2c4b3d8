"""A model's files between nodes: the service that sends them, and the client that reads them."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing, closing
from typing import Any, Final, Protocol, TypeVar

import grpc
import grpc.aio

from ...placement.errors import ExoNodeError, PeerLost
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ..machine.timing import Timing
from ..trust.certificates import node_name
from .channels import Channels, reply, stream

Context = grpc.aio.ServicerContext[Any, Any]
Result = TypeVar("Result")

BESIDE_ANSWERS: Final = 32 << 20
"""Bytes a second that a node sends for all copies together while answers run on it."""
_READERS: Final = 8
_WINDOW: Final = 1 << 20
"""The number of bytes that a peer must send within `stall_s`, in any chunks."""


class Range(Protocol):
    """A range of one file."""

    def read(self) -> bytes:
        """Returns the next chunk, empty at the end; blocks."""
        ...

    def close(self) -> None: ...


class FileSource(Protocol):
    """The files that a node serves. Every method blocks, and raises ExoNodeError to refuse."""

    def offer(self, model: str) -> pb.ModelOffer: ...

    def digest(self, model: str, path: str) -> str: ...

    def open(self, request: pb.FileRequest, /) -> Range: ...


class ModelFilesService(peer_pb2_grpc.ModelFilesServicer):
    """Serves a source's files; `busy` is whether answers run here, which copies must not slow."""

    def __init__(
        self,
        source: FileSource,
        busy: Callable[[], bool],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._sleep = sleep
        self._source = source
        self._busy = busy
        self._reading = asyncio.Semaphore(_READERS)
        self._pace = asyncio.Lock()

    async def Offer(self, request: pb.ModelOfferRequest, context: "Context") -> pb.ModelOffer:
        return await _run(lambda: self._source.offer(request.model))

    async def Digest(self, request: pb.FileRequest, context: "Context") -> pb.FileDigest:
        async with self._reading:
            digest = await _run(lambda: self._source.digest(request.model, request.path))
        return pb.FileDigest(sha256=digest)

    async def Read(
        self, request: pb.FileRequest, context: "Context"
    ) -> AsyncIterator[pb.FileChunk]:
        async with self._reading:
            with ExitStack() as files:
                file = await _run_to_its_end(
                    lambda: files.enter_context(closing(self._source.open(request)))
                )
                while data := await _run_to_its_end(file.read):
                    yield pb.FileChunk(data=data)
                    if self._busy():
                        async with self._pace:
                            await self._sleep(len(data) / BESIDE_ANSWERS)


async def _run(work: Callable[[], Result]) -> Result:
    try:
        return await asyncio.to_thread(work)
    except OSError as fault:
        raise ExoNodeError(f"the file cannot be read ({fault.strerror})") from fault


async def _run_to_its_end(work: Callable[[], Result]) -> Result:
    """Runs `work`, which opens a file or reads from one, on a thread: a cancel waits for it."""
    running = asyncio.ensure_future(_run(work))
    try:
        return await asyncio.shield(running)
    finally:
        if not running.done():
            _ = await asyncio.wait([running])
            _ = running.exception()  # marks it as retrieved


class ModelFilesClient:
    """One peer's ModelFiles service; every method raises the peer's refusal, or PeerLost."""

    def __init__(self, channels: Channels, timing: Timing) -> None:
        self._channels = channels
        self._timing = timing

    async def offer(self, address: str, node: NodeId, model: str) -> pb.ModelOffer:
        call = self._stub(address, node).Offer(
            pb.ModelOfferRequest(model=model), timeout=self._timing.long_reply_s
        )
        return await reply(call, address)

    async def digest(self, address: str, node: NodeId, model: str, path: str) -> str:
        call = self._stub(address, node).Digest(
            pb.FileRequest(model=model, path=path), timeout=self._timing.digest_timeout_s
        )
        return (await reply(call, address)).sha256

    async def read(
        self, address: str, node: NodeId, request: pb.FileRequest
    ) -> AsyncGenerator[bytes]:
        """Yields the chunks of a range; a peer that takes too long for one MiB is lost.

        The time that the caller spends on a chunk does not count.
        """
        read = self._stub(address, node).Read
        patience_s, bytes_ = self._timing.stall_s, 0
        async with aclosing(stream(read, request, address)) as chunks:
            while True:
                start = time.monotonic()
                try:
                    async with asyncio.timeout(patience_s):
                        chunk = await anext(chunks, None)
                except TimeoutError as fault:
                    raise PeerLost(
                        f"{address} sent {bytes_} bytes in {self._timing.stall_s:g} s"
                    ) from fault
                if chunk is None:
                    return
                patience_s -= time.monotonic() - start
                bytes_ += len(chunk.data)
                if bytes_ >= _WINDOW:
                    patience_s, bytes_ = self._timing.stall_s, 0
                yield chunk.data

    def _stub(self, address: str, node: NodeId) -> peer_pb2_grpc.ModelFilesStub:
        channel = self._channels.to(address, node_name(node), bulk=True)
        return peer_pb2_grpc.ModelFilesStub(channel)
