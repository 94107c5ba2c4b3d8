"""Joining over real sockets in one process: digits, attackers, refusals."""

import asyncio
import secrets
import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime, tzinfo
from typing import Any

import pytest
from joiners import Impostor, Joiner, asking, asks, joiner, until

from exo_node.node.cluster.member import MemberFacts
from exo_node.node.join import joining
from exo_node.node.join import wire as join_wire
from exo_node.node.join.approver import Approver
from exo_node.node.join.asker import Asker
from exo_node.node.join.handshake import ROUNDS, Passkey, PeerIdentity, transcript
from exo_node.node.join.port import MAX_CONNECTIONS, JoinPort
from exo_node.node.join.state import prove_digits
from exo_node.node.join.wire import JoinConnection, RemoteRefusal
from exo_node.node.machine.timing import LOCAL
from exo_node.node.trust import certificates
from exo_node.node.trust.keys import ClusterKey
from exo_node.placement.errors import (
    DigitsDiffer,
    ExoNodeError,
    JoinRequestNotFound,
    PeerLost,
)
from exo_node.proto import peer_pb2 as pb


async def test_the_key_travels_once_the_new_nodes_digits_were_typed_at_a_member() -> None:
    async with asking() as (old, new):
        await until(lambda: new.joining.asker.code)
        assert old.joining.asker.code is None, "the new node alone shows digits"
        assert new.key_on_disk == new.key
        party = await old.let_in(new, new.code)
        assert party.name == "new"
        await until(lambda: new.joined)
        assert new.key_on_disk == old.key
        assert new.joined is not None and new.joined.peers[0] == "127.0.0.1:9"
        assert not new.folder.is_fresh(new.joining.state.keys.fingerprint)
        assert not old.waiting()
        texts = " ".join(e for side in (old, new) for e in side.event_texts("join_requested"))
        assert new.joining.asker._code not in texts  # pyright: ignore[reportPrivateUsage]


async def test_wrong_digits_end_the_attempt_and_both_screens_say_that_they_did_not_match() -> None:
    async with asking() as (old, new):
        right = new.code
        wrong = str((int(right) + 1) % 10**6).zfill(6)
        first = old.request_of(new).id
        with pytest.raises(DigitsDiffer, match=r"did not match.*somebody is between"):
            _ = await old.let_in(new, wrong)
        await until(lambda: new.event_texts("join_refused"))
        assert "did not match" in new.event_texts("join_refused")[0]
        assert "did not match" in new.joining.asker.failure, "for its dashboard"
        assert "did not match" in old.event_texts("join_refused")[0]
        with pytest.raises(JoinRequestNotFound):
            _ = await old.joining.approver.let_in(first, right)
        await until(lambda: old.has_waiting(new))
        assert new.code != right, "fresh digits for every attempt"
        with pytest.raises(DigitsDiffer):
            _ = await old.let_in(new, right)
        await until(lambda: old.has_waiting(new))
        assert new.key_on_disk == new.key
        _ = await old.let_in(new, new.code)
        await until(lambda: new.joined)


async def test_digits_that_were_typed_once_are_not_tried_again() -> None:
    """An attacker in the new node's place would learn some bits with each try."""
    async with joiner("old", fresh=False) as old:
        attacker = Impostor(fresh=True)
        replies: list[str] = []
        messages: list[str] = []
        for _ in range(2):
            async with attacker.calling(old.address) as (line, own, other):
                await line.send(pb.JoinFrame(ask=pb.JoinAsk()))
                _ = await line.next(5)
                passkey = Passkey("joiner", transcript(own, other), "654321", secrets.token_bytes)

                async def attack(line: JoinConnection = line, passkey: Passkey = passkey) -> None:
                    _ = await line.receive("begin", person=True)
                    await line.send(pb.JoinFrame(commitment=passkey.commit()))
                    try:
                        replies.append(str((await line.next(5)).WhichOneof("frame")))
                    except RemoteRefusal as refusal:
                        replies.append(refusal.reason)

                attacking = asyncio.create_task(attack())
                [request] = old.waiting()
                typing = asyncio.create_task(old.joining.approver.let_in(request.id, "123456"))
                await attacking
            with pytest.raises((DigitsDiffer, PeerLost)) as fault:
                await typing
            messages.append(fault.value.message)
            await until(lambda: not old.waiting())
        assert replies == ["commitment", "wrong_code"], "no bit of them is revealed again"
        assert "typed here before" in messages[-1]


async def test_an_impostor_of_the_same_name_does_not_make_the_new_nodes_digits_worthless() -> None:
    """Typed for it first, they are used up; typed for the true node, that one makes new ones."""
    async with asking() as (old, new):
        code = new.code
        async with Impostor(fresh=True, name="new").calling(old.address) as (line, *_):
            await line.send(pb.JoinFrame(ask=pb.JoinAsk()))
            _ = await line.next(5)
            mistaken = next(r for r in old.waiting() if r.party.node != new.identity.node)
            typing = asyncio.create_task(old.joining.approver.let_in(mistaken.id, code))
            _ = await line.receive("begin", person=True)
            await line.send(pb.JoinFrame(commitment=bytes(32)))
            _ = await line.receive("commitment")
            await line.send(pb.JoinFrame(opened=bytes(32)))
        with pytest.raises(ExoNodeError):
            _ = await typing
        assert new.code == code and old.has_waiting(new), "it had no attempt"
        with pytest.raises(DigitsDiffer, match=r"typed here before.*shows new ones now"):
            _ = await old.let_in(new, code)
        await until(lambda: new.event_texts("join_refused") and old.has_waiting(new))
        assert new.code != code
        _ = await old.let_in(new, new.code)
        await until(lambda: new.joined)


async def test_a_node_that_waits_for_a_person_is_not_evicted_by_silent_callers() -> None:
    async with asking() as (old, new):
        first = old.request_of(new)
        host, port = old.address.split(":")
        callers = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        port_: Any = old.joining._port  # pyright: ignore[reportPrivateUsage]
        await until(lambda: len(port_._callers) >= MAX_CONNECTIONS + 1)
        assert old.waiting() == [first]
        for _, writer in callers:
            writer.close()
        _ = await old.let_in(new, new.code)
        await until(lambda: new.joined)


@pytest.mark.parametrize("after", range(0, ROUNDS, 7))
async def test_a_key_that_comes_before_the_last_round_is_not_taken(after: int) -> None:
    """An impostor that knows the first bits (here: all of them) and hands its key over early."""
    async with joiner("new") as new:
        impostor = Impostor()
        outcomes: list[str] = []

        async def attend(line: JoinConnection, own: PeerIdentity, other: PeerIdentity) -> None:
            await asks(line)
            await asyncio.sleep(0.05)
            code = new.code
            await line.send(pb.JoinFrame(begin=pb.JoinBegin()))
            passkey = Passkey("approver", transcript(other, own), code, bytes)
            for _ in range(after):
                passkey.receive((await line.receive("commitment")).commitment)
                await line.send(pb.JoinFrame(commitment=passkey.commit()))
                passkey.check((await line.receive("opened")).opened)
                await line.send(pb.JoinFrame(opened=passkey.reveal()))
            approved = pb.JoinApproved(key=impostor.key.text)
            await line.send(pb.JoinFrame(approved=approved))
            try:
                _ = await line.receive("stored")
            except ExoNodeError as fault:
                outcomes.append(fault.message)

        async with impostor.listening(attend) as address:
            new.discover(address)
            await until(lambda: outcomes)
        assert new.joined is None and new.key_on_disk == new.key


async def test_an_approver_that_proves_the_digits_is_trusted_with_its_clusters_key_alone() -> None:
    for honest in (True, False):
        async with joiner("new") as new, joiner("else", fresh=False) as third:
            owner = Impostor()
            key = owner.key if honest else third.key

            async def attend(
                line: JoinConnection,
                own: PeerIdentity,
                other: PeerIdentity,
                new: Joiner = new,
                key: ClusterKey = key,
            ) -> None:
                await asks(line)
                await asyncio.sleep(0.05)
                code = new.code
                await line.send(pb.JoinFrame(begin=pb.JoinBegin()))
                await prove_digits(line, "approver", transcript(other, own), code)
                await line.send(pb.JoinFrame(approved=pb.JoinApproved(key=key.text)))
                with suppress(RemoteRefusal):
                    _ = await line.next(5)

            async with owner.listening(attend) as address:
                new.discover(address)
                if honest:
                    await until(lambda new=new: new.joined)
                    assert new.key_on_disk == owner.key
                else:
                    await until(lambda new=new: new.event_texts("join_refused"))
                    assert new.joined is None and new.key_on_disk == new.key


async def test_a_node_that_sees_two_clusters_joins_the_one_whose_member_proved_the_digits() -> None:
    async with (
        joiner("evil", fresh=False) as evil,
        joiner("owner", fresh=False) as owner,
        joiner("new") as new,
    ):
        new.discover(evil)
        new.discover(owner)
        await until(lambda: evil.has_waiting(new) and owner.has_waiting(new))
        with pytest.raises(DigitsDiffer):
            _ = await evil.let_in(new, str((int(new.code) + 7) % 10**6).zfill(6))
        assert owner.has_waiting(new), "the owner's request did not vanish"
        _ = await owner.let_in(new, new.code)
        await until(lambda: new.joined)
        assert new.key_on_disk == owner.key


async def test_a_denied_node_reports_the_refusal_and_does_not_ask_again() -> None:
    async with asking() as (old, new):
        _ = old.joining.approver.deny(old.request_of(new).id)
        await until(lambda: new.event_texts("join_refused"))
        assert "a person refused it" in new.event_texts("join_refused")[0]
        assert "a person refused it" in old.event_texts("join_refused")[0]
        await until(lambda: not new.joining.asker.calls.applications())
        await asyncio.sleep(1.5)
        assert not old.waiting() and new.joined is None


async def test_a_joiner_that_goes_away_leaves_no_request() -> None:
    async with joiner("old", fresh=False) as old:
        async with joiner("new") as new:
            new.discover(old)
            await until(lambda: old.has_waiting(new))
            id_ = old.request_of(new).id
        await until(lambda: not old.waiting())
        with pytest.raises(JoinRequestNotFound):
            _ = await old.joining.approver.let_in(id_, "123456")


async def test_a_joiner_that_goes_away_in_the_middle_is_a_lost_peer_and_nothing_hangs() -> None:
    async with joiner("old", fresh=False) as old:
        async with Impostor(fresh=True).calling(old.address) as (line, _own, _other):
            await line.send(pb.JoinFrame(ask=pb.JoinAsk()))
            await until(old.waiting)
            deciding = asyncio.create_task(
                old.joining.approver.let_in(old.waiting()[0].id, "123456")
            )
            _ = await line.receive("begin", person=True)
        with pytest.raises(PeerLost, match="went away"):
            _ = await deciding


# ------------------------------------------------------------------- several fresh ones


async def test_of_two_fresh_nodes_the_one_whose_digits_are_typed_joins_the_other() -> None:
    async with joiner("one") as one, joiner("two") as two:
        one.discover(two)
        await until(lambda: one.has_waiting(two) and two.has_waiting(one))
        assert one.code != two.code
        _ = await one.let_in(two, two.code)
        await until(lambda: two.joined)
        assert two.key_on_disk == one.key == one.key_on_disk
        await until(lambda: not one.joining.asker.calls.applications())
        assert not one.joining.state.fresh, "another node is in its cluster, so it leaves for none"


async def test_digits_typed_on_both_of_two_fresh_nodes_at_once_never_swap_their_clusters() -> None:
    for _ in range(3):
        async with joiner("one") as one, joiner("two") as two:
            one.discover(two)
            two.discover(one)
            await until(lambda one=one, two=two: one.has_waiting(two) and two.has_waiting(one))
            outcomes = await asyncio.gather(
                one.let_in(two, two.code), two.let_in(one, one.code), return_exceptions=True
            )
            await asyncio.sleep(0.2)
            joined = [side for side in (one, two) if side.joined]
            assert len(joined) <= 1, outcomes
            keys = {one.key_on_disk.text, two.key_on_disk.text}
            assert len(keys) == (1 if joined else 2)


# ------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("where", "what", "loop"),
    [
        (JoinPort, "_welcome", "the join port at 127.0.0.1"),
        (Asker, "_converse", "asking 127.0.0.1:"),
        (joining, "ask_for_hint", "the look at 127.0.0.1:9"),
        (Approver, "settle", "the watch for company"),
    ],
    ids=["port", "pursuit", "look", "watch"],
)
async def test_no_loop_of_joining_ends_for_good_and_readiness_names_the_one_that_is_down(
    monkeypatch: pytest.MonkeyPatch, where: object, what: str, loop: str
) -> None:
    """H3."""

    def broken(*arguments: object) -> None:
        for each in arguments:
            if isinstance(each, socket.socket):
                each.close()
        raise RuntimeError("a defect")

    async with joiner("old") as old, joiner("new", peers=["127.0.0.1:9"]) as new:
        old.company.live.append(MemberFacts(pb.NodeFacts(id="b" * 20)))
        monkeypatch.setattr(where, what, broken)
        new.discover(old)
        await until(lambda: loop in old.loops.trouble() + new.loops.trouble())
        monkeypatch.undo()
        await until(lambda: old.has_waiting(new))
        await until(lambda: old.joining.state.is_settled)
        await until(lambda: not old.loops.trouble() and not new.loops.trouble())


class _In2055(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "_In2055":
        return cls(2055, 6, 1, tzinfo=tz)


@pytest.mark.parametrize("mine", [True, False], ids=["this clock", "the other clock"])
@pytest.mark.parametrize("ended_side", ["the one that is asked", "the one that asks"])
async def test_a_clock_that_spoils_a_handshake_is_named_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, mine: bool, ended_side: str
) -> None:
    """L9. A certificate that has ended looks to its reader as any does to a clock that is ahead."""
    async with joiner("good") as good:
        with monkeypatch.context() as past:
            past.setattr(certificates, "_VALID_TO", datetime(2021, 1, 1, tzinfo=UTC))
            ended = joiner("ended")
            old = await ended.__aenter__()
        if mine:
            monkeypatch.setattr(join_wire, "datetime", _In2055)
        try:
            server, client = (old, good) if "asked" in ended_side else (good, old)
            client.discover(server)
            await until(
                lambda: old.event_texts("join_refused") and good.event_texts("join_refused")
            )
            for side in (old, good):
                text = side.event_texts("join_refused")[0]
                assert ("this machine's clock says 2055-06-01" in text) == mine, text
                assert ("compare the clocks" in text) != mine, text
        finally:
            _ = await ended.__aexit__(None, None, None)


async def test_another_clusters_fingerprint_cannot_be_claimed() -> None:
    """L4: a fingerprint is proven by a signature before anything is done in its name."""
    async with joiner("owner", fresh=False) as owner, joiner("new") as new:
        liar = Impostor()
        fingerprint = owner.joining.state.keys.fingerprint
        with pytest.raises(ExoNodeError, match="does not prove"):
            async with liar.calling(new.address, cluster=fingerprint):
                pass

        async def attend(line: JoinConnection, own: PeerIdentity, other: PeerIdentity) -> None:
            """Sends no more than its hello."""

        liar.claims = fingerprint
        async with liar.listening(attend) as address:
            new.discover(address)
            await until(lambda: any("does not prove" in t for t in new.event_texts("join_refused")))
        new.discover(owner)
        await until(lambda: owner.has_waiting(new))
        assert [a.address for a in new.joining.asker.calls.applications()] == [owner.address]


async def test_a_cancel_that_comes_with_the_connection_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both in one turn of the loop, as on a busy machine."""
    connecting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def open_connection(*_: Any, **__: Any) -> Any:
        return await connecting

    monkeypatch.setattr(asyncio, "open_connection", open_connection)

    async def call() -> None:
        async with join_wire.connect("127.0.0.1:1", ssl.create_default_context(), LOCAL):
            raise AssertionError("the cancel was lost")

    task = asyncio.create_task(call())
    await asyncio.sleep(0.05)
    connecting.set_result((None, None))
    _ = task.cancel()  # before the task that awaits the connection runs
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_defect_in_a_conversation_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that provokes it again and again would take all of the node's files."""

    async def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    caller = Impostor()
    async with joiner("one") as one:
        monkeypatch.setattr(one.joining._port, "_attend", fail)  # pyright: ignore[reportPrivateUsage]
        async with join_wire.connect(one.address, caller.client_tls, LOCAL) as line:
            async with asyncio.timeout(2.0):
                with pytest.raises(PeerLost):
                    _ = await line.next(30.0)


async def test_a_close_that_is_cancelled_leaves_no_socket_open() -> None:
    """The other side sends nothing, so the closing handshake would last."""
    called, caller, ended = Impostor(), Impostor(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def serve(server: socket.socket) -> None:
        raw, _ = server.accept()
        tls = called.server_tls.wrap_socket(raw, server_side=True)
        with raw, tls:
            inner = tls.detach()
        with socket.socket(fileno=inner) as silent:
            while silent.recv(1 << 16):
                pass
        _ = loop.call_soon_threadsafe(ended.set)

    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = asyncio.create_task(asyncio.to_thread(serve, server))
        address = f"127.0.0.1:{server.getsockname()[1]}"

        async def call() -> None:
            async with join_wire.connect(address, caller.client_tls, LOCAL):
                pass

        task = asyncio.create_task(call())
        await asyncio.sleep(0.2)  # the close waits for the other side
        assert not task.done() and not ended.is_set()
        _ = task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(2.0):
            _ = await ended.wait()
        await serving
