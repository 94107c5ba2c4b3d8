"""States after prompts' prefixes, between the runners of replicas, as files of the disk tier."""

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Final

import grpc
import grpc.aio

from ...placement.errors import ExoNodeError, InvalidRequest, PeerLost, StateLost
from ...placement.ids import NodeId, runner_name
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.grpc_options import CHANNEL_OPTIONS
from ...proto.uncut_reads import next_reply
from ..checkpoint.files import Buffer
from ..checkpoint.prefix_files import PrefixReceiver, ReceivedPrefix
from ..engine.compute import ComputeThread
from ..engine.prefixes.lookup import PrefixLookup
from ..engine.request import Parameters
from ..model.stage_limits import StageLimits

log = logging.getLogger(__name__)

CONNECT_S: Final = 2.0
"""Limit for each address: a runner that is not reached is not waited for."""
SILENCE_S: Final = 10.0
"""Between two pieces. The first one waits for a step of the other runner, and for checksums."""
FETCH_S: Final = 60.0
"""Limit for all of it, the wait for another transfer included; then the prompt is computed."""


CHUNK_BYTES: Final = 3 << 20
"""Bytes of one message: gRPC's default limit is 4 MiB, and each has a way through several threads.
"""
MAX_READERS: Final = 4
"""States that are sent at the same time: each keeps its arrays in memory until it is sent."""


class PrefixFetcher:
    """Fetches one state at a time. All that wait for their requests to begin have bounded bytes."""

    def __init__(
        self,
        key: str,
        credentials: grpc.ChannelCredentials,
        lookup: PrefixLookup,
        limit: int,
        context_length: int,
    ) -> None:
        """`key`: see `persistent_files.shared_prefix_key`. `limit`: bytes of all states
        that are in memory beside the caches."""
        self._key = key
        self._credentials = credentials
        self._lookup = lookup
        self._limit = limit
        self._context_length = context_length
        self._turn = asyncio.Lock()
        self._waiting = weakref.WeakSet[ReceivedPrefix]()
        """States whose requests may not have begun yet."""

    async def fetch(self, source: pb.PrefixSource, request: Parameters) -> ReceivedPrefix | None:
        """A state that has more of the prompt's rows than are cached here. None, with the reason in
        the log, if there is none or anything fails: the prompt is then computed."""
        if not request.uses_cache:
            return None
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(FETCH_S), self._turn:
                received = await self._receive(source, request)
        except (ExoNodeError, grpc.RpcError, TimeoutError, ValueError) as fault:
            why = reason_of(fault)
            log.warning("the state after a prompt was not copied from %s: %s", source.node, why)
            return None
        seconds = time.monotonic() - began_at
        text = "copied the state after %d rows of a prompt from %s: %d bytes in %.2f s"
        log.info(text, received.rows, source.node, received.size, seconds)
        return received

    async def _receive(self, source: pb.PrefixSource, request: Parameters) -> ReceivedPrefix:
        salt, drafts = request.sharing.cache_salt, request.k > 0
        find = partial(self._lookup.expected, drafts=drafts, context_length=self._context_length)
        expected = await asyncio.to_thread(find, self._key, request.prompt, salt)
        in_memory = sum(each.held_bytes for each in self._waiting)
        receiver = PrefixReceiver(self._limit - in_memory, expected.check)
        wire = pb.PrefixRequest(
            placement=source.placement,
            tokens=request.prompt,
            cache_salt=salt,
            drafts=drafts,
            key=self._key,
        )
        async with connected(source, self._credentials) as channel:
            call = peer_pb2_grpc.GeneratorStub(channel).ReadPrefix(wire)
            try:
                while True:
                    chunk = await next_reply(call, SILENCE_S)
                    if not isinstance(chunk, pb.FileChunk):  # the end
                        received = receiver.finish()
                        self._waiting.add(received)
                        return received
                    await asyncio.to_thread(receiver.feed, chunk.data)
            finally:
                _ = call.cancel()


@asynccontextmanager
async def connected(
    source: pb.PrefixSource, credentials: grpc.ChannelCredentials
) -> AsyncGenerator[grpc.aio.Channel]:
    """A channel to a runner, by the first of its addresses that answers. Raises PeerLost."""
    ready = source.ready
    addresses = [(ready.host, ready.port), *((a.host, a.port) for a in ready.addresses)]
    name = ("grpc.ssl_target_name_override", runner_name(NodeId(source.node)))
    for host, port in dict.fromkeys(addresses):
        target = f"{host}:{port}"
        options = [*CHANNEL_OPTIONS, name]
        channel = grpc.aio.secure_channel(target, credentials, options=options)
        try:
            if await _is_ready(channel):
                yield channel
                return
        finally:
            await channel.close()
    raise PeerLost("its runner does not answer")


async def _is_ready(channel: grpc.aio.Channel) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            await channel.channel_ready()
    except TimeoutError:
        return False
    return True


def reason_of(fault: BaseException) -> str:
    """Why another runner did not do what it was asked, for a person."""
    if isinstance(fault, grpc.aio.AioRpcError):
        return f"{fault.code().name.lower()}: {fault.details()}"
    if isinstance(fault, TimeoutError):
        return "it takes too long"
    return str(fault) or type(fault).__name__


class PrefixSender:
    """Streams states of one whole model. Without a reader nothing of a stream is left."""

    def __init__(
        self, limits: StageLimits, key: str, lookup: PrefixLookup, compute: ComputeThread
    ) -> None:
        """`key`: see `persistent_files.shared_prefix_key`."""
        self._limits = limits
        self.key = key
        self._lookup = lookup
        self._compute = compute
        self._readers = 0

    async def send(self, request: pb.PrefixRequest) -> AsyncGenerator[pb.FileChunk, None]:
        """The file's content. Raises ExoNodeError.

        The compute thread only looks up the arrays; checksums and pieces are made on other threads.
        """
        self._check(request)
        self._readers += 1
        try:
            find = partial(
                self._lookup.export,
                self.key,
                list(request.tokens),
                request.cache_salt,
                drafts=request.drafts,
            )
            pieces = await asyncio.wrap_future(self._compute.submit(find))
            if pieces is None:
                raise StateLost("the state after the prompt is not cached any more")
            async with aclosing(chunks_of(pieces())) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._readers -= 1

    def _check(self, request: pb.PrefixRequest) -> None:
        if request.placement != self._limits.placement:
            # The port of a runner that is gone may be another's by now.
            raise PeerLost("another placement's runner listens here now")
        if request.key != self.key:
            raise InvalidRequest(
                "this runner's states are of another model, or of another kind of machine",
                param="key",
            )
        if any(token >= self._limits.vocabulary for token in request.tokens):
            raise InvalidRequest("tokens must be in the vocabulary", param="tokens")
        if self._readers >= MAX_READERS:
            raise PeerLost(f"{MAX_READERS} states are being sent already")


async def chunks_of(pieces: Iterator[Buffer]) -> AsyncGenerator[pb.FileChunk, None]:
    """Messages of at most CHUNK_BYTES. Each is made when the reader has taken the last."""
    chunks = cut(pieces)
    while (data := await asyncio.to_thread(next, chunks, None)) is not None:
        yield pb.FileChunk(data=data)


def cut(pieces: Iterator[Buffer]) -> Iterator[bytes]:
    """The bytes of a file, CHUNK_BYTES at a time."""
    parts, room = list[Buffer](), CHUNK_BYTES
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            parts.append(rest[:room])
            room, rest = room - len(parts[-1]), rest[room:]
            if not room:
                yield b"".join(parts)
                parts, room = [], CHUNK_BYTES
    if parts:
        yield b"".join(parts)
