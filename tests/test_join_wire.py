"""Joining over real sockets in one process: approval, somebody in the middle, who is refused."""

import asyncio
import secrets
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from exo_node.node import join_client, join_requests, join_server, join_wire
from exo_node.node.control_client import Channels, ControlClient
from exo_node.node.control_links import LinkService
from exo_node.node.control_server import ControlServer, NodeSide
from exo_node.node.join import Handshake, Party, is_open_proof, open_proof
from exo_node.node.join_client import Asking, JoinClient
from exo_node.node.join_requests import SHOWN, Request
from exo_node.node.join_server import JoinServer
from exo_node.node.join_wire import Line, Refusal, ask_for_hint, connected, hello, tls_contexts
from exo_node.node.trust import (
    ClusterKey,
    Identity,
    cluster_fingerprint,
    join_credentials,
    node_credentials,
    node_id,
    proven_public_key,
    server_credentials,
)
from exo_node.placement.errors import InvalidRequest, JoinRequestNotFound, PeerLost, Untrusted
from exo_node.proto import peer_pb2 as pb

LOOPBACK = "127.0.0.1"
WITHIN_S = 10.0


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(4 * WITHIN_S):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


@dataclass
class Side:
    """A node that is nothing but its side of joining."""

    folder: Path
    fresh: bool = True
    name: str = "node"
    protocol: int = 1
    open_name: str | None = None
    settling: bool = False
    twins: set[str] = field(default_factory=set[str])
    cluster: str | None = None

    def __post_init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        self.identity = Identity(node_id(key.public_key()), key)
        self.key = ClusterKey(secrets.token_bytes(20))
        self.server_tls, self.client_tls = tls_contexts(
            join_credentials(self.identity), self.folder
        )
        self.waiting: list[Request] = []
        self.let_in: list[str] = []
        self.stored: list[bool] = []
        self.refusals: list[tuple[str, Refusal]] = []
        self.shown: list[Asking] = []
        self.took: list[ClusterKey] = []
        self.peers: list[str] = []
        self.met_others: list[Party] = []
        self.seen: list[str] = []

    def own(self) -> Party:
        return Party(
            node=self.identity.node,
            public_key=proven_public_key(self.identity),
            cluster=self.cluster or cluster_fingerprint(self.key),
            name=self.name,
            chip="chip",
            version="0.1.0",
            protocol=self.protocol,
            address="127.0.0.1:9",
            fresh=self.fresh,
            open=self.open_name is not None,
        )

    def unfit(self, other: Party) -> Refusal | None:
        if other.protocol != self.protocol:
            return Refusal("protocol", f"protocol {self.protocol} here, {other.protocol} there")
        return None

    async def twin_of(self, other: Party) -> Refusal | None:
        return Refusal("duplicate", "runs already") if other.node in self.twins else None

    def not_now(self) -> Refusal | None:
        return Refusal("not_yet", "settling") if self.settling else None

    def met(self, other: Party, address: str) -> None:
        self.met_others.append(other)

    def see(self, address: str) -> None:
        self.seen.append(address)

    def is_open_to(self, proof: bytes, transcript: bytes) -> bool:
        return self.open_name is not None and is_open_proof(proof, self.open_name, transcript)

    def waits(self, request: Request, *, approved: bool) -> None:
        self.waiting.append(request)

    def admit(self, other: Party) -> pb.JoinApproved:
        self.let_in.append(other.node)
        return pb.JoinApproved(key=self.key.text, peers=["10.0.0.7:52416"])

    def admitted(self, other: Party, *, stored: bool) -> None:
        self.stored.append(stored)

    def refused(self, who: str, refusal: Refusal) -> None:
        self.refusals.append((who, refusal))

    def turned_away(self, address: str, refusal: Refusal) -> None:
        self.refusals.append((address, refusal))

    def known(self, other: Party) -> None: ...

    def left(self, cluster: str) -> bool:
        return False

    def proof(self, transcript: bytes) -> bytes:
        return b"" if self.open_name is None else open_proof(self.open_name, transcript)

    def wants(self) -> None: ...

    def shows(self, asking: Asking) -> None:
        self.shown.append(asking)

    async def take(self, key: ClusterKey) -> None:
        self.took.append(key)

    def taken(self, approver: Party, peers: list[str]) -> None:
        self.peers = peers


@asynccontextmanager
async def served(side: Side) -> AsyncGenerator[tuple[JoinServer, str]]:
    server = JoinServer(side, side.server_tls)
    port = server.start([LOOPBACK], 0)
    server.begin()
    try:
        yield server, f"{LOOPBACK}:{port}"
    finally:
        await server.close()


@asynccontextmanager
async def asking(side: Side, address: str) -> AsyncGenerator[JoinClient]:
    client = JoinClient(side, side.client_tls)
    client.see(address)
    try:
        yield client
    finally:
        await client.close()


# ------------------------------------------------------------------------------ approval


def test_the_key_travels_once_the_digits_of_both_screens_were_given(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False, name="old"), Side(tmp_path, name="new")
        async with served(old) as (server, address), asking(new, address) as client:
            await until(lambda: old.waiting)
            [request] = old.waiting
            assert request.code == new.shown[0].code == client.asking()[0].code
            assert request.party.node == new.own().node
            assert new.took == [] and old.let_in == []
            party = await server.approve(request.id, request.code)
            assert party.name == "new"
            await until(lambda: new.peers)
        assert new.took == [old.key] and old.stored == [True]
        assert new.peers == ["10.0.0.7:52416"]

    run(scenario)


def test_wrong_digits_end_the_attempt_and_the_next_one_has_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False), Side(tmp_path)
        async with served(old) as (server, address), asking(new, address):
            await until(lambda: old.waiting)
            wrong = str((int(old.waiting[0].code) + 1) % 10**6).zfill(6)
            with pytest.raises(InvalidRequest, match="does not show"):
                _ = await server.approve(old.waiting[0].id, wrong)
            await until(lambda: new.refusals)
            assert new.refusals[0][1].reason == "wrong_code"
            with pytest.raises(JoinRequestNotFound):
                _ = await server.approve(old.waiting[0].id, old.waiting[0].code)
            await until(lambda: len(old.waiting) == 2)
            assert old.waiting[1].id != old.waiting[0].id
        assert new.took == [] and old.let_in == []

    run(scenario)


def test_a_denied_node_is_told_so_and_does_not_ask_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False), Side(tmp_path)
        async with served(old) as (server, address), asking(new, address) as client:
            await until(lambda: old.waiting)
            server.deny(old.waiting[0].id)
            await until(lambda: new.refusals)
            assert new.refusals[0][1].reason == "denied"
            assert old.refusals[0][1].reason == "denied"
            await until(lambda: not client.asking())
            await until(lambda: all(task.done() for task in client._pursuits.values()))  # pyright: ignore[reportPrivateUsage]
        assert len(old.waiting) == 1 and new.took == []

    run(scenario)


def test_a_request_that_nobody_decides_expires_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_requests, "PENDING_S", 0.3)

    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False), Side(tmp_path)
        async with served(old) as (server, address), asking(new, address):
            await until(lambda: old.waiting)
            await until(lambda: new.refusals and old.refusals)
            assert new.refusals[0][1].reason == old.refusals[0][1].reason == "expired"
            with pytest.raises(JoinRequestNotFound):
                _ = await server.approve(old.waiting[0].id, old.waiting[0].code)
        assert new.took == []

    run(scenario)


def test_a_joiner_that_goes_away_leaves_no_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False), Side(tmp_path)
        async with served(old) as (server, address):
            async with asking(new, address):
                await until(lambda: old.waiting)
            await until(lambda: not server.pending())
            with pytest.raises(JoinRequestNotFound):
                _ = await server.approve(old.waiting[0].id, old.waiting[0].code)

    run(scenario)


@pytest.mark.parametrize(("theirs", "is_let_in"), [("lab", True), ("other", False), (None, False)])
def test_the_same_open_name_needs_no_person(
    tmp_path: Path, theirs: str | None, is_let_in: bool
) -> None:
    async def scenario() -> None:
        old = Side(tmp_path, fresh=False, open_name="lab")
        new = Side(tmp_path, open_name=theirs)
        async with served(old) as (server, address), asking(new, address):
            await until(lambda: old.waiting)
            if is_let_in:
                await until(lambda: new.peers)
            else:
                assert len(server.pending()) == 1
        assert (new.took == [old.key]) is is_let_in

    run(scenario)


def test_a_node_shows_a_bounded_number_of_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever answers it could try for those that another screen shows already."""
    monkeypatch.setattr(join_client, "LOOK_AGAIN_S", 0.0)

    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False), Side(tmp_path)

        def refuse(request: Request, *, approved: bool) -> None:
            old.waiting.append(request)
            asyncio.get_running_loop().call_soon(server._decide, request.id, "wrong_code")  # pyright: ignore[reportPrivateUsage]

        monkeypatch.setattr(old, "waits", refuse)
        async with served(old) as (server, address), asking(new, address):
            await until(lambda: new.refusals and new.refusals[-1][1].reason == "too_many")
        assert len(new.shown) == len(old.waiting) == SHOWN

    run(scenario)


def test_a_refusal_that_is_worth_another_try_costs_no_nonce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_client, "RETRY_S", 0.0)

    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False, settling=True), Side(tmp_path)
        async with served(old) as (_, address), asking(new, address):
            await until(lambda: len(new.refusals) > 2 * SHOWN)
            assert {refusal.reason for _, refusal in new.refusals} == {"not_yet"}
            old.settling = False
            await until(lambda: old.waiting)

    run(scenario)


def test_when_the_asked_address_goes_away_another_one_of_its_cluster_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_client, "LOOK_AGAIN_S", 0.05)

    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False), Side(tmp_path)
        async with AsyncExitStack() as leaving, served(old) as (server, second):
            _, first = await leaving.enter_async_context(served(old))
            async with asking(new, first) as client:
                await until(lambda: [each.address for each in client.asking()] == [first])
                client.see(second)
                assert not server.pending(), "one request for a cluster"
                await leaving.aclose()
                await until(lambda: [each.address for each in client.asking()] == [second])
                await until(lambda: len(server.pending()) == 1)

    run(scenario)


def test_of_two_fresh_nodes_only_the_larger_id_asks(tmp_path: Path) -> None:
    async def scenario() -> None:
        small, large = sorted((Side(tmp_path), Side(tmp_path)), key=lambda s: s.own().node)
        async with served(large) as (server, address), asking(small, address):
            await until(lambda: large.met_others or large.waiting or not server.pending())
        assert large.waiting == []
        async with served(small) as (_, address), asking(large, address):
            await until(lambda: small.waiting)

    run(scenario)


def test_a_node_that_still_looks_around_is_asked_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False, settling=True), Side(tmp_path)
        async with served(old) as (_, address), asking(new, address):
            await until(lambda: new.refusals)
            assert new.refusals[0][1].reason == "not_yet" and old.waiting == []
            old.settling = False
            await until(lambda: old.waiting)

    run(scenario)


# ---------------------------------------------------------------------- in the middle


class Middle:
    """Whoever answers the joiner and asks the approver with keys of its own, and relays the rest.

    It describes itself to each as the other one: name, chip, version, address and cluster.
    """

    def __init__(self, folder: Path, approver: Side, joiner: Side) -> None:
        self.towards_joiner = Side(folder, fresh=False, cluster=approver.own().cluster)
        self.towards_joiner.name = approver.name
        self.towards_approver = Side(folder, cluster=joiner.own().cluster)
        self.towards_approver.name = joiner.name
        self.towards_joiner.key = approver.key  # as if it even knew what it is after


def test_the_two_screens_differ_when_somebody_relays_with_keys_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False, name="old"), Side(tmp_path, name="new")
        middle = Middle(tmp_path, old, new)
        async with (
            served(old) as (server, real),
            served(middle.towards_joiner) as (_, fake),
            asking(new, fake),
            asking(middle.towards_approver, real),
        ):
            await until(lambda: old.waiting and new.shown)
            assert old.waiting[0].party.name == "new"
            assert new.shown[0].approver.cluster == old.own().cluster
            on_old, on_new = old.waiting[0].code, new.shown[0].code
            assert on_old != on_new
            # The person types what the new node shows: it is not what the old one waits for.
            with pytest.raises(InvalidRequest):
                _ = await server.approve(old.waiting[0].id, on_new)
        assert old.let_in == [] and new.took == [] and middle.towards_approver.took == []

    run(scenario)


def test_bytes_that_are_only_passed_on_show_the_same_digits_and_stay_secret(
    tmp_path: Path,
) -> None:
    """A relay without keys is a wire: the digits agree, and the key is not in what it saw."""
    seen = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False, name="old"), Side(tmp_path)
        async with served(old) as (server, real):

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                back, onward = await asyncio.open_connection(*join_wire.split(real))
                _ = await asyncio.gather(pump(reader, onward), pump(back, writer))
                for each in (onward, writer):
                    await each.wait_closed()

            wire = await asyncio.start_server(relay, LOOPBACK, 0)
            port = wire.sockets[0].getsockname()[1]
            async with asking(new, f"{LOOPBACK}:{port}"):
                await until(lambda: old.waiting and new.shown)
                assert old.waiting[0].code == new.shown[0].code
                _ = await server.approve(old.waiting[0].id, old.waiting[0].code)
                await until(lambda: new.peers)
            wire.close()
            await asyncio.sleep(0)
        assert new.took == [old.key]
        assert old.key.text.encode() not in seen and b"old" not in seen

    run(scenario)


def test_a_key_of_another_cluster_than_the_digits_vouched_for_is_not_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False, cluster="0" * 16), Side(tmp_path)
        async with served(old) as (server, address), asking(new, address):
            await until(lambda: old.waiting)
            with pytest.raises(PeerLost):
                _ = await server.approve(old.waiting[0].id, old.waiting[0].code)
            await until(lambda: new.refusals)
            assert "not its cluster's" in new.refusals[0][1].message
        assert new.took == [] and old.stored == [False]

    run(scenario)


# --------------------------------------------------------------------------- refused


async def _say(address: str, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*join_wire.split(address))
    writer.write(data)
    answer = await reader.read(4096)
    writer.close()
    await writer.wait_closed()
    return answer


def test_plaintext_is_refused_and_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        side = Side(tmp_path, fresh=False)
        async with served(side) as (_, address):
            answer = await _say(address, b"GET /v1/join/requests HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in answer
            await until(lambda: side.refusals)
            assert "does not speak TLS" in side.refusals[0][1].message
            assert LOOPBACK in side.refusals[0][0]

    run(scenario)


def test_a_caller_without_a_certificate_is_refused_and_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        side = Side(tmp_path, fresh=False)
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        async with served(side) as (_, address):
            with pytest.raises((Untrusted, PeerLost)):
                async with connected(address, bare) as line:
                    await line.send(pb.JoinFrame(hello=pb.JoinHello(protocol=1)))
                    _ = await line.receive("hello")
            await until(lambda: side.refusals)
            assert "showed no certificate" in side.refusals[0][1].message

    run(scenario)


def test_a_certificate_of_a_cluster_is_none_of_the_join_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        side, other = Side(tmp_path, fresh=False), Side(tmp_path)
        _, context = tls_contexts(node_credentials(other.identity, side.key), tmp_path)
        context.verify_mode = ssl.CERT_NONE
        async with served(side) as (_, address):
            with pytest.raises((Untrusted, PeerLost)):
                async with connected(address, context) as line:
                    _ = await line.receive("hello")
            await until(lambda: side.refusals)
            assert "not one that exo-node issues" in side.refusals[0][1].message

    run(scenario)


def test_a_borrowed_id_is_refused(tmp_path: Path) -> None:
    """A certificate under the node id of another key; everybody can make one."""

    async def scenario() -> None:
        side, thief = Side(tmp_path, fresh=False), Side(tmp_path)
        victim = Side(tmp_path)
        borrowed = replace(thief.identity, node=victim.identity.node)
        _, context = tls_contexts(join_credentials(borrowed), tmp_path)
        async with served(side) as (_, address):
            with pytest.raises((Untrusted, PeerLost)):
                async with connected(address, context) as line:
                    _ = await line.receive("hello")
            await until(lambda: side.refusals)
            assert "not its key's id" in side.refusals[0][1].message

    run(scenario)


def test_another_protocol_is_refused_and_named_on_both_sides(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False), Side(tmp_path, protocol=2)
        async with served(old) as (_, address), asking(new, address):
            await until(lambda: old.refusals and new.refusals)
            for side in (old, new):
                assert side.refusals[0][1].reason == "protocol"
                assert "protocol 1 here, 2 there" in side.refusals[0][1].message
        assert old.waiting == []

    run(scenario)


def test_an_id_that_is_in_use_is_refused_and_named_on_both_sides(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Side(tmp_path, fresh=False), Side(tmp_path)
        old.twins.add(new.own().node)
        async with served(old) as (_, address), asking(new, address):
            await until(lambda: old.refusals and new.refusals)
            assert {s.refusals[0][1].reason for s in (old, new)} == {"duplicate"}

    run(scenario)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (pb.JoinFrame(), "nothing instead of hello"),
        (pb.JoinFrame(approved=pb.JoinApproved(key="a" * 32)), "approved instead of hello"),
        (pb.JoinFrame(hello=pb.JoinHello(protocol=1)), "describes itself"),
        (
            pb.JoinFrame(hello=pb.JoinHello(cluster="0" * 16, name="\x1b[2J", address="a:1")),
            "describes itself",
        ),
    ],
    ids=["empty", "out of turn", "without fields", "with control characters"],
)
def test_a_hello_that_exo_node_does_not_say_is_refused(
    tmp_path: Path, frame: pb.JoinFrame, says: str
) -> None:
    async def scenario() -> None:
        side, caller = Side(tmp_path, fresh=False), Side(tmp_path)
        async with served(side) as (_, address):
            async with connected(address, caller.client_tls) as line:
                await line.send(frame)
                with pytest.raises((Refusal, PeerLost)):
                    _ = await line.receive("hello")
            await until(lambda: side.refusals)
            assert says in side.refusals[0][1].message

    run(scenario)


def test_frames_over_the_limit_and_bytes_that_are_none_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        side, caller = Side(tmp_path, fresh=False), Side(tmp_path)
        async with served(side) as (_, address):
            for data in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xff\xff"):
                async with connected(address, caller.client_tls) as line:
                    line._writer.write(data)  # pyright: ignore[reportPrivateUsage]
                    with pytest.raises((Refusal, PeerLost)):
                        _ = await line.receive("hello")
            await until(lambda: len(side.refusals) == 2)
            says = [refusal.message for _, refusal in side.refusals]
            assert "4294967295 bytes" in says[0] and "no frame" in says[1]

    run(scenario)


def test_a_nonce_other_than_the_committed_one_is_refused_on_the_wire(tmp_path: Path) -> None:
    async def scenario() -> None:
        side, caller = Side(tmp_path, fresh=False), Side(tmp_path)
        async with served(side) as (_, address):
            async with connected(address, caller.client_tls) as line:
                handshake = Handshake("joiner", caller.own(), secrets.token_bytes(32))
                await line.send(hello(handshake))
                _ = await line.receive("hello")
                other = pb.JoinReveal(nonce=secrets.token_bytes(32))
                await line.send(pb.JoinFrame(reveal=other))
                with pytest.raises(Refusal, match="committed"):
                    _ = await line.receive("reveal")
            await until(lambda: side.refusals)
        assert side.waiting == []

    run(scenario)


def test_connections_from_one_address_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_server, "MAX_CONNECTIONS_PER_ADDRESS", 2)

    async def scenario() -> None:
        side, caller = Side(tmp_path, fresh=False), Side(tmp_path)
        async with served(side) as (_, address):
            async with (
                connected(address, caller.client_tls),
                connected(address, caller.client_tls),
            ):
                with pytest.raises((PeerLost, Untrusted)):
                    async with connected(address, caller.client_tls):
                        pass
            line: Line | None = None
            async with asyncio.timeout(WITHIN_S):
                while line is None:
                    try:
                        async with connected(address, caller.client_tls) as line:
                            pass
                    except (PeerLost, Untrusted):
                        await asyncio.sleep(0.01)

    run(scenario)


async def _no_links() -> list[pb.LinkReport]:
    return []


def test_a_member_of_another_protocol_is_named_once_on_the_refusing_side(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        side = Side(tmp_path)
        other = Side(tmp_path)
        links, unreached = LinkService(_no_links), cast(NodeSide, object())
        server = ControlServer(unreached, node_credentials(side.identity, side.key), links)
        port = await server.start([LOOPBACK], 0)
        channels = Channels(node_credentials(other.identity, side.key))
        beat = pb.Heartbeat(protocol=2, sender=pb.NodeFacts(id=other.identity.node))
        try:
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="protocol 1 and the other 2"):
                    _ = await ControlClient(channels).exchange(f"{LOOPBACK}:{port}", None, beat)
        finally:
            await channels.close()
            await server.close()
        told = [r.getMessage() for r in caplog.records if "refused node" in r.getMessage()]
        assert len(told) == 1
        assert other.identity.node in told[0] and "protocol 1 and the other 2" in told[0]

    run(scenario)


# ----------------------------------------------------- finding the join port of a named peer


def test_a_control_port_tells_strangers_its_cluster_and_join_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        side = Side(tmp_path)
        server = grpc.aio.server()
        credentials = node_credentials(side.identity, side.key, 4711)
        port = server.add_secure_port(f"{LOOPBACK}:0", server_credentials(credentials))
        await server.start()
        try:
            hint = await ask_for_hint(f"{LOOPBACK}:{port}")
            assert hint is not None
            assert (hint.cluster, hint.join_port) == (cluster_fingerprint(side.key), 4711)
        finally:
            await server.stop(None)
        with pytest.raises(PeerLost):
            _ = await ask_for_hint(f"{LOOPBACK}:{port}")

    run(scenario)
