"""Links are timed over mutual TLS, and a probe cannot make a node allocate without bound."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from exo_node.node.rpc.control_server import PeersOnly
from exo_node.node.rpc.link_rpc import (
    _CHUNK,  # pyright: ignore[reportPrivateUsage]
    MAX_ANSWER_BYTES,
    LinkClient,
    LinkService,
)
from exo_node.node.trust.certificates import (
    Credentials,
    channel_credentials,
    node_credentials,
    node_name,
    server_credentials,
)
from exo_node.node.trust.keys import ClusterKey, load_or_create_identity
from exo_node.placement.errors import PeerLost, Untrusted
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc

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

    async def measure() -> list[pb.LinkReport]:
        return [REPORT]

    peer_pb2_grpc.add_LinkServicer_to_server(LinkService(measure), server)
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


async def test_the_head_makes_a_node_measure_its_own_links(other: ProbedPeer) -> None:
    client = LinkClient(other.credentials, time.perf_counter)
    assert await client.measure_all(other.address, other.node) == [REPORT]


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
