"""The live cluster as this node sees it: its members, and which of them is the head."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from ...placement.errors import PeerLost
from ...placement.ids import NodeId, Term
from ...proto import peer_pb2 as pb
from ..machine.events import EventLog
from ..machine.tasks import Loops
from ..machine.timing import Timing
from ..rpc.control_client import ControlClient
from ..rpc.control_server import PROTOCOL
from .change_log import ChangeLog, term_trouble
from .cluster_state import Change, ClusterState
from .desired import DesiredPlacements
from .election import HeadChanged, HeadLost, TermRaised
from .exchanges import Calls, Exchanges, News
from .heartbeats import describe_node, fill, read
from .member import Member, MemberFacts, MemberReport, clock_difference
from .membership import Died, LeftCluster, Suspected


class Cluster:
    """Owns membership and election; everything runs on the node's event loop."""

    def __init__(
        self,
        self_facts: Callable[[], pb.NodeFacts],
        states: Callable[[], list[pb.StageState]],
        client: ControlClient,
        cluster_state: ClusterState,
        on_lost: Callable[[NodeId, str], None],
        fingerprint: str,
        events: EventLog,
        desired: DesiredPlacements,
        loops: Loops,
        timing: Timing,
    ) -> None:
        """`states` gives this node's stages; `on_lost` hears of nodes that died or left.

        `desired` is the head's: sent where this node is the head, else learnt.
        """
        self._self_facts = self_facts
        self._states = states
        self._client = client
        self._cluster_state = cluster_state
        self._on_lost = on_lost
        self._fingerprint = fingerprint
        self._events = events
        self._desired = desired
        self._loops = loops
        self._timing = timing
        self._members: dict[NodeId, Member] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._news = News()
        self._gone: dict[NodeId, asyncio.Event] = {}
        self.self_id = cluster_state.self_id
        calls = Calls(self._own_address, self._beat, self._answered, self._refused, self.is_live)
        self._exchanges = Exchanges(self.self_id, client, loops, timing, self._news, calls)
        self._log = ChangeLog(self.self_id, self._name, events)

    def start(self) -> None:
        self._apply(self._cluster_state.tick(time.monotonic()))
        self._ticker = self._loops.keep(self._tick, "the membership's clock")

    async def close(self) -> None:
        """Sends a last heartbeat, so that the others need not wait for a timeout."""
        farewell = self._beat()
        farewell.leaving = True
        goodbyes = [
            self._client.exchange(member.address, node, farewell)
            for node, member in self._members.items()
            if node in self._cluster_state.membership.live()
        ]
        _ = await asyncio.gather(*goodbyes, return_exceptions=True)
        await self._exchanges.close()
        if self._ticker is not None:
            self._ticker.cancel()
            _ = await asyncio.gather(self._ticker, return_exceptions=True)

    def leave(self) -> None:
        """Before the end: this node gives up its lease, and the others place nothing here."""
        _ = self._events.add("leaving", f"{self._self_facts().name} is about to leave")
        self._apply(self._cluster_state.resign(time.monotonic()))
        self.speak_up()

    def dial(self, address: str, node: NodeId | None = None) -> None:
        """Begins to exchange heartbeats with whoever listens there; known addresses are ignored."""
        self._exchanges.dial(address, node)

    def heard(self, sender: NodeId, beat: pb.Heartbeat) -> pb.Heartbeat:
        """A heartbeat that came in; the answer is this node's own.

        A head that follows the sender from now on answers as the head once more: what it was asked
        for is the sender's to continue with.
        """
        if beat.leaving:
            self._apply(self._cluster_state.left(sender, time.monotonic()))
            _ = self._members.pop(sender, None)
            return self._beat()
        address = f"{beat.sender.host}:{beat.sender.port}"
        known = self._members.get(sender)
        moved = known is not None and known.beat.sender.port != beat.sender.port
        last_word = self._beat() if self.is_head and beat.head == sender else None
        self._note(sender, address if known is None or moved else known.address, beat)
        if (member := self._members.get(sender)) is not None:
            member.reach.received_at = time.monotonic()
        self.dial(address, sender)
        return self._beat() if last_word is None or self.is_head else last_word

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
        """The term of the head's lease; without a head, the highest that is known."""
        return self._cluster_state.election.term

    def trouble(self) -> str:
        """Why this node cannot lead though it would; "" where it can."""
        return term_trouble(self._cluster_state.election.not_stored)

    async def wait_for_head(self, other_than: NodeId | None = None) -> NodeId:
        """The head, after the election if there is one. Raises PeerLost.

        `other_than` is a head that did not answer: it waits until that one is given up.
        """
        try:
            async with asyncio.timeout(self._timing.election_s):
                while (head := self.head) is None or head == other_than:
                    await self._news.wait()
        except TimeoutError:
            raise PeerLost(
                "the cluster has no head that answers; `exo-node status` shows which nodes do. "
                "Try again in a few seconds"
            ) from None
        return head

    async def heed(self, within_s: float) -> None:
        """Returns when there is news of the head, or after so long."""
        await self._news.wait(within_s)

    def is_live(self, node: NodeId) -> bool:
        """Whether the node is not known to be dead or gone."""
        return node == self.self_id or node in self._cluster_state.membership.live()

    def is_alive(self, node: NodeId) -> bool:
        """Whether the node answers, as far as is known; it may be about to leave."""
        return node == self.self_id or node in self._cluster_state.membership.alive()

    def leads(self, node: NodeId) -> bool:
        """Whether that node is live and says that it is the head."""
        member = self._members.get(node)
        live = node in self._cluster_state.membership.live()
        return live and member is not None and member.beat.head == node

    async def until_gone(self, node: NodeId) -> None:
        """Returns when the node has died, left or been restarted; at once if it is unknown."""
        if node in self._cluster_state.membership.live():
            _ = await self._gone.setdefault(node, asyncio.Event()).wait()

    # ----------------------------------------------------------------------- the others

    def members(self) -> list[MemberFacts]:
        """Nodes that may take new work: alive, not suspect, not about to leave; this one first."""
        itself = MemberFacts(self._self_facts(), self._states())
        return [
            *([itself] if self.self_id not in self._cluster_state.draining else []),
            *self.others(),
        ]

    def others(self) -> list[MemberFacts]:
        """`members` without this node."""
        may = self._cluster_state.membership.alive() - self._cluster_state.draining
        return [_facts(m) for node, m in self._members.items() if node in may]

    def absent(self) -> list[MemberFacts]:
        """Nodes that are known and not among `others`: dead, suspect or about to leave."""
        here = {member.id for member in self.others()}
        return [_facts(m) for node, m in self._members.items() if node not in here]

    def draining(self) -> frozenset[NodeId]:
        """Nodes that are about to leave: what runs on them has to move, they take nothing new."""
        return self._cluster_state.draining

    def address(self, node: NodeId) -> str:
        """host:port of another node's control server. Raises PeerLost."""
        member = self._members.get(node)
        if member is None:
            raise PeerLost(f"node {node} is not in the cluster")
        return member.address

    def note_unloaded(self, node: NodeId, placement: str, stage: int) -> None:
        """The node answered that it holds that stage no more; its next heartbeat will say so."""
        if (member := self._members.get(node)) is not None:
            member.unloaded.add((placement, stage))

    def note_loading(self, node: NodeId, placement: str, stage: int) -> None:
        """The node is about to load that stage, perhaps again."""
        if (member := self._members.get(node)) is not None:
            member.unloaded.discard((placement, stage))

    def reports(self) -> list[MemberReport]:
        """Every node that is known and not forgotten, this one first, with its last heartbeat."""
        alive, draining = self._cluster_state.membership.live(), self._cluster_state.draining
        itself = MemberFacts(self._self_facts(), self._states())
        own = MemberReport(itself, self.self_id in draining, self.self_id, time.monotonic())
        others = [
            MemberReport(_facts(m), node in draining, m.beat.head, m.heard_at, m.alive_since)
            for node, m in self._members.items()
            if node in alive
        ]
        return [own, *others]

    def progress(self, node: NodeId, placement: str, stage: int) -> tuple[int, float] | None:
        """Steps that a stage's runner on another node has finished, and for how long (s) no more.

        None where its node's heartbeats do not name it.
        """
        member = self._members.get(node)
        progress = None if member is None else member.progress.get((placement, stage))
        return None if progress is None else (progress[0], time.monotonic() - progress[1])

    def describe(self, version: str) -> dict[str, Any]:
        """The body of `GET /v1/cluster`."""
        status = self._cluster_state.membership.statuses()
        draining, head = self._cluster_state.draining, self.head
        draining_status = {node: "draining" for node in draining if status.get(node) != "dead"}
        mine = draining_status.get(self.self_id, "alive")
        nodes = [describe_node(self._self_facts(), self._states(), mine, head=head, itself=True)]
        for node, m in sorted(self._members.items()):
            state = draining_status.get(node) or status.get(node, "dead")
            nodes.append(describe_node(m.beat.sender, m.stages, state, head=head, itself=False))
        return {
            "self": self.self_id,
            "head": head,
            "term": self.term,
            "lease": self._lease(),
            "cluster": self._fingerprint,
            "version": version,
            "nodes": nodes,
        }

    def reach(self) -> dict[NodeId, dict[str, Any]]:
        """How each other node that is not dead and this one reach each other, JSON-ready."""
        status, now = self._cluster_state.membership.statuses(), time.monotonic()
        return {
            node: {"node": node, "name": member.beat.sender.name, "address": member.address}
            | member.reach.describe(now)
            for node, member in sorted(self._members.items())
            if status.get(node, "dead") != "dead"
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

    def speak_up(self) -> None:
        """Sends heartbeats now, and wakes who waits for the head."""
        self._news.notify()

    def exchange_s(self, node: NodeId) -> float:
        """Seconds that a heartbeat there and back takes of late; 0 where that is not known."""
        member = self._members.get(node)
        return 0.0 if member is None else member.exchange_s

    # --------------------------------------------------------------------------- inside

    def _beat(self) -> pb.Heartbeat:
        message = pb.Heartbeat(
            protocol=PROTOCOL,
            sender=self._self_facts(),
            peers=[member.address for member in self._members.values()],
            placements=self._states(),
            desired=self._desired.to_wire() if self.is_head else (),
            sent_ms=time.time_ns() // 10**6,
        )
        fill(message, self._cluster_state.beat(time.monotonic()))
        return message

    def _note(self, node: NodeId, address: str, beat: pb.Heartbeat) -> None:
        now = time.monotonic()
        if node not in self._members:
            self._members[node] = Member(address, beat)
        member = self._members[node]
        if now - member.heard_at > self._timing.dead_after_s:  # it may have been another head's
            member.alive_since = now
        member.record_heartbeat(address, beat, now)
        self._apply(self._cluster_state.heard(read(node, beat), now))
        if node == beat.head:
            self._desired.learn(node, beat.desired, followed=node == self.head)
        if node not in self._cluster_state.membership.statuses():
            # It said goodbye, and this heartbeat was still under way.
            _ = self._members.pop(node, None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._timing.tick_s)
            self._apply(self._cluster_state.tick(time.monotonic()))

    def _own_address(self) -> str:
        own = self._self_facts()
        return f"{own.host}:{own.port}"

    def _answered(self, node: NodeId, address: str, beat: pb.Heartbeat, took_s: float) -> None:
        self._note(node, address, beat)
        if (member := self._members.get(node)) is not None:
            member.record_exchange(took_s)
            member.reach.answered_at = time.monotonic()
            if beat.sent_ms:
                member.reach.clock = clock_difference(beat.sent_ms, took_s, time.time())

    def _refused(self, node: NodeId, address: str) -> None:
        """Counts a refused connection, but only at the address that the node has now."""
        member = self._members.get(node)
        if member is not None and member.address == address:
            self._apply(self._cluster_state.refused(node, time.monotonic()))

    def _apply(self, changes: Iterable[Change]) -> None:
        """Logs the changes, then does what follows from them."""
        for change in changes:
            self._log.add(change, self._cluster_state)
            match change:
                case HeadChanged() | HeadLost() | TermRaised() | Suspected():
                    self._news.notify()  # a node that still vouches for a suspect delays its death
                case Died(node, restarted=restarted):
                    what = "was restarted" if restarted else "does not answer any more"
                    self._lost(node, f"{self._name(node)} {what}")
                case LeftCluster(node):
                    self._lost(node, f"{self._name(node)} left the cluster")
                case _:
                    pass

    def _lost(self, node: NodeId, why: str) -> None:
        if (gone := self._gone.pop(node, None)) is not None:
            gone.set()
        self._on_lost(node, why)

    def _name(self, node: NodeId) -> str:
        if node == self.self_id:
            return f"{self._self_facts().name} ({node})"
        member = self._members.get(node)
        return f"{member.beat.sender.name} ({node})" if member else node


def _facts(member: Member) -> MemberFacts:
    return MemberFacts(member.beat.sender, member.stages)
