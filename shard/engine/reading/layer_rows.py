"""Rows and states of some layers' caches, as one runner sends them to another: in a file of the
disk tier, with its checksums, for each forward over a prompt."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, QuantizedKVCache

from ....mtp.caches.rollback import (
    RowCache,
    TapedCache,
    holds_rows,
    row_count,
    state_arrays,
)
from ....mtp.caches.window import WindowCache
from ...checkpoint.files import Buffer
from ...checkpoint.prefix_files import ReceivedPrefix, pieces_of
from ...model.stage_model import StageModel
from ..prefixes.encoding import DTYPE_NAMES, described_parts, read_parts
from ..prefixes.lookup import SPARE_ROWS
from ..states.cache_parts import LayerRows, Span, copied, joined, room_of

_WINDOW_SPARE: Final = 1 << 12
"""Rows beyond its window that a window's cache may have: those of a forward, and alignment."""

Rows: TypeAlias = tuple[str, int, int]
"""Dtype, heads and size of an array of rows."""


class Selection(NamedTuple):
    """The part of a forward's results that is sent: those of the rows [begin, end)."""

    begin: int
    end: int
    states: bool
    """Whether it has the states after the last row, of caches that are not divided by rows."""
    hidden: int
    """Number of last rows whose hidden states it has."""

    def with_all_hidden(self) -> "Selection":
        """The selection from a reader whose hidden states another one continues with."""
        return self._replace(hidden=self.end - self.begin)


class LayerParts(NamedTuple):
    """The rows and states that one forward added to the caches of some layers."""

    rows: Sequence[LayerRows | None]
    """The rows of each cache; None where it is not divided by rows."""
    states: Sequence[Any]
    """The states of those other caches, in order; empty if none were selected."""
    hidden: mx.array | None
    """(1, n, H)"""


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Dtypes and shapes of some layers' caches, which are the same for every prompt."""

    rows: tuple[tuple[Rows, ...] | None, ...]
    """The arrays of rows of each cache; None where it is not divided by rows."""
    quantised: tuple[tuple[int, int] | None, ...]
    """Group size and bits of each cache; None if it is not quantised."""
    states: tuple[Any, ...]
    """A `_Window`, or the dtype and shape of each array, of each other cache."""
    hidden: tuple[str, int]
    """Dtype and size of a hidden state."""
    context_length: int

    @classmethod
    def of(
        cls, model: StageModel, hidden_size: int, dtype: mx.Dtype, context_length: int
    ) -> "LayerForm":
        """The form that the graph of one row has; nothing is computed. Raises ValueError for caches
        that cannot be sent, and what the model's class raises."""
        caches = model.make_caches()
        model.rope_positions.set_deltas([0])
        entering = mx.zeros((1, 1, hidden_size), dtype)
        _ = model.hidden(mx.zeros((1, 1), mx.int32), entering, caches, is_lazy=True)
        rows = tuple(_rows_form(cache) if holds_rows(cache) else None for cache in caches)
        forms = (
            (cache.group_size, cache.bits) if isinstance(cache, QuantizedKVCache) else None
            for cache in caches
        )
        states = tuple(_state_form(cache) for cache in caches if not holds_rows(cache))
        hidden = (DTYPE_NAMES[dtype], hidden_size)
        return cls(rows, tuple(forms), states, hidden, context_length)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all caches."""
        return sum(_row_bytes(arrays) for arrays in self.rows if arrays is not None)

    @property
    def state_bytes(self) -> int:
        """Upper bound of the bytes of the states after a row."""
        return sum(map(_state_bytes, self.states))

    def bytes(self, selection: Selection) -> int:
        """Upper bound of the bytes of a selection."""
        state_bytes = self.state_bytes if selection.states else 0
        dtype, size = self.hidden
        row_bytes = self.row_bytes * (selection.end - selection.begin)
        return row_bytes + state_bytes + selection.hidden * size * _ITEM_BYTES[dtype]

    def check(self, selection: Selection, description: Mapping[str, Any]) -> None:
        """Checks a file's description. Raises ValueError, or a parser's error."""
        if (description["begin"], description["end"]) != (selection.begin, selection.end):
            raise ValueError("it has other rows than were asked for")
        if len(description["rows"]) != len(self.rows):
            raise ValueError("it is of other layers")
        most, names = self.context_length + SPARE_ROWS, list[str]()
        forms = zip(description["rows"], self.rows, self.quantised, strict=True)
        for part, form, quantised in forms:
            if (part is None) != (form is None):
                raise ValueError("a layer of it has another kind of cache")
            if part is None or form is None:
                continue
            own = None if part["quantised"] is None else tuple(part["quantised"])
            room_fits = type(part["room"]) is int and selection.end <= part["room"] <= most
            if len(part["names"]) != len(form) or own != quantised or not room_fits:
                raise ValueError("the rows of a layer have another form")
            names += part["names"]
        if len(description["states"]) != (len(self.states) if selection.states else 0):
            raise ValueError("it has other states than were asked for")
        if ("hidden" in description["tensors"]) != (selection.hidden > 0):
            raise ValueError("it has other hidden states than were asked for")
        if len(set(names)) < len(names):
            raise ValueError("two layers have the same rows")

    def read(self, received: ReceivedPrefix, selection: Selection) -> LayerParts:
        """Compute thread: the content of a file whose description was checked. Frees the file.
        Raises one of `encoding.CONTENT_FAULTS` for content of another form."""
        try:
            rows, states, hidden = read_parts(received)
        finally:
            received.free()
        count = selection.end - selection.begin
        for part, form in zip(rows, self.rows, strict=True):
            if part is not None and form is not None:
                _require(part.arrays, [(d, (1, h, count, size)) for d, h, size in form])
        for state, form in zip(states, self.states if selection.states else (), strict=True):
            _require_state(state, form, selection.end)
        if hidden is not None:
            dtype, size = self.hidden
            _require([hidden], [(dtype, (1, selection.hidden, size))])
        return LayerParts(rows, states, hidden)


class _Window(NamedTuple):
    """The form of a `WindowCache`'s state."""

    max_size: int
    keys: Rows
    values: Rows


def content_of(
    caches: Sequence[Any], selection: Selection, hidden: mx.array | None
) -> Iterator[Buffer]:
    """Compute thread: the file of a selection from `caches`, in pieces that other threads make; the
    first one waits for the device, this thread does not.

    `hidden` (1, n, H): the hidden states of a forward that ends with the selection's last row.
    """
    span = Span.of(caches, selection.begin, selection.end)
    states = [c.state for c in caches if not holds_rows(c)] if selection.states else []
    own = None if hidden is None or not selection.hidden else hidden[:, -selection.hidden :]
    described, stored = described_parts(span, states, own)

    def pieces() -> Iterator[Buffer]:
        ends = {"begin": selection.begin, "end": selection.end}
        yield from pieces_of(described | ends, stored(), lambda: None)

    return pieces()


def extended(
    caches: Sequence[Any], parts: Sequence[LayerParts], fresh: Sequence[Any], end: int
) -> list[Any]:
    """`caches` with the parts of forwards, the last of which ends at row `end`. `fresh`: empty
    caches, which take the states that came with it. Raises ValueError."""
    _require_finite(parts)
    states, grown = list(parts[-1].states)[::-1], list[Any]()
    columns = zip(*(each.rows for each in parts), strict=True)
    for cache, rows, empty in zip(caches, columns, fresh, strict=True):
        if added := [each for each in rows if each is not None]:
            grown.append(_with_rows(cache, added))
            if row_count(grown[-1]) != end:
                raise ValueError("it does not have its rows in every layer")
            continue
        if states:
            empty.state = states.pop()
            cache = empty
        grown.append(cache)
    return grown


class CacheMark(NamedTuple):
    """A cache as it is after a forward, while later forwards write to it."""

    room: int
    """The room of a cache that is divided by rows."""
    copy: Any
    """The copy of another cache; None if it was not copied."""

    @classmethod
    def of(cls, cache: Any, *, copies: bool) -> "CacheMark":
        if holds_rows(cache):
            return cls(room_of(cache), None)
        return cls(0, copied(cache) if copies else None)


def as_marked(cache: Any, mark: CacheMark, rows: int) -> Any:
    """The cache as it was after `rows` rows, over the arrays that it has now."""
    if not holds_rows(cache):
        return copied(mark.copy)
    if isinstance(cache, CacheList):
        return CacheList(*(as_marked(part, mark, rows) for part in cache.caches))
    twin = copy.copy(cache)
    twin.keys, twin.values = _cut(cache.keys, mark.room), _cut(cache.values, mark.room)
    twin.offset = rows
    return twin


def _cut(arrays: Any, room: int) -> Any:
    if isinstance(arrays, mx.array):
        return arrays[..., :room, :]
    return None if arrays is None else tuple(array[..., :room, :] for array in arrays)


def _with_rows(cache: RowCache, rows: Sequence[LayerRows]) -> RowCache:
    count = row_count(cache)
    if not count:
        return joined(rows)
    own = tuple(array[..., :count, :] for array in state_arrays(cache))
    return joined([LayerRows(own, count, rows[-1].quantised), *rows])


_ITEM_BYTES: Final = {name: dtype.size for dtype, name in DTYPE_NAMES.items()}


def _rows_form(cache: RowCache) -> tuple[Rows, ...]:
    return tuple(map(_array_form, state_arrays(cache)))


def _array_form(array: mx.array) -> Rows:
    return DTYPE_NAMES[array.dtype], array.shape[1], array.shape[3]


def _state_form(cache: Any) -> Any:
    if isinstance(cache, WindowCache):
        assert cache.keys is not None and cache.values is not None
        return _Window(cache.max_size, _array_form(cache.keys), _array_form(cache.values))
    if type(cache) in (ArraysCache, TapedCache):
        return tuple((DTYPE_NAMES[array.dtype], array.shape) for array in cache.cache)
    raise ValueError(f"a cache of kind {type(cache).__name__} cannot be sent")


def _row_bytes(arrays: Sequence[Rows]) -> int:
    return sum(heads * size * _ITEM_BYTES[dtype] for dtype, heads, size in arrays)


def _state_bytes(form: Any) -> int:
    if isinstance(form, _Window):
        return _row_bytes((form.keys, form.values)) * (form.max_size + _WINDOW_SPARE)
    sizes = cast("Sequence[tuple[str, tuple[int, ...]]]", form)
    return sum(math.prod(shape) * _ITEM_BYTES[dtype] for dtype, shape in sizes)


def _require_state(state: Any, form: Any, end: int) -> None:
    if not isinstance(form, _Window):
        arrays, *padding = state
        if any(each is not None for each in padding):
            raise ValueError("a state of it is of a batch")
        _require(arrays, form)
        return
    keys, values, offset, start, max_size = state
    counts = (offset, start, max_size)
    if not all(type(count) is int for count in counts) or not 0 <= start <= offset == end:
        raise ValueError("a window of it has other rows")
    if max_size != form.max_size:
        raise ValueError("a window of it has another size")
    shapes = [(d, (1, h, end - start, size)) for d, h, size in (form.keys, form.values)]
    _require([keys, values], shapes)


def _require_finite(parts: Sequence[LayerParts]) -> None:
    """Checks the last row of each forward, which earlier ones reach through attention. Raises
    ValueError."""
    last = list[mx.array]()
    for rows, states, hidden in parts:
        last += [array[..., -1, :] for part in rows if part is not None for array in part.arrays]
        last += [each for state in states for each in _arrays_in(state)]
        last += [] if hidden is None else [hidden[:, -1]]
    kinds = [array for array in last if mx.issubdtype(array.dtype, mx.floating)]
    finite = [mx.isfinite(array).all() for array in kinds]
    if finite and not mx.stack(finite).all().item():
        raise ValueError("its numbers are not finite")


def _arrays_in(state: Any) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    parts = cast("Sequence[Any]", state) if isinstance(state, (list, tuple)) else ()
    return [array for part in parts for array in _arrays_in(part)]


def _require(arrays: Sequence[Any], forms: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Raises ValueError unless the arrays have these dtypes and shapes."""
    own = [(DTYPE_NAMES[a.dtype], a.shape) for a in arrays if isinstance(a, mx.array)]
    if own != list(forms) or len(own) != len(arrays):
        raise ValueError("an array of it has another form")
