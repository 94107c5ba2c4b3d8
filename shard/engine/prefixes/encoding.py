"""Paths of the prefix cache as named arrays and JSON values, and files of those as prefixes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ....mtp.caches.rollback import TapedCache, cache_arrays, row_count
from ....mtp.caches.window import WindowCache
from ....mtp.seams import FORWARD_FAULTS
from ...checkpoint.files import Buffer
from ...checkpoint.prefix_files import PrefixFile, ReceivedPrefix, StoredTensor
from ..states.cache_parts import LayerRows, Span, joined
from ..states.state import DraftState, State
from .tree import PrefixNode, drafter_spans, pending_of

_HEAD: Final = "head"
_HIDDEN: Final = "hidden"
_ALIGNMENT: Final = 16
"""Bytes, of each tensor that is received: kernels load so many at once."""
_STATE_KINDS: Final = (WindowCache, ArraysCache, TapedCache)
"""Caches whose state consists of numbers and arrays, unlike a list of caches."""
_DTYPES: Final[Mapping[str, mx.Dtype]] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}
DTYPE_NAMES: Final[Mapping[mx.Dtype, str]] = {dtype: name for name, dtype in _DTYPES.items()}
"""The names that safetensors has for dtypes."""


def can_encode(node: PrefixNode) -> bool:
    """Whether a request may begin after a node, and its states can be written."""
    states = node.states
    return states is not None and all(type(state) in _STATE_KINDS for state in states)


def encoded(
    path: Sequence[PrefixNode], begin: int, *, drafts: bool
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The rows of a path after row `begin`, at which one of its nodes ends, and the states after
    its last row. Its drafter's part is always whole: that is one layer among many.

    The tensors are views of the nodes' arrays. `drafts`: whether to add the drafter's part.
    """
    arrays = dict[str, mx.array]()
    nodes, last = [node for node in path if node.end > begin], path[-1]
    spans = [_span(node.span, f"{index}", arrays) for index, node in enumerate(nodes)]
    states = [_plain(state.state, "state", arrays) for state in last.states or ()]
    head: dict[str, Any] | None = None
    if drafts and last.drafter is not None:
        parts = drafter_spans(path)
        head = {"rows": last.drafter.end, "spans": []}
        head["spans"] = [_span(span, f"{_HEAD}.{i}", arrays) for i, span in enumerate(parts)]
        if (hidden := pending_of(path)) is not None:
            arrays[_HIDDEN] = hidden
    description = {
        "begin": begin,
        "rows": last.end,
        "first_turn": next((node.end for node in path if node.first_turn), 0),
        "spans": spans,
        "states": states,
        "head": head,
    }
    return description, _stored(arrays)


PrefixContent = PrefixFile | ReceivedPrefix
"""A file of a prefix, or what another runner sent in its place."""
CONTENT_FAULTS: Final = (OSError, MemoryError, *FORWARD_FAULTS)
"""Exceptions for files whose content is not what was written, or has no room."""


def read_state(
    files: Iterable[PrefixContent], make_caches: Callable[[], list[Any]], ids: Sequence[int]
) -> State:
    """The state in a prefix's file and those of its parents, which follow it; evaluated.

    `make_caches` makes the empty caches of one request. `ids`: the prompt's. Raises one of
    CONTENT_FAULTS for a file that was changed.
    """
    described, layers, arrays = dict[str, Any](), list[list[LayerRows]](), dict[str, mx.array]()
    for file in files:
        if not described:
            described = dict(file.description)
            arrays = _arrays_of(file, list(described["tensors"]))
            layers = _columns(described["spans"], arrays)
            continue
        # Of parents no state is needed, nor the draft head's part.
        spans = file.description["spans"]
        rows = _columns(spans, _arrays_of(file, _names_in(spans)))
        layers = [[*a, *b] for a, b in zip(rows, layers, strict=True)]
    caches = make_caches()
    states = [_with_arrays(state, arrays) for state in described["states"]][::-1]
    for index, (cache, parts) in enumerate(zip(caches, layers, strict=True)):
        if not parts:
            cache.state = states.pop()
            continue
        caches[index] = joined(parts)
        if row_count(caches[index]) != described["rows"]:
            raise ValueError("it does not have its rows in every layer")
    mx.eval(cache_arrays(caches))
    draft = _draft_from(described["head"], arrays, ids)
    first_turn = described["first_turn"]
    return State(caches, described["rows"], draft, "disk", first_turn=first_turn)


def described_parts(
    span: Span, states: Sequence[Any], hidden: mx.array | None
) -> tuple[dict[str, Any], Callable[[], dict[str, StoredTensor]]]:
    """Description of a file of what one forward added to some layers: rows of their caches, the
    states of those that are not divided by rows, and hidden states; and what gives its tensors on
    another thread, which then waits for the device."""
    arrays = dict[str, mx.array]()
    rows = _span(span, "rows", arrays)
    plain = [_plain(state, "state", arrays) for state in states]
    if hidden is not None:
        arrays[_HIDDEN] = hidden
    return {"rows": rows, "states": plain}, _stored_later(arrays)


def read_parts(
    file: ReceivedPrefix,
) -> tuple[list[LayerRows | None], list[Any], mx.array | None]:
    """The inverse of `described_parts`. Raises one of CONTENT_FAULTS."""
    described = file.description
    arrays = _arrays_of(file, list(described["tensors"]))
    rows = [None if part is None else _layer_rows(part, arrays) for part in described["rows"]]
    return rows, _with_arrays(described["states"], arrays), arrays.get(_HIDDEN)


def _arrays_of(file: PrefixContent, names: list[str]) -> dict[str, mx.array]:
    with closing(file.tensors(names)) as tensors:
        return {name: _array(*each) for name, each in zip(names, tensors, strict=True)}


def _draft_from(
    head: Mapping[str, Any] | None, arrays: Mapping[str, mx.array], ids: Sequence[int]
) -> DraftState | None:
    """The draft head's state after a file's last row; None if the file has none."""
    if head is None:
        return None
    parts = _columns(head["spans"], arrays)
    cache = joined(parts[0]) if parts else None
    return DraftState.with_unread(cache, head["rows"], arrays.get(_HIDDEN), ids)


def _names_in(spans: Iterable[Iterable[Mapping[str, Any] | None]]) -> list[str]:
    """The names of the tensors of described spans."""
    return [name for span in spans for part in span if part is not None for name in part["names"]]


def joined_description(
    descriptions: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[Mapping[str, str]]]:
    """The description of one file that has what several have: those of a prefix's parents in order,
    and its own, whose tensors keep their names; and by file the names of the tensors that are
    needed, with their new names."""
    spans, tensors = list[Any](), list[Mapping[str, str]]()
    *parents, last = descriptions
    for number, described in enumerate(parents):
        names = dict[str, str]()
        for span in described["spans"]:
            spans.append([_renamed(part, f"parent.{number}.", names) for part in span])
        tensors.append(names)
    spans += last["spans"]
    tensors.append({name: name for name in last["tensors"]})
    first_turn = next((d["first_turn"] for d in descriptions if d["first_turn"]), 0)
    whole = {"begin": 0, "parent": None, "spans": spans, "first_turn": first_turn}
    return {**last, **whole}, tensors


def _renamed(
    part: Mapping[str, Any] | None, prefix: str, names: dict[str, str]
) -> Mapping[str, Any] | None:
    if part is None:
        return None
    names |= {name: prefix + name for name in part["names"]}
    return {**part, "names": [prefix + name for name in part["names"]]}


def _span(span: Span | None, name: str, arrays: dict[str, mx.array]) -> list[Any]:
    """Adds a span's arrays to `arrays`. Returns the rest of it as JSON values, by layer."""
    described = list[Any]()
    for layer, rows in enumerate(span.layers if span is not None else ()):
        if rows is None:
            described.append(None)
            continue
        names = [f"{name}.{layer}.{index}" for index in range(len(rows.arrays))]
        arrays |= dict(zip(names, rows.arrays, strict=True))
        described.append({"names": names, "room": rows.room, "quantised": rows.quantised})
    return described


def _columns(
    spans: Iterable[Sequence[Any]], arrays: Mapping[str, mx.array]
) -> list[list[LayerRows]]:
    """The rows of described spans, by layer."""
    return [
        [_layer_rows(part, arrays) for part in column if part is not None]
        for column in zip(*spans, strict=True)
    ]


def _layer_rows(part: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> LayerRows:
    form = part["quantised"]
    own = tuple(arrays[name] for name in part["names"])
    return LayerRows(own, part["room"], None if form is None else (form[0], form[1]))


class DeviceBytes:
    """A tensor's bytes, within an array that has those of several."""

    def __init__(self, several: mx.array, begin: int, size: int) -> None:
        self._several, self._begin, self._size = several, begin, size

    @classmethod
    def of(cls, tensors: Sequence[Buffer]) -> "list[DeviceBytes]":
        """Any thread: copies of tensors' bytes, in one array: a GPU's driver takes long for one."""
        parts, begins, end = list[Buffer](), list[int](), 0
        for each in tensors:
            begins.append(end)
            parts += each, bytes(_ALIGNMENT - len(each) % _ALIGNMENT)
            end += len(each) + len(parts[-1])
        several = mx.array(cast("mx.array", memoryview(b"".join(parts))))
        return [cls(several, begin, len(each)) for begin, each in zip(begins, tensors, strict=True)]

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        data = memoryview(cast("Any", self._several))
        return bytes(data[self._begin : self._begin + self._size])

    @property
    def array(self) -> mx.array:
        """Compute thread."""
        return self._several[self._begin : self._begin + self._size]


def _array(dtype: str, shape: tuple[int, ...], data: Buffer | DeviceBytes) -> mx.array:
    if not len(data):
        if 0 not in shape:
            raise ValueError("a tensor has no bytes")
        return mx.zeros(shape, _DTYPES[dtype])
    if isinstance(data, DeviceBytes):
        return data.array.view(_DTYPES[dtype]).reshape(shape)
    flat = mx.array(cast("mx.array", memoryview(data)))
    return flat.view(_DTYPES[dtype]).reshape(shape)


def _stored(arrays: Mapping[str, mx.array]) -> dict[str, StoredTensor]:
    """The bytes of arrays; evaluates those that are lazy or not contiguous."""
    flat = {name: mx.contiguous(a).reshape(-1).view(mx.uint8) for name, a in arrays.items()}
    mx.eval(list(flat.values()))
    views = {name: memoryview(cast("Any", each)) for name, each in flat.items()}
    return {
        name: StoredTensor(DTYPE_NAMES[array.dtype], array.shape, views[name])
        for name, array in arrays.items()
    }


def _stored_later(arrays: Mapping[str, mx.array]) -> Callable[[], dict[str, StoredTensor]]:
    """The bytes of arrays, which the device begins to copy: others may write to them."""
    flat = [mx.contiguous(a).reshape(-1).view(mx.uint8) for a in arrays.values()]
    # One copy, even of one array: a GPU hands over a buffer at a time, and for good.
    whole = mx.concatenate([mx.zeros((0,), mx.uint8), *flat])
    mx.async_eval(whole)
    forms = {name: (DTYPE_NAMES[a.dtype], a.shape, a.nbytes) for name, a in arrays.items()}

    def stored() -> dict[str, StoredTensor]:
        data, tensors = memoryview(cast("Any", whole)), dict[str, StoredTensor]()
        for name, (dtype, shape, nbytes) in forms.items():
            tensors[name] = StoredTensor(dtype, shape, data[:nbytes])
            data = data[nbytes:]
        return tensors

    return stored


def _plain(state: Any, name: str, arrays: dict[str, mx.array]) -> Any:
    """A state as JSON values, with names in place of its arrays."""
    if isinstance(state, mx.array):
        key = f"{name}.{len(arrays)}"
        arrays[key] = state
        return {"array": key}
    if isinstance(state, (list, tuple)):
        return [_plain(each, name, arrays) for each in cast("Sequence[Any]", state)]
    assert state is None or isinstance(state, (int, float, str)), type(state)
    return state


def _with_arrays(plain: Any, arrays: Mapping[str, mx.array]) -> Any:
    """The inverse of `_plain`."""
    if isinstance(plain, dict):
        return arrays[cast("dict[str, str]", plain)["array"]]
    if isinstance(plain, list):
        return [_with_arrays(each, arrays) for each in cast("list[Any]", plain)]
    return plain
