"""Changes of membership and election as events, with a sentence for a person."""

import logging
from collections.abc import Callable
from typing import assert_never

from ...placement.ids import NodeId
from ..machine.events import EventLog
from .cluster_state import Change, ClusterState
from .election import HeadChanged, HeadLost, TermNotStored, TermRaised, TermStored
from .membership import Died, Joined, LeftCluster, Recovered, Refuted, Suspected

log = logging.getLogger(__name__)


def term_trouble(why: str) -> str:
    """The sentence for a person on a term that cannot be stored; "" where `why` is empty."""
    return why and (
        f"the head's term cannot be stored in the data folder ({why}): this node does not "
        "lead until it can; free space there, or make the folder again"
    )


def log_change(
    change: Change, state: ClusterState, name: Callable[[NodeId], str], events: EventLog
) -> None:
    """Adds an event, or a line to the log, for a change.

    `state`: this node's after the change. `name` gives a node's name.
    """
    add = events.add
    match change:
        case Joined(node):
            _ = add("joined", f"{name(node)} joined", node=node)
        case Suspected(node, by=witness):
            whom = "" if witness is None else f" {name(witness)}"
            text = f"{name(node)} does not answer{whom}; it gets no new work"
            _ = add("suspected", text, node=node, by=witness)
        case Recovered(node):
            _ = add("recovered", f"{name(node)} answers again", node=node)
        case Refuted(node, by=witness, was=was):
            text = f"{name(witness)} took this node for {was}; told it otherwise"
            _ = add("refuted", text, node=node, by=witness, was=was)
        case Died(node, restarted=restarted):
            text = f"{name(node)} was restarted" if restarted else f"{name(node)} is dead"
            _ = add("died", text, node=node, restarted=restarted)
        case LeftCluster(node):
            _ = add("left", f"{name(node)} left", node=node)
        case HeadLost(head, term):
            alone = not state.membership.live()
            then = "no other node is here to lead" if alone else "electing another one"
            text = f"{name(head)} is the head no longer; {then}"
            _ = add("election", text, node=head, term=int(term))
        case HeadChanged(head, term, before=before):
            who = "this node" if head == state.self_id else name(head)
            text = f"{who} is the head now (term {term})"
            _ = add("head_changed", text, node=head, term=int(term), before=before)
        case TermRaised(term):
            log.info("the head's term is %d now", term)
        case TermNotStored(why):
            _ = add("term_not_stored", term_trouble(why))
        case TermStored():
            _ = add("term_stored", "the head's term can be stored again")
        case _:
            assert_never(change)
