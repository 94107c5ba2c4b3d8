"""mDNS on the loopback interface: real packets, two processes, and hostile announcements."""

import asyncio
import gc
import logging
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from exo_node.node.cluster import discovery
from exo_node.node.cluster.discovery import (
    MAX_CANDIDATES,
    SERVICE,
    Announcement,
    DiscoveredPeer,
    Discovery,
    candidates,
)
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.tasks import Loops
from exo_node.node.machine.timing import LOCAL, Timing
from exo_node.placement.ids import NodeId

LOOPBACK = "127.0.0.1"
WITHIN_S = 60.0


def new_id() -> NodeId:
    return NodeId("".join(secrets.choice("abcdefghijklmnopqrstuvwxyz234567") for _ in range(20)))


def new_cluster() -> str:
    return secrets.token_hex(8)


@dataclass
class Watcher:
    """One Discovery and its peers, which may include other nodes of this machine."""

    own: Announcement
    peers: set[DiscoveredPeer] = field(default_factory=set[DiscoveredPeer])
    timing: Timing = LOCAL

    def __post_init__(self) -> None:
        self.reports: list[DiscoveredPeer] = []
        self.news = asyncio.Event()
        self.discovery = Discovery(self.own, [LOOPBACK], self._add, self.timing)

    def _add(self, candidate: DiscoveredPeer) -> None:
        self.reports.append(candidate)
        self.peers.add(candidate)
        self.news.set()

    async def until(self, holds: Callable[[set[DiscoveredPeer]], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not holds(self.peers):
                self.news.clear()
                _ = await self.news.wait()


def announcement(cluster: str, port: int = 7001, node: NodeId | None = None) -> Announcement:
    return Announcement(node or new_id(), cluster, "0.1.0", LOOPBACK, port)


@asynccontextmanager
async def started(*watchers: Watcher) -> AsyncGenerator[None]:
    for watcher in watchers:
        watcher.discovery.start(Loops(EventLog(), LOCAL))
    try:
        yield
    finally:
        _ = await asyncio.gather(*(watcher.discovery.close() for watcher in watchers))


def candidate(own: Announcement) -> DiscoveredPeer:
    return DiscoveredPeer(own.node, own.cluster, f"{own.host}:{own.port}")


# ---------------------------------------------------------------- real packets


async def test_two_nodes_find_each_other_across_clusters_and_never_themselves() -> None:
    one, two = Watcher(announcement("a" * 16, 7001)), Watcher(announcement("b" * 16, 7002))
    async with started(one, two):
        await one.until(lambda peers: candidate(two.own) in peers)
        await two.until(lambda peers: candidate(one.own) in peers)
        assert await one.discovery.settled() is None
    for watcher in (one, two):
        assert watcher.own.node not in {peer.node for peer in watcher.peers}


CHILD = """
import asyncio, sys
from exo_node.node.machine.tasks import Loops
from exo_node.node.cluster.discovery import Announcement, Discovery
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LOCAL

async def main(node, cluster):
    found = asyncio.Queue()
    own = Announcement(node, cluster, "0.1.0", "127.0.0.1", 7102)
    child = Discovery(own, ["127.0.0.1"], found.put_nowait, LOCAL)
    child.start(Loops(EventLog(), LOCAL))
    while (peer := await found.get()).cluster != cluster:
        pass
    print(peer.node, peer.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_two_processes_share_the_port_and_find_each_other() -> None:
    parent = Watcher(announcement(new_cluster(), 7101))
    child = announcement(parent.own.cluster, 7102)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, child.node, child.cluster, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with started(parent):
            await parent.until(lambda peers: candidate(child) in peers)
            line = await asyncio.wait_for(process.stdout.readline(), WITHIN_S)
            assert line.decode().split() == [parent.own.node, f"{LOOPBACK}:7101"]
    finally:
        process.kill()
        _ = await process.communicate()


async def test_a_node_answers_a_question_by_multicast() -> None:
    patient = replace(LOCAL, heartbeat_s=WITHIN_S / 3)
    one = Watcher(announcement(new_cluster()), timing=patient)
    two = Watcher(announcement(new_cluster(), 7002))
    async with started(one, two):
        assert [await each.discovery.settled() for each in (one, two)] == [None, None]
        assert await one.discovery.answering([two.own.node]) == {two.own.node}
    assert await one.discovery.answering([two.own.node]) == frozenset()


async def test_a_node_that_returns_to_its_address_is_not_reported_again() -> None:
    observer = Watcher(announcement(new_cluster()))
    peer = announcement(observer.own.cluster, 7002)
    async with started(observer):
        for _ in range(2):
            life = Watcher(peer)
            async with started(life):
                assert await life.discovery.settled() is None
                await observer.until(lambda peers: candidate(peer) in peers)
    assert observer.reports.count(candidate(peer)) == 1


def test_a_copied_node_is_found_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        cluster, copied = new_cluster(), new_id()
        first = Watcher(announcement(cluster, 7001, copied))
        observer = Watcher(announcement(cluster, 7003))
        async with started(observer, first):
            assert await first.discovery.settled() is None
            for _ in range(5):  # a machine under load may lose all of a name's three probes
                second = Watcher(announcement(cluster, 7002, copied))
                async with started(second):
                    assert await second.discovery.settled() is None
                    both = {candidate(first.own), candidate(second.own)}
                    await observer.until(lambda peers, both=both: both <= peers)
                if is_reported():
                    break

    def is_reported() -> bool:
        return any("another node announces the id" in r.message for r in caplog.records)

    asyncio.run(scenario())
    assert is_reported()


async def test_a_flood_from_another_cluster_does_not_hide_this_one() -> None:
    observer = Watcher(announcement(new_cluster()))
    peer = Watcher(announcement(observer.own.cluster, 7002))
    async with started(observer):
        assert await observer.discovery.settled() is None
        async with flood(MAX_CANDIDATES + 20), started(peer):
            await observer.until(lambda peers: candidate(peer.own) in peers)
    foreign = {
        foreign_peer
        for foreign_peer in observer.peers
        if foreign_peer.cluster != observer.own.cluster
    }
    assert len(foreign) == MAX_CANDIDATES
    assert observer.discovery.ignored >= 20


@asynccontextmanager
async def flood(count: int) -> AsyncGenerator[None]:
    """`count` announcements of an unknown cluster, all at once."""
    cluster = new_cluster()
    rogue = AsyncZeroconf(interfaces=[LOOPBACK])
    try:
        for _ in range(count):
            node = new_id()
            service = service_info({"id": node, "cluster": cluster}, node=node)
            rogue.zeroconf.registry.async_add(service)
            rogue.zeroconf.async_send(rogue.zeroconf.generate_service_broadcast(service, None))
        yield
    finally:
        await rogue.async_close()


def test_closing_at_once_leaves_nothing_running() -> None:
    async def scenario() -> None:
        async with started(Watcher(announcement(new_cluster()))):
            pass
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
    _ = gc.collect()  # what is left open warns here, in the test that left it


# ------------------------------------------------------------ where it fails


def test_a_node_without_multicast_reports_it_once_and_keeps_trying(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[Exception] = [OSError(19, "No such device")] * 3

    def unplugged(**options: object) -> AsyncZeroconf:
        if faults:
            raise faults.pop()
        return AsyncZeroconf(interfaces=[LOOPBACK])

    async def scenario() -> None:
        late = Watcher(announcement(new_cluster()), timing=replace(LOCAL, refresh_s=0.1))
        other = Watcher(announcement(new_cluster()))
        async with started(other):
            assert await other.discovery.settled() is None
            monkeypatch.setattr(discovery, "AsyncZeroconf", unplugged)
            async with started(late):
                assert await late.discovery.settled() == "[Errno 19] No such device"
                await late.until(lambda peers: candidate(other.own) in peers)
                await other.until(lambda peers: candidate(late.own) in peers)
        assert not faults

    asyncio.run(scenario())
    complaints = [r.message for r in caplog.records if "mDNS does not work" in r.message]
    assert complaints == [
        "mDNS does not work here ([Errno 19] No such device): "
        "other nodes are found through --peer only"
    ]


def test_a_network_that_swallows_multicast_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(*_: object) -> None:
        """No packet leaves."""

    def swallowed(**options: object) -> AsyncZeroconf:
        opened = AsyncZeroconf(interfaces=[LOOPBACK])
        monkeypatch.setattr(opened.zeroconf, "async_send", lose)
        return opened

    async def scenario() -> str | None:
        deaf = Watcher(announcement(new_cluster()), timing=replace(LOCAL, reply_s=0.2))
        async with started(deaf):
            return await deaf.discovery.settled()

    monkeypatch.setattr(discovery, "AsyncZeroconf", swallowed)
    assert asyncio.run(scenario()) == "this node does not hear its own multicast packets"
    assert any(r.levelno == logging.WARNING and "--peer" in r.message for r in caplog.records)


# --------------------------------------------------------- what is believed

HOME = Announcement(new_id(), new_cluster(), "0.1.0", "192.168.1.5", 7001)
PEER, CLUSTER = new_id(), new_cluster()
Text = Mapping[str | bytes, str | bytes | None]
GOOD: Text = {"id": PEER, "cluster": CLUSTER}


def service_info(
    text: Text, addresses: tuple[str, ...] = (LOOPBACK,), port: int = 7002, node: str = PEER
) -> AsyncServiceInfo:
    return AsyncServiceInfo(
        SERVICE,
        f"{node}.{SERVICE}",
        port=port,
        parsed_addresses=list(addresses),
        properties=dict(text),
        server=f"{node}.local.",
    )


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"id": PEER},
        {"cluster": CLUSTER},
        {"id": None, "cluster": CLUSTER},
        {"id": PEER.upper(), "cluster": CLUSTER},
        {"id": PEER + "a", "cluster": CLUSTER},
        {"id": f"{PEER}\n", "cluster": CLUSTER},
        {"id": "<script>alert(1)</script>", "cluster": CLUSTER},
        {"id": PEER, "cluster": CLUSTER[:-1]},
        {"id": PEER, "cluster": f"{CLUSTER[:-1]}g"},
        {b"id": b"\xff" * 20, b"cluster": CLUSTER.encode()},
    ],
)
def test_text_that_exo_node_does_not_write_is_ignored(text: Text) -> None:
    assert candidates(service_info(text, ("192.168.1.9",)), HOME) is None


@pytest.mark.parametrize(
    ("address", "is_believed"),
    [
        ("192.168.1.9", True),
        ("10.0.0.1", True),
        ("172.31.255.1", True),
        ("169.254.7.7", True),  # a Thunderbolt bridge without DHCP
        ("127.0.0.1", False),  # a stranger must not make this node dial itself
        ("0.0.0.0", False),
        ("8.8.8.8", False),
        ("172.32.0.1", False),
        ("224.0.0.251", False),
        ("255.255.255.255", False),
        ("fd00::1", False),  # not announced by nodes: IPv4 only
    ],
)
def test_only_addresses_of_a_local_network_are_dialled(address: str, is_believed: bool) -> None:
    expected = [DiscoveredPeer(PEER, CLUSTER, f"{address}:7002")] if is_believed else None
    assert candidates(service_info(GOOD, (address,)), HOME) == expected


def test_loopback_is_dialled_by_nodes_that_live_there() -> None:
    own = announcement(new_cluster())
    assert candidates(service_info(GOOD), own) == [
        DiscoveredPeer(PEER, CLUSTER, f"{LOOPBACK}:7002")
    ]


def test_one_service_offers_only_a_few_addresses() -> None:
    offered = candidates(service_info(GOOD, tuple(f"10.0.0.{n}" for n in range(1, 200))), HOME)
    assert offered is not None
    assert len(offered) == 4


def test_a_node_does_not_offer_itself() -> None:
    text: Text = {"id": HOME.node, "cluster": HOME.cluster}
    assert candidates(service_info(text, (HOME.host,), HOME.port), HOME) == []


@pytest.mark.parametrize(("address", "port"), [("192.168.1.5", 7002), ("192.168.1.6", 7001)])
def test_this_nodes_id_at_another_address_is_offered_because_it_is_a_copys(
    address: str, port: int
) -> None:
    text: Text = {"id": HOME.node, "cluster": HOME.cluster}
    expected = [DiscoveredPeer(HOME.node, HOME.cluster, f"{address}:{port}")]
    assert candidates(service_info(text, (address,), port), HOME) == expected


@pytest.mark.parametrize(
    ("text", "port"),
    [("7005", 7005), ("", None), ("0", None), ("65536", None), ("-1", None), ("x", None)],
)
def test_a_join_port_must_be_a_valid_port_number(text: str, port: int | None) -> None:
    offered = candidates(service_info({**GOOD, "join": text}, ("10.0.0.1",)), HOME)
    join = None if port is None else f"10.0.0.1:{port}"
    assert offered == [DiscoveredPeer(PEER, CLUSTER, "10.0.0.1:7002", join)]


async def test_a_node_announces_its_join_port() -> None:
    one, two = Watcher(announcement(new_cluster(), 7001)), Watcher(announcement(new_cluster()))
    one.own = replace(one.own, join_port=7009)
    one.discovery = Discovery(one.own, [LOOPBACK], one._add, LOCAL)  # pyright: ignore[reportPrivateUsage]
    expected = replace(candidate(one.own), join_address=f"{LOOPBACK}:7009")
    async with started(one, two):
        await two.until(lambda peers: expected in peers)


async def test_a_node_that_woke_announces_where_it_is_now() -> None:
    one, two = Watcher(announcement(new_cluster(), 7001)), Watcher(announcement(new_cluster()))
    async with started(one, two):
        await two.until(lambda peers: candidate(one.own) in peers)
        moved = replace(one.own, port=7010)
        one.discovery.announce_again(moved)
        await two.until(lambda peers: candidate(moved) in peers)
        assert await one.discovery.settled() is None
