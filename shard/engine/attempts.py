"""One attempt at an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...mtp.drafters import NativeDrafter
from ...mtp.loop import Generation
from ...mtp.seams import Drafter
from ...mtp.steps import Steps
from ..pipeline.verifier import PipelineVerifier
from .batching import Batching, Seat
from .local import LocalVerifier


@dataclass(frozen=True, slots=True)
class PipelineAttempt:
    """An answer of a placement of several stages."""

    generation: Generation
    verifier: PipelineVerifier
    drafter: Drafter
    alone_because: str
    cached: int = 0
    """Rows of the prompt that this stage's prefix cache had."""

    def steps(self) -> Steps:
        return self.generation.steps()

    def arrays(self) -> list[mx.array]:
        """What it holds in memory here."""
        return self.verifier.arrays() + self.drafter.arrays()

    def drop(self) -> None:
        """Frees what it holds here."""
        self.verifier.leave()


@dataclass(frozen=True, slots=True)
class WholeAttempt:
    """An answer of a model that is here whole."""

    generation: Generation
    verifier: LocalVerifier
    drafter: Drafter
    batching: Batching
    seat: Seat | None = None
    """Where it may be decoded with others."""
    alone_because: str = ""
    """Why it is never decoded with others."""
    cached: int = 0
    """Rows of the prompt that a prefix cache had."""

    def steps(self) -> Steps:
        return self.generation.steps() if self.seat is None else self.batching.steps(self.seat)

    @property
    def own_caches(self) -> Sequence[Any]:
        """By layer and of the draft head; none while a batch has its rows."""
        if self.seat is not None and self.seat.member is not None:
            return ()
        if (ahead := self.generation.ahead) is not None:
            caches, head = ahead.rows()
            return [*caches, head]
        cache = self.drafter.cache if isinstance(self.drafter, NativeDrafter) else None
        return [*self.verifier.state.caches, cache]

    def arrays(self) -> list[mx.array]:
        """What it holds by itself; a batch's arrays are counted there."""
        if self.seat is not None:
            return self.seat.arrays
        return self.verifier.arrays() + self.drafter.arrays()

    def drop(self) -> None:
        """Frees what it holds now, whoever still knows of it; its batch is left already."""
        _ = self.verifier.hand_over()
        if (ahead := self.generation.ahead) is not None:
            ahead.drop()
        if isinstance(self.drafter, NativeDrafter):
            self.drafter.drop()


Attempt = PipelineAttempt | WholeAttempt
