"""Which live node is the head. Pure; the interface holds what a lease-based election needs."""

from collections.abc import Collection
from typing import Protocol

from ..placement.ids import NodeId, Term


class Election(Protocol):
    """Names the head for a set of live nodes."""

    @property
    def term(self) -> Term:
        """Grows whenever the head changes."""
        ...

    def head(self, live: Collection[NodeId]) -> NodeId:
        """The head among `live`, which is never empty: this node is in it."""
        ...


class LowestIdElection:
    """The lowest id leads: every node that sees the same members names the same head."""

    def __init__(self) -> None:
        self._term = Term(0)
        self._head: NodeId | None = None

    @property
    def term(self) -> Term:
        return self._term

    def head(self, live: Collection[NodeId]) -> NodeId:
        head = min(live)
        if head != self._head:
            self._head = head
            self._term = Term(self._term + 1)
        return head
