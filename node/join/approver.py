"""The cluster's side of joining: who waits at this node, and how one of them is let in."""

import asyncio
import logging
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ...placement.errors import DigitsDiffer, ExoNodeError, PeerLost
from ...proto import peer_pb2 as pb
from .asker import Asker
from .duplicates import WatchedClient, duplicate
from .handshake import PeerIdentity, relation, spaced, transcript
from .rekey import Rekeying
from .requests import Attempts, PendingRequests, Request
from .state import JoinState, prove_digits, refusals_told
from .wire import JoinConnection, Refusal, hello, join_address, party_of

log = logging.getLogger(__name__)

_MAX_USED: Final = 1000
_CROWDED: Final = Refusal("too_many", "other nodes ask to join as well")


@dataclass(frozen=True, slots=True)
class _Typed:
    """Digits that a person typed for a node that waits."""

    code: str
    answer: "asyncio.Future[PeerIdentity]"
    used: bool = False
    """They served for an attempt before: the node is to show others, and learns no bit of them."""


_Verdict = _Typed | Refusal


class Approver:
    """Attends to the connections of the join port, and lets in whose digits a person typed."""

    def __init__(
        self,
        state: JoinState,
        asker: Asker,
        rekeying: Rekeying,
        client: WatchedClient,
        desk: PendingRequests,
    ) -> None:
        self._state = state
        self._asker = asker
        self._rekeying = rekeying
        self._client = client
        self._desk = desk
        self._verdicts: dict[str, asyncio.Future[_Verdict]] = {}
        self._used: dict[str, None] = {}
        self._attempts = Attempts()
        self._began = time.monotonic()

    async def let_in(self, id_: str, code: str) -> PeerIdentity:
        """Returns the node that waits here under that id once it has the key on its disk.

        Raises JoinRequestNotFound; DigitsDiffer where it shows others; PeerLost and Refusal.
        """
        answer: asyncio.Future[PeerIdentity] = asyncio.get_running_loop().create_future()
        self._decide(id_, _Typed(code, answer, used=code in self._used))
        return await asyncio.shield(answer)

    def deny(self, id_: str) -> PeerIdentity:
        """Raises JoinRequestNotFound."""
        return self._decide(id_, Refusal("denied", "this node is not let in: a person refused it"))

    def _decide(self, id_: str, verdict: _Verdict) -> PeerIdentity:
        request = self._desk.get(id_)
        self._desk.remove(id_)  # one decision each
        self._verdicts[id_].set_result(verdict)
        return request.party

    def _use_up(self, code: str) -> None:
        """A failed attempt told some bits of the digits to whoever it was made with."""
        self._used[code] = None
        while len(self._used) > _MAX_USED:
            del self._used[next(iter(self._used))]

    def settle(self) -> None:
        """A fresh node has company: it stays."""
        self._state.folder.establish()
        _ = self._stay()

    async def attend(self, line: JoinConnection) -> None:
        who = f"node {line.peer.node} at {line.address}"
        try:
            async with refusals_told(line):
                other = party_of((await line.receive("hello")).hello, line.peer)
                who = f"{other.name} ({other.node}) at {line.address}"
                await self._hear(line, other)
        except Refusal as refusal:
            self._state.refused(who, refusal)
        except PeerLost as fault:
            log.debug("%s: %s", who, fault.message)
        except ExoNodeError as fault:
            self._state.refused(who, Refusal("malformed", fault.message))

    async def _hear(self, line: JoinConnection, other: PeerIdentity) -> None:
        if (refusal := self._state.unfit(other) or await self._twin_of(other)) is not None:
            raise refusal
        own = self._state.own()
        await line.send(hello(own, self._state.key))
        kind = relation(own, other)
        if kind in ("ask", "both") and other.join_port:
            self._asker.see(join_address(line.address, other.join_port))
        match kind:
            case "same":
                await self._hear_member(line, other)
            case "asked" | "both":
                share = (await line.receive("ask")).ask.share
                if share:
                    await self._let_in_by_name(line, own, other, share)
                else:
                    await self._let_wait(line, own, other)
            case "ask":
                return
            case "apart":
                self._state.met(other, line.address)

    async def _hear_member(self, line: JoinConnection, other: PeerIdentity) -> None:
        """A node of this cluster has nothing to say here but a new key: see `join_rekey`."""
        rekey = (await line.receive("rekey")).rekey
        with self._state.doing("gets a new cluster key"):
            await self._rekeying.receive(line, other, rekey)

    async def _let_wait(self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity) -> None:
        request = Request(secrets.token_hex(8), other, line.address)
        verdict: asyncio.Future[_Verdict] = asyncio.get_running_loop().create_future()
        gone = self._desk.add(request)
        if request.id in gone:
            raise _CROWDED
        for each in gone:
            self._verdicts[each].set_result(_CROWDED)
        self._verdicts[request.id] = verdict
        self._announce(request)
        line.waits = True
        try:
            await line.send(pb.JoinFrame(waiting=pb.JoinWaiting()))
            async with line.kept_alive():
                decided = await _first_of(verdict, line)
        except BaseException:  # a cancelled connection too: who typed the digits waits for an end
            if verdict.done() and isinstance(typed := verdict.result(), _Typed):
                _fail(typed, _went_away(other))
            raise
        finally:
            self._desk.remove(request.id)
            del self._verdicts[request.id]
        if isinstance(decided, Refusal):
            raise decided
        with _answered(decided, other):
            if decided.used:
                await line.send(pb.JoinFrame(begin=pb.JoinBegin()))
                raise DigitsDiffer("the digits were used before")
            await self._let_in_by_digits(line, own, other, decided.code)

    async def _let_in_by_digits(
        self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity, code: str
    ) -> None:
        with self._state.doing("lets another node in"):
            await line.send(pb.JoinFrame(begin=pb.JoinBegin()))
            said = transcript(other, own)
            await prove_digits(line, "approver", said, code, used=lambda: self._use_up(code))
            await self._hand_over(line, own, other)

    async def _let_in_by_name(
        self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity, share: bytes
    ) -> None:
        if self._state.open_name is None:
            raise Refusal("wrong_name", "this node was not started with --open")
        if self._state.founded and time.monotonic() < self._began + self._state.timing.settle_s:
            raise Refusal("not_yet", "this node still looks for other clusters")
        if wait := self._attempts.wait_s(line.address, time.monotonic()):
            raise Refusal("too_many", f"too many tries; try again in {wait:.0f} s")
        with self._state.doing("lets another node in"):
            exchange = self._state.same_name("approver", transcript(other, own))
            exchange.meet(share)
            await line.send(pb.JoinFrame(begin=pb.JoinBegin(share=exchange.share)))
            try:
                exchange.check((await line.receive("proof")).proof)
            except DigitsDiffer as fault:
                raise Refusal("wrong_name", fault.message) from fault
            await line.send(pb.JoinFrame(proof=exchange.proof()))
            log.warning(
                "OPEN: %s is let in without approval, as it gives the same name", other.name
            )
            await self._hand_over(line, own, other)

    async def _hand_over(
        self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity
    ) -> None:
        """The key, to a node that has proven what it had to."""
        who = f"{other.name} ({other.node})"
        given_up = self._stay()
        others = [m.facts for m in self._state.members.others() if m.id != other.node]
        peers = [own.address, *(f"{facts.host}:{facts.port}" for facts in others)]
        try:
            await line.send(
                pb.JoinFrame(approved=pb.JoinApproved(key=self._state.key.text, peers=peers))
            )
            _ = await line.receive("stored", self._state.timing.stored_s)
        except BaseException:  # cancelled or refused: however it ended, nobody has the key
            log.warning("%s was approved, and went away before it had the key", who)
            # Nobody came: it may still be this node that joins another cluster.
            self._state.founded = self._state.folder.is_fresh(self._state.fingerprint)
            for address in given_up:
                self._asker.see(address)
            raise
        self._state.folder.establish()
        _ = self._state.events.add(
            "join_approved", f"{who} was let into the cluster", node=other.node
        )

    async def _twin_of(self, other: PeerIdentity) -> Refusal | None:
        """Whether another process with that node's id is in this cluster, and answers."""
        known = [member.id for member in self._state.members.others()]
        if other.cluster == self._state.fingerprint or other.node not in known:
            return None
        try:
            boot_id = await self._client.life_at(
                self._state.members.address(other.node), other.node
            )
        except PeerLost:
            boot_id = None
        return None if boot_id is None else Refusal("duplicate", duplicate(other.node))

    def _stay(self) -> list[str]:
        """This cluster is not left any more; returns the addresses that were asked."""
        self._state.founded = False
        return self._asker.withdraw()

    def _announce(self, request: Request) -> None:
        party = request.party
        who = f"{party.name} ({party.node}, {party.chip or 'unknown chip'}) at {request.address}"
        _ = self._state.events.add(
            "join_requested",
            f"{who} asks to join this cluster: type the six digits that it shows, `exo-node "
            "approve DIGITS` or on the dashboard",
            node=party.node,
        )


@contextmanager
def _answered(typed: _Typed, other: PeerIdentity) -> Generator[None]:
    """Whoever typed the digits learns what became of them."""
    try:
        yield
    except DigitsDiffer:
        # Only for this screen: the other side may be somebody who has to guess these digits.
        _fail(typed, DigitsDiffer(_why_not(typed, other), param="code"))
        raise
    except PeerLost:
        _fail(typed, _went_away(other))
        raise
    except ExoNodeError as fault:
        _fail(typed, fault)
        raise
    except BaseException:  # a cancelled connection too: who typed the digits waits for an end
        _fail(typed, _went_away(other))
        raise
    if not typed.answer.done():
        typed.answer.set_result(other)


def _why_not(typed: _Typed, other: PeerIdentity) -> str:
    code, who = spaced(typed.code), f"{other.name} ({other.node})"
    if typed.used:
        return (
            f"{code} was typed here before, and digits serve once: {who} was told so and shows new "
            "ones now; type those. If its screen still shows these, it is another node: compare "
            "the id that its screen names"
        )
    return (
        f"the digits did not match: {who} does not show {code}, so it was not let in; it shows new "
        "ones now. If its screen did show these, somebody is between the two nodes"
    )


def _went_away(other: PeerIdentity) -> PeerLost:
    return PeerLost(f"{other.name} went away before it had the key; it asks again")


def _fail(typed: _Typed, fault: ExoNodeError) -> None:
    if not typed.answer.done():
        typed.answer.set_exception(fault)
        _ = typed.answer.exception()  # there may be nobody who waits for it


async def _first_of(verdict: "asyncio.Future[_Verdict]", line: JoinConnection) -> _Verdict:
    """The verdict; raises where the node that waits goes away or says anything else."""
    listening = asyncio.create_task(_listen(line))
    try:
        _ = await asyncio.wait({verdict, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not verdict.done():
            listening.result()
        return verdict.result()
    finally:
        _ = listening.cancel()
        _ = await asyncio.gather(listening, return_exceptions=True)


async def _listen(line: JoinConnection) -> None:
    """Signs of life of a node that waits. Raises where it goes away or says anything else."""
    while True:
        frame = await line.next(line.timing.silence_s)
        if frame.WhichOneof("frame") != "waiting":
            raise Refusal("malformed", "a node that waits to be let in has nothing else to say")
