"""Changes of membership and election as events, with a sentence for a person."""

import logging
from collections.abc import Callable
from typing import Final, assert_never

from ...placement.ids import NodeId
from ..machine.events import EventLog
from .cluster_state import Change, ClusterState
from .election import HeadChanged, HeadLost, TermNotStored, TermRaised, TermStored
from .membership import Died, Joined, LeftCluster, Recovered, Refuted, Suspected

log = logging.getLogger(__name__)

_MAX_PAIRS: Final = 256


class LogOnce:
    """Remembers the last 256 (subject, detail) pairs, so that each is logged once."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], None] = {}

    def is_new(self, subject: str, detail: str) -> bool:
        """Whether the pair is not remembered; afterwards it is."""
        new = (subject, detail) not in self._pairs
        _ = self._pairs.pop((subject, detail), None)
        self._pairs[subject, detail] = None
        while len(self._pairs) > _MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        return new


def term_trouble(why: str) -> str:
    """A sentence for a person on `why` the term cannot be stored; "" where it can."""
    return why and (
        f"the head's term cannot be stored in the data folder ({why}): this node does not "
        "lead until it can; free space there, or make the folder again"
    )


class ChangeLog:
    """Writes changes; what else follows from them is the cluster's."""

    def __init__(self, self_id: NodeId, name: Callable[[NodeId], str], events: EventLog) -> None:
        """`name` gives a node's name with its id."""
        self._self = self_id
        self._name = name
        self._events = events

    def add(self, change: Change, state: ClusterState) -> None:
        """`state`: that of this node after the change."""
        match change:
            case HeadChanged() | HeadLost() | TermRaised():
                self._add_head(change, alone=not state.membership.live())
            case TermNotStored():
                _ = self._events.add("term_not_stored", term_trouble(state.election.not_stored))
            case TermStored():
                _ = self._events.add("term_stored", "the head's term can be stored again")
            case _:
                self._add_node(change)

    def _add_node(
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
            case Recovered():
                _ = add("recovered", f"{name} answers again", node=node)
            case Refuted(was=was, by=witness):
                text = f"{self._name(witness)} took this node for {was}; told it otherwise"
                _ = add("refuted", text, node=node, by=witness, was=was)
            case Died(restarted=restarted):
                text = f"{name} was restarted" if restarted else f"{name} is dead"
                _ = add("died", text, node=node, restarted=restarted)
            case LeftCluster():
                _ = add("left", f"{name} left", node=node)
            case _:
                assert_never(change)

    def _add_head(self, change: HeadChanged | HeadLost | TermRaised, *, alone: bool) -> None:
        term = int(change.term)
        match change:
            case HeadLost(head):
                then = "no other node is here to lead" if alone else "electing another one"
                text = f"{self._name(head)} is the head no longer; {then}"
                _ = self._events.add("election", text, node=head, term=term)
            case HeadChanged(head, before=before):
                who = "this node" if head == self._self else self._name(head)
                text = f"{who} is the head now (term {term})"
                _ = self._events.add("head_changed", text, node=head, term=term, before=before)
            case TermRaised():
                log.info("the head's term is %d now", term)
            case _:
                assert_never(change)
