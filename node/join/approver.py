"""The cluster's side of joining: nodes wait at this one until a person types their digits."""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import Final

from ...placement.errors import DigitsDiffer, ExoNodeError, PeerLost
from ...proto import peer_pb2 as pb
from ..machine.tasks import cancel
from .asker import Asker
from .duplicates import WatchedClient, duplicate_message
from .handshake import PeerIdentity, relation, spaced, transcript
from .requests import PendingRequest, PendingRequests
from .state import JoinState, prove_digits, refusals_sent
from .wire import JoinConnection, Refusal, hello, join_address, party_of

log = logging.getLogger(__name__)

_MAX_USED_CODES: Final = 1000
_CROWD_REFUSAL: Final = Refusal("too_many", "other nodes ask to join as well")


@dataclass(frozen=True, slots=True)
class _TypedDigits:
    """Digits that a person typed for a node that waits."""

    code: str
    outcome: "asyncio.Future[PeerIdentity]"
    is_used: bool = False
    """An attempt used them before: the node must show others, and gets no bit of these."""


_Decision = _TypedDigits | Refusal


@dataclass(eq=False, repr=False)
class Approver:
    """Serves the connections of the join port, and lets in the nodes whose digits were typed."""

    _state: JoinState
    _asker: Asker
    _client: WatchedClient
    _requests: PendingRequests

    def __post_init__(self) -> None:
        self._decisions: dict[str, asyncio.Future[_Decision]] = {}
        self._used_codes: dict[str, None] = {}

    async def let_in(self, id_: str, code: str) -> PeerIdentity:
        """Returns the node that waits here under that id once it has the key on its disk.

        Raises JoinRequestNotFound; DigitsDiffer where it shows others; PeerLost and Refusal.
        """
        outcome: asyncio.Future[PeerIdentity] = asyncio.get_running_loop().create_future()
        self._decide(id_, _TypedDigits(code, outcome, is_used=code in self._used_codes))
        return await asyncio.shield(outcome)

    def deny(self, id_: str) -> PeerIdentity:
        """Turns the node away. Raises JoinRequestNotFound."""
        return self._decide(id_, Refusal("denied", "this node is not let in: a person refused it"))

    def _decide(self, id_: str, decision: _Decision) -> PeerIdentity:
        request = self._requests.get(id_)
        self._requests.remove(id_)  # one decision each
        self._decisions[id_].set_result(decision)
        return request.party

    def _use_up(self, code: str) -> None:
        """Accepts these digits no more: a failed attempt reveals some bits to the other side."""
        self._used_codes[code] = None
        while len(self._used_codes) > _MAX_USED_CODES:
            del self._used_codes[next(iter(self._used_codes))]

    def settle(self) -> None:
        """Keeps this node in its cluster for good, and asks no other cluster any more."""
        self._state.settle()
        self._asker.settle()

    async def attend(self, line: JoinConnection) -> None:
        """Serves one connection to its end, and reports its failure."""
        who = f"node {line.peer.node} at {line.address}"
        try:
            async with refusals_sent(line):
                other = party_of((await line.receive("hello")).hello, line.peer)
                who = f"{other.name} ({other.node}) at {line.address}"
                await self._serve(line, other)
        except Refusal as refusal:
            self._state.report_refusal(who, refusal)
        except PeerLost as fault:
            log.debug("%s: %s", who, fault.message)
        except ExoNodeError as fault:
            self._state.report_refusal(who, Refusal("malformed", fault.message))

    async def _serve(self, line: JoinConnection, other: PeerIdentity) -> None:
        if (refusal := self._state.refusal_of(other) or await self._twin_of(other)) is not None:
            raise refusal
        own = self._state.describe_self()
        await line.send(hello(own, self._state.keys.cluster))
        kind = relation(own, other)
        if kind in ("ask", "both") and other.join_port:
            self._asker.discover(join_address(line.address, other.join_port))
        match kind:
            case "asked" | "both":
                _ = await line.receive("ask")
                await self._await_decision(line, own, other)
            case "ask" | "same":
                return
            case "apart":
                self._state.report_cluster(other, line.address)

    async def _await_decision(
        self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity
    ) -> None:
        """Keeps the node waiting until a person decides, and lets it in by the typed digits."""
        request = PendingRequest(secrets.token_hex(8), other, line.address)
        future: asyncio.Future[_Decision] = asyncio.get_running_loop().create_future()
        evicted_ids = self._requests.add(request)
        if request.id in evicted_ids:
            raise _CROWD_REFUSAL
        for each in evicted_ids:
            self._decisions[each].set_result(_CROWD_REFUSAL)
        self._decisions[request.id] = future
        self._announce(request)
        try:
            async with line.keep_alive():
                await line.send(pb.JoinFrame(waiting=pb.JoinWaiting()))
                decision = await _first_of(future, line)
            if isinstance(decision, Refusal):
                raise decision
            if decision.is_used:
                await line.send(pb.JoinFrame(begin=pb.JoinBegin()))
                raise DigitsDiffer("the digits were used before")
            await self._let_in_by_digits(line, own, other, decision.code)
        except BaseException as fault:  # a cancelled connection too: `let_in` waits for an outcome
            if future.done() and isinstance(digits := future.result(), _TypedDigits):
                _fail(digits, _explain(fault, digits, other))
            raise
        finally:
            self._requests.remove(request.id)
            del self._decisions[request.id]
        if not decision.outcome.done():
            decision.outcome.set_result(other)

    async def _let_in_by_digits(
        self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity, code: str
    ) -> None:
        with self._state.exclusive("lets another node in"):
            await line.send(pb.JoinFrame(begin=pb.JoinBegin()))
            await prove_digits(
                line,
                "approver",
                transcript(other, own),
                code,
                before_reveal=lambda: self._use_up(code),
            )
            await self._hand_over(line, own, other)

    async def _hand_over(
        self, line: JoinConnection, own: PeerIdentity, other: PeerIdentity
    ) -> None:
        """Sends the cluster key to a node that has proven the digits."""
        who = f"{other.name} ({other.node})"
        others = [m.facts for m in self._state.members.others() if m.id != other.node]
        peers = [own.address, *(f"{facts.host}:{facts.port}" for facts in others)]
        try:
            approved = pb.JoinApproved(key=self._state.keys.cluster.text, peers=peers)
            await line.send(pb.JoinFrame(approved=approved))
            _ = await line.receive("stored", self._state.timing.slow_reply_s)
        except BaseException:  # cancelled or refused: either way the other node has no key
            log.warning("%s was approved, and went away before it had the key", who)
            raise
        self.settle()
        _ = self._state.events.add(
            "join_approved", f"{who} was let into the cluster", node=other.node
        )

    async def _twin_of(self, other: PeerIdentity) -> Refusal | None:
        """The refusal of a node whose id another process in this cluster has, which answers."""
        member_ids = [member.id for member in self._state.members.others()]
        if other.cluster == self._state.keys.fingerprint or other.node not in member_ids:
            return None
        try:
            boot_id = await self._client.boot_id_at(
                self._state.members.address(other.node), other.node
            )
        except PeerLost:
            boot_id = None
        return None if boot_id is None else Refusal("duplicate", duplicate_message(other.node))

    def _announce(self, request: PendingRequest) -> None:
        party = request.party
        who = f"{party.name} ({party.node}, {party.chip or 'unknown chip'}) at {request.address}"
        _ = self._state.events.add(
            "join_requested",
            f"{who} asks to join this cluster: type the six digits that it shows, `exo-node "
            "approve DIGITS` or on the dashboard",
            node=party.node,
        )


def _explain(fault: BaseException, digits: _TypedDigits, other: PeerIdentity) -> ExoNodeError:
    """The error for this person; the other side, which may guess digits, gets no such detail."""
    if not isinstance(fault, DigitsDiffer):
        if isinstance(fault, ExoNodeError) and not isinstance(fault, PeerLost):
            return fault
        return PeerLost(f"{other.name} went away before it had the key; it asks again")
    code, who = spaced(digits.code), f"{other.name} ({other.node})"
    if digits.is_used:
        text = (
            f"{code} was typed here before, and digits serve once: {who} was told so and shows new "
            "ones now; type those. If its screen still shows these, it is another node: compare "
            "the id that its screen names"
        )
    else:
        text = (
            f"the digits did not match: {who} does not show {code}, so it was not let in; it shows "
            "new ones now. If its screen did show these, somebody is between the two nodes"
        )
    return DigitsDiffer(text, param="code")


def _fail(digits: _TypedDigits, fault: ExoNodeError) -> None:
    if not digits.outcome.done():
        digits.outcome.set_exception(fault)
        _ = digits.outcome.exception()  # its `let_in` may be cancelled


async def _first_of(decision: "asyncio.Future[_Decision]", line: JoinConnection) -> _Decision:
    """The decision. Raises as `_listen` where that ends first."""
    listening = asyncio.create_task(_listen(line))
    try:
        _ = await asyncio.wait({decision, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not decision.done():
            listening.result()
        return decision.result()
    finally:
        await cancel([listening])


async def _listen(line: JoinConnection) -> None:
    """Reads signs of life of a node that waits. Raises PeerLost, and Refusal for other frames."""
    while True:
        frame = await line.next(line.timing.silence_s)
        if frame.WhichOneof("frame") != "waiting":
            raise Refusal("malformed", "a node that waits to be let in has nothing else to say")
