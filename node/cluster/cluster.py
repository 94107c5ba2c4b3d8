"""The live cluster as this node sees it: its members, and which of them is the head."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...placement.errors import NO_HEAD, PeerLost
from ...placement.ids import NodeId, Term
from ...proto import peer_pb2 as pb
from ..machine.events import EventLog
from ..machine.tasks import Loops, cancel
from ..rpc.control_client import ControlClient
from ..rpc.control_server import PROTOCOL
from .change_log import log_change, term_trouble
from .cluster_state import Change, ClusterState
from .desired import DesiredPlacements
from .election import HeadChanged, HeadLost, TermRaised
from .exchanges import Calls, Exchanges, News
from .member import Member, MemberFacts
from .membership import Died, LeftCluster, Suspected


@dataclass(eq=False, repr=False)
class Cluster:
    """Owns membership and election; everything runs on the node's event loop."""

    _describe_self: Callable[[], MemberFacts]
    _client: ControlClient
    _cluster_state: ClusterState
    _on_lost: Callable[[NodeId, str], None]
    """Called with each node that died or left, and a sentence on it."""
    _events: EventLog
    _desired: DesiredPlacements
    """Sent where this node is the head, else replaced by the head's."""
    _loops: Loops

    def __post_init__(self) -> None:
        self._timing = self._cluster_state.timing
        self._members: dict[NodeId, Member] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._news = News()
        self._losses: dict[NodeId, asyncio.Event] = {}
        self.self_id = self._cluster_state.self_id
        calls = Calls(
            lambda: _address(self._describe_self().facts),
            self._heartbeat,
            self._record_answer,
            self._record_refusal,
            self._is_live,
        )
        self._exchanges = Exchanges(
            self.self_id, self._client, self._loops, self._timing, self._news, calls
        )

    def start(self) -> None:
        self._apply(self._cluster_state.tick(time.monotonic()))
        self._ticker = self._loops.keep(self._tick, "the membership's clock")

    async def close(self) -> None:
        """Sends a last heartbeat, so that the others need not wait for a timeout."""
        farewell = self._heartbeat()
        farewell.leaving = True
        goodbyes = [
            self._client.exchange(member.address, node, farewell)
            for node, member in self._members.items()
            if self._is_live(node)
        ]
        _ = await asyncio.gather(*goodbyes, return_exceptions=True)
        await self._exchanges.close()
        if self._ticker is not None:
            await cancel([self._ticker])

    def leave(self) -> None:
        """Before the end: this node gives up its lease, and the others place nothing here."""
        _ = self._events.add("leaving", f"{self._describe_self().facts.name} is about to leave")
        self._apply(self._cluster_state.resign(time.monotonic()))
        self.send_heartbeats()

    def dial(self, address: str, node: NodeId | None = None) -> None:
        """Begins to exchange heartbeats with the node that listens there, unless it has begun."""
        self._exchanges.dial(address, node)

    def answer(self, sender: NodeId, beat: pb.Heartbeat) -> pb.Heartbeat:
        """Processes the heartbeat of another node, and returns this node's.

        A head that follows the sender from now on answers as the head once more: the sender
        continues with the models that were requested here.
        """
        if beat.leaving:
            self._apply(self._cluster_state.remove(sender, time.monotonic()))
            _ = self._members.pop(sender, None)
            return self._heartbeat()
        address = _address(beat.sender)
        before, reached_at = self._members.get(sender), address
        if before is not None and before.beat.sender.port == beat.sender.port:
            reached_at = before.address  # the one at which it answers
        as_head = self._heartbeat() if self.is_head and beat.head == sender else None
        self._record(sender, reached_at, beat)
        if (member := self._members.get(sender)) is not None:
            member.reach.received_at = time.monotonic()
        self.dial(address, sender)
        return self._heartbeat() if as_head is None or self.is_head else as_head

    # ------------------------------------------------------------------------- the head

    @property
    def head(self) -> NodeId | None:
        """None during an election, which stops nothing: see `wait_for_head`."""
        return self._cluster_state.election.head

    @property
    def is_head(self) -> bool:
        return self.head == self.self_id

    @property
    def term(self) -> Term:
        """The term of the head's lease; without a head, the highest that this node received."""
        return self._cluster_state.election.term

    def trouble(self) -> str:
        """Why this node cannot lead though it would; "" where it can."""
        return term_trouble(self._cluster_state.election.not_stored)

    async def wait_for_head(self) -> NodeId:
        """The head, after the election if there is one. Raises PeerLost."""
        try:
            async with asyncio.timeout(self._timing.election_s):
                while (head := self.head) is None:
                    await self._news.wait()
        except TimeoutError:
            raise PeerLost(NO_HEAD) from None
        return head

    async def wait_for_news(self, within_s: float) -> None:
        """Returns when there is news of the head, or after `within_s` seconds."""
        await self._news.wait(within_s)

    def is_alive(self, node: NodeId) -> bool:
        """Whether the other node is neither suspect nor dead; it may be about to leave."""
        return node in self._cluster_state.membership.alive()

    def knows(self, node: NodeId) -> bool:
        """Whether the other node is remembered, be it dead or live."""
        return node in self._members

    def leads(self, node: NodeId) -> bool:
        """Whether that node is live and its last heartbeat claims that it is the head."""
        member = self._members.get(node)
        return self._is_live(node) and member is not None and member.beat.head == node

    async def until_gone(self, node: NodeId) -> None:
        """Returns when the node has died, left or been restarted; at once if it is unknown."""
        if self._is_live(node):
            _ = await self._losses.setdefault(node, asyncio.Event()).wait()

    # ----------------------------------------------------------------------- the others

    def members(self) -> list[MemberFacts]:
        """Nodes that may take new work: alive, not suspect, not about to leave; this one first."""
        draining = self.self_id in self._cluster_state.draining
        return [*([] if draining else [self._describe_self()]), *self.others()]

    def others(self) -> list[MemberFacts]:
        """`members` without this node."""
        return [self._facts(node) for node in self._members if self._takes_work(node)]

    def address(self, node: NodeId) -> str:
        """host:port of another node's control server. Raises PeerLost."""
        member = self._members.get(node)
        if member is None:
            raise PeerLost(f"node {node} is not in the cluster")
        return member.address

    def note_unloaded(self, node: NodeId, placement: str, stage: int) -> None:
        """The node answered that it has unloaded that stage; heartbeats before that may list it."""
        if (member := self._members.get(node)) is not None:
            member.unloaded.add((placement, stage))

    def note_loading(self, node: NodeId, placement: str, stage: int) -> None:
        """The node is about to load that stage, perhaps again."""
        if (member := self._members.get(node)) is not None:
            member.unloaded.discard((placement, stage))

    def reports(self) -> list[MemberFacts]:
        """Every node that is not dead, this one first; this one follows itself."""
        own = replace(
            self._describe_self(),
            draining=self.self_id in self._cluster_state.draining,
            head=self.self_id,
        )
        return [own, *(self._facts(node) for node in self._members if self._is_live(node))]

    def describe(self) -> dict[str, Any]:
        """The cluster's state in the body of `GET /v1/cluster`."""
        statuses = {self.self_id: "alive", **self._cluster_state.membership.statuses()}
        members = [self._describe_self(), *map(self._facts, sorted(self._members))]
        nodes: list[dict[str, Any]] = []
        for member in members:
            status = statuses.get(member.id, "dead")
            if status != "dead" and member.id in self._cluster_state.draining:
                status = "draining"
            roles = {"self": member.id == self.self_id, "head": member.id == self.head}
            nodes.append(member.describe(status) | roles)
        return {
            "self": self.self_id,
            "head": self.head,
            "term": self.term,
            "lease": self._lease(),
            "nodes": nodes,
        }

    def reach(self) -> dict[NodeId, dict[str, Any]]:
        """How each other node that is not dead and this one reach each other, JSON-ready."""
        now = time.monotonic()
        return {
            node: {"node": node, "name": member.beat.sender.name, "address": member.address}
            | member.reach.describe(now)
            for node, member in sorted(self._members.items())
            if self._is_live(node)
        }

    def _lease(self) -> dict[str, Any]:
        election = self._cluster_state.election
        return {
            "held": self.is_head,
            "followers": election.followers(),
            "head_for_s": round(election.head_for_s(time.monotonic()), 1),
            "elections": election.elections,
            "head_changes": election.head_changes,
            "incarnation": self._cluster_state.membership.incarnation,
        }

    def send_heartbeats(self) -> None:
        """Sends heartbeats now, and wakes the tasks that wait for the head."""
        self._news.notify()

    def exchange_s(self, node: NodeId) -> float:
        """Seconds that a heartbeat there and back takes of late, or 0 if none was answered yet."""
        member = self._members.get(node)
        return 0.0 if member is None else member.exchange_s

    def stages(self, node: NodeId) -> Iterable[pb.StageState]:
        """The runners of another node by its last heartbeat."""
        member = self._members.get(node)
        return () if member is None else member.beat.placements

    # --------------------------------------------------------------------------- inside

    def _heartbeat(self) -> pb.Heartbeat:
        own = self._describe_self()
        message = self._cluster_state.heartbeat(time.monotonic())
        message.protocol = PROTOCOL
        message.sender.CopyFrom(own.facts)
        message.peers.extend(member.address for member in self._members.values())
        message.placements.extend(own.stages)
        if self.is_head:
            message.desired.extend(self._desired.to_wire())
        return message

    def _record(self, node: NodeId, address: str, beat: pb.Heartbeat) -> None:
        now = time.monotonic()
        member = self._members.setdefault(node, Member(address, beat))
        member.record_heartbeat(address, beat, now, self._timing.dead_after_s)
        self._apply(self._cluster_state.record_heartbeat(beat, now))
        if node == beat.head:
            self._desired.learn(node, beat.desired, followed=node == self.head)
        if node not in self._cluster_state.membership.statuses():
            # The node has left, and this heartbeat was still under way.
            _ = self._members.pop(node, None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._timing.tick_s)
            self._apply(self._cluster_state.tick(time.monotonic()))

    def _record_answer(self, node: NodeId, address: str, beat: pb.Heartbeat, took_s: float) -> None:
        self._record(node, address, beat)
        if (member := self._members.get(node)) is not None:
            member.record_answer(took_s, time.monotonic())

    def _record_refusal(self, node: NodeId, address: str) -> None:
        """Counts a refused connection, but only at the address that the node has now."""
        member = self._members.get(node)
        if member is not None and member.address == address:
            self._apply(self._cluster_state.record_refusal(node, time.monotonic()))

    def _apply(self, changes: Iterable[Change]) -> None:
        """Logs the changes, then does what follows from them."""
        for change in changes:
            log_change(change, self._cluster_state, self.name, self._events)
            match change:
                case HeadChanged() | HeadLost() | TermRaised() | Suspected():
                    self._news.notify()  # a node that still vouches for a suspect delays its death
                case Died(node, restarted=restarted):
                    what = "was restarted" if restarted else "does not answer any more"
                    self._lost(node, f"{self.name(node)} {what}")
                case LeftCluster(node):
                    self._lost(node, f"{self.name(node)} left the cluster")
                case _:
                    pass

    def _lost(self, node: NodeId, why: str) -> None:
        if (loss := self._losses.pop(node, None)) is not None:
            loss.set()
        self._on_lost(node, why)

    def _is_live(self, node: NodeId) -> bool:
        """Whether the other node is not dead."""
        return node in self._cluster_state.membership.live()

    def _takes_work(self, node: NodeId) -> bool:
        state = self._cluster_state
        return node in state.membership.alive() and node not in state.draining

    def _facts(self, node: NodeId) -> MemberFacts:
        return self._members[node].facts(draining=node in self._cluster_state.draining)

    def name(self, node: NodeId) -> str:
        """The node's name; its id where none is known."""
        if node == self.self_id:
            return self._describe_self().facts.name
        member = self._members.get(node)
        return member.beat.sender.name if member else node


def _address(facts: pb.NodeFacts) -> str:
    return f"{facts.host}:{facts.port}"
