"""The state behind prompts that were read, for prompts that begin alike.

A tree: each node is what one forward over a prompt added. Prompts that begin alike are read by the
same forwards (`mtp.schedule`), so a path from the root is found by the ids of its forwards, and
what it holds is, bit for bit, what reading them again would give.

Requests in progress have rows of it as well. Where there is no room for both, the rows are theirs
alone (`Span.lend`) until the last of them ends.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...mtp.drafters import DrafterState
from ...mtp.rollback import cache_arrays
from .cache_parts import has_rows, joined, state_of
from .prefix_tree import DrafterPart, Node, Salt, drafter_spans, key_of, pending_of
from .spans import (
    Claim,
    Holding,
    Owner,
    Span,
    bytes_of_row,
    give_back,
    growth_behind,
    joined_size,
    parts_of,
    twice_at_once,
)

log = logging.getLogger(__name__)

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
        self.bytes = 0

    def find(
        self,
        prompt: Sequence[int],
        ends: Sequence[int],
        *,
        drafts: bool,
        claim: Claim | None = None,
        live: int = 0,
        salt: Salt = b"",
    ) -> Prefix | None:
        """The longest prefix of `prompt`, read by forwards that end at `ends`, that is kept.

        The last forward is never a part of it: its logits are wanted. `drafts`: the drafter's state
        is wanted, too. `claim`: of the request that goes on from it, beside `live` bytes of others;
        where both have no room the rows move to it. None: they are copied. `salt`: only what was
        kept with the same one is found.
        """
        path = self._walk(prompt, ends[:-1], salt)
        self._lose([span for node in path for span in node.spans if not span.is_known])
        node, moves = self._deepest(prompt, ends, salt, drafts=drafts), False
        if node is not None and claim is not None:
            following = next(end for end in ends if end > node.end) - node.end
            moves = self._prepare(node, following, live, drafts=drafts)
            node = self._deepest(prompt, ends, salt, drafts=drafts)
        return None if node is None else self._prefix(node, claim, drafts=drafts, moves=moves)

    def known(
        self, prompt: Sequence[int], ends: Sequence[int], salt: Salt = b"", *, drafts: bool
    ) -> int:
        """How many rows `find` would give."""
        node = self._deepest(prompt, ends, salt, drafts=drafts)
        return node.end if node else 0

    def keep(
        self,
        prompt: Sequence[int],
        ends: Sequence[int],
        rows: int,
        caches: Sequence[Any],
        drafter: DrafterState | None,
        turn_ends: frozenset[int],
        claim: Claim | None = None,
        live: int = 0,
        salt: Salt = b"",
    ) -> None:
        """Keeps the first `rows` rows of `prompt`, which are all that `caches` hold, if they are
        worth it.

        `ends`: of all its forwards, `rows` among them. `drafter`: its state behind those rows;
        None where nothing drafts. `turn_ends`: the tokens that end a turn. `claim`, `live`,
        `salt`: see `put`.
        """
        done = [end for end in ends if end <= rows]
        known = list(self._walk(prompt, done, salt))
        kept = max((node.end for node in known if node.states is not None), default=0)
        goes_on = prompt[rows - 1] in turn_ends or done[-1:] == list(ends[-2:-1])
        if kept < rows and not (goes_on or is_worth(caches, rows - kept)):
            return
        first_turn = next((end for end in done if prompt[end - 1] in turn_ends), 0)
        self.put(prompt, done, caches, drafter, first_turn, claim=claim, live=live, salt=salt)

    def put(
        self,
        prompt: Sequence[int],
        done: Sequence[int],
        caches: Sequence[Any],
        drafter: DrafterState | None,
        first_turn: int,
        sent: Mapping[tuple[int, int], bytes] = NOTHING_SENT,
        *,
        claim: Claim | None = None,
        live: int = 0,
        salt: Salt = b"",
    ) -> None:
        """Keeps all that `caches` hold: the rows of `prompt` that forwards ending at `done` read.

        `first_turn`: the row behind the first turn, or 0. `sent`: of a pipeline's stage, what left
        it for the rows [begin, end), as far as it is known. `claim`: of the request whose caches
        they are: rows that have no room beside `live` bytes stay there. None: they are copied.
        `salt`: of those who may find it.
        """
        node = above = self._root
        for begin, end in pairwise((0, *done)):
            above = node if node.drafter is not None else above
            key = key_of(prompt, begin, end, salt)
            if key not in node.children:
                size = bytes_of_row(caches) * (end - begin)
                copied = claim is None or self._has_room(size, live)
                span = Span.of(caches, begin, end, copied=copied)
                self._add(Node(node, key, end, span, first_turn=end == first_turn))
            node = node.children[key]
            if not node.sent:
                node.sent = sent.get((begin, end), b"")
                self.bytes += len(node.sent)
        with self._counted(node):
            if node.states is None:
                node.states = tuple(state_of(cache) for cache in caches if not has_rows(cache))
            if drafter is not None and node.drafter is None:
                begin = above.drafter.end if above.drafter else 0
                size = bytes_of_row([drafter.cache]) * (drafter.rows - begin)
                copied = claim is None or self._has_room(size, live)
                node.drafter = DrafterPart.of(drafter, above, copied=copied)
            elif drafter is not None and node.drafter is not None:
                node.drafter = node.drafter.with_hidden(drafter)
            mx.eval(list(node.arrays))
        if claim is not None:
            claim.own(node.path, 0 if drafter is None else drafter.rows)
        self._touch(node)

    def shrink(self, live: int) -> None:
        """Drops what does not fit beside `live` bytes of requests in progress."""
        room = max(0, self._budget - live)
        if self.bytes > room:
            self._lend(room)
        while self.bytes > room and (victim := self._victim()) is not None:
            with self._counted(victim):
                if victim.children:
                    victim.states = None
                    if victim.drafter is not None and not victim.is_pending_below:
                        victim.drafter = victim.drafter.without_hidden()
            if not victim.children:
                self._remove(victim)

    def end(self, claim: Claim, live: int, own: int, *, sound: bool) -> None:
        """A request in progress is over: what only it has is taken from its caches.

        `live`: bytes of all requests, its own among them; `own` of them go with it. Not `sound`:
        nobody knows what its caches hold, and what only it has is lost.
        """
        if claim.over:
            return
        owned = claim.rows.spans, claim.head.spans
        if sound and not all(span.here for spans in owned for span in spans):
            # What lies here as well can be lent until it leaves; then only victims make room.
            self.shrink(live + max(twice_at_once(spans) for spans in owned))
        rows, heads = claim.rows.leave(), claim.head.leave()
        holding = claim.holding
        claim.close()
        if not sound:
            self._lose([*rows, *heads])
        elif rows or heads:
            self._take_back(rows, heads, holding(), live, own)

    def clear(self) -> None:
        for node in self._root.below:
            for span in node.spans:
                span.discard()
        self._root.children.clear()
        self.bytes = 0

    @property
    def enabled(self) -> bool:
        return self._budget > 0

    def _take_back(
        self, rows: list[Span], heads: list[Span], holding: Holding, live: int, own: int
    ) -> None:
        self.shrink(live + max(twice_at_once(rows), twice_at_once(heads)))
        for span in (*rows, *heads):
            if not span.gone:
                span.coming = True
                self.bytes += span.size
        self.shrink(live - own)
        rows, heads = ([span for span in spans if not span.gone] for spans in (rows, heads))
        try:
            give_back(rows, holding.caches)
            give_back(heads, [holding.drafter])
        except RuntimeError as fault:  # MLX's: what the request left under way cannot be computed
            log.warning("what an answer read of its prompt is not kept: %s", fault)
            self._lose([span for span in (*rows, *heads) if span.coming])

    def _lose(self, spans: Sequence[Span]) -> None:
        """Nobody has these rows: what stands on them goes."""
        lost, waiting = set(spans), [self._root]
        while lost and waiting:
            for node in list(waiting.pop().children.values()):
                if node.span in lost:
                    self._remove(node)
                    continue
                waiting.append(node)
                if node.drafter is not None and node.drafter.span in lost:
                    for each in (node, *node.below):
                        with self._counted(each):
                            each.drop_drafter()

    def _has_room(self, size: int, live: int) -> bool:
        return self.bytes + live + size <= self._budget

    def _prepare(self, node: Node, following: int, live: int, *, drafts: bool) -> bool:
        """Makes room for a request that goes on from `node` with a forward of `following` rows;
        whether rows must move to it."""
        kinds = [[each.span for each in node.path if each.span is not None]]
        kinds += [drafter_spans(node.path)] if drafts else []
        grows = sum(growth_behind(spans, following) for spans in kinds)
        size = sum(joined_size(spans) for spans in kinds)
        size += max(grows, *(twice_at_once(spans) for spans in kinds))
        if self._has_room(size, live):
            return False
        self.shrink(live + size - sum(span.bytes for spans in kinds for span in spans))
        return True

    def _add(self, node: Node) -> None:
        assert node.parent is not None
        mx.eval(list(node.arrays))
        node.parent.children[node.key] = node
        self.bytes += node.bytes

    def _remove(self, node: Node) -> None:
        """It and all below it."""
        assert node.parent is not None
        del node.parent.children[node.key]
        for each in (node, *node.below):
            self.bytes -= each.bytes
            for span in each.spans:
                span.discard()

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

    def _deepest(
        self, prompt: Sequence[int], ends: Sequence[int], salt: Salt, *, drafts: bool
    ) -> Node | None:
        """What a request may go on from; it is used."""
        path = self._walk(prompt, ends[:-1], salt)
        able = [node for node in path if node.goes_on(drafts=drafts)]
        if not able:
            return None
        self._touch(able[-1])
        return able[-1]

    def _touch(self, node: Node) -> None:
        self._ticks += 1
        node.state_used = self._ticks
        for each in node.path:
            each.used = self._ticks

    def _prefix(self, node: Node, claim: Claim | None, *, drafts: bool, moves: bool) -> Prefix:
        path, caches = node.path, self._make_caches()
        rows = [each.span for each in path if each.span is not None]
        heads = drafter_spans(path) if drafts else []
        if claim is not None:
            claim.own(path, node.end if drafts else 0)
        if moves:
            for span in (*rows, *heads):
                self.bytes -= span.bytes
                span.here = False
        states, sources = iter(node.states or ()), dict[Owner, Sequence[Any]]()
        for layer, cache in enumerate(caches):
            if has_rows(cache):
                caches[layer] = joined(parts_of(rows, layer, sources, moves=moves))
                if moves:
                    mx.clear_cache()
            else:
                caches[layer] = next(states).twin()
        drafter = None
        if drafts and (last := node.drafter) is not None:
            parts = parts_of(heads, 0, sources, moves=moves)
            cache = cast("KVCache", joined(parts)) if parts else KVCache()  # never quantised
            drafter = DrafterState(cache, last.end, last.read, pending_of(path))
        mx.eval(cache_arrays(caches))
        if claim is not None:
            holding = Holding(caches, drafter.cache if drafter else None)
            claim.holding = lambda: holding
        forwards = (
            PrefixForward(each.end, each.states is not None, each.first_turn, each.sent)
            for each in path
        )
        return Prefix(caches, node.end, drafter, tuple(forwards))

    def _lend(self, room: int) -> None:
        """Rows that requests in progress have as well go first, and the last of a prompt before
        its first: where such a request fails, what only it had is lost."""
        for node in sorted(self._root.below, key=lambda node: -node.end):
            for span in node.spans:
                if self.bytes <= room:
                    return
                if span.here and any(owner.is_known() for owner in span.owners):
                    self.bytes -= span.bytes
                    span.lend()

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
