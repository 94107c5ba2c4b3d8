"""Attempts to take a new node over, over real sockets: used by tests and a bench."""

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass

from joiners import Impostor, Joiner, joiner, until

from exo_node.node.join.handshake import PeerIdentity, new_code
from exo_node.node.join.wire import JoinConnection
from exo_node.placement.errors import ExoNodeError
from exo_node.proto import peer_pb2 as pb

TRIES = 3
"""Approvals in a row: one less than a new node allows an address, which all here share."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one trial."""

    captured: bool
    owner_joined: bool | None
    """Whether the owner, who typed the digits at last, got the node; None without an owner."""
    both_told: bool
    """Whether both screens said that digits did not match."""


async def impostor_cluster(*, mdns: bool, with_owner: bool) -> Outcome:
    """An established cluster that approves whatever asks, with digits that it guesses.

    `mdns`: the new node hears of it; else it calls the new node, which looks back.
    """
    async with AsyncExitStack() as stack:
        evil = await stack.enter_async_context(joiner("evil", fresh=False))
        new = await stack.enter_async_context(joiner("new"))
        owner = None
        if mdns:
            new.discover(evil)
        else:
            evil.discover(new)
        if with_owner:
            owner = await stack.enter_async_context(joiner("owner", fresh=False))
            new.discover(owner)
            await until(lambda owner=owner: owner.has_waiting(new))
        for _ in range(TRIES):
            await until(lambda: evil.has_waiting(new) or new.joined)
            if new.joined:
                break
            try:
                _ = await evil.let_in(new, new_code(secrets.randbelow))
            except ExoNodeError:
                continue
        captured = new.key_on_disk == evil.key
        told = _says_so(new) and _says_so(evil)
        if owner is None:
            return Outcome(captured, None, told)
        await until(lambda: owner.has_waiting(new) and new.joining.asker.code)
        _ = await owner.let_in(new, new.code)
        return Outcome(captured, new.key_on_disk == owner.key, told)


async def middle(*, relays: bool) -> Outcome:
    """Somebody between a new node and its owner's cluster, who passes for each at the other.

    It relays what either proves, or proves guessed digits itself. The person types what the new
    node shows at the owner's.
    """
    async with joiner("owner", fresh=False) as owner, joiner("new") as new:
        as_cluster, as_new = Impostor(name="owner"), Impostor(fresh=True, name="new")
        done = asyncio.Event()

        async def attend(line: JoinConnection, own: PeerIdentity, other: PeerIdentity) -> None:
            async with as_new.calling(owner.address) as (there, _own, _other):
                _ = await line.receive("ask")
                await line.send(pb.JoinFrame(waiting=pb.JoinWaiting()))
                await there.send(pb.JoinFrame(ask=pb.JoinAsk()))
                try:
                    await (_relay(line, there) if relays else _guess(line, there))
                except ExoNodeError:
                    done.set()

        async with as_cluster.listening(attend) as address:
            new.discover(address)
            await until(lambda: owner.waiting() and new.joining.asker.code)
            try:
                _ = await owner.joining.approver.let_in(owner.waiting()[0].id, new.code)
                let_in = True
            except ExoNodeError:
                let_in = False
            await until(lambda: _says_so(new) or new.joined)
        captured = let_in or new.key_on_disk != new.key
        return Outcome(captured, None, _says_so(new) and _says_so(owner))


async def _relay(new: JoinConnection, owner: JoinConnection) -> None:
    """Every frame of one side goes to the other as it is."""

    async def along(source: JoinConnection, sink: JoinConnection) -> None:
        while True:
            frame = await source.next(10)
            await sink.send(frame)

    ways = [asyncio.create_task(along(new, owner)), asyncio.create_task(along(owner, new))]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        for way in done:
            way.result()
    finally:
        for way in ways:
            _ = way.cancel()
        _ = await asyncio.gather(*ways, return_exceptions=True)


async def _guess(new: JoinConnection, owner: JoinConnection) -> None:
    """The owner's first: each side is told commitments that open to guessed bits."""
    _ = await owner.receive("begin", None)
    await new.send(pb.JoinFrame(begin=pb.JoinBegin()))
    nonce = bytes(32)
    _ = await new.receive("commitment")
    await new.send(pb.JoinFrame(commitment=secrets.token_bytes(32)))
    _ = await new.receive("opened")
    await new.send(pb.JoinFrame(opened=nonce))
    await owner.send(pb.JoinFrame(commitment=secrets.token_bytes(32)))
    _ = await owner.receive("commitment")
    await owner.send(pb.JoinFrame(opened=nonce))
    _ = await owner.receive("opened")


def _says_so(side: Joiner) -> bool:
    return any("did not match" in text for text in side.event_texts("join_refused"))
