"""Measurements of a loaded stage, taken in pieces while its thread has nothing else to compute."""

import contextlib
import logging
from collections.abc import Callable
from typing import Final, TypeVar

import mlx.core as mx

from ...mtp.pieces import Pieces
from ...placement.errors import DeviceLost
from ...placement.gpu_faults import MEASUREMENT, gpu_fault
from .compute import device_lost

T = TypeVar("T")

log = logging.getLogger(__name__)

NOT_MEASURED: Final = (
    "not measured yet on this machine; it is measured while no answer runs, and later answers use "
    "what it finds"
)
"""Why an answer goes without something that might change its tokens."""
BUSY_PAUSE: Final = 20
"""While requests are in progress, a piece waits for this many times the seconds of the last one:
a runner that is never idle gets its measurements all the same."""
RETRIES_S: Final = (60.0, 600.0)
"""Seconds after which a measurement that a GPU fault ended is repeated: what had the memory, or
kept the GPU busy, may have ended."""


def repeated(make_pieces: Callable[[], Pieces[T]]) -> Pieces[T]:
    """Does a measurement's pieces, again after RETRIES_S where a GPU fault ended them.

    Raises the last fault; DeviceLost where the GPU computes nothing any more.
    """
    for wait_s in RETRIES_S:
        try:
            return (yield from make_pieces())
        except RuntimeError as fault:
            if gpu_fault(str(fault)) is None:
                raise
            log.warning("a GPU fault ended a measurement; it is repeated in %.0f s", wait_s)
            require_device(fault)
        mx.clear_cache()
        yield wait_s
    return (yield from make_pieces())


def require_device(fault: BaseException) -> None:
    """Raises DeviceLost if, after a measurement's `fault`, the GPU computes nothing any more.

    A command in flight was the measurement's own, so that nothing else is undefined.
    """
    with contextlib.suppress(RuntimeError):
        mx.synchronize()
    try:
        mx.eval(mx.ones(1) + 1)
    except RuntimeError as again:
        raise DeviceLost(
            f"the GPU computes nothing since a measurement: {fault}", param=MEASUREMENT
        ) from again


class Measuring:
    """The measurements that a stage still lacks. Runs on the compute thread."""

    def __init__(
        self,
        make_pieces: Callable[[], Pieces[None]],
        clock: Callable[[], float],
        before_piece: Callable[[], None] = lambda: None,
        has_room: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Does what pieces have before their first yield: takes up what an earlier load measured.

        `make_pieces` makes those of all that is not measured yet. `before_piece`: makes the model
        ready for a piece between other forwards. `has_room`: whether so many bytes fit beside the
        requests in progress; it reserves them.
        """
        self._make_pieces = make_pieces
        self._pieces: Pieces[None] | None = make_pieces()
        self._has_room = has_room
        self._held_bytes = 0
        self._clock = clock
        self._before_piece = before_piece
        self._due_at = self._paused_until = clock()
        self.is_held: Callable[[], bool] = lambda: False
        """Whether pieces wait: set where times will change."""
        self._advance()

    @property
    def is_done(self) -> bool:
        """Whether all is measured."""
        return self._pieces is None

    def step(self, *, idle: bool) -> bool:
        """Does one piece, unless none is left or requests come first; returns whether it did.

        `idle`: whether no request is in progress. A measurement between two pieces gives up what it
        holds, and begins again, where requests need the room.
        """
        if self._held_bytes and not (self._has_room(self._held_bytes) or idle):
            self._give_up()
        began_at = self._clock()
        if self.is_done or self.is_held() or began_at < self._paused_until:
            return False
        if not idle and began_at < self._due_at:
            return False
        try:
            mx.synchronize()
        except RuntimeError as fault:  # of other work, and no piece's
            raise device_lost(fault, keeps_chunk=False) or fault from None
        self._before_piece()
        self._advance()
        ended_at = self._clock()
        self._due_at = ended_at + BUSY_PAUSE * (ended_at - began_at)
        return True

    def finish(self, on_piece: Callable[[], None] = lambda: None) -> None:
        """Does all pieces; calls `on_piece` after each."""
        while self.step(idle=True):
            on_piece()

    def _give_up(self) -> None:
        assert self._pieces is not None
        self._pieces.close()
        self._pieces = self._make_pieces()
        self._hold(0)
        mx.clear_cache()

    def _hold(self, size: int) -> None:
        if size != self._held_bytes:
            self._held_bytes = size
            _ = self._has_room(size)

    def _advance(self) -> None:
        assert self._pieces is not None
        before = mx.get_active_memory()
        try:
            if wait_s := next(self._pieces):
                self._paused_until = self._clock() + wait_s
            self._hold(max(0, self._held_bytes + mx.get_active_memory() - before))
            return
        except StopIteration:
            pass
        self._pieces = None
        self._hold(0)
        mx.clear_cache()
