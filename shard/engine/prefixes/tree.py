"""The nodes of the prefix cache's tree: each has the rows that one forward over a prompt added."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from ....mtp.caches.rollback import cache_arrays
from ....mtp.types import CacheTier
from ..states.cache_parts import Span
from ..states.state import DraftState
from .prompt_path import stems


@dataclass(frozen=True, slots=True)
class DrafterPart:
    """The draft head's state after a node's rows, as far as the node adds to it."""

    begin: int
    """The first row of `span`: the rows before it are in earlier nodes."""
    span: Span | None
    """Rows of the head's cache."""
    end: int
    """Rows of the head's cache, those of earlier nodes included."""
    pending: mx.array | None
    """Hidden states of rows that the head has not read."""
    first: int
    """The row that `pending` begins at. If the head rested, it is after `end`, and the rows in
    between are pending at earlier nodes; see `pending_of`."""
    is_whole: bool = True
    """False: `pending` was dropped."""

    @classmethod
    def of(cls, drafter: DraftState, above: "PrefixNode | None") -> "DrafterPart":
        """The part that a node adds. `above`: the nearest earlier node with a draft state."""
        begin, rested = 0, False
        if above is not None and above.drafter is not None:
            begin = above.drafter.end
            rested = above.drafter.is_whole and begin == drafter.rows < above.end
        end, span, pending = drafter.rows, None, drafter.hidden
        if drafter.cache is not None and end > begin:
            span = Span.of([drafter.cache], begin, end)
        first = above.end if above is not None and rested else end
        if pending is not None and first > end:
            pending = mx.contiguous(pending[:, first - end :])
        return cls(begin, span, end, pending, first)

    @property
    def hidden_bytes(self) -> int:
        return 0 if self.pending is None else self.pending.nbytes

    def with_hidden(self, drafter: DraftState) -> "DrafterPart":
        if self.is_whole or drafter.rows != self.end:
            return self
        return replace(self, pending=drafter.hidden, first=self.end, is_whole=True)

    def without_hidden(self) -> "DrafterPart":
        return replace(self, pending=None, is_whole=False)


@dataclass(slots=True, eq=False, weakref_slot=True)
class PrefixNode:
    """One forward over a prompt, after those of its parents."""

    parent: "PrefixNode | None"
    key: bytes
    """The ids of its rows."""
    end: int
    span: Span | None = None
    """The rows of the caches; None for the root."""
    states: tuple[Any, ...] | None = None
    """Caches after the last row, of layers that are not divided by rows; they are never written
    to. None once they are evicted: no request can begin here."""
    drafter: DrafterPart | None = None
    first_turn: bool = False
    """Whether it ends the prompt's first turn, usually the system's, which is evicted late."""
    tier: CacheTier = "memory"
    """The tier of the next hit: a state that was read for a request counts once for the tier that
    it was read from."""
    used: int = 0
    """Tick of the last use of its rows."""
    state_used: int = 0
    """Tick of the last use of its state."""
    children: "dict[bytes, PrefixNode]" = field(default_factory=dict[bytes, "PrefixNode"])

    @property
    def spans(self) -> list[Span]:
        drafter = self.drafter  # read once: other threads look while it is replaced
        drafted = drafter.span if drafter is not None else None
        return [span for span in (self.span, drafted) if span is not None]

    @property
    def state_bytes(self) -> int:
        """Bytes that can be freed while the rows stay."""
        return self._hidden_bytes * (not self.is_pending_below) + self._last_row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(span.bytes for span in self.spans)

    @property
    def bytes(self) -> int:
        return self._hidden_bytes + self._last_row_bytes + self.row_bytes

    @property
    def path_bytes(self) -> int:
        """Bytes of everything that a request which begins after it needs."""
        return self.bytes + sum(each.row_bytes for each in self.path[:-1])

    @property
    def is_pending_below(self) -> bool:
        """Whether its pending rows are needed by a node below, whose own begin after them."""
        here = self.drafter
        if here is None or here.pending is None:
            return False
        parts = (node.drafter for node in self.below)
        return any(p is not None and p.end == here.end < self.end <= p.first for p in parts)

    @property
    def _hidden_bytes(self) -> int:
        drafter = self.drafter
        return drafter.hidden_bytes if drafter is not None else 0

    @property
    def _last_row_bytes(self) -> int:
        """Bytes of the states after the last row."""
        return sum(array.nbytes for array in cache_arrays(self.states or ()))

    @property
    def path(self) -> "list[PrefixNode]":
        """The nodes from the root's child to this one."""
        nodes, node = list[PrefixNode](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def stems(self) -> Iterator[tuple[int, str]]:
        """The row after each node of its path, with the node's name."""
        return stems((node.end, node.key) for node in self.path)

    @property
    def below(self) -> "Iterator[PrefixNode]":
        """All descendants."""
        stack = list(self.children.values())
        while stack:
            yield (node := stack.pop())
            stack += node.children.values()

    @property
    def arrays(self) -> Iterator[mx.array]:
        for span in self.spans:
            for rows in span.layers:
                if rows is not None:
                    yield from rows.arrays
        yield from cache_arrays(self.states or ())
        if self.drafter is not None and self.drafter.pending is not None:
            yield self.drafter.pending

    def is_usable(self, *, drafts: bool) -> bool:
        """Whether a request may begin after it; `drafts`: with a draft state."""
        drafter = self.drafter
        has_drafter = drafter is not None and drafter.is_whole
        return self.states is not None and (has_drafter or not drafts)


def drafter_spans(path: Sequence[PrefixNode]) -> list[Span]:
    """The spans of the drafter's rows up to the state at the path's end."""
    last = path[-1].drafter
    assert last is not None
    spans, next_end = list[Span](), last.end
    for node in reversed(path):
        # Nodes may have got a draft state one by one: only spans that join are used.
        each = node.drafter
        if each is not None and each.span is not None and each.end == next_end:
            spans.append(each.span)
            next_end = each.begin
    assert next_end == 0, "a row of the drafter's is missing"
    return spans[::-1]


def pending_of(path: Sequence[PrefixNode]) -> mx.array | None:
    """The hidden states of the rows up to the path's end that the drafter has not read."""
    last, next_end, parts = path[-1].drafter, path[-1].end, list[mx.array]()
    assert last is not None
    if last.first == last.end:
        return last.pending
    for node in reversed(path):
        each = node.drafter
        joins = each is not None and each.end == last.end and node.end == next_end > last.end
        if each is not None and joins and each.pending is not None:
            parts.append(each.pending)
            next_end = each.first
    assert next_end == last.end, "a row that the drafter is yet to read is missing"
    return mx.concatenate(parts[::-1], axis=1)
