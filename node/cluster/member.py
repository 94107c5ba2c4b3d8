"""The other nodes, each by its last heartbeat; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb

_NODE_FACTS = (
    *("id", "name", "version", "host", "port", "http_host", "http_port"),
    *("chip", "backend", "memory_bytes", "memory_bandwidth"),
)
_STAGE_FACTS = (
    *("placement", "model", "stage", "status", "progress", "pid", "live_requests"),
    *("weight_bytes", "checkpoint_bytes_read", "cache_bytes", "prefix_cache_bytes"),
    *("prefix_disk_bytes", "prefix_disk_rows", "prefix_memory_rows", "prefix_peer_rows"),
    "peak_memory_bytes",
)
EXCHANGE_WEIGHT = 0.25
"""Share of the last exchange in the mean: the first one's handshake fades within seconds."""


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A node as its last heartbeat describes it. Times are of this node's monotonic clock."""

    facts: pb.NodeFacts
    stages: Sequence[pb.StageState] = ()
    draining: bool = False
    head: str = ""
    """The node that it follows."""
    heard_at: float = inf
    """When its last heartbeat came, or inf if it is this node."""
    alive_since: float = -inf
    """The beginning of its heartbeats without a gap."""

    @property
    def id(self) -> NodeId:
        return NodeId(self.facts.id)

    def describe(self, status: str) -> dict[str, Any]:
        """An entry of `nodes` in the body of `GET /v1/cluster`."""
        facts = {name: getattr(self.facts, name) for name in _NODE_FACTS}
        return {**facts, "status": status, "stages": [_describe(each) for each in self.stages]}


@dataclass(slots=True)
class Reach:
    """When heartbeats last passed, in seconds of a monotonic clock, or None for never."""

    answered_at: float | None = None
    """The last heartbeat of this node that the other one answered."""
    received_at: float | None = None
    """The last heartbeat that the other node sent to this node's port."""

    def describe(self, now: float) -> dict[str, float | None]:
        """The seconds since then, JSON-ready."""
        answered_at, received_at = self.answered_at, self.received_at
        return {
            "answered_ago_s": None if answered_at is None else round(now - answered_at, 1),
            "heard_ago_s": None if received_at is None else round(now - received_at, 1),
        }


@dataclass(slots=True)
class Member:
    """Another node, its address and its last heartbeat."""

    address: str
    beat: pb.Heartbeat
    heard_at: float = -inf
    """When its last heartbeat came, by the monotonic clock."""
    alive_since: float = -inf
    """The beginning of its heartbeats without a gap."""
    unloaded: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """(placement, stage) that the node reported as unloaded, until its heartbeats agree."""
    reach: Reach = field(default_factory=Reach)
    exchange_s: float = 0.0
    """Seconds of a heartbeat there and back: a mean in which the last ones count most."""

    def record_answer(self, took_s: float, now: float) -> None:
        """Its last heartbeat, the answer to this node's of `took_s` ago, came now."""
        before = self.exchange_s or took_s
        self.exchange_s = before + EXCHANGE_WEIGHT * (took_s - before)
        self.reach.answered_at = now

    def record_heartbeat(self, address: str, beat: pb.Heartbeat, now: float, gap_s: float) -> None:
        """Replaces the last heartbeat and the address. `gap_s`: a longer pause is a gap."""
        if now - self.heard_at > gap_s:  # it may have been another head's
            self.alive_since = now
        self.address, self.beat, self.heard_at = address, beat, now
        self.unloaded &= {(state.placement, state.stage) for state in beat.placements}

    def facts(self, *, draining: bool) -> MemberFacts:
        """Without the stages that the node has unloaded since its last heartbeat."""
        beat = self.beat
        stages = [s for s in beat.placements if (s.placement, s.stage) not in self.unloaded]
        return MemberFacts(
            beat.sender, stages, draining, beat.head, self.heard_at, self.alive_since
        )


def _describe(state: pb.StageState) -> dict[str, Any]:
    facts = {name: getattr(state, name) for name in _STAGE_FACTS}
    return facts | {
        "layers": [state.first_layer, state.end_layer],
        "error": state.error or None,
    }
