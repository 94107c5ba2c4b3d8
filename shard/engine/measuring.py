"""Measurements of a loaded stage, taken in pieces while its thread has nothing else to compute."""

import logging
from collections.abc import Callable
from typing import Final

import mlx.core as mx

from ...mtp.pieces import Pieces
from .compute import device_lost

log = logging.getLogger(__name__)

NOT_MEASURED: Final = (
    "not measured yet on this machine; it is measured while no answer runs, and later answers use "
    "what it finds"
)
"""Why an answer goes without something that might change its tokens."""
BUSY_PAUSE: Final = 20
"""While requests are in progress, a piece waits for this many times the seconds of the last one:
a runner that is never idle gets its measurements all the same."""


class Measuring:
    """The measurements that a stage still lacks. Runs on the compute thread."""

    def __init__(
        self,
        pieces: Pieces[None],
        clock: Callable[[], float],
        before_piece: Callable[[], None] = lambda: None,
        *,
        only_idle: bool = False,
    ) -> None:
        """Does what `pieces` has before its first yield: takes up what an earlier load measured.

        `before_piece`: makes the model ready for a piece between other forwards. `only_idle`:
        whether a result may change requests in progress.
        """
        self._pieces: Pieces[None] | None = pieces
        self._clock = clock
        self._before_piece = before_piece
        self._only_idle = only_idle
        self._due_at = clock()
        self._advance()

    @property
    def is_done(self) -> bool:
        """Whether all is measured."""
        return self._pieces is None

    def step(self, *, idle: bool) -> bool:
        """Does one piece, unless none is left or requests come first; returns whether it did.

        `idle`: whether no request is in progress.
        """
        began_at = self._clock()
        if self.is_done or (not idle and (self._only_idle or began_at < self._due_at)):
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

    def _advance(self) -> None:
        assert self._pieces is not None
        try:
            next(self._pieces)
            return
        except StopIteration:
            pass
        # The compute thread's edge: answers continue with what is measured so far.
        except Exception:
            log.exception("a measurement failed; what it was to allow stays off")
        self._pieces = None
        mx.clear_cache()
