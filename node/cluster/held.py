"""What heads hold: told with their heartbeats, and adopted by the node that is the head next."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...placement.ids import NodeId
from ...proto import peer_pb2 as pb


@dataclass(frozen=True, slots=True)
class HeadReport:
    """A head's last word: its placements, and what was asked of them."""

    placements: tuple[pb.HeldPlacement, ...]
    desired: tuple[pb.DesiredPlacement, ...]


class Held:
    """By head. The last word of a head outlives it, until another head's is heard or adopted."""

    def __init__(self) -> None:
        self.own: Callable[[], list[pb.HeldPlacement]] = list
        """This node's, for its heartbeats while it is the head."""
        self._told: dict[NodeId, HeadReport] = {}

    def learn(self, head: NodeId, told: pb.Heartbeat, *, only: bool) -> None:
        """A head's heartbeat. `only`: it is this node's own head, and no other counts."""
        if only:
            self._told.clear()
        self._told[head] = HeadReport(tuple(told.held), tuple(told.desired))

    def take(self, leads: Callable[[NodeId], bool]) -> Mapping[NodeId, HeadReport]:
        """The words of those that lead no longer; they are not kept."""
        over = {head: told for head, told in self._told.items() if not leads(head)}
        self._told = {head: told for head, told in self._told.items() if head not in over}
        return over

    def names(self, placement: str) -> bool:
        """Whether a head that leads still, or is not adopted yet, holds that placement."""
        words = (told.placements for told in self._told.values())
        return any(held.placement == placement for each in words for held in each)
