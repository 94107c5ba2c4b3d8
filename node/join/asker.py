"""The joining node's side: which clusters it asks, the digits that it shows, whose key it takes."""

import asyncio
import logging
import secrets
import ssl
import time
from dataclasses import dataclass
from typing import Final

from ...placement.errors import DuplicateIdentity, ExoNodeError, InvalidSettings, Untrusted
from ...proto import peer_pb2 as pb
from ..cluster.node_exit import RestartWithKey
from ..machine.tasks import Loops
from .handshake import PeerIdentity, new_code, relation, spaced, transcript
from .pursuits import Pursuits
from .requests import Attempts
from .state import JoinState, prove_digits, refusals_told
from .wire import JoinConnection, Refusal, Refused, connected, hello, key_of, party_of

log = logging.getLogger(__name__)

_MAX_PEERS: Final = 32
_MAY_CHANGE: Final = ("not_yet", "busy", "wrong_code", "wrong_name")
"""Reasons of a refusal after which another try is soon worth it."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A cluster at which this node waits to be let in."""

    approver: PeerIdentity
    address: str
    since: float


class Asker:
    """Asks every cluster that it sees, while this node is fresh; the digits decide on one."""

    def __init__(self, state: JoinState, tls: ssl.SSLContext, loops: Loops) -> None:
        self._state = state
        self._tls = tls
        self._code = new_code(secrets.randbelow)
        self.failure = ""
        """Why the digits that were shown before did not let this node in."""
        self._asking: dict[str, Asking] = {}
        self._denied: set[str] = set()
        self._other_name: set[str] = set()
        self._attempts = Attempts()
        self._timing = state.timing
        self._pursuits = Pursuits(self._approach, loops, state.timing)

    def see(self, address: str) -> None:
        """A join port (host:port) that may be of another cluster."""
        self._pursuits.see(address)

    async def close(self) -> None:
        await self._pursuits.close()

    @property
    def code(self) -> str | None:
        """The digits that this node shows; None while it asks nobody."""
        return self._code if self._asking else None

    def asking(self) -> list[Asking]:
        return list(self._asking.values())

    def withdraw(self) -> list[str]:
        """This node's cluster is not left any more; returns the addresses that were asked."""
        if self._state.open_name is not None:
            return []
        addresses = [asking.address for asking in self._asking.values()]
        for address in addresses:
            self._pursuits.drop(address)
        self._asking.clear()
        return addresses

    async def _approach(self, address: str) -> float | None:
        """One connection; see `join_pursuits.Approach`."""
        try:
            async with connected(address, self._tls, self._timing) as line, refusals_told(line):
                return await self._look(line, address)
        except Refusal as refusal:
            self._state.refused(address, refusal)
            if refusal.reason == "duplicate":
                self._state.ending.give_up(DuplicateIdentity(refusal.message))
            return self._again_s(refusal.reason)
        except Untrusted as fault:
            self._state.refused(address, Refusal("malformed", fault.message))
            raise

    def _again_s(self, reason: str) -> float | None:
        """Seconds until another try is worth it after a refusal; None: it never is."""
        if reason == "too_many":
            return self._timing.too_many_s
        return self._timing.retry_s if reason in _MAY_CHANGE else None

    async def _look(self, line: JoinConnection, address: str) -> float | None:
        own = self._state.own()
        await line.send(hello(own, self._state.key))
        other = party_of((await line.receive("hello")).hello, line.peer)
        if (refusal := self._state.unfit(other)) is not None:
            raise refusal
        match relation(own, other):
            case "same":
                self._state.members.dial(other.address)
                return None
            case "ask" | "both":
                return await self._ask(line, address, own, other)
            case "asked" if own.fresh:
                return self._timing.look_again_s  # it may become established, or go away
            case _:
                self._state.met(other, address)
                return None

    async def _ask(
        self, line: JoinConnection, address: str, own: PeerIdentity, other: PeerIdentity
    ) -> float | None:
        """One address of a cluster is asked; the others wait their turn, should that one fail."""
        cluster = other.cluster
        by_name = own.open and other.open and cluster not in self._other_name
        if cluster in self._denied or cluster in self._state.left or not (own.fresh or by_name):
            return None
        if cluster in self._asking:
            return self._timing.look_again_s
        asking = self._asking[cluster] = Asking(other, address, time.time())
        try:
            if by_name:
                await self._ask_by_name(line, own, other)
            else:
                await self._ask_by_digits(line, own, asking)
        except Refused as refused:
            if refused.reason == "denied":
                self._denied.add(cluster)
            elif refused.reason == "wrong_name":
                self._other_name.add(cluster)
            raise
        finally:
            _ = self._asking.pop(cluster, None)
        return None

    async def _ask_by_digits(self, line: JoinConnection, own: PeerIdentity, asking: Asking) -> None:
        other = asking.approver
        await line.send(pb.JoinFrame(ask=pb.JoinAsk()))
        if (await line.next(self._timing.answer_s)).WhichOneof("frame") != "waiting":
            raise Untrusted(f"{line.address} does not say that this node may ask")
        self._show(asking)
        async with line.kept_alive():
            _ = await line.receive("begin", person=True)
        if wait := self._attempts.wait_s(line.address, time.monotonic()):
            text = f"{own.name} was tried with digits too often; try again in {wait:.0f} s"
            raise Refusal("too_many", text)
        with self._state.doing("is being let in elsewhere"):
            code, self._code = self._code, new_code(secrets.randbelow)
            try:
                await prove_digits(line, "joiner", transcript(own, other), code)
            except (ExoNodeError, asyncio.CancelledError):
                self._say_that_digits_differ(asking)
                raise
            await self._take_key(line, own, other)

    async def _ask_by_name(
        self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity
    ) -> None:
        with self._state.doing("is being let in elsewhere"):
            exchange = self._state.same_name("joiner", transcript(own, other))
            await line.send(pb.JoinFrame(ask=pb.JoinAsk(share=exchange.share)))
            exchange.meet((await line.receive("begin")).begin.share)
            await line.send(pb.JoinFrame(proof=exchange.proof()))
            exchange.check((await line.receive("proof")).proof)
            await self._take_key(line, own, other)

    async def _take_key(self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity) -> None:
        """From a node that has proven what it had to."""
        if not (self._state.fresh or own.open):
            raise Refusal("busy", f"{own.name} has company in its cluster now")
        approved = (await line.receive("approved")).approved
        key = key_of(other, approved.key)
        try:
            _ = await asyncio.to_thread(self._state.folder.take, key)
        except InvalidSettings as fault:
            raise Refusal("malformed", f"the node cannot store the key: {fault.message}") from fault
        try:
            await line.send(pb.JoinFrame(stored=pb.JoinStored()))
        finally:  # the key is on the disk, whether or not the other side learns it
            text = f"this node joins the cluster of {other.name} ({other.cluster})"
            _ = self._state.events.add("join_approved", text, node=other.node)
            peers = (other.address, *approved.peers[:_MAX_PEERS])
            self._state.ending.rekeyed(RestartWithKey("approved", tuple(dict.fromkeys(peers))))

    def _show(self, asking: Asking) -> None:
        """The digits go to this terminal, never to the events, which other nodes are told."""
        other, code = asking.approver, spaced(self._code)
        where = f"{other.name} at {asking.address} (cluster {other.cluster})"
        if self._state.told.is_new(where, ""):
            _ = self._state.events.add(
                "join_requested",
                f"this node asks to join the cluster of {where}; its terminal, `exo-node nodes` on "
                "it and its dashboard show the digits that let it in",
                node=other.node,
            )
        if self._state.told.is_new(where, self._code):
            log.warning(
                "this node, %s, shows %s: to let it into the cluster of %s, run there, or on "
                "another node of that cluster, `exo-node approve %s`. Where several ask, compare "
                "the id",
                self._state.node,
                code,
                where,
                code,
            )

    def _say_that_digits_differ(self, asking: Asking) -> None:
        other = asking.approver
        self.failure = (
            f"the digits that were given at {other.name} ({asking.address}, cluster "
            f"{other.cluster}) did not match those of this node, so it did not join; it shows new "
            "ones. If they were typed as shown, somebody is between the two nodes"
        )
        _ = self._state.events.add(
            "join_refused", self.failure, node=other.node, reason="wrong_code"
        )
        for each in self._asking.values():
            self._show(each)
