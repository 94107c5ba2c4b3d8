"""One attempt at an answer, and what it leaves for the next one."""

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
from .request import EngineRequest


@dataclass(frozen=True, slots=True)
class Kept:
    """The generator's state of a pipeline's attempt that was lost, for the one that follows."""

    verifier: PipelineVerifier | None
    """None: a shared forward failed, and nobody knows the state."""
    attempt: int
    since: float


@dataclass(frozen=True, slots=True)
class PipelineAttempt:
    """An answer of a placement of several stages."""

    generation: Generation
    verifier: PipelineVerifier
    drafter: Drafter
    alone_because: str
    cached: int = 0
    """Rows of the prompt that this stage's prefix cache had."""

    @property
    def kept(self) -> PipelineVerifier:
        """What the next attempt may go on with."""
        return self.verifier

    def take_up(self, request: EngineRequest) -> None:
        """The other stages go on with what they hold of an earlier attempt, or of a prefix.

        Raises PeerLost.
        """
        if request.keeps:
            self.verifier.begin_rebuild(request.committed, answer=not request.replay)
        elif self.cached:
            self.verifier.begin_behind_prefix()

    def steps(self) -> Steps:
        return self.generation.steps()

    def arrays(self) -> list[mx.array]:
        """What it holds in memory here."""
        return self.verifier.arrays() + self.drafter.arrays()


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

    @property
    def kept(self) -> None:
        """Nothing: the next attempt reads the prompt again."""

    def take_up(self, request: EngineRequest) -> None:
        """No other stage holds anything of it."""

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
