"""One live node as its heartbeats tell of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One live node as heartbeats tell of it."""

    facts: pb.NodeFacts
    stages: Sequence[pb.StageState] = ()

    @property
    def id(self) -> NodeId:
        return NodeId(self.facts.id)
