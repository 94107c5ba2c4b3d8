"""The prefix cache in memory: states after prompts, for prompts that begin with the same ids.

It is a tree whose nodes hold what one forward over a prompt added. Prompts that begin alike are
read by the same forwards (`mtp.schedule`), so the ids of its forwards lead from the root to a node,
and the state there is, bit for bit, what reading them again would give.

It holds copies: a hit copies rows into the caches of the request, and a request's rows are copied
when they are cached. Requests in progress take precedence over cached states.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ....mtp.caches.rollback import cache_arrays, holds_rows
from ....mtp.types import CacheTier
from ..states.cache_parts import Span, bytes_of_row, copied, joined, joined_size, rows_in
from ..states.state import DraftState, State
from .prompt_path import PromptPath
from .tree import DrafterPart, PrefixNode, drafter_spans, pending_of

STATE_EVERY = 4096
"""Rows after which a state is cached even if it is larger than their keys and values."""


class PrefixCache:
    """States in memory, of bounded size; `_victim` defines the order of eviction.

    All methods but `longest` run on the compute thread.
    """

    def __init__(self, budget: int, make_caches: Callable[[], list[Any]]) -> None:
        """`budget`: bytes, shared with requests in progress; 0 disables the cache.

        `make_caches` makes the empty caches of one request.
        """
        self._budget = budget
        self._reserved = 0
        """Bytes of the budget that neither prefixes nor requests have."""
        self.make_caches = make_caches
        self._root = PrefixNode(None, b"", 0)
        self._ticks = 0
        self._latest: PrefixNode | None = None
        """The node that was used last; its path was used with it."""
        self.size = 0
        self.hits = Counter[CacheTier]()
        """Rows of prompts that requests began after, by the tier that had them."""

    def find(self, path: PromptPath, beyond: int = 0, live: int = 0) -> State | None:
        """A copy of the state after the longest prefix of more than `beyond` rows, or None.

        The path's last forward is never skipped. The copy has room beside `live` bytes of requests
        in progress, or a shorter one is given.
        """
        usable = self._usable(path)
        while usable and usable[-1].end > beyond:
            if (state := self._copy_with_room(usable.pop(), path, live)) is not None:
                return state
        return None

    def longest(self, path: PromptPath) -> PrefixNode | None:
        """Any thread: the node that `find` would copy if the copy had room.

        Does not count as a use. The tree may change meanwhile: each step is one look-up, and a
        node that was removed keeps its parents.
        """
        return max(self._nodes(path), key=lambda node: node.end, default=None)

    def cached_ends(self, path: PromptPath) -> list[int]:
        """Rows of all prefixes that `find` might return, ascending."""
        return [node.end for node in self._usable(path)]

    def keep(
        self, path: PromptPath, state: State, turn_ends: frozenset[int], live: int = 0
    ) -> PrefixNode | None:
        """Caches the state after the first rows of a prompt, if that is worthwhile. Returns its
        node.

        `turn_ends`: the tokens that end a turn. `live`: see `insert`.
        """
        read, rows = path.up_to(state.rows), state.rows
        nodes = list(self._walk(read))
        last_state = max((node.end for node in nodes if node.states is not None), default=0)
        is_likely = path.ids[rows - 1] in turn_ends or read.ends[-1:] == list(path.ends[-2:-1])
        if last_state < rows and not (
            is_likely or is_worth_caching(state.caches, rows - last_state)
        ):
            return None
        first_turn = next((end for end in read.ends if path.ids[end - 1] in turn_ends), 0)
        return self.insert(read, state, first_turn, live)

    def insert(
        self, path: PromptPath, state: State, first_turn: int, live: int = 0
    ) -> PrefixNode | None:
        """Caches a copy of the state after all forwards of `path`. Returns its node; None if it
        has no room beside `live` bytes. `first_turn`: the row after the first turn, or 0."""
        node, added = self._root, list[PrefixNode]()
        for end, key in path.forwards():
            if key not in node.children:
                span = Span.of(state.caches, node.end, end)
                added.append(PrefixNode(node, key, end, span, first_turn=end == first_turn))
                self._add(added[-1])
            node = node.children[key]
        self._touch(node)
        before, complete = (node.states, node.drafter), False
        with self._recounting(node):
            node.states, node.drafter = _behind(node, state)
        try:
            if self._make_room(node, live):
                mx.eval([array for each in node.path for array in each.arrays])
                complete = True
        finally:
            if not complete:
                with self._recounting(node):
                    node.states, node.drafter = before
                if added:
                    self._cut(node, added[0].parent or self._root)
        return node if complete else None

    def holds(self, node: PrefixNode) -> bool:
        """Whether a node is still cached, and a request may begin after it."""
        path = node.path
        parents = (self._root, *path[:-1])
        is_in_tree = all(
            parent.children.get(each.key) is each
            for parent, each in zip(parents, path, strict=True)
        )
        return is_in_tree and node.states is not None

    def reserve(self, size: int, live: int) -> bool:
        """Reserves `size` bytes of the budget, if they fit beside `live` ones of requests. Returns
        whether they do: without a budget the room is not known, and has no prefixes in it."""
        fits = not self._budget or size + live <= self._budget
        self._reserved = size if fits else 0
        return fits

    def evict(self, live: int | None = None) -> None:
        """Removes what has no room beside `live` bytes of requests in progress, the least useful
        first; without `live`, all of it."""
        if live is None:
            self._latest = None
            self._root.children.clear()
            self.size = 0
            return
        while (latest := self._latest) is not None and not self._make_room(latest, live):
            before = [each for each in latest.path[:-1] if each.states is not None]
            self._cut(latest, before[-1] if before else self._root)
        while not self._has_room(live) and (victim := self._victim()) is not None:
            self._evict(victim)

    @property
    def enabled(self) -> bool:
        return self._budget > 0

    def _has_room(self, live: int) -> bool:
        return self.size + live + self._reserved <= self._budget

    def _make_room(self, node: PrefixNode, live: int) -> bool:
        """Evicts nodes that `node` does not need until the rest fits beside `live` bytes.

        Returns whether it fits; if it cannot, evicts nothing.
        """
        if node.path_bytes + live + self._reserved > self._budget:
            return False
        while not self._has_room(live):
            victim = self._victim()
            if victim is None or victim is node:
                return False
            self._evict(victim)
        return True

    def _copy_with_room(self, node: PrefixNode, path: PromptPath, live: int) -> State | None:
        self._touch(node)  # the end of a prefix that is too long may be evicted
        if self._make_room(node, live + _copy_size(node, path)):
            return self._copy_of(node, path)
        return None

    def _evict(self, victim: PrefixNode) -> None:
        """Removes a node without children; of another node only the state."""
        if not victim.children:
            self._remove(victim)
            return
        with self._recounting(victim):
            victim.states = None
            if victim.drafter is not None and not victim.is_pending_below:
                victim.drafter = victim.drafter.without_hidden()

    def _cut(self, node: PrefixNode, end: PrefixNode) -> None:
        """Removes `node` and its ancestors below `end`, as far as they have no other children."""
        while node is not end and not node.children and node.parent is not None:
            self._remove(node)
            node = node.parent
        self._latest = None
        if end is not self._root:
            self._touch(end)

    def _add(self, node: PrefixNode) -> None:
        assert node.parent is not None
        node.parent.children[node.key] = node
        self.size += node.bytes

    def _remove(self, node: PrefixNode) -> None:
        """Removes a node and its descendants."""
        assert node.parent is not None
        del node.parent.children[node.key]
        self.size -= sum(each.bytes for each in (node, *node.below))

    @contextmanager
    def _recounting(self, node: PrefixNode) -> Generator[None]:
        """Updates `bytes` after a change of a node."""
        before = node.bytes
        yield
        self.size += node.bytes - before

    def _walk(self, path: PromptPath) -> Iterator[PrefixNode]:
        node: PrefixNode | None = self._root
        for _, key in path.forwards():
            node = node.children.get(key)
            if node is None:
                return
            yield node

    def _usable(self, path: PromptPath) -> list[PrefixNode]:
        """The nodes after which a request may begin, in the order of their rows. Marks the last
        one as used."""
        usable = list(self._nodes(path))
        if usable:
            self._touch(usable[-1])
        return usable

    def _nodes(self, path: PromptPath) -> Iterator[PrefixNode]:
        return (node for node in self._walk(path.inner) if node.is_usable(drafts=path.drafts))

    def _touch(self, node: PrefixNode) -> None:
        self._ticks += 1
        self._latest, node.state_used = node, self._ticks
        for each in node.path:
            each.used = self._ticks

    def _copy_of(self, node: PrefixNode, path: PromptPath) -> State:
        nodes, caches = node.path, self.make_caches()
        spans = [each.span for each in nodes if each.span is not None]
        states = iter(node.states or ())
        for layer, cache in enumerate(caches):
            if holds_rows(cache):
                caches[layer] = joined(rows_in(spans, layer))
            else:
                caches[layer] = copied(next(states))
        draft = None
        if path.drafts and (last := node.drafter) is not None:
            rows = rows_in(drafter_spans(nodes), 0)
            cache = joined(rows) if rows else None
            draft = DraftState.with_unread(cache, last.end, pending_of(nodes), path.ids)
        mx.eval(cache_arrays(caches))
        first_turn = next((each.end for each in nodes if each.first_turn), 0)
        tier, node.tier = node.tier, "memory"
        return State(caches, node.end, draft, tier, first_turn)

    def _victim(self) -> PrefixNode | None:
        """The next node to evict, or the next whose state to evict if it has children.

        The last used node goes last: otherwise the first turns of conversations that have ended
        would outlive a new one that fills the cache. States within a conversation go before nodes
        at the end of another one, since the next turn begins after the last state.
        """

        def rank(node: PrefixNode) -> tuple[bool, bool, bool, int]:
            used = node.state_used if node.children else node.used
            return node.used == self._ticks, node.first_turn, len(node.children) != 1, used

        candidates = (n for n in self._root.below if not n.children or n.state_bytes)
        return min(candidates, key=rank, default=None)


def is_worth_caching(caches: Sequence[Any], rows: int) -> bool:
    """Whether a state costs no more bytes than the keys and values of `rows` rows."""
    state = sum(a.nbytes for c in caches if not holds_rows(c) for a in cache_arrays([c]))
    return is_worth(state, rows * bytes_of_row(caches), rows)


def is_worth(state_bytes: int, row_bytes: int, rows: int) -> bool:
    """The same, of a state's bytes and those of the keys and values of `rows` rows."""
    return rows >= STATE_EVERY or state_bytes <= row_bytes


def _copy_size(node: PrefixNode, path: PromptPath) -> int:
    """Bytes of the caches of a request that begins after `node`, at the end of its prompt."""
    following = path.ends[-1] - node.end
    size = joined_size([each.span for each in node.path if each.span is not None], following)
    size += sum(array.nbytes for array in cache_arrays(node.states or ()))
    return size + (joined_size(drafter_spans(node.path), following) if path.drafts else 0)


def _behind(node: PrefixNode, state: State) -> tuple[tuple[Any, ...], DrafterPart | None]:
    """The states to cache at `node`, at whose last row `state` is; lazy."""
    states, part, draft = node.states, node.drafter, state.draft
    if states is None:
        states = tuple(copied(cache) for cache in state.caches if not holds_rows(cache))
    if draft is not None and part is None:
        above = [each for each in node.path[:-1] if each.drafter is not None]
        part = DrafterPart.of(draft, above[-1] if above else None)
    elif draft is not None and part is not None:
        part = part.with_hidden(draft)
    return states, part
