"""The verifier of a placement of one stage: the whole model in this process."""

from collections.abc import Generator, Sequence
from typing import Protocol

import mlx.core as mx

from ..mtp.rollback import cache_arrays, can_roll_back, rollback
from ..mtp.seams import Block, Wait, Want


class Target(Protocol):
    """A whole model: ids in, logits and perhaps hidden out."""

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Want) -> Block:
        """Ids (rows,) appended to the caches; lazy."""
        ...


class LocalVerifier:
    """One request's caches over a shared target."""

    def __init__(self, target: Target, caches: Sequence[object]) -> None:
        self._target = target
        self._caches = caches
        self._rows = 0
        # Without rollback a forward that turns out not to be wanted could not be taken back.
        self.overlaps = can_roll_back(caches)

    @property
    def position(self) -> int:
        return self._rows

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        self._rows += tokens.shape[0]
        return self._target.forward(tokens, self._caches, want=want)
        yield  # a generator that never waits: everything is in this process

    def rollback(self, rows: int) -> None:
        rollback(self._caches, rows)
        self._rows -= rows

    def arrays(self) -> list[mx.array]:
        return cache_arrays(self._caches)
