"""The state behind prompts that were read, for prompts that begin alike.

A tree: each node is what one forward over a prompt added. Prompts that begin alike are read by the
same forwards (`mtp.schedule`), so a path from the root is found by the ids of its forwards, and
what it holds is, bit for bit, what reading them again would give.

It has copies: a hit copies rows into the caches of the request, and what a request read is copied
when it is kept. Where these have no room beside the requests in progress, others go first.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...mtp.rollback import cache_arrays
from .cache_parts import KeptDraft, State, has_rows, joined, state_of
from .prefix_tree import DrafterPart, Node, Salt, drafter_spans, key_of, pending_of
from .spans import Span, bytes_of_row, joined_size, rows_in

STATE_EVERY = 4096
"""Rows after which a state is kept, however large it is beside its keys and values."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request goes on from: caches of its own that hold `position` rows."""

    caches: list[Any]
    position: int
    drafter: KeptDraft | None
    first_turn: int = 0
    """The row behind the prompt's first turn, if that is among them; else 0."""


class PrefixCache:
    """Bounded by bytes (`_victim` says what goes first). All methods run on the compute thread."""

    def __init__(self, budget: int, make_caches: Callable[[], list[Any]]) -> None:
        """`budget` in bytes, shared with requests in progress; 0 keeps nothing.

        `make_caches`: one request's, empty.
        """
        self._budget = budget
        self._make_caches = make_caches
        self._root = Node(None, b"", 0)
        self._ticks = 0
        self._latest: Node | None = None
        """Used last; what leads to it was used with it."""
        self.bytes = 0

    def find(
        self,
        prompt: Sequence[int],
        ends: Sequence[int],
        *,
        drafts: bool,
        live: int = 0,
        salt: Salt = b"",
    ) -> Prefix | None:
        """A copy of the longest prefix of `prompt`, read by forwards that end at `ends`, that is
        kept and has room for the copy beside `live` bytes of requests in progress.

        The last forward is never a part of it: its logits are wanted. `drafts`: the drafter's state
        is wanted, too. `salt`: only what was kept with the same one is found.
        """
        able = self._able(prompt, ends, salt, drafts=drafts)
        while able:
            node = able.pop()
            self._touch(node)  # of one that is too long the end makes room as others do
            if self._make_room(node, live + _copy_size(node, ends, drafts=drafts)):
                return self._copied(node, drafts=drafts)
        return None

    def known(
        self, prompt: Sequence[int], ends: Sequence[int], salt: Salt = b"", *, drafts: bool
    ) -> int:
        """How many rows `find` would give, given room for the copy."""
        return max(self.held(prompt, ends, salt, drafts=drafts), default=0)

    def held(
        self, prompt: Sequence[int], ends: Sequence[int], salt: Salt = b"", *, drafts: bool
    ) -> list[int]:
        """All that `find` might give, the fewest rows first."""
        return [node.end for node in self._able(prompt, ends, salt, drafts=drafts)]

    def keep(
        self,
        prompt: Sequence[int],
        ends: Sequence[int],
        rows: int,
        caches: Sequence[Any],
        drafter: KeptDraft | None,
        turn_ends: frozenset[int],
        live: int = 0,
        salt: Salt = b"",
    ) -> None:
        """Keeps the first `rows` rows of `prompt`, which are all that `caches` hold, if they are
        worth it.

        `ends`: of all its forwards, `rows` among them. `drafter`: its state behind those rows;
        None where nothing drafts. `turn_ends`: the tokens that end a turn. `live`, `salt`: see
        `put`.
        """
        done = [end for end in ends if end <= rows]
        known = list(self._walk(prompt, done, salt))
        kept = max((node.end for node in known if node.states is not None), default=0)
        goes_on = prompt[rows - 1] in turn_ends or done[-1:] == list(ends[-2:-1])
        if kept < rows and not (goes_on or is_worth(caches, rows - kept)):
            return
        first_turn = next((end for end in done if prompt[end - 1] in turn_ends), 0)
        self.put(prompt, done, caches, drafter, first_turn, live=live, salt=salt)

    def put(
        self,
        prompt: Sequence[int],
        done: Sequence[int],
        caches: Sequence[Any],
        drafter: KeptDraft | None,
        first_turn: int,
        *,
        live: int = 0,
        salt: Salt = b"",
    ) -> None:
        """Keeps copies of all that `caches` hold: the rows of `prompt` that forwards ending at
        `done` read. Nothing where they have no room beside `live` bytes of requests in progress.

        `first_turn`: the row behind the first turn, or 0. `salt`: of those who may find it.
        """
        node, added = self._root, list[Node]()
        for begin, end in pairwise((0, *done)):
            key = key_of(prompt, begin, end, salt)
            if key not in node.children:
                span = Span.of(caches, begin, end)
                added.append(Node(node, key, end, span, first_turn=end == first_turn))
                self._add(added[-1])
            node = node.children[key]
        self._touch(node)
        before, complete = (node.states, node.drafter), False
        with self._counted(node):
            node.states, node.drafter = _behind(node, caches, drafter)
        try:
            if self._make_room(node, live):
                mx.eval([array for each in node.path for array in each.arrays])
                complete = True
        finally:
            if not complete:
                with self._counted(node):
                    node.states, node.drafter = before
                if added:
                    self._cut(node, added[0].parent or self._root)

    def shrink(self, live: int) -> None:
        """Drops what does not fit beside `live` bytes of requests in progress."""
        while (latest := self._latest) is not None and not self._make_room(latest, live):
            before = [each for each in latest.path[:-1] if each.states is not None]
            self._cut(latest, before[-1] if before else self._root)
        while not self._has_room(live) and (victim := self._victim()) is not None:
            self._evict(victim)

    def clear(self) -> None:
        self._latest = None
        self._root.children.clear()
        self.bytes = 0

    @property
    def enabled(self) -> bool:
        return self._budget > 0

    def _has_room(self, live: int) -> bool:
        return self.bytes + live <= self._budget

    def _make_room(self, node: Node, live: int) -> bool:
        """Drops what is not needed to go on from `node` until all has room beside `live` bytes.

        Where it cannot have, nothing goes. Returns whether it has.
        """
        stays = node.bytes + sum(each.row_bytes for each in node.path[:-1])
        if stays + live > self._budget:
            return False
        while not self._has_room(live):
            victim = self._victim()
            if victim is None or victim is node:
                return False
            self._evict(victim)
        return True

    def _evict(self, victim: Node) -> None:
        """Of a node on which others stand its state goes, of another one all."""
        if not victim.children:
            self._remove(victim)
            return
        with self._counted(victim):
            victim.states = None
            if victim.drafter is not None and not victim.is_pending_below:
                victim.drafter = victim.drafter.without_hidden()

    def _cut(self, node: Node, end: Node) -> None:
        """Drops `node` and what leads to it from `end` on, as far as nothing else stands on it."""
        while node is not end and not node.children and node.parent is not None:
            self._remove(node)
            node = node.parent
        self._latest = None
        if end is not self._root:
            self._touch(end)

    def _add(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[node.key] = node
        self.bytes += node.bytes

    def _remove(self, node: Node) -> None:
        """It and all below it."""
        assert node.parent is not None
        del node.parent.children[node.key]
        self.bytes -= sum(each.bytes for each in (node, *node.below))

    @contextmanager
    def _counted(self, node: Node) -> Generator[None]:
        """Around what changes its bytes."""
        before = node.bytes
        yield
        self.bytes += node.bytes - before

    def _walk(self, prompt: Sequence[int], ends: Sequence[int], salt: Salt) -> Iterator[Node]:
        node: Node | None = self._root
        for begin, end in pairwise((0, *ends)):
            node = node.children.get(key_of(prompt, begin, end, salt))
            if node is None:
                return
            yield node

    def _able(
        self, prompt: Sequence[int], ends: Sequence[int], salt: Salt, *, drafts: bool
    ) -> list[Node]:
        """What a request may go on from, by rows; the last one is used."""
        path = self._walk(prompt, ends[:-1], salt)
        able = [node for node in path if node.goes_on(drafts=drafts)]
        if able:
            self._touch(able[-1])
        return able

    def _touch(self, node: Node) -> None:
        self._ticks += 1
        self._latest, node.state_used = node, self._ticks
        for each in node.path:
            each.used = self._ticks

    def _copied(self, node: Node, *, drafts: bool) -> Prefix:
        path, caches = node.path, self._make_caches()
        spans = [each.span for each in path if each.span is not None]
        states = iter(node.states or ())
        for layer, cache in enumerate(caches):
            if has_rows(cache):
                caches[layer] = joined(rows_in(spans, layer))
            else:
                caches[layer] = next(states).twin()
        drafter = None
        if drafts and (last := node.drafter) is not None:
            rows = rows_in(drafter_spans(path), 0)
            cache = cast("KVCache", joined(rows)) if rows else KVCache()  # never quantised
            drafter = KeptDraft(cache, last.end, pending_of(path))
        mx.eval(cache_arrays(caches))
        first_turn = next((each.end for each in path if each.first_turn), 0)
        return Prefix(caches, node.end, drafter, first_turn)

    def _victim(self) -> Node | None:
        """The node to drop, or the state of one on which others stand.

        What was used last goes last: first turns of conversations that are over would else outlive
        a new one that fills the room. States within a conversation go before anything at the end of
        another one: a turn that follows goes on behind the last of them.
        """

        def rank(node: Node) -> tuple[bool, bool, bool, int]:
            used = node.state_used if node.children else node.used
            return node.used == self._ticks, node.first_turn, len(node.children) != 1, used

        able = (n for n in self._root.below if not n.children or n.state_bytes)
        return min(able, key=rank, default=None)


def is_worth(caches: Sequence[Any], rows: int) -> bool:
    """Whether a state costs no more bytes than the keys and values of `rows` rows."""
    state = sum(a.nbytes for c in caches if not has_rows(c) for a in cache_arrays([c]))
    return rows >= STATE_EVERY or state <= rows * bytes_of_row(caches)


def _copy_size(node: Node, ends: Sequence[int], *, drafts: bool) -> int:
    """Bytes of a request's caches that goes on behind `node`, once it has read its prompt."""
    rest = ends[-1] - node.end
    size = joined_size([each.span for each in node.path if each.span is not None], rest)
    size += sum(state.bytes for state in node.states or ())
    return size + (joined_size(drafter_spans(node.path), rest) if drafts else 0)


def _behind(
    node: Node, caches: Sequence[Any], drafter: KeptDraft | None
) -> tuple[tuple[State, ...], DrafterPart | None]:
    """The states to be kept at `node`, behind whose rows `caches` and `drafter` are; lazy."""
    states, part = node.states, node.drafter
    if states is None:
        states = tuple(state_of(cache) for cache in caches if not has_rows(cache))
    if drafter is not None and part is None:
        above = [each for each in node.path[:-1] if each.drafter is not None]
        part = DrafterPart.of(drafter, above[-1] if above else None)
    elif drafter is not None and part is not None:
        part = part.with_hidden(drafter)
    return states, part
