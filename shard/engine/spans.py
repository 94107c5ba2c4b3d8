"""Rows of kept prompts, which lie here or with requests in progress that have the same rows.

A running request's caches hold the rows of its prompt, so that they need not lie here as well. A
span that is lent has no arrays here: who wants its rows meanwhile reads them in the caches of one
of its owners, and the last owner to end gives them back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mlx_lm.models.cache import KVCache

from .cache_parts import Rows, form_of, has_rows, row_bytes, rows_of, taken, viewed

if TYPE_CHECKING:
    from .prefix_tree import Node


class Holding(NamedTuple):
    """Where a request in progress has its rows."""

    caches: Sequence[Any]
    """By layer, as they are kept; anything where a layer has no rows."""
    drafter: Any
    """The cache of its draft head; None where nothing drafts."""


def _nothing() -> Holding:
    return Holding((), None)


class Owner:
    """A request in progress, for its model's rows or its draft head's."""

    def __init__(self, source: Callable[[], Sequence[Any]], is_known: Callable[[], bool]) -> None:
        """`source`: its caches as they are now, by layer, where that `is_known`."""
        self.source = source
        self.is_known = is_known
        self._spans = dict[Span, None]()

    def own(self, span: "Span") -> None:
        """It has these rows, and will until it leaves."""
        self._spans[span] = span.owners[self] = None

    @property
    def spans(self) -> "list[Span]":
        return list(self._spans)

    def forget(self, span: "Span") -> None:
        self._spans.pop(span, None)

    def leave(self) -> "list[Span]":
        """It owns nothing any more; the spans that only it had."""
        spans = list(self._spans)
        self._spans.clear()
        for span in spans:
            del span.owners[self]
        return [span for span in spans if not span.here and not span.owners]


class Claim:
    """What one request in progress has of kept prefixes."""

    def __init__(self) -> None:
        self.holding: Callable[[], Holding] = _nothing
        self.is_known: Callable[[], bool] = lambda: True
        self.rows = Owner(lambda: self.holding().caches, lambda: self.is_known())
        self.head = Owner(lambda: [self.holding().drafter], lambda: self.is_known())
        self.over = False

    def close(self) -> None:
        """The request is over; nothing of it stays in memory for the sake of this."""
        self.over, self.holding, self.is_known = True, _nothing, lambda: False

    def own(self, path: "Sequence[Node]", drafted: int) -> None:
        """It has the rows of all nodes of `path`, and `drafted` rows of its draft head."""
        for node in path:
            if node.span is not None:
                self.rows.own(node.span)
            each = node.drafter
            if each is not None and each.span is not None and each.end <= drafted:
                self.head.own(each.span)


@dataclass(slots=True, eq=False)
class Span:
    """The rows [begin, end) of several layers."""

    begin: int
    end: int
    layers: list[Rows | None]
    """None where a layer has no rows."""
    row: int
    """Bytes of one row of all layers."""
    here: bool
    coming: bool = False
    """It is about to be here."""
    gone: bool = False
    """Nothing leads to it any more."""
    owners: dict[Owner, None] = field(default_factory=dict[Owner, None])

    @classmethod
    def of(cls, caches: Sequence[Any], begin: int, end: int, *, copied: bool) -> "Span":
        """Of caches that hold those rows; where not `copied` they must get an owner."""
        layers = list[Rows | None]()
        for cache in caches:
            rows = rows_of(cache, begin, end) if copied and has_rows(cache) else None
            layers.append(form_of(cache) if rows is None and has_rows(cache) else rows)
        return cls(begin, end, layers, bytes_of_row(caches), copied)

    @property
    def size(self) -> int:
        """Bytes of its rows, wherever they are."""
        return self.row * (self.end - self.begin)

    @property
    def room(self) -> int:
        """Rows that the caches had room for."""
        return max((rows.room for rows in self.layers if rows is not None), default=0)

    @property
    def bytes(self) -> int:
        return self.size if self.here or self.coming else 0

    @property
    def is_known(self) -> bool:
        return self.here or any(owner.is_known() for owner in self.owners)

    def lend(self) -> None:
        """Its owners alone have the rows from here on."""
        assert self.owners
        for layer in range(len(self.layers)):
            self.lend_layer(layer)
        self.here = False

    def lend_layer(self, layer: int) -> None:
        if (rows := self.layers[layer]) is not None:
            self.layers[layer] = replace(rows, arrays=())

    def part(self, layer: int, sources: "dict[Owner, Sequence[Any]]") -> Rows:
        """One layer's rows, from here or in views of an owner's; `sources`: see `parts_of`."""
        rows = self.layers[layer]
        assert rows is not None
        if rows.arrays:
            return rows
        owner = next(owner for owner in self.owners if owner.is_known())
        if owner not in sources:
            sources[owner] = owner.source()
        return replace(viewed(sources[owner][layer], self.begin, self.end), room=rows.room)

    def discard(self) -> None:
        """Nobody will want it any more."""
        for owner in self.owners:
            owner.forget(self)
        self.owners.clear()
        self.gone = True


def bytes_of_row(caches: Sequence[Any]) -> int:
    return sum(row_bytes(cache) for cache in caches if has_rows(cache))


def growth_of(caches: Sequence[Any], rows: int) -> int:
    """Bytes that caches grow by in a forward of `rows` rows, which they have room for or not."""
    return sum(
        _steps(row_bytes(cache), rows)
        for cache in caches
        if has_rows(cache) and cache.offset + rows > form_of(cache).room
    )


def _steps(row: int, rows: int) -> int:
    return row * KVCache.step * -(-rows // KVCache.step)


def growth_behind(spans: Sequence[Span], rows: int) -> int:
    """The same of a cache of all of `spans`."""
    if not spans or spans[-1].end + rows <= spans[-1].room:
        return 0
    return _steps(spans[-1].row, rows)


def joined_size(spans: Sequence[Span]) -> int:
    """Bytes of a cache of all of them, which begin at row 0, with its room."""
    if not spans:
        return 0
    return spans[-1].row * max(spans[-1].end, spans[-1].room)


def twice_at_once(spans: Sequence[Span]) -> int:
    """Bytes that are there twice while the rows of all of them move: the keys or values of a layer,
    where the layers have as many."""
    layers = max((sum(rows is not None for rows in span.layers) for span in spans), default=0)
    return sum(span.size for span in spans) // (2 * max(1, layers))


def parts_of(
    spans: Sequence[Span], layer: int, sources: dict[Owner, Sequence[Any]], *, moves: bool
) -> list[Rows]:
    """One layer's rows of all of them; nothing of it stays here where it `moves`.

    `sources` notes owners' caches, which are asked for once.
    """
    parts = [span.part(layer, sources) for span in spans]
    if moves:
        for span in spans:
            span.lend_layer(layer)
    return parts


def give_back(spans: Sequence[Span], caches: Sequence[Any]) -> None:
    """The rows of `spans`, in their order, come from `caches`, which lose their own.

    Raises RuntimeError.
    """
    if not spans:
        return
    for layer, form in enumerate(spans[0].layers):
        if form is None:
            continue
        if caches[layer] is None or caches[layer].offset < spans[-1].end:
            raise RuntimeError("its caches have fewer rows than it claimed")
        copies = taken(caches[layer], [(span.begin, span.end) for span in spans])
        for span, arrays in zip(spans, copies, strict=True):
            span.layers[layer] = replace(cast("Rows", span.layers[layer]), arrays=arrays)
    for span in spans:
        span.here, span.coming = True, False
