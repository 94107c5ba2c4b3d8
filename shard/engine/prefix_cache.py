"""The state behind prompts that were read, for prompts that begin alike.

A tree: each node is what one forward over a prompt added. Prompts that begin alike are read by the
same forwards (`mtp.schedule`), so a path from the root is found by the ids of its forwards, and
what it holds is, bit for bit, what reading them again would give.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...mtp.drafters import DrafterState
from ...mtp.rollback import cache_arrays
from .cache_parts import Rows, State, has_rows, joined, row_bytes, rows_of, state_of

STATE_EVERY = 4096
"""Rows after which a state is kept, however large it is beside its keys and values."""

NOTHING_SENT: Final[Mapping[tuple[int, int], bytes]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request goes on from: caches of its own that hold `position` rows."""

    caches: list[Any]
    position: int
    drafter: DrafterState | None
    forwards: "tuple[PrefixForward, ...]" = ()


@dataclass(frozen=True, slots=True)
class PrefixForward:
    """A forward over a kept prefix."""

    end: int
    kept: bool
    """Whether the state behind it is here as well."""
    first_turn: bool
    sent: bytes


@dataclass(frozen=True, slots=True)
class _Drafter:
    """The drafter's state behind a node's rows; see `DrafterState`."""

    begin: int
    rows: Rows | None
    """Of its cache, from row `begin` on, where those of an earlier node end."""
    end: int
    read: mx.array | None
    pending: mx.array | None
    whole: bool = True
    """False: `read` and `pending` were dropped."""

    @property
    def hidden_bytes(self) -> int:
        return sum(each.nbytes for each in (self.read, self.pending) if each is not None)

    @property
    def bytes(self) -> int:
        return self.hidden_bytes + (self.rows.bytes if self.rows else 0)

    def without_hidden(self) -> "_Drafter":
        return replace(self, read=None, pending=None, whole=False)


@dataclass(slots=True, eq=False)
class _Node:
    parent: "_Node | None"
    key: bytes
    """The ids of its rows."""
    end: int
    rows: tuple[Rows | None, ...] = ()
    """By layer; None where the layer has a state."""
    states: tuple[State, ...] | None = None
    """Of the other layers, behind its last row; None: not kept, so nothing goes on from here."""
    drafter: _Drafter | None = None
    first_turn: bool = False
    """It ends with the prompt's first turn, as a rule the system's: it goes late."""
    sent: bytes = b""
    """What left a pipeline's stage for the next one, of its rows; empty: not kept."""
    used: int = 0
    state_used: int = 0
    children: dict[bytes, "_Node"] = field(default_factory=dict[bytes, "_Node"])

    @property
    def state_bytes(self) -> int:
        """What can go while the rows stay."""
        hidden = self.drafter.hidden_bytes if self.drafter else 0
        return hidden + sum(state.bytes for state in self.states or ())

    @property
    def bytes(self) -> int:
        states = sum(state.bytes for state in self.states or ())
        rows = sum(rows.bytes for rows in self.rows if rows is not None)
        return rows + states + len(self.sent) + (self.drafter.bytes if self.drafter else 0)

    @property
    def path(self) -> "list[_Node]":
        """From the root's child to this one."""
        found, node = list[_Node](), self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def goes_on(self, *, drafts: bool) -> bool:
        has_drafter = self.drafter is not None and self.drafter.whole
        return self.states is not None and (has_drafter or not drafts)


class PrefixCache:
    """Bounded by bytes (`_victim` says what goes first). All methods run on the compute thread."""

    def __init__(self, budget: int, make_caches: Callable[[], list[Any]]) -> None:
        """`budget` in bytes, shared with requests in progress; 0 keeps nothing.

        `make_caches`: one request's, empty.
        """
        self._budget = budget
        self._make_caches = make_caches
        self._root = _Node(None, b"", 0)
        self._ticks = 0
        self.bytes = 0

    def find(self, prompt: Sequence[int], ends: Sequence[int], *, drafts: bool) -> Prefix | None:
        """The longest prefix of `prompt`, read by forwards that end at `ends`, that is kept.

        The last forward is never a part of it: its logits are wanted. `drafts`: the drafter's state
        is wanted, too.
        """
        known = self._walk(prompt, ends[:-1])
        found = [node for node in known if node.goes_on(drafts=drafts)]
        if not found:
            return None
        self._touch(found[-1])
        return self._prefix(found[-1], drafts=drafts)

    def keep(
        self,
        prompt: Sequence[int],
        ends: Sequence[int],
        rows: int,
        caches: Sequence[Any],
        drafter: DrafterState | None,
        turn_ends: frozenset[int],
    ) -> None:
        """Keeps the first `rows` rows of `prompt`, which are all that `caches` hold, if they are
        worth it.

        `ends`: of all its forwards, `rows` among them. `drafter`: its state behind those rows;
        None where nothing drafts. `turn_ends`: the tokens that end a turn.
        """
        done = [end for end in ends if end <= rows]
        known = list(self._walk(prompt, done))
        kept = max((node.end for node in known if node.states is not None), default=0)
        goes_on = prompt[rows - 1] in turn_ends or done[-1:] == list(ends[-2:-1])
        if kept < rows and not (goes_on or is_worth(caches, rows - kept)):
            return
        first_turn = next((end for end in done if prompt[end - 1] in turn_ends), 0)
        self.put(prompt, done, caches, drafter, first_turn)

    def put(
        self,
        prompt: Sequence[int],
        done: Sequence[int],
        caches: Sequence[Any],
        drafter: DrafterState | None,
        first_turn: int,
        sent: Mapping[tuple[int, int], bytes] = NOTHING_SENT,
    ) -> None:
        """Keeps all that `caches` hold: the rows of `prompt` that forwards ending at `done` read.

        `first_turn`: the row behind the first turn, or 0. `sent`: of a pipeline's stage, what left
        it for the rows [begin, end), as far as it is known.
        """
        node = above = self._root
        for begin, end in pairwise((0, *done)):
            above = node if node.drafter is not None else above
            key = _key(prompt[begin:end])
            if key not in node.children:
                self._add(_Node(node, key, end, first_turn=end == first_turn), begin, caches)
            node = node.children[key]
            if not node.sent:
                node.sent = sent.get((begin, end), b"")
                self.bytes += len(node.sent)
        before = node.bytes
        if node.states is None:
            node.states = tuple(state_of(cache) for cache in caches if not has_rows(cache))
        if drafter is not None and not (node.drafter and node.drafter.whole):
            node.drafter = _cut(drafter, above.drafter.end if above.drafter else 0)
        mx.eval(list(_arrays(node)))
        self.bytes += node.bytes - before
        self._touch(node)

    def shrink(self, live: int) -> None:
        """Drops what does not fit beside `live` bytes of requests in progress."""
        room = max(0, self._budget - live)
        while self.bytes > room and (victim := self._victim()) is not None:
            before = victim.bytes
            if victim.children:
                victim.states = None
                victim.drafter = victim.drafter.without_hidden() if victim.drafter else None
                self.bytes -= before - victim.bytes
            else:
                assert victim.parent is not None
                del victim.parent.children[victim.key]
                self.bytes -= before

    def clear(self) -> None:
        self._root.children.clear()
        self.bytes = 0

    @property
    def enabled(self) -> bool:
        return self._budget > 0

    def _add(self, node: _Node, begin: int, caches: Sequence[Any]) -> None:
        assert node.parent is not None
        node.rows = tuple(
            rows_of(cache, begin, node.end) if has_rows(cache) else None for cache in caches
        )
        mx.eval(list(_arrays(node)))
        node.parent.children[node.key] = node
        self.bytes += node.bytes

    def _walk(self, prompt: Sequence[int], ends: Sequence[int]) -> Iterator[_Node]:
        node: _Node | None = self._root
        for begin, end in pairwise((0, *ends)):
            node = node.children.get(_key(prompt[begin:end]))
            if node is None:
                return
            yield node

    def _touch(self, node: _Node) -> None:
        self._ticks += 1
        node.state_used = self._ticks
        for each in node.path:
            each.used = self._ticks

    def _prefix(self, node: _Node, *, drafts: bool) -> Prefix:
        path, caches = node.path, self._make_caches()
        states = iter(node.states or ())
        for layer, cache in enumerate(caches):
            if not has_rows(cache):
                caches[layer] = next(states).twin()
                continue
            parts = [each.rows[layer] for each in path]
            caches[layer] = joined([part for part in parts if part is not None])
        drafter = _joined_drafter(path) if drafts else None
        mx.eval(cache_arrays(caches), cache_arrays([drafter.cache]) if drafter else [])
        forwards = (
            PrefixForward(each.end, each.states is not None, each.first_turn, each.sent)
            for each in path
        )
        return Prefix(caches, node.end, drafter, tuple(forwards))

    def _victim(self) -> _Node | None:
        """The node to drop, or the state of one on which others stand.

        What was used last goes last: first turns of conversations that are over would else outlive
        a new one that fills the room. States within a conversation go before anything at the end of
        another one: a turn that follows goes on behind the last of them.
        """

        def rank(node: _Node) -> tuple[bool, bool, bool, int]:
            used = node.state_used if node.children else node.used
            return node.used == self._ticks, node.first_turn, len(node.children) != 1, used

        able = (n for n in self._nodes(self._root) if not n.children or n.state_bytes)
        return min(able, key=rank, default=None)

    def _nodes(self, node: _Node) -> Iterator[_Node]:
        waiting = list(node.children.values())
        while waiting:
            yield (each := waiting.pop())
            waiting += each.children.values()


def is_worth(caches: Sequence[Any], rows: int) -> bool:
    """Whether a state costs no more bytes than the keys and values of `rows` rows."""
    state = sum(a.nbytes for c in caches if not has_rows(c) for a in cache_arrays([c]))
    row = sum(row_bytes(c) for c in caches if has_rows(c))
    return rows >= STATE_EVERY or state <= rows * row


def _key(ids: Sequence[int]) -> bytes:
    return array("Q", ids).tobytes()


def _arrays(node: _Node) -> Iterator[mx.array]:
    for rows in (*node.rows, node.drafter.rows if node.drafter else None):
        if rows is not None:
            yield from rows.arrays
    for state in node.states or ():
        yield from cache_arrays([state.cache])


def _cut(drafter: DrafterState, begin: int) -> _Drafter:
    rows = rows_of(drafter.cache, begin, drafter.rows) if drafter.rows > begin else None
    return _Drafter(begin, rows, drafter.rows, drafter.read, drafter.pending)


def _joined_drafter(path: Sequence[_Node]) -> DrafterState:
    last = path[-1].drafter
    assert last is not None
    parts, wanted = list[Rows](), last.end
    for node in reversed(path):
        # Nodes may have been given a drafter's state one by one: rows are taken where they join.
        each = node.drafter
        if each is not None and each.rows is not None and each.end == wanted:
            parts.append(each.rows)
            wanted = each.begin
    cache = cast("KVCache", joined(parts[::-1])) if parts else KVCache()  # never quantised
    return DrafterState(cache, last.end, last.read, last.pending)
