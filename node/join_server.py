"""The join port: nodes that are not trusted yet ask here to be let in, and wait for a person."""

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ..placement.errors import ExoNodeError, InvalidSettings, PeerLost
from ..proto import peer_pb2 as pb
from .background import background
from .join import NONCE_BYTES, Handshake, Party, Reason, relation
from .join_requests import PENDING_S, Desk, Outcome, Request, wrong_code
from .join_wire import (
    CONNECT_S,
    FRAME_BYTES,
    SILENCE_S,
    Line,
    Refusal,
    hello,
    join_address,
    party_of,
    why_no_handshake,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
MAX_CONNECTIONS_PER_ADDRESS: Final = 16
_STORED_S: Final = 10.0

_SAYS: Final[dict[Outcome, str]] = {
    "denied": "a person refused it",
    "expired": f"nobody approved it within {PENDING_S / 60:.0f} minutes",
    "wrong_code": "other digits were typed there than these two nodes show",
}


class Approver(Protocol):
    """What the join port needs of the node."""

    def own(self) -> Party: ...

    def unfit(self, other: Party) -> Refusal | None:
        """Why the two can never be in one cluster, such as another protocol."""
        ...

    async def twin_of(self, other: Party) -> Refusal | None:
        """Whether another process with that node's id is in this cluster, and answers."""
        ...

    def not_now(self) -> Refusal | None:
        """Why nobody can join at the moment."""
        ...

    def met(self, other: Party, address: str) -> None:
        """A node of another cluster that does not ask."""
        ...

    def see(self, address: str) -> None:
        """A join port that this node should ask itself."""
        ...

    def is_open_to(self, proof: bytes, transcript: bytes) -> bool:
        """Whether the joiner needs no person, because both have the same --open."""
        ...

    def waits(self, request: Request, *, approved: bool) -> None:
        """A request is there; `approved` already where --open says so."""
        ...

    def admit(self, other: Party) -> pb.JoinApproved:
        """The key for a node that was approved: this cluster is not left for another any more."""
        ...

    def admitted(self, other: Party, *, stored: bool) -> None:
        """Whether the node has the key on its disk, or went away before."""
        ...

    def refused(self, who: str, refusal: Refusal) -> None:
        """A request or a caller that was refused; `who` names it to a person."""
        ...


class JoinServer:
    """Listens from `start`, answers from `begin`, until `close`."""

    def __init__(
        self,
        side: Approver,
        context: ssl.SSLContext,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._side = side
        self._context = context
        self._clock = clock
        self._desk = Desk()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._callers: list[str] = []
        self._decisions: dict[str, asyncio.Future[Outcome]] = {}
        self._stored: dict[str, asyncio.Future[None]] = {}

    def start(self, hosts: Sequence[str], port: int) -> int:
        """Returns the port: `port`, or a free one where that is taken. Raises InvalidSettings."""
        try:
            self._listeners = _listeners(hosts, port)
        except OSError:
            try:
                self._listeners = _listeners(hosts, 0)
            except OSError as fault:
                raise InvalidSettings(
                    f"no port can be had on {' and '.join(hosts)} for nodes that ask to join: "
                    f"{fault.strerror}; give an address of this machine with --interface",
                    param="--interface",
                ) from fault
        return self._listeners[0].getsockname()[1]

    def begin(self) -> None:
        for listener in self._listeners:
            self._keep(background(self._accept(listener), "the join port"))

    async def close(self) -> None:
        """Whoever waits is told so by the end of the connection."""
        tasks = list(self._tasks)
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    # ------------------------------------------------------------- what a person decides

    def pending(self) -> list[tuple[Request, float]]:
        """Each request with the seconds that it has left."""
        now = self._clock()
        return [(request, request.expires - now) for request in self._desk.pending(now)]

    async def approve(self, id_: str, code: str) -> Party:
        """Returns the node once it has the key on its disk.

        Raises JoinRequestNotFound; InvalidRequest where the node shows other digits; PeerLost.
        """
        request = next((r for r, _ in self.pending() if r.id == id_), None)
        outcome = self._desk.approve(id_, code, self._clock())
        assert request is not None, "the desk knows the request"
        stored = self._stored[id_]
        self._decide(id_, outcome)
        if outcome != "approved":
            raise wrong_code(request.party.name, code)
        await asyncio.shield(stored)
        return request.party

    def deny(self, id_: str) -> None:
        """Raises JoinRequestNotFound."""
        self._decide(id_, self._desk.deny(id_, self._clock()))

    def send_elsewhere(self) -> None:
        """This node asks to join another cluster itself: nobody can be let into this one."""
        for request, _ in self.pending():
            self._desk.withdraw(request.id)
            self._decide(request.id, "elsewhere")

    def _decide(self, id_: str, outcome: Outcome) -> None:
        if (decision := self._decisions.get(id_)) is not None and not decision.done():
            decision.set_result(outcome)

    # ------------------------------------------------------------------------ connections

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listener)
            except OSError as fault:  # such as no file descriptor left: others are let go of soon
                log.warning("the join port cannot accept now: %s", fault.strerror)
                await asyncio.sleep(1)
                continue
            crowded = self._callers.count(address) >= MAX_CONNECTIONS_PER_ADDRESS
            if crowded or len(self._callers) >= MAX_CONNECTIONS:
                connection.close()
                continue
            self._callers.append(address)
            task = background(self._welcome(connection, address), f"a caller from {address}")
            task.add_done_callback(lambda _, address=address: self._callers.remove(address))
            self._keep(task)

    async def _welcome(self, connection: socket.socket, address: str) -> None:
        """One connection from its handshake to its end; what goes wrong is told once."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=FRAME_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=CONNECT_S
            )
        except OSError as fault:  # ssl.SSLError is one
            refusal = Refusal("malformed", why_no_handshake(fault))
            self._side.refused(f"a caller from {address}", refusal)
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            line = Line(reader, writer)
        except ExoNodeError as fault:
            transport.abort()
            self._side.refused(f"a caller from {address}", Refusal("malformed", fault.message))
            return
        try:
            await self._attend(line)
        finally:
            await line.close()

    async def _attend(self, line: Line) -> None:
        who = f"node {line.peer.node} at {line.address}"
        try:
            said = (await line.receive("hello")).hello
            other = party_of(said, line.peer)
            who = f"{other.name} ({other.node}) at {line.address}"
            await self._hear(line, other, said.commitment)
        except Refusal as refusal:
            await line.refuse(refusal)
            if refusal.reason != "not_yet":
                self._side.refused(who, refusal)
        except PeerLost as fault:
            log.debug("%s: %s", who, fault.message)
        except ExoNodeError as fault:
            refusal = Refusal("malformed", fault.message)
            await line.refuse(refusal)
            self._side.refused(who, refusal)

    async def _hear(self, line: Line, other: Party, committed: bytes) -> None:
        if (refusal := self._side.unfit(other) or await self._side.twin_of(other)) is not None:
            raise refusal
        handshake = Handshake("approver", self._side.own(), secrets.token_bytes(NONCE_BYTES))
        handshake.meet(other, committed)
        await line.send(hello(handshake))
        match relation(handshake.own, other):
            case "asked":
                await self._receive_request(line, handshake)
            case "ask" if other.join_port:
                self._side.see(join_address(line.address, other.join_port))
            case _:
                self._side.met(other, line.address)

    async def _receive_request(self, line: Line, handshake: Handshake) -> None:
        if (refusal := self._side.not_now()) is not None:
            raise refusal
        if not self._desk.admits(line.address, self._clock()):
            raise Refusal("too_many", "too many nodes asked to join; try again in a few minutes")
        # Refused later, the joiner would have spent one of its few nonces.
        await line.send(pb.JoinFrame(waiting=pb.JoinWaiting()))
        handshake.check((await line.receive("reveal")).reveal.nonce)
        await line.send(pb.JoinFrame(reveal=pb.JoinReveal(nonce=handshake.reveal())))
        confirmed = (await line.receive("confirm")).confirm
        await self._wait_for_a_person(line, handshake, confirmed.open_proof)

    async def _wait_for_a_person(self, line: Line, handshake: Handshake, proof: bytes) -> None:
        other, loop = handshake.other, asyncio.get_running_loop()
        request = self._desk.add(
            secrets.token_hex(8), other, line.address, handshake.code, self._clock()
        )
        decision: asyncio.Future[Outcome] = loop.create_future()
        stored: asyncio.Future[None] = loop.create_future()
        self._decisions[request.id], self._stored[request.id] = decision, stored
        is_open = self._side.is_open_to(proof, handshake.transcript)
        if is_open:
            self._decide(request.id, self._desk.approve(request.id, request.code, self._clock()))
        self._side.waits(request, approved=is_open)
        try:
            async with line.kept_alive():
                outcome = await self._decision(line, decision, request.expires)
            await self._answer(line, other, outcome)
            stored.set_result(None)
        finally:
            self._desk.withdraw(request.id)
            del self._decisions[request.id], self._stored[request.id]
            if not stored.done():
                stored.set_exception(
                    PeerLost(f"{other.name} went away before it had the key; it asks again")
                )
                _ = stored.exception()  # there may be nobody who waits for it

    async def _decision(
        self, line: Line, decision: "asyncio.Future[Outcome]", expires: float
    ) -> Outcome:
        """Raises PeerLost when the joiner goes away before a person has decided."""
        listening = asyncio.create_task(_listen(line))
        try:
            _ = await asyncio.wait(
                {decision, listening},
                timeout=max(0.0, expires - self._clock()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if decision.done():
                return decision.result()
            if listening.done():
                listening.result()
            return "expired"
        finally:
            _ = listening.cancel()
            _ = await asyncio.gather(listening, return_exceptions=True)

    async def _answer(self, line: Line, other: Party, outcome: Outcome) -> None:
        if outcome == "approved":
            stored = False
            try:
                await line.send(pb.JoinFrame(approved=self._side.admit(other)))
                _ = await line.receive("stored", _STORED_S)
                stored = True
            finally:
                self._side.admitted(other, stored=stored)
            return
        if outcome == "elsewhere" and (refusal := self._side.not_now()) is not None:
            raise refusal
        reason: Reason = outcome
        raise Refusal(reason, f"this node is not let in: {_SAYS.get(outcome, outcome)}")

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _listen(line: Line) -> None:
    """Signs of life of a joiner that waits. Raises where it goes away or says anything else."""
    while True:
        frame = await line.next(SILENCE_S)
        if frame.WhichOneof("frame") != "waiting":
            raise Refusal("malformed", "a node that waits to be let in has nothing else to say")


def _listeners(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """One on each host, all on the same port. Raises OSError and leaves none open."""
    found: list[socket.socket] = []
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            found.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
            port = listener.getsockname()[1]
    except OSError:
        for listener in found:
            listener.close()
        raise
    return found
