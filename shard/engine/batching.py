"""Answers that are decoded together: who joins the batch, and who goes on alone."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from ...mtp.ahead import Ahead
from ...mtp.batch import Batch, Held, Member
from ...mtp.batch_caches import can_batch
from ...mtp.depth import DepthPolicy
from ...mtp.drafters import PENDING_ROWS, RESTING_ROWS, NativeDrafter
from ...mtp.loop import Generation
from ...mtp.sampler import Sampler
from ...mtp.seams import Drafter, StopCondition, Wait, as_ids, as_row
from ...mtp.steps import Step, Steps
from ...mtp.task import Task
from ...mtp.types import FinishReason, Round
from .local import LocalVerifier

MOST_PADDING: Final = 2.0
"""A batch has the room of its longest request for each: at most so many times what they need."""

TURNS: Final = 2
"""Of others, that a round waits for at most: first tokens of prompts read together take two."""


@dataclass(slots=True, eq=False)
class Seat:
    """One answer that may be decoded with others."""

    generation: Generation
    verifier: LocalVerifier
    drafter: Drafter
    depth: DepthPolicy
    member: Member | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """What it holds by itself."""
        return [] if self.member is not None else self.verifier.arrays() + self.drafter.arrays()


class Batching:
    """The answers of one engine. All methods run on the compute thread."""

    def __init__(self, batch: Batch | None, reason: str = "") -> None:
        """`batch` None: every answer is decoded alone, because of `reason`; without one its rows
        meet those of others on their way through a pipeline."""
        self._batch = batch
        self._reason = reason
        self._seats: list[Seat] = []
        self._coming: list[Seat] = []
        """Those that handed out their first token alone and join at their next turn."""

    def refuse(self, reason: str) -> None:
        """Before the first answer: each is decoded alone."""
        self._batch, self._reason = None, reason

    def why_alone(self, caches: Sequence[object]) -> str:
        """Why a request with these caches never joins others; empty where it may."""
        if self._reason:
            return self._reason
        if not can_batch(caches):
            others = {type(cache).__name__ for cache in caches if not can_batch([cache])}
            kinds = ", ".join(sorted(others))
            return f"this model's caches ({kinds}) are not computed in batches"
        return ""

    def seat(
        self,
        task: Task,
        verifier: LocalVerifier,
        drafter: Drafter,
        sampler: Sampler,
        ending: StopCondition,
        depth: DepthPolicy,
        clock: Callable[[], float] = lambda: 0.0,
        ahead: Ahead | None = None,
    ) -> Seat:
        """An answer for `steps`; the parts are those of a `Generation` and of a `Seat`."""

        def leaves() -> bool:
            return self.leaves(seat)

        made = task, verifier, drafter, sampler, ending, depth, clock, leaves
        generation = Generation(*made, ahead=ahead)
        seat = Seat(generation, verifier, drafter, depth)
        return seat

    @property
    def patience(self) -> int:
        """Rows of an answer here that may wait for its draft head: many where drafts do not pay
        for as many answers as run now."""
        rests = self._batch is not None and self._batch.rests
        return RESTING_ROWS if rests else PENDING_ROWS

    def leaves(self, seat: Seat) -> bool:
        """Whether it is to go on in the batch; asked before each round that it computes alone."""
        if self._batch is None:
            return False
        if seat not in self._seats:
            self._seats.append(seat)
        return len(self._seats) > 1 and self._batch.fits(seat.verifier.position, MOST_PADDING)

    def steps(self, seat: Seat) -> Steps:
        """As `Generation.steps`; its rounds are the batch's while others decode as well."""
        if self._batch is not None:
            self._batch.running += 1
        try:
            while True:
                reason = yield from self._alone(seat)
                if reason is None:
                    reason = yield from self._together(seat)
                if reason is not None:
                    return reason
        finally:
            for seats in (self._seats, self._coming):
                if seat in seats:
                    seats.remove(seat)
            if self._batch is not None:
                self._batch.running -= 1
                if seat.member is not None:
                    self._batch.drop(seat.member)

    def _alone(self, seat: Seat) -> Steps:
        """Rounds of its own; those of a batch wait for it as soon as it may join them."""
        steps, first = seat.generation.steps(), seat not in self._seats
        try:
            while True:
                try:
                    step = next(steps)
                except StopIteration as end:
                    return end.value
                if first and self._seats and isinstance(step, Round):
                    self._coming.append(seat)
                    first = False
                yield step
                if seat in self._coming:
                    self._coming.remove(seat)
        finally:
            steps.close()

    def _together(self, seat: Seat) -> Generator[Step, None, FinishReason | None]:
        """Rounds of the batch; None where nobody else is there any more."""
        batch, generation = self._batch, seat.generation
        assert batch is not None and generation.token is not None
        drafter = seat.drafter if isinstance(seat.drafter, NativeDrafter) else None
        (token,) = as_ids(generation.token)
        position = seat.verifier.position
        held = Held(seat.verifier.hand_over(), position)
        seat.member = member = Member(generation.answer, seat.depth, drafter, token)
        batch.settle()
        batch.join(member, held)
        yield Wait.a_turn()  # others take what was landed, and may join before the next round
        while True:
            if len(self._seats) == 1:
                batch.settle()
                if not member.rounds and not member.over:
                    break
            for _ in range(TURNS):
                if self._coming and not member.rounds:
                    yield Wait.a_turn()  # fewer forwards for all, and nobody waits for two
            yield batch.take(member)
            if member.reason is not None and not member.rounds:
                return member.reason
        self._return(seat, batch.leave(member))
        return None

    def _return(self, seat: Seat, held: Held) -> None:
        assert seat.member is not None
        seat.verifier.take_over(held.caches, held.position)
        seat.generation.come_back(seat.drafter, as_row([seat.member.token]))
        seat.member = None

    def arrays(self) -> list[mx.array]:
        return [] if self._batch is None else self._batch.arrays()
