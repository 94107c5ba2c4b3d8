"""Simulated nodes: the real membership and election over a simulated network and clock."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations

from exo_node.node.cluster.cluster_state import Change, ClusterState
from exo_node.node.cluster.election import HeadChanged, TermRaised
from exo_node.node.machine.timing import LAN
from exo_node.placement.ids import NodeId, Term

STEP_S = 0.25
RECENT_S = 5.0
BEAT_EVERY = 4
"""Steps between two heartbeats of a node to another one; each of a pair sends its own."""


class Disk:
    """A term store that outlives its node's processes."""

    def __init__(self, term: int = 0) -> None:
        self.term = Term(term)

    def load(self) -> Term:
        return self.term

    def save(self, term: Term) -> None:
        self.term = term


class VolatileDisk(Disk):
    """A seeded fault: the term is lost with the process."""

    def load(self) -> Term:
        return Term(0)


@dataclass(slots=True)
class Simulated:
    """A cluster in simulated time; each broken promise is an AssertionError where it happens."""

    disk: Callable[[], Disk] = Disk
    now: float = 0.0
    up: dict[NodeId, ClusterState] = field(default_factory=dict[NodeId, ClusterState])
    paused: set[NodeId] = field(default_factory=set[NodeId])
    cut: set[frozenset[NodeId]] = field(default_factory=set[frozenset[NodeId]])
    lost: Callable[[], bool] = lambda: False
    """Whether the next heartbeat is lost."""
    changes: list[tuple[float, NodeId, Change]] = field(
        default_factory=list[tuple[float, NodeId, Change]]
    )
    _disks: dict[NodeId, Disk] = field(default_factory=dict[NodeId, Disk])
    _lives: int = 0
    _steps: int = 0
    _highest: dict[NodeId, int] = field(default_factory=lambda: defaultdict(int))
    _led: dict[tuple[NodeId, int], int] = field(default_factory=dict[tuple[NodeId, int], int])
    _urgent: set[NodeId] = field(default_factory=set[NodeId])
    _troubled: dict[frozenset[NodeId], float] = field(
        default_factory=dict[frozenset[NodeId], float]
    )
    """When a heartbeat between the two last failed to arrive."""

    # --------------------------------------------------------------------- events

    def start(self, name: str, wait_s: float = 1.0) -> None:
        node = NodeId(name)
        self._lives += 1
        disk = self._disks.setdefault(node, self.disk())
        life = self._lives * 1000
        self.up[node] = ClusterState(node, life, disk, self.now, LAN, wait_s=wait_s)
        for other in self.up.keys() - {node}:  # nothing is known of the process before
            _ = self._troubled.pop(frozenset((node, other)), None)
        self._urgent.add(node)  # a fresh node dials at once
        self._check(node, ())

    def kill(self, name: str) -> None:
        del self.up[NodeId(name)]
        self.paused.discard(NodeId(name))

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self.paused.add(NodeId(name))

    def resume(self, name: str) -> None:
        self.paused.discard(NodeId(name))

    def part(self, *groups: str) -> None:
        """Only nodes of one group reach each other; a letter is a node."""
        nodes = [NodeId(node) for group in groups for node in group]
        same = [set(group) for group in groups]
        pairs = combinations(nodes, 2)
        self.cut = {frozenset(p) for p in pairs if not any(set(p) <= group for group in same)}

    def sever(self, one: str, other: str) -> None:
        self.cut.add(frozenset((NodeId(one), NodeId(other))))

    def heal(self) -> None:
        self.cut.clear()

    def leave(self, name: str) -> None:
        """The node drains; `kill` is its end."""
        node = NodeId(name)
        self._record(node, self.up[node].resign(self.now))
        self._urgent.add(node)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self._step()

    # ---------------------------------------------------------------------- views

    def heads(self) -> dict[str, tuple[str | None, int]]:
        """(head, term) in the view of each running node."""
        return {n: (s.election.head, int(s.election.term)) for n, s in sorted(self.up.items())}

    def leaders(self) -> list[str]:
        return [node for node, standing in self.up.items() if standing.election.head == node]

    def agreed(self) -> bool:
        return len(set(self.heads().values())) == 1 and len(self.leaders()) == 1

    def since(self, when: float, kind: type[Change] | None = None) -> list[tuple[NodeId, Change]]:
        return [
            (node, change)
            for at, node, change in self.changes
            if at > when and (kind is None or isinstance(change, kind))
        ]

    # ------------------------------------------------------------------------- inside

    def _step(self) -> None:
        self.now += STEP_S
        self._steps += 1
        running = [node for node in sorted(self.up) if node not in self.paused]
        for node in running:
            self._record(node, self.up[node].tick(self.now))
        urgent, self._urgent = self._urgent, set()
        for turn, (one, other) in enumerate(combinations(sorted(self.up), 2)):
            if frozenset((one, other)) in self.cut or {one, other} & self.paused:
                self._troubled[frozenset((one, other))] = self.now
                continue
            phase = (self._steps + turn) % BEAT_EVERY
            if phase == 0 or urgent & {one, other}:
                self._exchange(one, other)
            elif phase == BEAT_EVERY // 2:
                self._exchange(other, one)

    def _exchange(self, one: NodeId, other: NodeId) -> None:
        """A heartbeat and its answer, which is sent after the heartbeat was processed."""
        for sender, receiver in ((one, other), (other, one)):
            if self.lost():
                self._troubled[frozenset((one, other))] = self.now
                return
            beat = self.up[sender].heartbeat(self.now)
            self._record(receiver, self.up[receiver].record_heartbeat(beat, self.now))

    def _record(self, node: NodeId, changes: Iterable[Change]) -> None:
        changes_of_node = tuple(changes)
        self.changes += [(self.now, node, change) for change in changes_of_node]
        self._check(node, changes_of_node)

    def _check(self, node: NodeId, changes_of_node: tuple[Change, ...]) -> None:
        standing = self.up[node]
        term = int(standing.election.term)
        assert term >= self._highest[node], f"{node} knew term {self._highest[node]}, now {term}"
        self._highest[node] = term
        if any(isinstance(change, HeadChanged | TermRaised) for change in changes_of_node):
            self._urgent.add(node)
            if standing.election.head == node:
                self._check_lease(node, term)

    def _check_lease(self, node: NodeId, term: int) -> None:
        life = self.up[node].boot_id
        assert self._led.setdefault((node, term), life) == life, f"{node} led term {term} before"
        for other, standing in self.up.items():
            election = standing.election
            if other == node or (election.head, election.term) != (other, term):
                continue
            trouble = self._troubled.get(frozenset((node, other)), -RECENT_S)
            excused = self.now - trouble <= RECENT_S
            assert excused, f"{node} and {other} both lead term {term}"
