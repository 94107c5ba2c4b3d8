"""Fetches the state behind a prompt's prefix from the runner of another replica."""

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import grpc
import grpc.aio

from ...placement.errors import ExoNodeError, PeerLost
from ...placement.ids import NodeId, runner_name
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.grpc_options import CHANNEL_OPTIONS
from ..checkpoint.prefix_files import PrefixReceiver, ReceivedPrefix
from ..engine.prefixes.expected import ExpectedPrefix
from ..engine.prefixes.lookup import PrefixLookup
from ..engine.request import Parameters

log = logging.getLogger(__name__)

CONNECT_S: Final = 2.0
"""Limit for each address: a runner that is not reached is not waited for."""
SILENCE_S: Final = 10.0
"""Between two pieces. The first one waits for a step of the other runner, and for checksums."""
FETCH_S: Final = 60.0
"""Limit for all of it, the wait for another transfer included; then the prompt is computed."""


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
            why = _reason(fault)
            log.warning("the state behind a prompt was not copied from %s: %s", source.node, why)
            return None
        seconds = time.monotonic() - began_at
        text = "copied the state behind %d rows of a prompt from %s: %d bytes in %.2f s"
        log.info(text, received.rows, source.node, received.size, seconds)
        return received

    async def _receive(self, source: pb.PrefixSource, request: Parameters) -> ReceivedPrefix:
        expected = await asyncio.to_thread(self._expected, request)
        in_memory = sum(each.held_bytes for each in self._waiting)
        receiver = PrefixReceiver(self._limit - in_memory, expected.check)
        wire = pb.PrefixRequest(
            placement=source.placement,
            tokens=request.prompt,
            cache_salt=request.sharing.cache_salt,
            drafts=request.k > 0,
            key=self._key,
        )
        async with self._connected(source) as channel:
            call = peer_pb2_grpc.GeneratorStub(channel).ReadPrefix(wire)
            try:
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        chunk = await call.read()
                    if not isinstance(chunk, pb.FileChunk):  # the end
                        received = receiver.finish()
                        self._waiting.add(received)
                        return received
                    await asyncio.to_thread(receiver.feed, chunk.data)
            finally:
                _ = call.cancel()

    def _expected(self, request: Parameters) -> ExpectedPrefix:
        return self._lookup.expected(
            self._key,
            request.prompt,
            request.sharing.cache_salt,
            drafts=request.k > 0,
            context_length=self._context_length,
        )

    @asynccontextmanager
    async def _connected(self, source: pb.PrefixSource) -> AsyncGenerator[grpc.aio.Channel]:
        """A channel to the runner, by the first of its addresses that answers. Raises PeerLost."""
        ready = source.ready
        addresses = [(ready.host, ready.port), *((a.host, a.port) for a in ready.addresses)]
        name = ("grpc.ssl_target_name_override", runner_name(NodeId(source.node)))
        for host, port in dict.fromkeys(addresses):
            target = f"{host}:{port}"
            options = [*CHANNEL_OPTIONS, name]
            channel = grpc.aio.secure_channel(target, self._credentials, options=options)
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


def _reason(fault: Exception) -> str:
    if isinstance(fault, grpc.aio.AioRpcError):
        return f"{fault.code().name.lower()}: {fault.details()}"
    if isinstance(fault, TimeoutError):
        return "it takes too long"
    return str(fault) or type(fault).__name__
