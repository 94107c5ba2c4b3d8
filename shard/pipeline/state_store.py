"""What a spare was sent of a stage's requests, and how it becomes their state when it is needed.

A copy has everything that the stage holds of a request at some row: keys and values since the copy
before it, all of a recurrent state, and the trail. The spare keeps bytes, of which arrays are made
once it takes the stage's place. What was computed since is rebuilt from trails, as without copies.
"""

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from ...mtp.drafters import DrafterState
from ...mtp.rollback import TapedCache, cache_arrays
from ...placement.errors import InvalidFrame
from ...proto import peer_pb2 as pb
from ..model.stage_limits import StageLimits
from ..model.stage_model import StageModel
from ..model.tensors import ITEM_BYTES, WIRE, from_bytes
from .frames import REQUEST_NAME, Assembler, HiddenBlock
from .replay_buffer import ReplayBuffer
from .request_state import RequestState, digest_of

log = logging.getLogger(__name__)

ROOM_STEP = 1024
"""Rows by which a buffer's room may exceed what is in it."""
REMEMBERED = 4096
"""Requests that were taken up, so that copies of them that come late are refused."""

_KINDS = (KVCache, ArraysCache, TapedCache)
_DRAFTER = -1
"""The layer number of a drafter's cache."""
_BY_WIRE = {number: name for name, number in WIRE.items()}


def why_not_copied(own: Sequence[object]) -> str:
    """Why caches of these kinds cannot be copied; empty where they can."""
    # Not their sub-classes: those may hold more than what is copied.
    others = sorted({type(c).__name__ for c in own if type(c) not in _KINDS})
    return f"caches of kind {others[0]} cannot be copied" if others else ""


class _Rows:
    """Keys or values of one layer, (1, heads, room, size), written as they come."""

    def __init__(self, like: pb.Tensor) -> None:
        _, self._heads, _, self._size = like.shape
        self._dtype = _BY_WIRE[like.dtype]
        self._room = 0
        self._data = bytearray()

    def __len__(self) -> int:
        """In bytes."""
        return len(self._data)

    def fits(self, tensor: pb.Tensor) -> bool:
        _, heads, _, size = tensor.shape
        return (heads, size, _BY_WIRE[tensor.dtype]) == (self._heads, self._size, self._dtype)

    def write(self, begin: int, tensor: pb.Tensor) -> None:
        """The rows from `begin` on, in place of those that were there."""
        rows, data = tensor.shape[2], memoryview(tensor.data)
        if begin + rows > self._room:
            self._resize(max(begin + rows, 3 * self._room // 2))
        width = self._size * ITEM_BYTES[self._dtype]
        for head in range(self._heads):
            at = (head * self._room + begin) * width
            part = data[head * rows * width : (head + 1) * rows * width]
            self._data[at : at + len(part)] = part

    def array(self, room: int) -> mx.array:
        """With as much room as the stage's own buffer."""
        if room != self._room:
            self._resize(room)
        return from_bytes(self._data, self._dtype, (1, self._heads, room, self._size))

    def _resize(self, room: int) -> None:
        width = self._size * ITEM_BYTES[self._dtype]
        old, before, kept = memoryview(self._data), self._room, min(room, self._room) * width
        self._data, self._room = bytearray(self._heads * room * width), room
        for head in range(self._heads):
            at, was = head * room * width, head * before * width
            self._data[at : at + kept] = old[was : was + kept]


@dataclass(frozen=True, slots=True)
class _Mark:
    """A row at which the whole state is known."""

    position: int
    layers: tuple[pb.LayerState, ...]
    """Of attention the room only."""
    answer: HiddenBlock | None
    drafter: pb.DrafterCopy | None
    """Without its keys and values."""
    ids: bytes

    @property
    def bytes(self) -> int:
        drafter = self.drafter.ByteSize() if self.drafter else 0
        return drafter + sum(layer.ByteSize() for layer in self.layers)


@dataclass(slots=True)
class _Kept:
    """The copies of one request, joined."""

    attempt: int
    renewed: float = 0.0
    marks: list[_Mark] = field(default_factory=list[_Mark])
    """The last two: a stage may be a row ahead of what was handed out."""
    rows: dict[int, tuple[_Rows, _Rows]] = field(default_factory=dict[int, tuple[_Rows, _Rows]])
    """Keys and values, by layer; a drafter's by `_DRAFTER`."""
    replay_buffer: ReplayBuffer = field(default_factory=ReplayBuffer)

    @property
    def bytes(self) -> int:
        attention = sum(len(keys) + len(values) for keys, values in self.rows.values())
        states = sum(mark.bytes for mark in self.marks)
        return attention + states + self.replay_buffer.bytes

    def cut_back(self, position: int) -> None:
        """The rows from `position` on were taken back, and are sent anew."""
        self.marks = [mark for mark in self.marks if mark.position <= position]
        self.replay_buffer.roll_back(position)


class StateStore:
    """On a spare: what it was sent, by request. Any thread keeps, the compute thread takes.

    Of two rows a request's state is known: where the later one is ahead of what the answer's reader
    was given, the earlier one will do.
    """

    def __init__(
        self, model: StageModel, expected: StageLimits, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._expected = expected
        self._template = model.own_caches(model.make_caches())
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._taken: OrderedDict[str, int] = OrderedDict()
        """The attempts that took copies up: what their forerunners still send is refused."""

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(kept.bytes for kept in self._kept.values())

    @property
    def why_not(self) -> str:
        """Why this stage cannot be copied; empty where it can."""
        return why_not_copied(self._template)

    def keep(self, copy: pb.StateCopy) -> None:
        """Raises InvalidFrame, naming the field; what was kept of the request is dropped then."""
        begin = int(copy.begin)
        with self._lock:
            kept = self._kept.pop(copy.request, None)
            if kept is None or begin == 0:
                kept = _Kept(int(copy.attempt))
                kept.replay_buffer.begins = int(copy.replay_begins)
            self._check(copy, kept)
            answer, blocks = (
                next(self._blocks(copy.answer), None),
                list(self._blocks(copy.replay_buffer)),
            )
            kept.cut_back(begin)
            layers = tuple(self._layer(kept, n, begin, each) for n, each in enumerate(copy.layers))
            drafter = _without_rows(kept, copy.drafter) if copy.HasField("drafter") else None
            mark = _Mark(int(copy.position), layers, answer, drafter, copy.ids)
            kept.marks = [*kept.marks[-1:], mark]
            for block in blocks:
                kept.replay_buffer.add(block)
            kept.attempt, kept.renewed = int(copy.attempt), self._clock()
            self._kept[copy.request] = kept

    def hold(self, requests: Iterable[str]) -> None:
        """These live; what is kept of others is dropped."""
        living = set(requests)
        with self._lock:
            self._kept = {name: kept for name, kept in self._kept.items() if name in living}
            for kept in self._kept.values():
                kept.renewed = self._clock()

    def expire(self, lease_s: float) -> list[str]:
        """Drops what nobody has held for `lease_s` seconds; returns those requests."""
        limit = self._clock() - lease_s
        with self._lock:
            ended = [name for name, kept in self._kept.items() if kept.renewed < limit]
            for name in ended:
                del self._kept[name]
        return ended

    def take(
        self, request: str, attempt: int, position: int, ids: Sequence[int] | None = None
    ) -> RequestState | None:
        """The state at `position` rows, or as few before them as is known. Not kept afterwards.

        `ids`: those of the rows, which an attempt that was lost may have drawn otherwise.
        """
        with self._lock:
            kept = self._kept.pop(request, None)
            self._taken[request] = max(attempt, self._taken.pop(request, 0))
            while len(self._taken) > REMEMBERED:
                _ = self._taken.popitem(last=False)
        if kept is None or kept.attempt >= attempt:
            return None
        marks = [mark for mark in kept.marks if mark.position <= position]
        if ids is not None:
            marks = [mark for mark in marks if mark.ids == digest_of(ids[: mark.position])]
        if not marks:
            return None
        known = marks[-1].position
        log.info("request %s goes on from a copy of %d of its %d rows", request, known, position)
        return self._state(kept, marks[-1])

    def _layer(self, kept: _Kept, number: int, begin: int, layer: pb.LayerState) -> pb.LayerState:
        """What a mark needs of a layer; keys and values are written where they belong."""
        if isinstance(self._template[number], ArraysCache):
            return layer
        _write(kept, number, begin, layer)
        return pb.LayerState(room=layer.room)

    def _state(self, kept: _Kept, mark: _Mark) -> RequestState:
        caches = self._model.make_caches()
        own = self._model.own_caches(caches)
        for number, (cache, layer) in enumerate(zip(own, mark.layers, strict=True)):
            if isinstance(cache, ArraysCache):
                cache.cache = [_array(tensor) for tensor in layer.tensors]
                continue
            cache.keys, cache.values = (rows.array(layer.room) for rows in kept.rows.pop(number))
            cache.offset = mark.position
        kept.replay_buffer.roll_back(mark.position)
        mx.eval(cache_arrays(own))
        return RequestState(
            caches,
            position=mark.position,
            answer=mark.answer,
            replay_buffer=kept.replay_buffer,
            drafter=_drafter(kept, mark.drafter) if mark.drafter else None,
        )

    def _check(self, copy: pb.StateCopy, kept: _Kept) -> None:
        e = self._expected
        last = kept.marks[-1].position if kept.marks else 0
        checks = (
            ("placement", copy.placement == e.placement, "this runner's"),
            ("request", REQUEST_NAME.fullmatch(copy.request), "1 to 64 letters, digits, - or _"),
            ("attempt", copy.attempt > self._taken.get(copy.request, 0), "above what took over"),
            ("begin", copy.begin <= last, f"at most {last}, the rows that are here"),
            (
                "position",
                copy.begin < copy.position <= e.context_length,
                f"above begin and at most {e.context_length}",
            ),
            ("layers", len(copy.layers) == len(self._template), f"{len(self._template)}"),
            ("replay_begins", copy.replay_begins <= copy.position, "at most position"),
        )
        for name, good, wanted in checks:
            if not good:
                raise InvalidFrame(f"copy.{name} must be {wanted}", param=f"copy.{name}")
        for number, (cache, layer) in enumerate(zip(self._template, copy.layers, strict=True)):
            if not _fits(cache, layer, kept.rows.get(number), copy):
                raise InvalidFrame(
                    f"copy.layers[{number}] must hold what a {type(cache).__name__} of this model "
                    f"has at row {copy.position}",
                    param="copy.layers",
                )
        if copy.HasField("drafter") and not self._drafter_fits(copy, kept):
            raise InvalidFrame(
                f"copy.drafter must be what this model's draft head has at row {copy.position}",
                param="copy.drafter",
            )

    def _drafter_fits(self, copy: pb.StateCopy, kept: _Kept) -> bool:
        drafter, known = copy.drafter, kept.rows.get(_DRAFTER)
        last = kept.marks[-1].drafter if kept.marks else None
        begin, rows = int(drafter.begin), int(drafter.rows)
        size = self._expected.hidden_size
        read, *behind = (
            _hidden_rows(each, size) for each in (drafter.read, drafter.pending, drafter.ahead)
        )
        if read not in (0, 1) or min(behind) < 0 or rows + sum(behind) != copy.position:
            return False
        if begin > (int(last.rows) if last and known else 0):
            return False
        if begin == rows and not drafter.layer.tensors:  # nothing new
            return rows == 0 or _has_room(drafter.layer, rows)
        return begin < rows and _attention_fits(drafter.layer, known, begin, rows)

    def _blocks(self, frames: Iterable[pb.Frame]) -> Iterator[HiddenBlock]:
        assembler = Assembler(replace(self._expected, stage=self._expected.stage + 1))
        for frame in frames:
            if (block := assembler.add(frame)) is not None:
                yield block


def _fits(
    cache: Any, layer: pb.LayerState, known: tuple[_Rows, _Rows] | None, copy: pb.StateCopy
) -> bool:
    """`known`: the rows of earlier copies, which these are joined to."""
    if not all(map(_is_whole, layer.tensors)):
        return False
    if isinstance(cache, ArraysCache):
        return len(layer.tensors) == len(cache.cache)
    return _attention_fits(layer, known, int(copy.begin), int(copy.position))


def _attention_fits(
    layer: pb.LayerState, known: tuple[_Rows, _Rows] | None, begin: int, end: int
) -> bool:
    """Whether it is keys and values of the rows [begin, end)."""
    shapes = [list(tensor.shape) for tensor in layer.tensors]
    return (
        len(shapes) == 2
        and all(map(_is_whole, layer.tensors))
        and all(len(shape) == 4 and (shape[0], shape[2]) == (1, end - begin) for shape in shapes)
        and _has_room(layer, end)
        and (known is None or all(map(_Rows.fits, known, layer.tensors)))
    )


def _has_room(layer: pb.LayerState, rows: int) -> bool:
    return rows <= layer.room <= rows + ROOM_STEP


def _write(kept: _Kept, number: int, begin: int, layer: pb.LayerState) -> None:
    keys, values = layer.tensors
    pair = kept.rows.setdefault(number, (_Rows(keys), _Rows(values)))
    for rows, tensor in zip(pair, (keys, values), strict=True):
        rows.write(begin, tensor)


def _without_rows(kept: _Kept, drafter: pb.DrafterCopy) -> pb.DrafterCopy:
    """What a mark needs of it; keys and values are written where they belong."""
    if drafter.layer.tensors:
        _write(kept, _DRAFTER, int(drafter.begin), drafter.layer)
    del drafter.layer.tensors[:]
    return drafter


def _drafter(kept: _Kept, drafter: pb.DrafterCopy) -> DrafterState:
    cache = KVCache()
    if drafter.rows:
        pair = kept.rows.pop(_DRAFTER)
        cache.keys, cache.values = (rows.array(drafter.layer.room) for rows in pair)
        cache.offset = int(drafter.rows)
    read, pending, ahead = (
        _array(tensor) if tensor.shape else None
        for tensor in (drafter.read, drafter.pending, drafter.ahead)
    )
    return DrafterState(cache, cache.offset, read, pending, ahead)


def _hidden_rows(tensor: pb.Tensor, size: int) -> int:
    """Of hidden states (1, n, size); 0 where there are none, and -1 of what is no such thing."""
    if not tensor.ByteSize():
        return 0
    shape = list(tensor.shape)
    good = len(shape) == 3 and (shape[0], shape[2]) == (1, size) and shape[1] and _is_whole(tensor)
    return shape[1] if good else -1


def _is_whole(tensor: pb.Tensor) -> bool:
    name = _BY_WIRE.get(tensor.dtype)
    return name is not None and len(tensor.data) == math.prod(tensor.shape) * ITEM_BYTES[name]


def _array(tensor: pb.Tensor) -> mx.array:
    return from_bytes(tensor.data, _BY_WIRE[tensor.dtype], tuple(tensor.shape))
