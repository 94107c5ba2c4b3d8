"""Asks other clusters to let this node in, while the rules of `node/join.py` say that it should."""

import asyncio
import hmac
import logging
import secrets
import ssl
import time
from dataclasses import dataclass
from typing import Final, Protocol

from ..placement.errors import InvalidSettings, PeerLost, Untrusted
from ..proto import peer_pb2 as pb
from .background import background
from .join import NONCE_BYTES, Handshake, Party, relation
from .join_requests import SHOWN, Attempts
from .join_wire import ANSWER_S, SILENCE_S, Line, Refusal, connected, hello, party_of
from .trust import ClusterKey, cluster_fingerprint, parse_cluster_key

log = logging.getLogger(__name__)

MAX_ADDRESSES: Final = 128
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 15.0
LOOK_AGAIN_S: Final = 3.0
"""While the other one should ask, or another address of its cluster is asked already."""
_MAX_PEERS: Final = 32


class Joiner(Protocol):
    """What asking needs of the node."""

    def own(self) -> Party: ...

    def unfit(self, other: Party) -> Refusal | None:
        """Why the two can never be in one cluster, such as another protocol."""
        ...

    def met(self, other: Party, address: str) -> None:
        """A node of another cluster that this one does not ask."""
        ...

    def known(self, other: Party) -> None:
        """A node of this cluster after all."""
        ...

    def left(self, cluster: str) -> bool:
        """Whether a person told this node to leave that cluster."""
        ...

    def proof(self, transcript: bytes) -> bytes:
        """That this node has --open's name; empty without."""
        ...

    def wants(self) -> None:
        """It begins to ask a fresh node, which founds for both: it lets nobody else in now."""
        ...

    def shows(self, asking: "Asking") -> None:
        """The digits are there."""
        ...

    def turned_away(self, address: str, refusal: Refusal) -> None:
        """By either side; `duplicate` where this node's id is another process's."""
        ...

    async def take(self, key: ClusterKey) -> None:
        """Stores the key. Raises InvalidSettings."""
        ...

    def taken(self, approver: Party, peers: list[str]) -> None:
        """The other side knows that the key is stored: this node can be built anew."""
        ...


@dataclass(frozen=True, slots=True)
class Asking:
    """A request of this node's that waits at another one."""

    approver: Party
    address: str
    code: str
    since: float


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The one address of a cluster that is asked."""

    address: str
    fresh: bool


class JoinClient:
    """Pursues each join port that it is told of until it is clear what that node is to this one."""

    def __init__(self, side: Joiner, context: ssl.SSLContext) -> None:
        self._side = side
        self._context = context
        self._pursuits: dict[str, asyncio.Task[None]] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._denied: set[str] = set()
        self._asking: dict[str, Asking] = {}
        self._attempts = Attempts(SHOWN, SHOWN)

    def see(self, address: str) -> None:
        """A join port (host:port) that may be of another cluster; known ones are ignored."""
        if address in self._pursuits or len(self._pursuits) >= MAX_ADDRESSES:
            return
        self._pursuits[address] = background(self._pursue(address), f"asking {address}")

    @property
    def asks_fresh(self) -> str | None:
        """The join port of a fresh node that this one asks, or is about to ask again."""
        return next((wanted.address for wanted in self._wanted.values() if wanted.fresh), None)

    def withdraw(self) -> None:
        """This node's cluster is established now: it does not leave it for another any more."""
        for wanted in self._wanted.values():
            _ = self._pursuits[wanted.address].cancel()
        self._wanted.clear()
        self._asking.clear()

    def asking(self) -> list[Asking]:
        return list(self._asking.values())

    def resume(self) -> None:
        """What `withdraw` gave up is pursued again."""
        for address in [address for address, task in self._pursuits.items() if task.cancelled()]:
            del self._pursuits[address]
            self.see(address)

    async def close(self) -> None:
        tasks = list(self._pursuits.values())
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)

    async def _pursue(self, address: str) -> None:
        wait: float | None = RETRY_S
        backoff = RETRY_S
        while wait is not None:
            try:
                wait, backoff = await self._approach(address), RETRY_S
            except Refusal as refusal:
                self._side.turned_away(address, refusal)
                wait = self._after(refusal)
            except Untrusted as fault:
                self._forget(address)
                self._side.turned_away(address, Refusal("malformed", fault.message))
                wait = backoff = min(2 * backoff, MAX_RETRY_S)
            except PeerLost:
                self._forget(address)
                wait = backoff = min(2 * backoff, MAX_RETRY_S)
            if wait is not None:
                await asyncio.sleep(wait)

    def _forget(self, address: str, but: str = "") -> None:
        """Nobody is asked there any more, or a node of another cluster: one of its other addresses
        may be asked, and this node may let others in."""
        for cluster in [c for c, w in self._wanted.items() if w.address == address and c != but]:
            del self._wanted[cluster]

    def _after(self, refusal: Refusal) -> float | None:
        """Seconds until another try is worth it; None: never."""
        if refusal.instead:
            self.see(refusal.instead)
        match refusal.reason:
            case "not_yet":
                return RETRY_S
            case "elsewhere" | "expired" | "wrong_code":
                return LOOK_AGAIN_S
            case "too_many":
                return MAX_RETRY_S
            case _:
                return None

    async def _approach(self, address: str) -> float | None:
        """One connection; returns the seconds until the next one, None where there is no need."""
        async with connected(address, self._context) as line:
            own = self._side.own()
            handshake = Handshake("joiner", own, secrets.token_bytes(NONCE_BYTES))
            await line.send(hello(handshake))
            said = (await line.receive("hello")).hello
            other = party_of(said, line.peer)
            self._forget(address, but=other.cluster)
            if (refusal := self._side.unfit(other)) is not None:
                raise refusal
            handshake.meet(other, said.commitment)
            match relation(own, other):
                case "same":
                    self._side.known(other)
                    return None
                case "ask" if other.cluster not in self._denied and not self._side.left(
                    other.cluster
                ):
                    return await self._want(line, handshake, address)
                case "asked" if own.fresh:
                    return LOOK_AGAIN_S  # it may become established, or go away
                case _:
                    self._side.met(other, address)
                    return None

    async def _want(self, line: Line, handshake: Handshake, address: str) -> float | None:
        """One address of a cluster is asked; the others wait their turn, should that one fail."""
        cluster = handshake.other.cluster
        wanted = _Wanted(address, handshake.other.fresh)
        if self._wanted.get(cluster, wanted).address != address:
            return LOOK_AGAIN_S
        self._wanted[cluster] = wanted
        if wanted.fresh:
            self._side.wants()
        try:
            return await self._ask(line, handshake, address)
        except Refusal as refusal:
            if refusal.reason == "denied":
                self._denied.add(cluster)
            if self._after(refusal) is None:
                self._forget(address)
            raise
        finally:
            _ = self._asking.pop(cluster, None)

    async def _ask(self, line: Line, handshake: Handshake, address: str) -> float | None:
        other = handshake.other
        if (await line.next(ANSWER_S)).WhichOneof("frame") != "waiting":
            raise Untrusted(f"{line.address} does not say that this node may ask")
        # Whoever has this node's nonce knows the digits, shown or not: each one counts.
        if not self._attempts.admits(other.cluster, time.monotonic()):
            raise Refusal("too_many", "this node has shown too many digits; it waits some minutes")
        await line.send(pb.JoinFrame(reveal=pb.JoinReveal(nonce=handshake.reveal())))
        handshake.check((await line.receive("reveal")).reveal.nonce)
        asking = Asking(other, address, handshake.code, time.time())
        self._asking[other.cluster] = asking
        confirm = pb.JoinConfirm(open_proof=self._side.proof(handshake.transcript))
        self._side.shows(asking)
        await line.send(pb.JoinFrame(confirm=confirm))
        async with line.kept_alive():
            approved = await self._verdict(line)
        key = _key_of(other, approved.key)
        try:
            await self._side.take(key)
        except InvalidSettings as fault:
            await line.refuse(Refusal("malformed", "the node could not store the key"))
            raise Refusal("malformed", fault.message) from fault
        await line.send(pb.JoinFrame(stored=pb.JoinStored()))
        self._side.taken(other, list(approved.peers)[:_MAX_PEERS])
        return None

    async def _verdict(self, line: Line) -> pb.JoinApproved:
        """Waits as long as the other side gives signs of life."""
        while True:
            frame = await line.next(SILENCE_S)
            match frame.WhichOneof("frame"):
                case "waiting":
                    continue
                case "approved":
                    return frame.approved
                case kind:
                    raise Untrusted(f"{line.address} sent {kind} instead of its decision")


def _key_of(approver: Party, text: str) -> ClusterKey:
    """The key, which must be that of the cluster whose digits were compared. Raises Untrusted."""
    wrong = Untrusted(f"{approver.name} sent a key that is not its cluster's")
    try:
        key = parse_cluster_key(text, "the approval")
    except InvalidSettings:
        raise wrong from None
    if not hmac.compare_digest(cluster_fingerprint(key), approver.cluster):
        raise wrong
    return key
