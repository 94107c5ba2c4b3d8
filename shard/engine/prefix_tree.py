"""The nodes of a prefix cache's tree: what one forward over a prompt added."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import mlx.core as mx

from ...mtp.rollback import cache_arrays
from .cache_parts import KeptDraft, State
from .spans import Span

Salt: TypeAlias = bytes
"""Stands for who asked: requests of one salt share what is kept of their prompts, no others do."""


@dataclass(frozen=True, slots=True)
class DrafterPart:
    """What the draft head holds behind a node's rows; see `KeptDraft`."""

    begin: int
    span: Span | None
    """Of its cache, from row `begin` on, where those of an earlier node end."""
    end: int
    pending: mx.array | None
    first: int
    """The row that `pending` begins at. Where the head rested it is behind `end`: what lies between
    is pending at earlier nodes, see `pending_of`."""
    whole: bool = True
    """False: `pending` was dropped."""

    @classmethod
    def of(cls, drafter: KeptDraft, above: "Node | None") -> "DrafterPart":
        """`above`: the nearest node before that has a drafter's state."""
        begin, rested = 0, False
        if above is not None and above.drafter is not None:
            begin = above.drafter.end
            rested = above.drafter.whole and begin == drafter.rows < above.end
        end, span, pending = drafter.rows, None, drafter.hidden
        if end > begin:
            span = Span.of([drafter.cache], begin, end)
        first = above.end if above is not None and rested else end
        if pending is not None and first > end:
            pending = mx.contiguous(pending[:, first - end :])
        return cls(begin, span, end, pending, first)

    @property
    def hidden_bytes(self) -> int:
        return 0 if self.pending is None else self.pending.nbytes

    def with_hidden(self, drafter: KeptDraft) -> "DrafterPart":
        if self.whole or drafter.rows != self.end:
            return self
        return replace(self, pending=drafter.hidden, first=self.end, whole=True)

    def without_hidden(self) -> "DrafterPart":
        return replace(self, pending=None, whole=False)


@dataclass(slots=True, eq=False)
class Node:
    """One forward over a prompt, behind those of its parents."""

    parent: "Node | None"
    key: bytes
    """The ids of its rows."""
    end: int
    span: Span | None = None
    """Its rows; None of the root, which has none."""
    states: tuple[State, ...] | None = None
    """Of the other layers, behind its last row; None: not kept, so nothing goes on from here."""
    drafter: DrafterPart | None = None
    first_turn: bool = False
    """It ends with the prompt's first turn, as a rule the system's: it goes late."""
    used: int = 0
    state_used: int = 0
    children: "dict[bytes, Node]" = field(default_factory=dict[bytes, "Node"])

    @property
    def spans(self) -> list[Span]:
        drafted = self.drafter.span if self.drafter else None
        return [span for span in (self.span, drafted) if span is not None]

    @property
    def state_bytes(self) -> int:
        """What can go while the rows stay."""
        return self._hidden_bytes * (not self.is_pending_below) + self._recurrent_bytes

    @property
    def row_bytes(self) -> int:
        """What stays as long as the node does."""
        return sum(span.bytes for span in self.spans)

    @property
    def bytes(self) -> int:
        return self._hidden_bytes + self._recurrent_bytes + self.row_bytes

    @property
    def is_pending_below(self) -> bool:
        """Whether what is pending here is a part of what is pending at a node below."""
        here = self.drafter
        if here is None or here.pending is None:
            return False
        parts = (node.drafter for node in self.below)
        return any(p is not None and p.end == here.end < self.end <= p.first for p in parts)

    @property
    def _hidden_bytes(self) -> int:
        return self.drafter.hidden_bytes if self.drafter else 0

    @property
    def _recurrent_bytes(self) -> int:
        return sum(state.bytes for state in self.states or ())

    @property
    def path(self) -> "list[Node]":
        """From the root's child to this one."""
        found, node = list[Node](), self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def below(self) -> "Iterator[Node]":
        """Its children, theirs and so on."""
        waiting = list(self.children.values())
        while waiting:
            yield (each := waiting.pop())
            waiting += each.children.values()

    @property
    def arrays(self) -> Iterator[mx.array]:
        for span in self.spans:
            for rows in span.layers:
                if rows is not None:
                    yield from rows.arrays
        for state in self.states or ():
            yield from cache_arrays([state.cache])
        if self.drafter is not None and self.drafter.pending is not None:
            yield self.drafter.pending

    def goes_on(self, *, drafts: bool) -> bool:
        has_drafter = self.drafter is not None and self.drafter.whole
        return self.states is not None and (has_drafter or not drafts)


def key_of(prompt: Sequence[int], begin: int, end: int, salt: Salt = b"") -> bytes:
    """The key of the forward over the rows [begin, end).

    `salt` is part of the keys of first forwards: prompts of different salts share no node.
    """
    mark = b"" if begin else mark_of(salt)
    return mark + array("Q", prompt[begin:end]).tobytes()


def mark_of(salt: Salt) -> bytes:
    """The beginning of what tells prompts of one salt from all others."""
    return salt + b":" if salt else b""


def drafter_spans(path: Sequence[Node]) -> list[Span]:
    """Of the drafter's rows up to the state at the path's end."""
    last = path[-1].drafter
    assert last is not None
    spans, wanted = list[Span](), last.end
    for node in reversed(path):
        # Nodes may have been given a drafter's state one by one: rows are taken where they join.
        each = node.drafter
        if each is not None and each.span is not None and each.end == wanted:
            spans.append(each.span)
            wanted = each.begin
    assert wanted == 0, "a row of the drafter's is missing"
    return spans[::-1]


def pending_of(path: Sequence[Node]) -> mx.array | None:
    """The hidden states of the rows up to the path's end that the drafter is yet to read."""
    last, wanted, parts = path[-1].drafter, path[-1].end, list[mx.array]()
    assert last is not None
    if last.first == last.end:
        return last.pending
    for node in reversed(path):
        each = node.drafter
        joins = each is not None and each.end == last.end and node.end == wanted > last.end
        if each is not None and joins and each.pending is not None:
            parts.append(each.pending)
            wanted = each.first
    assert wanted == last.end, "a row that the drafter is yet to read is missing"
    return mx.concatenate(parts[::-1], axis=1)
