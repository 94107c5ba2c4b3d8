"""The attempts that run: begun behind what was read before, counted, and ended."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from ...mtp.ahead import Ahead, can_run_ahead
from ...mtp.batch_prompts import PromptBatch
from ...mtp.drafters import NativeDrafter
from ...mtp.fixed_rows import FixedRows
from ...mtp.loop import Generation
from ...mtp.sampler import Sampler
from ...mtp.seams import Drafter, StopCondition
from ...mtp.task import Task
from ...placement.errors import InvalidRequest
from ..pipeline.verifier import PipelineVerifier
from .attempts import Attempt, PipelineAttempt, WholeAttempt
from .batching import Batching
from .drafting import Drafting
from .earlier import Earlier
from .local import LocalVerifier
from .request import EngineRequest

ALONE: Final = "begun anew after a fault, it shares no forward that may fail again"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found of the model when it was loaded, as far as attempts depend on it."""

    prompts: PromptBatch | None
    """Where prompts are read together; None: each by itself."""
    fixed_rows: int
    """Strict mode's rows of a decode forward, or 0."""
    rebuild_rows: int
    """See `Task`."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What every attempt is made of."""

    task: Task
    drafter: Drafter
    sampler: Sampler
    ending: StopCondition


class LiveAttempts:
    """Those of one engine, by (request, attempt). All methods run on the compute thread."""

    def __init__(
        self,
        drafting: Drafting,
        earlier: Earlier,
        batching: Batching,
        prefill_chunk: int,
        turn_ends: frozenset[int],
        special_tokens: tuple[int, ...],
        clock: Callable[[], float],
        patience: Callable[[], int],
        ahead: "Callable[[LocalVerifier, Sampler], Ahead] | None" = None,
    ) -> None:
        """`special_tokens`: see `Sampler`; `turn_ends`: see `Task`; `patience`: see
        `NativeDrafter`, of requests that do not fix their K. `ahead`: what builds rounds while
        others run, where that pays."""
        self._drafting = drafting
        self._earlier = earlier
        self._batching = batching
        self._prefill_chunk = prefill_chunk
        self._turn_ends = turn_ends
        self._special_tokens = special_tokens
        self._clock = clock
        self._patience = patience
        self._ahead = ahead
        self._names: set[tuple[str, int]] = set()
        self._live: dict[tuple[str, int], Attempt] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def bytes(self) -> int:
        """Of KV and recurrent state."""
        live = [array for attempt in self._live.values() for array in attempt.arrays()]
        together = self._batching.arrays()
        return self._earlier.bytes + sum(array.nbytes for array in (*live, *together))

    def enter(self, request: EngineRequest) -> None:
        """The name is its own until `end`. Raises InvalidRequest."""
        key = (request.request, request.attempt)
        if key in self._names:
            raise InvalidRequest(
                f"attempt {request.attempt} of request {request.request} is running already; a "
                "request needs a name of its own",
                param="request",
            )
        self._names.add(key)

    def begin(
        self,
        request: EngineRequest,
        ending: StopCondition,
        measured: Measured,
        common: int,
    ) -> Attempt:
        """`ending` sees its tokens. `common`: see `Earlier.common`."""
        sampler = Sampler(
            request.sampling,
            secrets.randbits(63),
            self._special_tokens,
            request.prompt,
            request.grammar,
        )
        attempt = self._begun(request, ending, measured, sampler, common)
        self._live[request.request, request.attempt] = attempt
        return attempt

    def _begun(
        self,
        request: EngineRequest,
        ending: StopCondition,
        measured: Measured,
        sampler: Sampler,
        common: int,
    ) -> Attempt:
        prompts = None if request.alone else measured.prompts
        begun = self._earlier.begin(request, lambda: self.bytes, prompts, common)
        verifier, state, cached = begun
        patience = self._patience if request.adaptive else None
        drafter = self._drafting.drafter(sampler, request.k, request.async_draft_eval, patience)
        if state is not None and isinstance(drafter, NativeDrafter):
            drafter.take_up(state, request.ids)
        task = Task(
            request.prompt,
            request.max_tokens,
            self._prefill_chunk,
            request.replay,
            request.top_logprobs,
            self._turn_ends,
            measured.rebuild_rows,
        )
        parts = _Parts(task, drafter, sampler, ending)
        match verifier:
            case PipelineVerifier():
                return self._piped(request, verifier, parts, cached)
            case LocalVerifier():
                return self._whole(request, verifier, parts, cached, measured.fixed_rows)

    def _piped(
        self, request: EngineRequest, verifier: PipelineVerifier, parts: _Parts, cached: int
    ) -> PipelineAttempt:
        depth = self._drafting.depth(request)
        alone = ALONE if request.alone else self._batching.why_alone(verifier.caches)
        made = parts.task, verifier, parts.drafter, parts.sampler, parts.ending
        generation = Generation(*made, depth, self._clock, remote=verifier)
        return PipelineAttempt(generation, verifier, parts.drafter, alone, cached)

    def _whole(
        self,
        request: EngineRequest,
        verifier: LocalVerifier,
        parts: _Parts,
        cached: int,
        fixed_rows: int,
    ) -> WholeAttempt:
        task, drafter, sampler, ending = parts.task, parts.drafter, parts.sampler, parts.ending
        depth = self._drafting.depth(request)
        if alone := ALONE if request.alone else self._batching.why_alone(verifier.state.caches):
            padded = fixed_rows and verifier.takes_back  # padding goes by being taken back
            rows = FixedRows(verifier, fixed_rows) if padded else verifier
            generation = Generation(task, rows, drafter, sampler, ending, depth, self._clock)
            seat = None
        else:
            made = task, verifier, drafter, sampler, ending, depth, self._clock
            seat = self._batching.seat(*made, self._ahead_of(request, verifier, drafter, sampler))
            generation = seat.generation
        made = generation, verifier, drafter, self._batching, seat, alone, cached
        return WholeAttempt(*made)

    def _ahead_of(
        self, request: EngineRequest, verifier: LocalVerifier, drafter: Drafter, sampler: Sampler
    ) -> Ahead | None:
        fits = isinstance(drafter, NativeDrafter) and can_run_ahead(verifier.state.caches)
        if self._ahead is None or not fits or not sampler.is_free:
            return None
        if request.top_logprobs is not None or request.async_draft_eval is False:
            return None
        return self._ahead(verifier, sampler)

    def end(self, request: EngineRequest) -> None:
        """Frees the attempt's state, here and on every stage."""
        key = (request.request, request.attempt)
        self._names.discard(key)
        self._earlier.release(*key)
        if (attempt := self._live.pop(key, None)) is None:
            return  # it ended before it began
        attempt.drop()
        # Arrays whose last reference the caller holds are freed after it; buffers now.
        mx.clear_cache()
