"""One attempt at an answer, what it leaves for the next one, and what a spare is sent of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from ...mtp.batch import Member
from ...mtp.drafters import NativeDrafter
from ...mtp.loop import Generation
from ...mtp.rollback import cache_arrays
from ...mtp.seams import Drafter
from ...mtp.steps import Steps
from ..pipeline.merged import offer_merged
from ..pipeline.request_state import RequestState, digest_of
from ..pipeline.state_sender import StateSender
from ..pipeline.verifier import PipelineVerifier
from .batching import Batching, Seat
from .local import LocalVerifier
from .request import EngineRequest
from .spans import Claim, Holding


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of an attempt that was lost, for the one that follows.

    None of a whole model: its spare has a copy.
    """

    verifier: PipelineVerifier | None
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
    claim: None = None
    """What it has of kept prefixes is its state's."""

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

    def offer(self, sender: StateSender, request: EngineRequest, ids: Sequence[int]) -> None:
        """Its state, for the spare of this stage."""
        offer_merged(sender, request.request, request.attempt, self.verifier.state)


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
    claim: Claim = field(default_factory=Claim)
    """What it has of kept prefixes."""

    @property
    def kept(self) -> None:
        """Nothing: the spare has a copy."""

    def take_up(self, request: EngineRequest) -> None:
        """No other stage holds anything of it."""

    def steps(self) -> Steps:
        return self.generation.steps() if self.seat is None else self.batching.steps(self.seat)

    @property
    def is_alone(self) -> bool:
        """Whether its rows are its own; a batch's go with that."""
        return self.seat is None or self.seat.member is None

    @property
    def is_known(self) -> bool:
        """Whether anybody knows what its caches hold."""
        return self.is_alone or not self.batching.broken

    def holding(self) -> Holding:
        """Where its rows are now; where they are known."""
        if self.seat is not None and self.seat.member is not None:
            return Holding(*self.batching.rows_of(self.seat.member))
        if (ahead := self.generation.ahead) is not None:
            return Holding(*ahead.rows())
        cache = self.drafter.cache if isinstance(self.drafter, NativeDrafter) else None
        return Holding(self.verifier.state.caches, cache)

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

    def offer(self, sender: StateSender, request: EngineRequest, ids: Sequence[int]) -> None:
        """Its state, for the spare, where it can be copied now.

        In a batch it may be a round ahead of `ids`: a spare keeps the copy before as well.
        """
        if not sender.due(request.request) or (state := self._state(ids)) is None:
            return
        sender.offer(request.request, request.attempt, state)
        own = self.verifier.state  # the next copy begins behind this one
        own.lowest, own.copied = state.lowest, state.copied

    def _state(self, ids: Sequence[int]) -> RequestState | None:
        """The forward under way is waited for first: that is the answer's own work."""
        if self.seat is not None and self.seat.member is not None:
            return self._state_in_batch(ids, self.seat.member)
        if self.generation.runs_ahead:
            return None  # it stops doing so for the sake of copies
        drafter, state = self.generation.settle(), self.verifier.state
        native = isinstance(drafter, NativeDrafter)
        state.drafter = self.verifier.with_ahead(drafter.state) if native else None
        state.ids = digest_of(ids[: state.position])
        return state

    def _state_in_batch(self, ids: Sequence[int], member: Member) -> RequestState | None:
        if (found := self.batching.held(member)) is None:
            return None
        held, drafter = found
        # What the batch has under way is waited for here, and is not counted as time of the copy:
        # copies may take a small share only, and would become rare.
        drafted = [] if drafter is None else cache_arrays([drafter.cache])
        mx.eval(cache_arrays(held.caches), drafted)
        # A state of its own: views would keep the batch's arrays for as long as the answer lasts.
        state = replace(self.verifier.state, caches=held.caches, position=held.position)
        ahead = (token for each in member.rounds for token in each.tokens)
        state.drafter, state.ids = drafter, digest_of([*ids, *ahead][: held.position])
        return state


Attempt = PipelineAttempt | WholeAttempt
