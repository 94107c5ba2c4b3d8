"""Copies of a stage's requests for its spare: what is sent, and when; see `state_store.py`."""

import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ...mtp.drafters import DrafterState
from ...proto import peer_pb2 as pb
from ..model.stage_limits import StageLimits
from ..model.stage_model import StageModel
from ..model.tensors import DTYPES, WIRE
from .copy_turns import CopyTurns
from .frames import HiddenBlock, cut
from .request_state import RequestState

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

EVERY_S = 0.25
"""Between two copies of one request: about what is left to be computed after a loss."""
COMPUTE_SHARE = 0.05
"""Of the compute thread's time at most goes into copies."""
SENDING_SHARE = 0.25
"""Of the time at most a copy is on its way, and takes from what the network has."""
MAX_COPY = 512 << 20
"""Bytes of one copy. A request that is larger when it is first copied is not copied."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StateSender:
    """Decides when a spare is sent what. All methods run on the compute thread.

    `names`, the requests that the spare has something of, may be read anywhere: the compute thread
    may be busy for longer than a lease.
    """

    def __init__(
        self,
        model: StageModel,
        expected: StageLimits,
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
        self._turns = CopyTurns()
        self._next = ""
        """Whose turn it is, until its state is offered."""
        self._free_at = 0.0
        self._following = False
        self._under_way = False

    def follow(self, following: bool) -> None:
        """There is a spare that has no copies yet, or none."""
        self._following, self._under_way = following, False
        self._rows.clear()
        self._due.clear()
        self._turns.clear()
        self.names = ()

    @property
    def following(self) -> bool:
        """Whether there is a spare."""
        return self._following

    def due(self, request: str) -> bool:
        """Whether it is the request's turn to be copied; asked at each of its rounds."""
        self._next = ""
        now, due_at = self._clock(), self._due.get(request, 0.0)
        if not self._following or due_at == math.inf:
            return False
        free = not self._under_way and now >= max(self._free_at, due_at)
        if self._turns.ask(request, free=free):
            self._next = request
        return bool(self._next)

    def offer(self, request: str, attempt: int, state: RequestState) -> None:
        """The state fits its rows now: it is copied if that is due."""
        if self._next != request and not self.due(request):
            return
        self._next, now = "", self._clock()
        begin = min(self._rows.get(request, 0), state.lowest)
        if begin == state.position:
            return
        if why := self._why_not(state, begin):
            log.info("request %s is not copied to the spare: %s", request, why)
            self._due[request] = math.inf
            self._turns.forget(request)
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
        self._turns.forget(request)
        if self._rows.pop(request, None) is not None:
            self.names = tuple(self._rows)
            _ = self._hold(self.names)

    def _why_not(self, state: RequestState, begin: int) -> str:
        own = self._model.own_caches(state.caches)
        arrays = [array for cache in own for array in _arrays(cache)]
        arrays += _hiddens(state.drafter) if state.drafter else []
        if any(array is None or array.dtype not in _NAMES for array in arrays):
            return "its state has arrays of another kind than floating point"
        replay_buffer = sum(len(block.data) for block in state.replay_buffer.after(begin))
        size = replay_buffer + sum(_bytes_since(cache, begin) for cache in own)
        if (drafter := state.drafter) is not None:
            size += sum(hidden.nbytes for hidden in _hiddens(drafter))
            size += _bytes_since(drafter.cache, min(begin, drafter.rows)) if drafter.rows else 0
        return f"{size / 1e6:.0f} MB are too many at once" if size > MAX_COPY else ""

    def _copy(self, request: str, attempt: int, state: RequestState, begin: int) -> pb.StateCopy:
        own = self._model.own_caches(state.caches)
        replay_buffer = state.replay_buffer.after(begin)
        layers = [_parts(cache, begin) for cache in own]
        drafter = None if state.drafter is None else _DrafterParts.of(state, state.drafter, begin)
        # At once: a wait for each array costs more than the copy does where cores are busy.
        mx.eval(layers, [] if drafter is None else [*drafter.rows, *drafter.hiddens.values()])
        return pb.StateCopy(
            placement=self._expected.placement,
            request=request,
            attempt=attempt,
            begin=begin,
            position=state.position,
            layers=[_layer(cache, parts) for cache, parts in zip(own, layers, strict=True)],
            replay_buffer=self._frames(replay_buffer),
            replay_begins=state.replay_buffer.begins,
            answer=self._frames([] if state.answer is None else [state.answer]),
            drafter=None if drafter is None else drafter.message(),
            ids=state.ids,
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


def _parts(cache: Any, begin: int) -> list[mx.array]:
    """What is sent of a layer, contiguous; lazy."""
    if isinstance(cache, ArraysCache):
        return [mx.contiguous(array) for array in cache.cache if array is not None]
    return [mx.contiguous(a[..., begin : cache.offset, :]) for a in (cache.keys, cache.values)]


def _layer(cache: Any, parts: Iterable[mx.array]) -> pb.LayerState:
    room = 0 if isinstance(cache, ArraysCache) else cache.keys.shape[2]
    return pb.LayerState(tensors=[_tensor(part) for part in parts], room=room)


def _hiddens(drafter: DrafterState) -> list[mx.array]:
    kinds = (drafter.read, drafter.pending, drafter.ahead)
    return [hidden for hidden in kinds if hidden is not None]


class _DrafterParts(NamedTuple):
    """What is sent of a drafter; contiguous and lazy."""

    begin: int
    state: DrafterState
    rows: list[mx.array]
    """Keys and values from `begin` on; empty where there are no new ones."""
    hiddens: dict[str, mx.array]

    @classmethod
    def of(cls, state: RequestState, drafter: DrafterState, begin: int) -> "_DrafterParts":
        """What changed of it since the last copy; all of it where `begin` is 0."""
        # A row of its cache is of a row of the target's and of the token behind that.
        since, state.copied = min(state.copied, max(0, begin - 1)), drafter.rows
        rows = list[mx.array]()
        if since < drafter.rows:
            keys, values = drafter.cache.keys, drafter.cache.values
            assert keys is not None and values is not None
            rows = [mx.contiguous(a[..., since : drafter.rows, :]) for a in (keys, values)]
        hiddens = {
            name: mx.contiguous(hidden)
            for name in ("read", "pending", "ahead")
            if (hidden := getattr(drafter, name)) is not None
        }
        return cls(since, drafter, rows, hiddens)

    def message(self) -> pb.DrafterCopy:
        copy = pb.DrafterCopy(begin=self.begin, rows=self.state.rows)
        if self.state.rows:
            keys = self.state.cache.keys
            assert keys is not None
            tensors = [_tensor(part) for part in self.rows]
            copy.layer.CopyFrom(pb.LayerState(tensors=tensors, room=keys.shape[2]))
        for name, hidden in self.hiddens.items():
            getattr(copy, name).CopyFrom(_tensor(hidden))
        return copy


def _tensor(array: mx.array) -> pb.Tensor:
    """Of an array that is contiguous and evaluated."""
    data = bytes(memoryview(cast("Buffer", array)))
    return pb.Tensor(dtype=WIRE[_NAMES[array.dtype]], shape=array.shape, data=data)


def _arrays(cache: Any) -> list[mx.array | None]:
    return list(cache.cache) if isinstance(cache, ArraysCache) else [cache.keys, cache.values]
