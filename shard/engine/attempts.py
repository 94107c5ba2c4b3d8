"""What an attempt leaves for the next one, and what a running one gives to a spare."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...mtp.drafters import NativeDrafter
from ...mtp.loop import Generation
from ..pipeline.request_state import RequestState, digest_of
from ..pipeline.verifier import PipelineVerifier
from .local import LocalVerifier


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of an attempt that was lost, for the one that follows.

    None of a whole model: its spare has a copy.
    """

    verifier: PipelineVerifier | None
    attempt: int
    since: float


@dataclass(frozen=True, slots=True)
class Running:
    """One answer in the making, and the verifier whose state is freed or kept at its end."""

    generation: Generation
    verifier: PipelineVerifier | LocalVerifier
    cached: int = 0
    """Rows of the prompt that a prefix cache had."""

    def copied(self, ids: Sequence[int]) -> RequestState:
        """A whole model's state as a spare is sent it.

        The forward under way is waited for first: it is the answer's own work, not the copy's.
        """
        assert isinstance(self.verifier, LocalVerifier)
        drafter, state = self.generation.settle(), self.verifier.state
        native = isinstance(drafter, NativeDrafter)
        state.drafter = self.verifier.with_ahead(drafter.state) if native else None
        state.ids = digest_of(ids[: state.position])
        return state
