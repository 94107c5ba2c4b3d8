"""What a spare is sent of a stage's requests, and how it becomes their state when it is needed.

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

from ..mtp.rollback import TapedCache
from ..placement.errors import InvalidFrame
from ..proto import peer_pb2 as pb
from .frames import REQUEST_NAME, Assembler, Expectation, HiddenBlock, cut
from .request_state import RequestState
from .stage_model import StageModel
from .trail import Trail
from .wire import DTYPES, ITEM_BYTES, WIRE, from_bytes, to_bytes

log = logging.getLogger(__name__)

EVERY_S = 0.25
"""Between two copies of one request: about what is left to be computed after a loss."""
COMPUTE_SHARE = 0.02
"""Of the compute thread's time at most goes into copies."""
SENDING_SHARE = 0.25
"""Of the time at most a copy is on its way, and takes from what the network has."""
MAX_COPY = 512 << 20
"""Bytes of one copy. A request that is larger when it is first copied is not copied."""
ROOM_STEP = 1024
"""Rows by which a buffer's room may exceed what is in it."""
REMEMBERED = 4096

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_KINDS = (KVCache, ArraysCache, TapedCache)
_BY_WIRE = {number: name for name, number in WIRE.items()}


def why_not_copied(own: Sequence[object]) -> str:
    """Why caches of these kinds cannot be copied; empty where they can."""
    # Not their sub-classes: those may hold more than what is copied.
    others = sorted({type(c).__name__ for c in own if type(c) not in _KINDS})
    return f"caches of kind {others[0]} cannot be copied" if others else ""


class Copier:
    """Decides when a spare is sent what. All methods run on the compute thread.

    `names`, the requests that the spare has something of, may be read anywhere: the compute thread
    may be busy for longer than a lease.
    """

    def __init__(
        self,
        model: StageModel,
        expected: Expectation,
        clock: Callable[[], float],
        send: Callable[[pb.StateCopy], object],
        hold: Callable[[tuple[str, ...]], object],
    ) -> None:
        """`send` a copy and tell what requests the spare is to `hold`; neither may block."""
        self._model = model
        self._expected = expected
        self._clock = clock
        self._send = send
        self._hold = hold
        self.names: tuple[str, ...] = ()
        self._rows: dict[str, int] = {}
        """Of each request that the spare has a copy of."""
        self._due: dict[str, float] = {}
        self._free_at = 0.0
        self._following = False
        self._under_way = False

    def follow(self, following: bool) -> None:
        """There is a spare that has no copies yet, or none."""
        self._following, self._under_way = following, False
        self._rows.clear()
        self._due.clear()
        self.names = ()

    def offer(self, request: str, attempt: int, state: RequestState) -> None:
        """The state fits its rows now: it is copied if that is due."""
        now = self._clock()
        if not self._following or self._under_way or now < self._free_at:
            return
        if now < self._due.get(request, 0.0):
            return
        begin = min(self._rows.get(request, 0), state.lowest)
        if begin == state.position:
            return
        if why := self._why_not(state, begin):
            log.info("request %s is not copied to the spare: %s", request, why)
            self._due[request] = math.inf
            return
        copy = self._copy(request, attempt, state, begin)
        took = self._clock() - now
        self._due[request] = now + took + EVERY_S
        self._free_at = now + took / COMPUTE_SHARE
        self._rows[request] = state.lowest = state.position
        self.names = tuple(self._rows)
        self._under_way = True
        _ = self._send(copy)

    def delivered(self, seconds: float) -> None:
        """The last copy reached the spare after so long."""
        self._under_way = False
        self._free_at = max(self._free_at, self._clock() + seconds * (1 / SENDING_SHARE - 1))

    def refused(self, request: str) -> None:
        """The spare did not take the last copy: the next one begins at row 0."""
        self._under_way = False
        _ = self._rows.pop(request, None)

    def release(self, request: str) -> None:
        """The request is over."""
        _ = self._due.pop(request, None)
        if self._rows.pop(request, None) is not None:
            self.names = tuple(self._rows)
            _ = self._hold(self.names)

    def _why_not(self, state: RequestState, begin: int) -> str:
        own = self._model.own_caches(state.caches)
        if any(array is None or array.dtype not in _NAMES for c in own for array in _arrays(c)):
            return "its state has arrays of another kind than floating point"
        trail = sum(len(block.data) for block in state.trail.after(begin))
        size = trail + sum(_bytes_since(cache, begin) for cache in own)
        return f"{size >> 20} MiB are too many at once" if size > MAX_COPY else ""

    def _copy(self, request: str, attempt: int, state: RequestState, begin: int) -> pb.StateCopy:
        own = self._model.own_caches(state.caches)
        trail = state.trail.after(begin)
        return pb.StateCopy(
            placement=self._expected.placement,
            request=request,
            attempt=attempt,
            begin=begin,
            position=state.position,
            layers=[_layer(cache, begin) for cache in own],
            trail=self._frames(trail),
            trail_begins=state.trail.begins,
            answer=self._frames([] if state.answer is None else [state.answer]),
        )

    def _frames(self, blocks: Iterable[HiddenBlock]) -> list[pb.Frame]:
        e = self._expected
        return [
            frame
            for block in blocks
            for frame in cut(block, e.placement, e.stage + 1, e.dtype, e.hidden_size)
        ]


def _bytes_since(cache: Any, begin: int) -> int:
    size = sum(array.nbytes for array in _arrays(cache) if array is not None)
    if isinstance(cache, ArraysCache):
        return size
    return size // cache.keys.shape[2] * (cache.offset - begin)


def _layer(cache: Any, begin: int) -> pb.LayerState:
    if isinstance(cache, ArraysCache):
        return pb.LayerState(tensors=[_tensor(array) for array in cache.cache if array is not None])
    keys, values = (array[..., begin : cache.offset, :] for array in (cache.keys, cache.values))
    return pb.LayerState(tensors=[_tensor(keys), _tensor(values)], room=cache.keys.shape[2])


def _tensor(array: mx.array) -> pb.Tensor:
    return pb.Tensor(dtype=WIRE[_NAMES[array.dtype]], shape=array.shape, data=to_bytes(array))


@dataclass(frozen=True, slots=True)
class _Mark:
    """A row at which the whole state is known."""

    position: int
    layers: tuple[pb.LayerState, ...]
    answer: HiddenBlock | None


@dataclass(slots=True)
class _Kept:
    """The copies of one request, joined."""

    attempt: int
    renewed: float = 0.0
    marks: list[_Mark] = field(default_factory=list[_Mark])
    """The last two: a stage may be a row ahead of what was handed out."""
    deltas: list[pb.StateCopy] = field(default_factory=list[pb.StateCopy])
    """Their layers hold keys and values only, of rows [begin, position) each."""
    trail: Trail = field(default_factory=Trail)
    bytes: int = 0
    """At most: what later copies replaced counts still."""


class Copies:
    """On a spare: what it was sent, by request. Any thread keeps, the compute thread takes.

    Of two rows a request's state is known: where the later one is ahead of what the answer's reader
    was given, the earlier one will do.
    """

    def __init__(
        self, model: StageModel, expected: Expectation, clock: Callable[[], float]
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
        with self._lock:
            kept = self._kept.pop(copy.request, None)
            if kept is None or copy.begin == 0:
                kept = _Kept(int(copy.attempt))
                kept.trail.begins = int(copy.trail_begins)
            self._check(copy, kept)
            mark = _Mark(
                int(copy.position),
                _marked(copy, self._template),
                next(self._blocks(copy.answer), None),
            )
            blocks = list(self._blocks(copy.trail))
            _cut_back(kept, int(copy.begin))
            kept.attempt, kept.renewed = int(copy.attempt), self._clock()
            kept.marks = [*kept.marks[-1:], mark]
            kept.deltas.append(_keys_and_values(copy, self._template))
            kept.bytes += copy.ByteSize()
            for block in blocks:
                kept.trail.add(block)
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

    def take(self, request: str, attempt: int, position: int) -> RequestState | None:
        """The state at `position` rows, or as few before them as is known. Not kept afterwards."""
        with self._lock:
            kept = self._kept.pop(request, None)
            self._taken[request] = max(attempt, self._taken.pop(request, 0))
            while len(self._taken) > REMEMBERED:
                _ = self._taken.popitem(last=False)
        if kept is None or kept.attempt >= attempt:
            return None
        marks = [mark for mark in kept.marks if mark.position <= position]
        if not marks:
            return None
        known = marks[-1].position
        log.info("request %s goes on from a copy of %d of its %d rows", request, known, position)
        return self._state(kept, marks[-1])

    def _state(self, kept: _Kept, mark: _Mark) -> RequestState:
        caches = self._model.make_caches()
        for number, cache in enumerate(self._model.own_caches(caches)):
            tensors = mark.layers[number].tensors
            if isinstance(cache, ArraysCache):
                cache.cache = [_array(tensor) for tensor in tensors]
                continue
            room = mark.layers[number].room
            cache.keys, cache.values = (
                _joined(kept.deltas, number, part, mark.position, room) for part in (0, 1)
            )
            cache.offset = mark.position
        kept.trail.roll_back(mark.position)
        state = RequestState(caches, position=mark.position, answer=mark.answer, trail=kept.trail)
        mx.eval([array for cache in self._model.own_caches(caches) for array in _arrays(cache)])
        return state

    def _check(self, copy: pb.StateCopy, kept: _Kept) -> None:
        e = self._expected
        last = kept.marks[-1].position if kept.marks else 0
        checks = (
            ("placement", copy.placement == e.placement, "this runner's"),
            ("request", REQUEST_NAME.fullmatch(copy.request), "1 to 64 letters, digits, - or _"),
            ("attempt", copy.attempt > self._taken.get(copy.request, 0), "not over"),
            ("begin", copy.begin <= last, f"at most {last}, the rows that are here"),
            (
                "position",
                copy.begin < copy.position <= e.context_length,
                f"above begin and at most {e.context_length}",
            ),
            ("layers", len(copy.layers) == len(self._template), f"{len(self._template)}"),
            ("trail_begins", copy.trail_begins <= copy.position, "at most position"),
        )
        for name, good, wanted in checks:
            if not good:
                raise InvalidFrame(f"copy.{name} must be {wanted}", param=f"copy.{name}")
        for number, cache in enumerate(self._template):
            before = kept.deltas[0].layers[number] if kept.deltas else copy.layers[number]
            if not _layer_fits(cache, copy.layers[number], before, copy):
                raise InvalidFrame(
                    f"copy.layers[{number}] must hold what a {type(cache).__name__} of this model "
                    f"has at row {copy.position}",
                    param="copy.layers",
                )

    def _blocks(self, frames: Iterable[pb.Frame]) -> Iterator[HiddenBlock]:
        assembler = Assembler(replace(self._expected, stage=self._expected.stage + 1))
        for frame in frames:
            if (block := assembler.add(frame)) is not None:
                yield block


def _layer_fits(
    cache: object, layer: pb.LayerState, before: pb.LayerState, copy: pb.StateCopy
) -> bool:
    """`before`: the layer in the first copy of the request, whose rows these are joined to."""
    if not all(map(_is_whole, layer.tensors)):
        return False
    if isinstance(cache, ArraysCache):
        return len(layer.tensors) == len(cache.cache)
    rows, shapes = copy.position - copy.begin, [tensor.shape for tensor in before.tensors]
    if len(layer.tensors) != 2 or any(len(shape) != 4 for shape in shapes):
        return False
    pairs = zip(layer.tensors, before.tensors, strict=True)
    return copy.position <= layer.room <= copy.position + ROOM_STEP and all(
        [*now.shape] == [1, then.shape[1], rows, then.shape[3]] and now.dtype == then.dtype
        for now, then in pairs
    )


def _is_whole(tensor: pb.Tensor) -> bool:
    name = _BY_WIRE.get(tensor.dtype)
    return name is not None and len(tensor.data) == math.prod(tensor.shape) * ITEM_BYTES[name]


def _marked(copy: pb.StateCopy, template: Sequence[object]) -> tuple[pb.LayerState, ...]:
    """Of each layer what a mark needs: a recurrent state, or the room of keys and values."""
    return tuple(
        layer if isinstance(cache, ArraysCache) else pb.LayerState(room=layer.room)
        for cache, layer in zip(template, copy.layers, strict=True)
    )


def _keys_and_values(copy: pb.StateCopy, template: Sequence[object]) -> pb.StateCopy:
    layers = [
        pb.LayerState() if isinstance(cache, ArraysCache) else layer
        for cache, layer in zip(template, copy.layers, strict=True)
    ]
    return pb.StateCopy(begin=copy.begin, position=copy.position, layers=layers)


def _cut_back(kept: _Kept, position: int) -> None:
    """The rows from `position` on were taken back, and are sent anew."""
    kept.marks = [mark for mark in kept.marks if mark.position <= position]
    kept.trail.roll_back(position)


def _array(tensor: pb.Tensor) -> mx.array:
    return from_bytes(tensor.data, _BY_WIRE[tensor.dtype], tuple(tensor.shape))


def _arrays(cache: Any) -> Sequence[mx.array | None]:
    return list(cache.cache) if isinstance(cache, ArraysCache) else [cache.keys, cache.values]


def _joined(
    deltas: Sequence[pb.StateCopy], layer: int, part: int, rows: int, room: int
) -> mx.array:
    """(1, heads, room, size) of keys or values; those of a later delta count where two overlap."""
    pieces: list[mx.array] = []
    end = rows
    for delta in reversed(deltas):
        if delta.begin < end:
            array = _array(delta.layers[layer].tensors[part])
            pieces.insert(0, array[:, :, : end - int(delta.begin)])
            end = int(delta.begin)
    whole = mx.concatenate(pieces, axis=2)
    batch, heads, _, size = whole.shape
    return mx.concatenate([whole, mx.zeros((batch, heads, room - rows, size), whole.dtype)], axis=2)
