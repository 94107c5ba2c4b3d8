"""Attempts to capture a new node over real sockets, for tests and a bench."""

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
    """The outcome of one trial."""

    captured: bool
    owner_joined: bool | None
    """Whether the owner, who typed the digits at last, got the node; None without an owner."""
    both_told: bool
    """Whether both screens reported that digits did not match."""


async def impostor_cluster(*, mdns: bool, with_owner: bool) -> Outcome:
    """An established cluster that approves every request, with guessed digits.

    `mdns`: the new node discovers it; else it calls the new node, which calls back.
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
        both_told = _reports_mismatch(new) and _reports_mismatch(evil)
        if owner is None:
            return Outcome(captured, None, both_told)
        await until(lambda: owner.has_waiting(new) and new.joining.asker.code)
        _ = await owner.let_in(new, new.code)
        return Outcome(captured, new.key_on_disk == owner.key, both_told)


async def middle(*, relays: bool) -> Outcome:
    """An attacker between a new node and its owner's cluster, who poses as each to the other.

    It relays the frames of both, or proves guessed digits itself. The person types the new node's
    digits at the owner's.
    """
    async with joiner("owner", fresh=False) as owner, joiner("new") as new:
        as_cluster, as_new = Impostor(name="owner"), Impostor(fresh=True, name="new")

        async def attend(line: JoinConnection, own: PeerIdentity, other: PeerIdentity) -> None:
            async with as_new.calling(owner.address) as (there, _own, _other):
                _ = await line.receive("ask")
                await line.send(pb.JoinFrame(waiting=pb.JoinWaiting()))
                await there.send(pb.JoinFrame(ask=pb.JoinAsk()))
                try:
                    await (_relay(line, there) if relays else _guess(line, there))
                except ExoNodeError:
                    return  # the other connection ends as well

        async with as_cluster.listening(attend) as address:
            new.discover(address)
            await until(lambda: owner.waiting() and new.joining.asker.code)
            try:
                _ = await owner.joining.approver.let_in(owner.waiting()[0].id, new.code)
                let_in = True
            except ExoNodeError:
                let_in = False
            await until(lambda: _reports_mismatch(new) or new.joined)
        captured = let_in or new.key_on_disk != new.key
        return Outcome(captured, None, _reports_mismatch(new) and _reports_mismatch(owner))


async def _relay(new: JoinConnection, owner: JoinConnection) -> None:
    """Sends every frame of one side to the other, unchanged."""

    async def along(source: JoinConnection, sink: JoinConnection) -> None:
        while True:
            frame = await source.next(10)
            await sink.send(frame)

    ways = [asyncio.create_task(along(new, owner)), asyncio.create_task(along(owner, new))]
    try:
        ended, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        for way in ended:
            way.result()
    finally:
        for way in ways:
            _ = way.cancel()
        _ = await asyncio.gather(*ways, return_exceptions=True)


async def _guess(new: JoinConnection, owner: JoinConnection) -> None:
    """Sends each side random commitments, as for guessed bits."""
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


def _reports_mismatch(side: Joiner) -> bool:
    return any("did not match" in text for text in side.event_texts("join_refused"))
