"""The engine of a generator: drives one answer from ids to text and its final stats."""

import logging
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...mtp.batch import Batch, BatchBroken
from ...mtp.batch_drafter import BatchHead
from ...mtp.batch_prompts import PromptBatch, PromptsBroken
from ...mtp.depth import AdaptiveDepth, DepthPolicy, FixedDepth
from ...mtp.drafters import DrafterState, NativeDrafter, NoDrafter
from ...mtp.family import draft_logits, family_of
from ...mtp.finite import NotFinite
from ...mtp.fixed_rows import FixedRows
from ...mtp.head import DraftHead
from ...mtp.loop import Generation
from ...mtp.probe import Costs
from ...mtp.sampler import Sampler
from ...mtp.seams import Drafter, StopCondition, Verifier, Wait
from ...mtp.stats import StatsCollector
from ...mtp.steps import Prefilled, Rebuilt, Steps
from ...mtp.task import Task
from ...mtp.types import FinishReason, GenerationStats, Round, Sampling
from ...placement.errors import ContextLengthExceeded, ExoNodeError, InvalidRequest, PeerLost
from ..model.numeric import numeric_error, parked
from ..model.stage_model import StageModel
from ..pipeline.request_state import RequestState
from ..pipeline.state_sender import StateSender
from ..pipeline.state_store import StateStore
from ..pipeline.verifier import Link, PipelineVerifier
from .admission import Admission
from .attempts import Running
from .batching import Batching
from .draft_profile import Profile, ProfileKey
from .earlier import Earlier
from .local import FamilyTarget, LocalVerifier, Target, WholeTarget
from .options import EngineOptions
from .probing import (
    Subject,
    probe_batch_identity,
    probe_costs,
    probe_fixed_rows,
    probe_identity,
)
from .request import EngineRequest

if TYPE_CHECKING:
    from ..text.codec import TextCodec

log = logging.getLogger(__name__)

NO_PROFILE = ProfileKey("", "", "", "", 0, 0)


@dataclass(frozen=True, slots=True)
class Delta:
    """One round and the text that became certain with it."""

    round: Round
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end, with the text that was held back until now."""

    reason: FinishReason
    text: str
    stats: GenerationStats
    identity: str
    batch_identity: str = "off"


EngineEvent = Prefilled | Rebuilt | Delta | Done


class TextEngine:
    """Answers requests on the generator. Everything but `encode` runs on the compute thread."""

    def __init__(
        self,
        codec: "TextCodec",
        stage: StageModel,
        vocabulary: int,
        options: EngineOptions,
        *,
        head: DraftHead | None = None,
        link: Link | None = None,
        clock: Callable[[], float] = time.perf_counter,
        profile: Profile | None = None,
        state_sender: StateSender | None = None,
        copies: StateStore | None = None,
        kernels: tuple[str, ...] = (),
    ) -> None:
        """`link` leads to the other stages; None when this stage is the whole model.

        `profile`: what adaptive drafting knows and learns; None: nothing that outlives this engine.
        `state_sender`: what a spare of this stage is sent.
        `copies`: what this one, a spare, was sent.
        `kernels`: those of our own under the model, for the stats.
        """
        self._codec = codec
        self._stage = stage
        self._options = options
        self._vocabulary = vocabulary
        self._head = head
        self._max_k = options.max_draft_tokens if head is not None else 0
        # A card may name more ids than this checkpoint has: then all of them are drafted.
        drafted = options.draft_vocabulary
        self._draft_vocabulary = drafted if drafted < vocabulary else 0
        self._fixed_rows = options.fixed_rows if link is None else 0
        self._profile = profile or Profile.open("", NO_PROFILE, clock)
        self.token_bytes = codec.token_bytes
        self._special_tokens = codec.special_tokens
        self._link = link
        self._state_sender = state_sender
        self._kernels = kernels
        self._clock = clock
        fed = head.hidden_kind if head is not None else None
        self._family = family_of(stage.model, fed) if link is None else None
        self._target: Target = (
            WholeTarget(stage.model) if self._family is None else FamilyTarget(self._family)
        )
        self._live: dict[tuple[str, int], Callable[[], list[mx.array]]] = {}
        self._parked: set[tuple[str, int]] = set()
        keeps = link is None and options.prefix_cache_bytes > 0
        self._turn_ends = codec.end_tokens if keeps else frozenset[int]()
        self._earlier = Earlier(
            stage,
            self._target,
            options,
            self._turn_ends,
            link=link,
            sender=state_sender,
            copies=copies,
            clock=clock,
        )
        self._batching = self._new_batching()
        self._prompts = self._new_prompts()
        self._admission = Admission(options.context_length)
        self.identity = "off"
        self.batch_identity = "off"
        """Measured by `probe`; "off" where no answers are decoded together."""
        self.head_off = ""
        """Why the draft head was loaded and is not used all the same."""
        self.head_parked = ""
        """Why it is not used any more: an answer found its logits not to be finite."""

    def _new_batching(self) -> Batching:
        if self._link is not None:
            return Batching(None, "requests to a pipeline take turns")
        if self._fixed_rows:
            return Batching(None, "strict mode computes each request by forwards of its own")
        if not self._options.batching:
            return Batching(None, "EXO_BATCHING_ENABLED is 0")
        head = None
        if self._head is not None and self._family is not None:
            logits = draft_logits(self._family, self._head, self._draft_vocabulary)
            overlap = self._options.async_draft_eval
            head = BatchHead(self._head, self._family.embed, logits, overlap)
        return Batching(Batch(self._target, head, self._clock))

    def _new_prompts(self) -> PromptBatch | None:
        """Only used where a batch changes no bit: states behind prompts are kept for others."""
        target = self._target
        if self._batching.why_alone(self._stage.make_caches()) or isinstance(target, WholeTarget):
            return None
        assert isinstance(target, FamilyTarget)
        return PromptBatch(target, self._options.prefill_chunk)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Any thread. Raises InvalidRequest."""
        return self._codec.encode_chat(messages)

    def budget(self, prompt_tokens: int, max_tokens: int) -> int:
        """The number of tokens to generate at most; `max_tokens` 0 means up to the context's end.

        Raises ContextLengthExceeded, and InvalidRequest for a prompt of no tokens.
        """
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param="messages")
        room = self._options.context_length - prompt_tokens
        if room < 1 or max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens and max_tokens asks for {max_tokens}, but "
                f"this model's context holds {self._options.context_length}; shorten the messages "
                "or lower max_tokens",
                param="messages" if room < 1 else "max_tokens",
            )
        return max_tokens or room

    def checked(self, sampling: Sampling) -> Sampling:
        """Raises InvalidRequest for a logit_bias on an id that the model does not have."""
        for token, _ in sampling.penalties.logit_bias:
            if token >= self._vocabulary:
                raise InvalidRequest(
                    f"logit_bias names token {token}, and this model has {self._vocabulary}",
                    param="logit_bias",
                )
        return sampling

    def probe(self) -> None:
        """Measures both identities for the largest K and what rounds cost, or finds them in the
        profile. Warms the kernels up as well.
        """
        subject = self._subject()
        if not self._batching.why_alone(self._stage.make_caches()):
            k = self._max_k
            self.batch_identity = probe_batch_identity(subject, k, self._profile)
            self._profile.save()
        if not self._max_k:
            return
        if self._fixed_rows:
            self.head_off = probe_fixed_rows(subject, self._fixed_rows)
            if self.head_off:
                self._max_k = self._fixed_rows = 0
                return
            self.identity = "bitwise"
        else:
            self.identity = probe_identity(subject, self._max_k, self._profile)
        probe_costs(subject, self._max_k, self._fixed_rows, self._profile)
        self._profile.save()

    def measure_costs(self, prompt: Sequence[int], k: int, repeats: int) -> Costs:
        """What verifies and drafts up to `k` cost here; see `mtp.probe`."""
        return self._subject().costs(prompt, k, repeats)

    def _subject(self) -> Subject:
        def make_drafter(depth: int, prompt: Sequence[int]) -> Drafter:
            asked = EngineRequest("costs", 1, prompt, Sampling(), 1, (), depth, "")
            return self._drafter(Sampler(Sampling(), 1), asked)

        return Subject(
            self._target.forward,
            self._target,
            self._stage.make_caches,
            make_drafter,
            self._vocabulary,
            self._options.context_length,
            self._clock,
            self._target if isinstance(self._target, FamilyTarget) else None,
        )

    def generate(self, request: EngineRequest) -> Generator[Wait | EngineEvent, None, None]:
        """Drives one answer; closing the generator frees its state here and on every stage."""
        self._check(request)
        if request.k and self.head_parked:
            request = replace(request, k=0, adaptive=False, drafting_reason=self.head_parked)
        entry = yield from self._admission.enter(
            len(request.prompt), request.max_tokens, background=request.background
        )
        try:
            self._check(request)  # its name may be another's by now
            yield from self._answer(request)
        finally:
            self._admission.leave(entry)

    def _answer(self, request: EngineRequest) -> Generator[Wait | EngineEvent, None, None]:
        stats = StatsCollector(self._clock)
        for round_ in request.replay:
            stats.add(round_)
        text = self._codec.stream(request.stop, ignore_end=request.ignore_end)
        running = self._start(request, text)
        lost = False
        try:
            if request.keeps and isinstance(running.verifier, PipelineVerifier):
                running.verifier.begin_rebuild(request.committed, answer=not request.replay)
            reason = yield from self._copied(
                request, running, _with_text(self._steps(running), stats, text)
            )
            self._park_head(running.generation.answer.parked_at)
            final = stats.finish(
                prompt_tokens=len(request.prompt),
                rule=request.sampling.rule_of(request.k),
                policy=request.policy,
                k=request.k,
                reason=request.drafting_reason or self.head_parked,
                resumes=request.attempt - 1,
                parked=bool(self.head_parked),
                kernels=self._kernels,
                cached=running.cached,
                alone_because=running.alone_because,
            )
            identity = self.identity if request.k else "off"
            together = self.batch_identity if final.batched_tokens else "off"
            yield Done(reason, text.finish(), final, identity, together)
        except PeerLost:
            lost = True
            raise
        except NotFinite as fault:
            self._earlier.prefixes.clear()
            raise numeric_error(
                fault.position, self._options.dtype, alone=self._link is None
            ) from fault
        except (BatchBroken, PromptsBroken) as fault:
            raise ExoNodeError(str(fault)) from fault
        finally:
            self._end(request, running.verifier, lost=lost)

    def _park_head(self, position: int | None) -> None:
        if position is not None and not self.head_parked:
            self.head_parked = parked(position)
            log.warning("%s", self.head_parked)

    def _copied(
        self,
        request: EngineRequest,
        running: Running,
        events: Generator[Wait | EngineEvent, None, FinishReason],
    ) -> Generator[Wait | EngineEvent, None, FinishReason]:
        """The events; where the rows fit what was handed out, a spare is sent them."""
        ids = request.ids
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                return end.value
            if isinstance(event, Delta):
                ids += event.round.tokens
            elif isinstance(event, Prefilled):
                self._earlier.keep_prefix(request, running, event.done, self.cache_bytes)
            yield event
            if self._state_sender is None or isinstance(event, Wait):
                continue
            if isinstance(running.verifier, PipelineVerifier):
                self._state_sender.offer(request.request, request.attempt, running.verifier.state)
            elif self._state_sender.due(request.request):
                state = running.copied(ids, self._batching)
                if state is not None:
                    self._state_sender.offer(request.request, request.attempt, state)
                    running.was_copied(state)

    def _check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest."""
        if not 0 <= request.k <= self._max_k:
            raise InvalidRequest(
                f"num_draft_tokens {request.k} is not in this runner's range of 0 to {self._max_k}",
                param="num_draft_tokens",
            )
        if (request.request, request.attempt) in self._live:
            raise InvalidRequest(
                f"attempt {request.attempt} of request {request.request} is running already; a "
                "request needs a name of its own",
                param="request",
            )

    def _start(self, request: EngineRequest, ending: StopCondition) -> Running:
        sampler = Sampler(
            request.sampling, secrets.randbits(63), self._special_tokens, request.prompt
        )
        verifier, drafted, cached = self._earlier.begin(
            request, self.cache_bytes, self._prompts if self.batch_identity == "bitwise" else None
        )
        drafter = self._drafter(sampler, request)
        if drafted is not None and isinstance(drafter, NativeDrafter):
            drafter.take_up(drafted, request.ids)
        task = Task(
            request.prompt,
            request.max_tokens,
            self._options.prefill_chunk,
            request.replay,
            request.top_logprobs,
            self._turn_ends,
            # Strict mode has forwards of one size, which `identity` says nothing of.
            self._max_k + 1 if self.identity == "bitwise" and not self._fixed_rows else 0,
        )
        depth, key = self._depth(request), (request.request, request.attempt)
        alone = self._batching.why_alone(verifier.state.caches)
        if alone or not isinstance(verifier, LocalVerifier):
            padded = self._fixed_rows and verifier.takes_back  # padding goes by being taken back
            rows = FixedRows(verifier, self._fixed_rows) if padded else verifier
            remote = verifier if isinstance(verifier, PipelineVerifier) else None
            generation = Generation(
                task, rows, drafter, sampler, ending, depth, self._clock, remote=remote
            )
            # Not of FixedRows: asking must not settle what it leaves open until the next forward.
            self._live[key] = lambda: verifier.arrays() + drafter.arrays()
            return Running(generation, verifier, cached=cached, alone_because=alone)
        again = self._drafter_again(sampler, request)
        seat = self._batching.seat(
            task, verifier, drafter, sampler, ending, depth, again, self._clock
        )
        self._live[key] = lambda: seat.arrays
        return Running(seat.generation, verifier, seat, cached)

    def _drafter_again(
        self, sampler: Sampler, request: EngineRequest
    ) -> Callable[[DrafterState | None], Drafter]:
        def made(state: DrafterState | None) -> Drafter:
            drafter = self._drafter(sampler, request)
            if state is not None and isinstance(drafter, NativeDrafter):
                drafter.take_up(state, ())
            return drafter

        return made

    def _steps(self, running: Running) -> Steps:
        if running.seat is None:
            return running.generation.steps()
        return self._batching.steps(running.seat)

    def _end(self, request: EngineRequest, verifier: Verifier, *, lost: bool) -> None:
        """Frees the answer's state, or keeps it where another attempt follows."""
        key = (request.request, request.attempt)
        del self._live[key]
        kept = lost or key in self._parked
        self._parked.discard(key)
        if request.adaptive:
            self._profile.save()
        if kept:
            self._earlier.keep(request, verifier)
        else:
            self._earlier.release(*key)
        # Arrays whose last reference the caller holds are freed after it; buffers now.
        mx.clear_cache()

    @property
    def live_requests(self) -> int:
        return len(self._live)

    def cache_bytes(self) -> int:
        """Bytes of KV and recurrent state of all live requests on this stage, copies included."""
        live = [array for arrays in self._live.values() for array in arrays()]
        together = self._batching.arrays()
        return self._earlier.bytes + sum(array.nbytes for array in (*live, *together))

    def park(self, request: str, attempt: int) -> None:
        """Any thread: the attempt is about to be cancelled, and another one follows."""
        if (request, attempt) in self._live:
            self._parked.add((request, attempt))

    def expire(self, lease_s: float) -> list[str]:
        """Frees what no other attempt took up for `lease_s` seconds; returns those requests."""
        return self._earlier.expire(lease_s)

    @property
    def prefix_cache_bytes(self) -> int:
        return self._earlier.prefixes.bytes

    def prefix_of(self, request: EngineRequest) -> RequestState | None:
        """What the prefix cache has for it."""
        return self._earlier.prefix_of(request, self.cache_bytes)

    def _depth(self, request: EngineRequest) -> DepthPolicy:
        if not request.adaptive or request.k == 0:
            return FixedDepth(request.k)
        return AdaptiveDepth(request.k, request.k, self._profile.prior, self._profile.costs)

    def _drafter(self, sampler: Sampler, request: EngineRequest) -> Drafter:
        if request.k == 0:
            return NoDrafter()
        overlap = request.async_draft_eval
        assert self._head is not None and self._family is not None
        return NativeDrafter(
            self._head,
            self._family.embed,
            draft_logits(self._family, self._head, self._draft_vocabulary),
            sampler,
            request.k,
            overlap=self._options.async_draft_eval if overlap is None else overlap,
        )


def _with_text(
    steps: Steps, stats: StatsCollector, text: Any
) -> Generator[Wait | EngineEvent, None, FinishReason]:
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            assert end.value is not None, "an answer that left came back"
            return end.value
        if isinstance(step, Round):
            stats.add(step)
            yield Delta(step, text.take())
            continue
        if isinstance(step, Rebuilt):
            _ = text.take()  # of the rounds that the earlier attempt handed out
        yield step
