"""Measurements of links: a service that answers probes, and the client that times them."""

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio

from ...placement.errors import InvalidRequest, PeerLost
from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.uncut_reads import next_reply
from ..trust.certificates import Credentials, channel_credentials, node_name
from .channels import NODE_CHANNEL_OPTIONS, from_status

Context = grpc.aio.ServicerContext[Any, Any]

MAX_ANSWER_BYTES: Final = 1 << 20
ECHOES: Final = ((1 << 10, 30), (8 << 10, 20), (64 << 10, 10))
"""(bytes in each direction, number of round trips)."""
_LEAST_ECHOES: Final = 5
_PART_LIMIT_S: Final = 2.0  # each size of echoes and each transfer: 5 round trips of a bad network
_CHUNK: Final = 256 << 10
_CHUNKS: Final = 16  # 4 MiB in all
_CONNECT_LIMIT_S: Final = 3.0
_LIMIT_S: Final = 30.0


class LinkService(peer_pb2_grpc.LinkServicer):
    """Answers probes."""

    async def Echo(
        self, request_iterator: AsyncIterator[pb.Probe], context: "Context"
    ) -> AsyncIterator[pb.Probe]:
        async for probe in request_iterator:
            if probe.answer_bytes > MAX_ANSWER_BYTES:
                raise InvalidRequest(
                    f"answer_bytes is {probe.answer_bytes}, at most {MAX_ANSWER_BYTES}",
                    param="answer_bytes",
                )
            yield pb.Probe(data=bytes(probe.answer_bytes))


class LinkClient:
    """Times links over connections of its own, so that heartbeats do not queue behind probes."""

    def __init__(self, credentials: Credentials, clock: Callable[[], float]) -> None:
        self._credentials = channel_credentials(credentials)
        self._clock = clock

    async def measure(self, address: str, node: NodeId) -> pb.LinkReport:
        """Measures the link to host:port, a peer's control server; the report has no addresses.

        Raises ExoNodeError.
        """
        async with self._channel(address, node) as channel:
            try:
                async with asyncio.timeout(_CONNECT_LIMIT_S):
                    await channel.channel_ready()
            except TimeoutError as fault:
                raise PeerLost(f"{address} does not answer") from fault
            try:
                return await self._all(peer_pb2_grpc.LinkStub(channel))
            except grpc.aio.AioRpcError as fault:
                raise from_status(fault, address) from fault

    def _channel(self, address: str, node: NodeId) -> grpc.aio.Channel:
        options = [
            *NODE_CHANNEL_OPTIONS,
            ("grpc.ssl_target_name_override", node_name(node)),
            # Else gRPC shares the connection of the heartbeats.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        return grpc.aio.secure_channel(address, self._credentials, options)

    async def _all(self, stub: peer_pb2_grpc.LinkStub) -> pb.LinkReport:
        call = stub.Echo(timeout=_LIMIT_S)
        try:
            _ = await self._echo(call, ECHOES[0][0])  # the first one starts the stream
            echoes = [await self._echoes(call, size, count) for size, count in ECHOES]
        finally:
            _ = call.cancel()
        round_trip_s = echoes[0].p50_s
        return pb.LinkReport(
            echoes=echoes,
            bandwidth_out=await self._bandwidth(stub, _CHUNK, 0, round_trip_s),
            bandwidth_in=await self._bandwidth(stub, 0, _CHUNK, round_trip_s),
        )

    async def _echoes(self, call: Any, size: int, count: int) -> pb.Echoes:
        """Times `count` round trips; fewer where they are slow, but _LEAST_ECHOES at least."""
        seconds: list[float] = []
        until = self._clock() + _PART_LIMIT_S
        while len(seconds) < _LEAST_ECHOES or (len(seconds) < count and self._clock() < until):
            seconds.append(await self._echo(call, size))
        p50 = statistics.median(seconds)
        return pb.Echoes(bytes=size, count=len(seconds), min_s=min(seconds), p50_s=p50)

    async def _echo(self, call: Any, size: int) -> float:
        start = self._clock()
        await call.write(pb.Probe(data=bytes(size), answer_bytes=size))
        _ = _checked(await call.read())
        return self._clock() - start

    async def _bandwidth(
        self, stub: peer_pb2_grpc.LinkStub, size: int, answer_bytes: int, round_trip_s: float
    ) -> float:
        """Bytes a second of up to 4 MiB one way, by the answers within _PART_LIMIT_S."""
        call = stub.Echo(timeout=_LIMIT_S)
        probe = pb.Probe(data=bytes(size), answer_bytes=answer_bytes)
        answers, start = 0, self._clock()
        last = start

        async def send() -> None:
            for _ in range(_CHUNKS):
                await call.write(probe)

        async def receive() -> None:
            nonlocal answers, last
            for _ in range(_CHUNKS):
                _ = _checked(await next_reply(call))
                answers, last = answers + 1, self._clock()

        sending = asyncio.create_task(send())
        try:
            async with asyncio.timeout(_PART_LIMIT_S):
                await receive()
        except TimeoutError:
            pass  # a slow link: the answers until now give its speed
        finally:
            _ = sending.cancel()
            _ = await asyncio.gather(sending, return_exceptions=True)
            _ = call.cancel()
        duration_s = last - start
        if not duration_s:
            return 0.0
        # The answer's way back is no part of the transfer; on loopback it may be most of it.
        transfer_s = max(duration_s - round_trip_s, duration_s / 2)
        return answers * max(size, answer_bytes) / transfer_s


def _checked(answer: Any) -> pb.Probe:
    """A probe's answer. Raises PeerLost where the call ended without one."""
    if isinstance(answer, pb.Probe):
        return answer
    raise PeerLost("the peer ended the measurement")
