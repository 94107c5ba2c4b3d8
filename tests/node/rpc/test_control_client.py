"""Calls between nodes and of runners: what is lost, what is cancelled, how links are timed."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from exo_node.node.machine.timing import LAN
from exo_node.node.rpc.channels import Channels, stream
from exo_node.node.rpc.control_server import PeersOnly
from exo_node.node.rpc.link_rpc import (
    _CHUNK,  # pyright: ignore[reportPrivateUsage]
    MAX_ANSWER_BYTES,
    LinkClient,
    LinkService,
)
from exo_node.node.runners.runner_client import Endpoint, RunnerClient
from exo_node.node.trust.certificates import (
    Credentials,
    channel_credentials,
    node_credentials,
    node_name,
    runner_credentials,
    server_credentials,
)
from exo_node.node.trust.keys import ClusterKey, load_or_create_cluster_key, load_or_create_identity
from exo_node.placement.errors import ExoNodeError, HeadGone, PeerLost, QueueFull, Untrusted
from exo_node.placement.ids import NodeId, PlacementId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc


class _Silent(peer_pb2_grpc.RunnerServicer):
    """Receives every ping and answers none, as a runner that hangs."""

    def __init__(self) -> None:
        self.has_ping = asyncio.Event()
        self.deadlines_s: list[float] = []
        """The seconds until each ping's deadline, at its arrival."""

    async def Ping(self, request: pb.PingRequest, context: Any) -> pb.RunnerState:
        self.deadlines_s.append(context.time_remaining())
        self.has_ping.set()
        _ = await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def Enter(self, request: pb.EnterRequest, context: Any) -> pb.EnterReply:
        raise NotImplementedError


class _Endless(peer_pb2_grpc.GeneratorServicer):
    """Sends one event and never ends."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        yield pb.GenerateEvent(started=pb.Started(prompt_ids=[1]))
        _ = await asyncio.Event().wait()

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeReply:
        raise NotImplementedError

    async def FindPrefix(self, request: pb.GenerateRequest, context: Any) -> pb.CachedPrefix:
        raise NotImplementedError

    def ReadPrefix(self, request: pb.PrefixRequest, context: Any) -> AsyncIterator[pb.FileChunk]:
        raise NotImplementedError


@asynccontextmanager
async def _runner(
    folder: Path, silent: _Silent | None = None
) -> AsyncGenerator[tuple[RunnerClient, Endpoint, grpc.aio.Server]]:
    """A client of runners, and a runner with its server."""
    key, identity = load_or_create_cluster_key(folder), load_or_create_identity(folder)
    server = grpc.aio.server()
    peer_pb2_grpc.add_GeneratorServicer_to_server(_Endless(), server)
    peer_pb2_grpc.add_RunnerServicer_to_server(silent or _Silent(), server)
    credentials = server_credentials(runner_credentials(identity.node, key))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    channels = Channels(node_credentials(identity, key))
    endpoint = Endpoint(identity.node, pb.LoadReady(host="127.0.0.1", port=port))
    try:
        yield RunnerClient(channels, LAN), endpoint, server
    finally:
        await channels.close()
        await server.stop(grace=None)


@pytest.mark.parametrize(
    ("cut", "fault"),
    [("channel", PeerLost), ("server", PeerLost), ("client", asyncio.CancelledError)],
)
async def test_an_answer_whose_runner_is_gone_is_a_lost_peer_and_a_client_that_leaves_cancels(
    tmp_path: Path, cut: str, fault: type[BaseException]
) -> None:
    """Closing the channel here is no cancellation by the client: it must not end it silently."""
    async with (
        _runner(tmp_path) as (client, endpoint, server),
        aclosing(client.generate(endpoint, pb.GenerateRequest())) as events,
    ):
        _ = await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        match cut:
            case "channel":
                await client.forget(endpoint)
            case "server":
                await server.stop(grace=None)
            case _:
                _ = waiting.cancel()
        with pytest.raises(fault):
            _ = await waiting


async def test_a_ping_whose_channel_another_answer_closes_is_a_lost_peer(tmp_path: Path) -> None:
    """With two answers on one runner that hangs, the first one's recovery closes the channel."""
    silent = _Silent()
    async with _runner(tmp_path, silent) as (client, endpoint, _):
        pinging = asyncio.ensure_future(client.read_state(endpoint, PlacementId("p"), 0, 60))
        _ = await asyncio.wait_for(silent.has_ping.wait(), 30)
        [deadline_s] = silent.deadlines_s
        assert LAN.slow_reply_s < deadline_s <= 60, "a ping has its caller's timeout"
        await client.forget(endpoint)
        with pytest.raises(PeerLost):
            _ = await pinging


class _Call:
    """A server stream of one message; its second read ends when the call is cancelled."""

    def __init__(self) -> None:
        self.read_cancelled = False
        self._end = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[int]:
        yield 1
        try:
            _ = await self._end.wait()
        except asyncio.CancelledError:
            self.read_cancelled = True
            raise

    def cancel(self) -> None:
        self._end.set()


async def test_a_read_in_flight_ends_with_its_call_and_is_not_cancelled() -> None:
    """gRPC never frees the memory of a cancelled read."""
    call = _Call()
    events = stream(lambda _: call, None, "a peer")
    assert await anext(events) == 1
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.01)
    _ = waiting.cancel()
    _ = await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled() and not call.read_cancelled
    await events.aclose()


class _Failed:
    """A server stream that ends with this status before its first message."""

    def __init__(self, details: str, code: str = "") -> None:
        self._fault = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(("exo-code", code)) if code else grpc.aio.Metadata(),
            details=details,
        )

    async def __aiter__(self) -> AsyncIterator[int]:
        raise self._fault
        yield 0

    def cancel(self) -> None:
        """Does nothing: the call has ended."""


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (_Failed("Socket closed"), HeadGone),
        (_Failed("failed to connect: Connection refused (111)"), HeadGone),
        (_Failed("stage 1 is gone", "peer_lost"), PeerLost),
        (_Failed("the queue is full", "queue_full"), QueueFull),
    ],
)
async def test_a_head_whose_process_ended_is_a_lost_head_and_its_own_errors_stay(
    call: _Failed, fault: type[ExoNodeError]
) -> None:
    with pytest.raises(fault) as raised:
        _ = [message async for message in stream(lambda _: call, None, "the head", lost=HeadGone)]
    assert type(raised.value) is fault


async def test_answers_of_hosts_that_are_kept_outlive_the_end_of_the_others(tmp_path: Path) -> None:
    """After sleep a node ends its connections to other machines, and not those to its runners."""
    async with _runner(tmp_path) as (client, endpoint, _):
        channels = client._channels  # pyright: ignore[reportPrivateUsage]
        async with aclosing(client.generate(endpoint, pb.GenerateRequest())) as answer:
            _ = await anext(answer)
            waiting = asyncio.ensure_future(anext(answer))
            await channels.close(keep=["127.0.0.1"])
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await channels.close(keep=["192.168.1.5"])
            with pytest.raises(PeerLost):
                _ = await waiting


KEY = ClusterKey(b"0123456789abcdefghij")
REPORT = pb.LinkReport(peer="c", from_address="10.0.0.1", to_address="10.0.0.3")


@dataclass(frozen=True, slots=True)
class ProbedPeer:
    """A node that only answers probes."""

    node: NodeId
    address: str
    credentials: Credentials


@pytest.fixture
async def other(tmp_path: Path) -> AsyncGenerator[ProbedPeer]:
    identity = load_or_create_identity(tmp_path)
    credentials = node_credentials(identity, KEY)
    server = grpc.aio.server(interceptors=(PeersOnly(),))

    peer_pb2_grpc.add_LinkServicer_to_server(LinkService(), server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(credentials))
    await server.start()
    try:
        yield ProbedPeer(identity.node, f"127.0.0.1:{port}", credentials)
    finally:
        await server.stop(grace=0)


async def test_a_link_is_timed_by_size_and_in_both_directions(other: ProbedPeer) -> None:
    """The clock advances by a millisecond at each read, whatever the machine's speed."""
    tick = 2.0**-10
    ticks = itertools.count(0.0, tick)
    client = LinkClient(other.credentials, lambda: next(ticks))
    measured = await client.measure(other.address, other.node)
    sizes = [(each.bytes, each.count) for each in measured.echoes]
    assert sizes == [(1024, 30), (8192, 20), (65536, 10)]
    assert all(each.min_s == each.p50_s == tick for each in measured.echoes)
    # One read of the clock for each chunk, less an echo's time: 16 chunks in 15 ticks. On a
    # machine that stalls fewer come before the limit; a single one counts as half a tick.
    chunk_s = _CHUNK / tick
    assert chunk_s < measured.bandwidth_out <= 2 * chunk_s
    assert chunk_s < measured.bandwidth_in <= 2 * chunk_s


async def test_a_slow_network_is_measured_by_fewer_probes(other: ProbedPeer) -> None:
    """The clock advances by 0.6 s at each read: 5 echoes, not the 30 that take half a minute."""
    ticks = itertools.count(0.0, 0.6)
    client = LinkClient(other.credentials, lambda: next(ticks))
    measured = await client.measure(other.address, other.node)
    assert [each.count for each in measured.echoes] == [5, 5, 5]
    assert measured.echoes[0].min_s == pytest.approx(0.6)


async def test_a_probe_that_asks_for_too_much_is_refused(other: ProbedPeer) -> None:
    options = [("grpc.ssl_target_name_override", node_name(other.node))]
    credentials = channel_credentials(other.credentials)
    async with grpc.aio.secure_channel(other.address, credentials, options) as channel:
        call = peer_pb2_grpc.LinkStub(channel).Echo()
        await call.write(pb.Probe(answer_bytes=MAX_ANSWER_BYTES))
        answer = await call.read()
        assert isinstance(answer, pb.Probe) and len(answer.data) == MAX_ANSWER_BYTES
        await call.write(pb.Probe(answer_bytes=MAX_ANSWER_BYTES + 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_another_node_at_the_address_is_no_link(other: ProbedPeer) -> None:
    client = LinkClient(other.credentials, time.perf_counter)
    with pytest.raises((Untrusted, PeerLost)):
        _ = await client.measure(other.address, NodeId("x" * 20))


async def test_an_address_without_a_listener_is_a_lost_peer(other: ProbedPeer) -> None:
    client = LinkClient(other.credentials, time.perf_counter)
    async with asyncio.timeout(60):  # gRPC itself never stops trying
        with pytest.raises(PeerLost):
            _ = await client.measure("127.0.0.1:9", other.node)
