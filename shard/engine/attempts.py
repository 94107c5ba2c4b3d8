"""What an attempt leaves for the next one, and what a running one gives to a spare."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ...mtp.batch import Member
from ...mtp.drafters import NativeDrafter
from ...mtp.loop import Generation
from ...mtp.rollback import cache_arrays
from ..pipeline.request_state import RequestState, digest_of
from ..pipeline.verifier import PipelineVerifier
from .batching import Batching, Seat
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
    seat: Seat | None = None
    """Of a whole model: where it may be decoded with others."""
    cached: int = 0
    """Rows of the prompt that a prefix cache had."""
    alone_because: str = ""
    """Why it is never decoded with others."""

    def copied(self, ids: Sequence[int], batching: Batching) -> RequestState | None:
        """A whole model's state as a spare is sent it; None where it cannot be copied now.

        In a batch it may be a round ahead of `ids`: a spare keeps the copy before as well.
        The forward under way is waited for first: it is the answer's own work, not the copy's.
        """
        assert isinstance(self.verifier, LocalVerifier)
        if self.seat is not None and self.seat.member is not None:
            return self._copied_of_batch(ids, self.seat.member, batching)
        drafter, state = self.generation.settle(), self.verifier.state
        native = isinstance(drafter, NativeDrafter)
        state.drafter = self.verifier.with_ahead(drafter.state) if native else None
        state.ids = digest_of(ids[: state.position])
        return state

    def was_copied(self, state: RequestState) -> None:
        """The next copy begins behind `state`, where that was sent."""
        own = self.verifier.state
        own.lowest, own.copied = state.lowest, state.copied

    def _copied_of_batch(
        self, ids: Sequence[int], member: Member, batching: Batching
    ) -> RequestState | None:
        held = batching.held(member)
        if held is None:
            return None
        # What the batch has under way is waited for here, and is not counted as time of the copy:
        # copies may take a small share only, and would become rare.
        drafted = [] if held.drafter is None else cache_arrays([held.drafter.cache])
        mx.eval(cache_arrays(held.caches), drafted)
        # A state of its own: views would keep the batch's arrays for as long as the answer lasts.
        state = replace(self.verifier.state, caches=held.caches, position=held.position)
        ahead = (token for each in member.rounds for token in each.tokens)
        state.drafter, state.ids = held.drafter, digest_of([*ids, *ahead][: held.position])
        return state
