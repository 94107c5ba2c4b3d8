"""The live cluster as this node sees it: dials candidates, exchanges heartbeats, names the head."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, assert_never

from ...placement.errors import ExoNodeError, OtherCluster, PeerLost, PeerRefused
from ...placement.ids import NodeId, Term
from ...proto import peer_pb2 as pb
from ..machine.events import EventLog
from ..machine.tasks import Loops
from ..machine.timing import ClusterTiming
from ..rpc.control_client import ControlClient
from ..rpc.control_server import PROTOCOL
from .cluster_state import Change, ClusterState
from .desired import DesiredPlacements
from .election import HeadChanged, HeadLost, TermNotStored, TermRaised, TermStored
from .heartbeats import checked, describe_node, fill, read
from .held import Held
from .member import Dial, Member
from .member_facts import MemberFacts
from .membership import Died, Joined, LeftCluster, Recovered, Refuted, Suspected

log = logging.getLogger(__name__)

QUICK_TRIES = 6
"""Of a live node, before its address is tried less and less often."""


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
        held: Held,
        timing: ClusterTiming,
    ) -> None:
        """`states` gives this node's stages; `on_lost` hears of nodes that died or left.

        `desired` and `held` are the head's: told where this node is it, else learnt.
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
        self._held = held
        self._timing = timing
        self._members: dict[NodeId, Member] = {}
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # set, and replaced, when there is something to tell at once
        self._gone: dict[NodeId, asyncio.Event] = {}
        self.self_id = cluster_state.self_id

    def start(self) -> None:
        self._tell(self._cluster_state.tick(time.monotonic()))
        self._ticker = self._loops.keep(self._tick, "the membership's clock")

    async def close(self) -> None:
        """Says goodbye, so that the others need not wait for a timeout."""
        farewell = self._beat()
        farewell.leaving = True
        goodbyes = [
            self._client.exchange(member.address, node, farewell)
            for node, member in self._members.items()
            if node in self._cluster_state.membership.live()
        ]
        _ = await asyncio.gather(*goodbyes, return_exceptions=True)
        tasks = [*self._dials.values(), *([self._ticker] if self._ticker else [])]
        for task in tasks:
            task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)

    def leave(self) -> None:
        """Before the end: this node gives up its lease, and the others place nothing here."""
        _ = self._events.add("leaving", f"{self._self_facts().name} is about to leave")
        self._tell(self._cluster_state.resign(time.monotonic()))
        self.speak_up()

    def dial(self, address: str, node: NodeId | None = None) -> None:
        """Begins to exchange heartbeats with whoever listens there; known addresses are ignored."""
        own = self._self_facts()
        if node == self.self_id or address == f"{own.host}:{own.port}" or address in self._dials:
            return
        exchange = partial(self._exchange_for_ever, Dial(address, node, self._timing.heartbeat_s))
        self._dials[address] = self._loops.keep(exchange, f"the exchange with {address}")

    def heard(self, sender: NodeId, beat: pb.Heartbeat) -> pb.Heartbeat:
        """A heartbeat that came in; the answer is this node's own.

        A head that follows the sender from now on answers as the head once more: what it held and
        was asked is the sender's to go on with, or to tell.
        """
        if beat.leaving:
            self._tell(self._cluster_state.left(sender, time.monotonic()))
            _ = self._members.pop(sender, None)
            return self._beat()
        address = f"{beat.sender.host}:{beat.sender.port}"
        known = self._members.get(sender)
        moved = known is not None and known.beat.sender.port != beat.sender.port
        last_word = self._beat() if self.is_head and beat.head == sender else None
        self._note(sender, address if known is None or moved else known.address, beat)
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
        """Of the head's lease; the highest known where there is no head."""
        return self._cluster_state.election.term

    def trouble(self) -> str:
        """Why this node cannot lead though it would; "" where it can."""
        why = self._cluster_state.election.not_stored
        return why and (
            f"the head's term cannot be stored in the data folder ({why}): this node does not "
            "lead until it can; free space there, or make the folder again"
        )

    async def wait_for_head(self, other_than: NodeId | None = None) -> NodeId:
        """The head, after the election if there is one. Raises PeerLost.

        `other_than` is a head that did not answer: it waits until that one is given up.
        """
        try:
            async with asyncio.timeout(self._timing.election_s):
                while (head := self.head) is None or head == other_than:
                    _ = await self._news.wait()
        except TimeoutError:
            raise PeerLost(
                "the cluster has no head that answers; `exo-node status` shows which nodes do. "
                "Try again in a few seconds"
            ) from None
        return head

    async def heed(self, within_s: float) -> None:
        """Returns when there is news of the head, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                _ = await self._news.wait()

    def is_live(self, node: NodeId) -> bool:
        """Whether the node is not known to be dead or gone."""
        return node == self.self_id or node in self._cluster_state.membership.live()

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
        beats = [m.beat for node, m in self._members.items() if node in may]
        return [MemberFacts(beat.sender, beat.placements) for beat in beats]

    def absent(self) -> list[MemberFacts]:
        """Nodes that are known and not among `others`: dead, suspect or about to leave."""
        here = {member.id for member in self.others()}
        beats = [m.beat for node, m in self._members.items() if node not in here]
        return [MemberFacts(beat.sender, beat.placements) for beat in beats]

    def draining(self) -> frozenset[NodeId]:
        """Nodes that are about to leave: what runs on them has to move, they take nothing new."""
        return self._cluster_state.draining

    def address(self, node: NodeId) -> str:
        """host:port of another node's control server. Raises PeerLost."""
        member = self._members.get(node)
        if member is None:
            raise PeerLost(f"node {node} is not in the cluster")
        return member.address

    def missing_stages(self, expected: Iterable[tuple[NodeId, str, int]]) -> list[tuple[str, int]]:
        """Of the (node, placement, stage) that should be up, those gone for the grace."""
        gone: list[tuple[str, int]] = []
        now = time.monotonic()
        for node, placement, stage in expected:
            member = self._members.get(node)
            if member is None:
                continue
            key = (placement, stage)
            if any((s.placement, s.stage) == key for s in member.beat.placements):
                _ = member.missing_since.pop(key, None)
            elif now - member.missing_since.setdefault(key, now) > self._timing.stage_grace_s:
                gone.append(key)
        return gone

    def progress(self, node: NodeId, placement: str, stage: int) -> tuple[int, float] | None:
        """Steps that a stage's runner on another node has finished, and for how long (s) no more.

        None where its node's heartbeats do not name it.
        """
        member = self._members.get(node)
        found = None if member is None else member.progress.get((placement, stage))
        return None if found is None else (found[0], time.monotonic() - found[1])

    def describe(self, version: str) -> dict[str, Any]:
        """The body of `GET /v1/cluster`."""
        status = self._cluster_state.membership.statuses()
        draining, head = self._cluster_state.draining, self.head
        shown = {node: "draining" for node in draining if status.get(node) != "dead"}
        mine = shown.get(self.self_id, "alive")
        nodes = [describe_node(self._self_facts(), self._states(), mine, head=head, itself=True)]
        for node, m in sorted(self._members.items()):
            seen = shown.get(node) or status.get(node, "dead")
            nodes.append(
                describe_node(m.beat.sender, m.beat.placements, seen, head=head, itself=False)
            )
        return {
            "self": self.self_id,
            "head": head,
            "term": self.term,
            "lease": self._lease(),
            "cluster": self._fingerprint,
            "version": version,
            "nodes": nodes,
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
            desired=self._desired.told() if self.is_head else (),
            held=self._held.own() if self.is_head else (),
        )
        fill(message, self._cluster_state.beat(time.monotonic()))
        return message

    async def _exchange_for_ever(self, dial: Dial) -> None:
        while True:
            begun = time.monotonic()
            try:
                beat = await self._client.exchange(dial.address, dial.node, self._beat())
                beat = checked(beat, dial.address)
            except ExoNodeError as fault:
                self._complain(dial, fault)
                if isinstance(fault, PeerRefused):
                    self._refused(dial)
                await asyncio.sleep(self._until_next_try(dial))
                continue
            node = NodeId(beat.sender.id)
            if node == self.self_id:
                return  # one of our own addresses, under a name we did not know
            dial.node, dial.backoff_s, dial.complaint = node, self._timing.heartbeat_s, ""
            dial.failures = 0
            self._note(node, dial.address, beat)
            if (member := self._members.get(node)) is not None:
                member.took(time.monotonic() - begun)
            for address in beat.peers:
                self.dial(address)
            await self._pause()

    def _refused(self, dial: Dial) -> None:
        """Where it listened before a restart says nothing of a node that only pauses."""
        member = None if dial.node is None else self._members.get(dial.node)
        if dial.node is not None and member is not None and member.address == dial.address:
            self._tell(self._cluster_state.refused(dial.node, time.monotonic()))

    def _until_next_try(self, dial: Dial) -> float:
        """Seconds. Soon where a live node did not answer: the others wait to know about it."""
        timing = self._timing
        dial.failures += 1
        if dial.node is not None and dial.failures <= QUICK_TRIES and self.is_live(dial.node):
            return timing.quick_try_s
        most = timing.max_backoff_s if dial.node is None else timing.known_backoff_s
        pause, dial.backoff_s = dial.backoff_s, min(2 * dial.backoff_s, most)
        return pause

    async def _pause(self) -> None:
        """Until the next heartbeat is due, or there is something to tell at once."""
        news = self._news
        try:
            async with asyncio.timeout(self._timing.heartbeat_s):
                _ = await news.wait()
        except TimeoutError:
            return

    def speak_up(self) -> None:
        """Sends heartbeats now, and wakes who waits for the head."""
        self._news.set()
        self._news = asyncio.Event()

    def _note(self, node: NodeId, address: str, beat: pb.Heartbeat) -> None:
        now = time.monotonic()
        known = self._members.get(node)
        if known is None:
            known = self._members[node] = Member(address, beat)
        else:
            known.beat, known.address = beat, address
        known.progress = {
            key: before
            if (before := known.progress.get(key)) is not None and before[0] == state.progress
            else (state.progress, now)
            for state in beat.placements
            for key in [(state.placement, state.stage)]
        }
        self._tell(self._cluster_state.heard(read(node, beat), now))
        if node == beat.head:
            followed = node == self.head
            self._held.learn(node, beat, only=followed)
            if followed:
                self._desired.learn(beat.desired)
        if node not in self._cluster_state.membership.statuses():
            # It said goodbye, and this heartbeat was still under way.
            _ = self._members.pop(node, None)

    def _complain(self, dial: Dial, fault: ExoNodeError) -> None:
        """Once for each kind of trouble: a node that is off for a night must not fill the log."""
        if dial.complaint != fault.code:
            dial.complaint = fault.code
            if isinstance(fault, OtherCluster):  # as before every joining
                log.info("%s is not of this cluster: one of the two may ask to join", dial.address)
            elif fault.message.startswith(dial.address):
                log.warning("%s", fault.message)
            else:
                log.warning("%s: %s", dial.address, fault.message)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._timing.tick_s)
            self._tell(self._cluster_state.tick(time.monotonic()))

    def _tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case HeadChanged() | HeadLost() | TermRaised():
                    self._tell_of_head(change)
                case TermNotStored() | TermStored():
                    self._tell_of_disk(change)
                case _:
                    self._tell_of_node(change)

    def _tell_of_node(
        self, change: Joined | Suspected | Recovered | Died | LeftCluster | Refuted
    ) -> None:
        node, name, add = change.node, self._name(change.node), self._events.add
        match change:
            case Joined():
                _ = add("joined", f"{name} joined", node=node)
            case Suspected(by=witness):
                whom = "" if witness is None else f" {self._name(witness)}"
                text = f"{name} does not answer{whom}; it gets no new work"
                _ = add("suspected", text, node=node, by=witness)
                self.speak_up()  # a node that still vouches for it delays its death
            case Recovered():
                _ = add("recovered", f"{name} answers again", node=node)
            case Refuted(was=was, by=witness):
                text = f"{self._name(witness)} took this node for {was}; told it otherwise"
                _ = add("refuted", text, node=node, by=witness, was=was)
            case Died(restarted=restarted):
                text = f"{name} was restarted" if restarted else f"{name} is dead"
                _ = add("died", text, node=node, restarted=restarted)
                self._lost(node, text if restarted else f"{name} does not answer any more")
            case LeftCluster():
                _ = add("left", f"{name} left", node=node)
                self._lost(node, f"{name} left the cluster")
            case _:
                assert_never(change)

    def _lost(self, node: NodeId, why: str) -> None:
        if (gone := self._gone.pop(node, None)) is not None:
            gone.set()
        self._on_lost(node, why)

    def _tell_of_head(self, change: HeadChanged | HeadLost | TermRaised) -> None:
        term = int(change.term)
        match change:
            case HeadLost(head):
                others = self._cluster_state.membership.live()
                then = "electing another one" if others else "no other node is here to lead"
                text = f"{self._name(head)} is the head no longer; {then}"
                _ = self._events.add("election", text, node=head, term=term)
            case HeadChanged(head, before=before):
                who = "this node" if head == self.self_id else self._name(head)
                text = f"{who} is the head now (term {term})"
                _ = self._events.add("head_changed", text, node=head, term=term, before=before)
            case TermRaised():
                log.info("the head's term is %d now", term)
            case _:
                assert_never(change)
        self.speak_up()

    def _tell_of_disk(self, change: TermNotStored | TermStored) -> None:
        match change:
            case TermNotStored():
                _ = self._events.add("term_not_stored", self.trouble())
            case TermStored():
                _ = self._events.add("term_stored", "the head's term can be stored again")
            case _:
                assert_never(change)

    def _name(self, node: NodeId) -> str:
        if node == self.self_id:
            return f"{self._self_facts().name} ({node})"
        member = self._members.get(node)
        return f"{member.beat.sender.name} ({node})" if member else node
