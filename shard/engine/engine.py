"""The engine of a generator: drives one answer from ids to text and its final stats."""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...mtp.ahead import AHEAD_BY, Ahead
from ...mtp.batch import Batch, BatchBroken
from ...mtp.batch_prompts import PromptBatch, PromptsBroken
from ...mtp.family import family_of
from ...mtp.finite import DraftNotFinite, NotFinite
from ...mtp.head import DraftHead
from ...mtp.parts import Parts
from ...mtp.probe import Costs
from ...mtp.sampler import Sampler
from ...mtp.seams import Drafter, Wait
from ...mtp.stats import StatsCollector
from ...mtp.steps import Prefilled, Rebuilt, Steps
from ...mtp.types import FinishReason, Round, Sampling
from ...placement.errors import InvalidRequest, NumericError, StateLost
from ..kernels.first_choices import choose_first
from ..model.numeric import numeric_error
from ..model.stage_model import MODEL_FAULTS, StageModel, said
from ..model.tensors import DTYPES
from ..pipeline.meeting import Meeting
from ..pipeline.merged import Merged
from ..pipeline.verifier import Link
from .admission import Admission
from .attempts import Attempt
from .batching import Batching
from .draft_profile import Profile, ProfileKey
from .drafting import Drafting
from .earlier import Earlier
from .events import Delta, Done, EngineEvent, Retold
from .live import LiveAttempts, Measured
from .local import FamilyTarget, LocalVerifier, Target, WholeTarget
from .options import EngineOptions
from .prefix_disk import PrefixDisk
from .probing import (
    Subject,
    probe_batch_identity,
    probe_costs,
    probe_fixed_rows,
    probe_identity,
)
from .request import EngineRequest
from .request_limits import RequestLimits

if TYPE_CHECKING:
    from ..text.codec import TextCodec

log = logging.getLogger(__name__)

MORE: Final = 64
"""Tokens of an answer that what is kept makes room for at once."""
NO_PROFILE = ProfileKey("", "", "", "", 0, 0)


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
        kernels: tuple[str, ...] = (),
        prefix_disk: PrefixDisk | None = None,
        runs_ahead: bool | None = None,
    ) -> None:
        """`link` leads to the other stages; None when this stage is the whole model.

        `profile`: what adaptive drafting knows and learns; None: nothing that outlives this engine.
        `kernels`: those of our own under the model, for the stats.
        `prefix_disk`: where prefixes outlive this engine.
        `runs_ahead`: whether rounds are built while others run; None: where `kernels` make it pay,
        and where the device computes meanwhile, rounds of a batch.
        """
        self._codec = codec
        self._stage = stage
        self._options = options
        self._kernels = kernels
        self._clock = clock
        self._alone = link is None
        self._fixed_rows = options.fixed_rows if link is None else 0
        self._profile = profile or Profile.open("", NO_PROFILE, clock)
        self.limits = RequestLimits(options.context_length, vocabulary)
        self.token_bytes = codec.token_bytes
        self.answer_format = codec.answer_format
        self.has_call_grammar = codec.has_call_grammar
        self.grammars = codec.grammars
        self.call_grammar = codec.call_grammar
        fed = None if head is None else head.hidden_kind
        family = family_of(stage.model, fed) if link is None else None
        self._target: Target = WholeTarget(stage.model) if family is None else FamilyTarget(family)
        self.drafting = Drafting(head, family, vocabulary, options, self._profile)
        self._batching = self._new_batching(runs_ahead)
        self._parts = Parts(clock)
        self._meeting = self._new_meeting(link)
        self._prompts = self._new_prompts()
        turn_ends = codec.end_tokens if options.prefix_cache_bytes else frozenset[int]()
        self._earlier = self._new_earlier(turn_ends, link, prefix_disk)
        fit = set(kernels) >= AHEAD_BY if runs_ahead is None else runs_ahead
        self._runs_ahead = fit and options.async_draft_eval
        self._live = self._new_live(turn_ends)
        self._admission = Admission(options.context_length)
        self.identity = "off"
        self.batch_identity = "off"
        """Measured by `probe`; "off" where no answers are decoded together."""

    def _new_live(self, turn_ends: frozenset[int]) -> LiveAttempts:
        return LiveAttempts(
            self.drafting,
            self._earlier,
            self._batching,
            self._options.prefill_chunk,
            turn_ends,
            self._codec.special_tokens,
            self._clock,
            lambda: self._batching.patience,
            self._new_ahead if self._runs_ahead else None,
        )

    def _new_ahead(self, verifier: LocalVerifier, sampler: Sampler) -> Ahead:
        head = self.drafting.batch_head()
        assert head is not None
        return Ahead(self._target, head, verifier, sampler)

    def _new_earlier(
        self, turn_ends: frozenset[int], link: Link | None, disk: PrefixDisk | None
    ) -> Earlier:
        return Earlier(
            self._stage,
            self._target,
            self._options,
            turn_ends,
            link=link,
            meeting=self._meeting,
            disk=disk,
            parts=self._parts,
        )

    def _new_batching(self, runs_ahead: bool | None) -> Batching:
        if self._options.fixed_rows:
            return Batching(None, "strict mode computes each request by forwards of its own")
        if not self._options.batching:
            return Batching(None, "EXO_BATCHING_ENABLED is 0")
        if not self._alone:
            return Batching(None)
        made = self._target, self.drafting.batch_head(), self._clock
        return Batching(Batch(*made, ahead=runs_ahead))

    def _new_meeting(self, link: Link | None) -> Meeting | None:
        """Where rows of several requests set out through a pipeline together."""
        stage, dtype = self._stage, self._options.dtype
        if link is None or self._batching.why_alone(stage.make_caches()):
            return None
        return Meeting(stage, Merged(stage, DTYPES[dtype]), link, self._options.stages, dtype)

    def _new_prompts(self) -> PromptBatch | None:
        """Only used where a batch changes no bit: states behind prompts are kept for others."""
        target, caches = self._target, self._stage.make_caches()
        if isinstance(target, WholeTarget) or self._batching.why_alone(caches):
            return None
        assert isinstance(target, FamilyTarget)
        return PromptBatch(target, self._options.prefill_chunk, self._parts)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Any thread. Raises InvalidRequest."""
        return self._codec.encode_chat(messages)

    def probe(self) -> None:
        """Measures both identities for the largest K and what rounds cost, or finds them in the
        profile. Warms the kernels up as well.
        """
        subject, k = self._subject(), self.drafting.max_k
        choose_first(self.limits.vocabulary, k, DTYPES[self._options.dtype])
        if self._meeting is not None:
            self._meeting.probe(self.limits.vocabulary, self._options.context_length)
            if self._meeting.refused:
                self._batching.refuse(self._meeting.refused)
        elif not self._batching.why_alone(self._stage.make_caches()):
            self._probe_batch(subject, k)
        if not k:
            return
        if self._fixed_rows:
            if why := probe_fixed_rows(subject, self._fixed_rows):
                self.drafting.turn_off(why)
                self._fixed_rows = 0
                return
            self.identity = "bitwise"
        else:
            self.identity = probe_identity(subject, k, self._profile)
        probe_costs(subject, k, self._fixed_rows, self._profile)
        self._profile.save(at_once=True)

    def _probe_batch(self, subject: Subject, k: int) -> None:
        try:
            self.batch_identity = probe_batch_identity(subject, k, self._profile)
        except MODEL_FAULTS as fault:  # nothing of it is kept: only the probe's own state is lost
            why = f"this model cannot be computed in batches ({said(fault)})"
            log.warning("%s: its requests take turns", why)
            self._batching.refuse(why)
            self._prompts = None
            return
        self._profile.save(at_once=True)

    def measure_costs(self, prompt: Sequence[int], k: int, repeats: int) -> Costs:
        """What verifies and drafts up to `k` cost here; see `mtp.probe`."""
        return self._subject().costs(prompt, k, repeats)

    def _subject(self) -> Subject:
        def make_drafter(depth: int, prompt: Sequence[int]) -> Drafter:
            return self.drafting.drafter(Sampler(Sampling(), 1), depth)

        return Subject(
            self._target.forward,
            self._target,
            self._stage.make_caches,
            make_drafter,
            self.limits.vocabulary,
            self._options.context_length,
            self._clock,
            self._target if isinstance(self._target, FamilyTarget) else None,
        )

    def generate(self, request: EngineRequest) -> Generator[Wait | EngineEvent, None, None]:
        """Drives one answer; closing the generator frees its state here and on every stage."""
        self.drafting.check(request.k)
        request = self.drafting.granted(request)
        self._live.enter(request)
        try:
            entry = yield from self._admission.enter(
                len(request.prompt), request.max_tokens, background=request.background
            )
            try:
                yield from self._answer(request)
            finally:
                self._admission.leave(entry)
        finally:
            self._live.end(request)

    def _answer(self, request: EngineRequest) -> Generator[Wait | EngineEvent, None, None]:
        stats = StatsCollector(self._clock)
        for round_ in request.replay:
            stats.add(round_, replayed=True)
        stops = request.stop_strings()
        text = self._codec.stream(stops, ignore_end=request.ignore_end, continues=request.continues)
        common = yield from self._earlier.common(request)
        attempt = self._live.begin(request, text, self._measured(), common)
        try:
            steps = _with_text(attempt.steps(), stats, text)
            reason = yield from self._with_prefixes(request, attempt, steps)
            self.drafting.park(attempt.generation.answer.parked_at)
            final = stats.finish(
                prompt_tokens=len(request.prompt),
                rule=request.sampling.rule_of(request.k),
                policy=request.policy,
                k=request.k,
                reason=request.drafting_reason or self.drafting.parked,
                resumes=request.attempt - 1,
                parked=bool(self.drafting.parked),
                kernels=self._kernels,
                cached=attempt.cached,
                alone_because=attempt.alone_because,
            )
            identity = self.identity if request.k else "off"
            if self._meeting is not None:
                self.batch_identity = "bitwise" if self._meeting.same else "near_tie"
            batched = self.batch_identity if final.batched_tokens else "off"
            rest = text.finish()
            yield Done(reason, rest, final, identity, batched, text.stopped_by)
        except NotFinite as fault:
            if request.grammar is not None and request.grammar.failed:
                raise InvalidRequest(request.grammar.failed) from fault
            self._earlier.prefixes.clear()
            raise numeric_error(fault.position, self._options.dtype, alone=self._alone) from fault
        except NumericError:  # of a stage's numbers
            self._earlier.prefixes.clear()
            raise
        except (BatchBroken, PromptsBroken, DraftNotFinite) as fault:
            if request.grammar is not None and request.grammar.failed:
                raise InvalidRequest(request.grammar.failed) from fault
            if fault.__cause__ is not None:  # the others hear of it as well
                log.error("%s", fault, exc_info=fault)
            # Its entry node has all that it was told: the next attempt computes it alone.
            raise StateLost(str(fault)) from fault
        finally:
            if request.adaptive:
                self._profile.save()

    def _with_prefixes(
        self,
        request: EngineRequest,
        attempt: Attempt,
        events: Generator[Wait | EngineEvent, None, FinishReason],
    ) -> Generator[Wait | EngineEvent, None, FinishReason]:
        """Passes events on; keeps prefixes of the prompt, and makes room for the answer."""
        rows = due = len(request.ids)
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                return end.value
            if isinstance(event, Delta):
                rows += len(event.round.tokens)
                if rows >= due:
                    self._earlier.goes_on(attempt, MORE, self.cache_bytes)
                    due = rows + MORE // 2
            elif isinstance(event, Prefilled):
                self._earlier.keep_prefix(request, attempt, event.done, self.cache_bytes)
            yield event

    def _measured(self) -> Measured:
        # Strict mode has forwards of one size, which `identity` says nothing of.
        same = self.identity == "bitwise" and not self._fixed_rows
        return Measured(
            self._prompts if self.batch_identity == "bitwise" else None,
            self._fixed_rows,
            self.drafting.max_k + 1 if same else 0,
        )

    @property
    def live_requests(self) -> int:
        return len(self._live)

    def cache_bytes(self) -> int:
        """Bytes of KV and recurrent state of all live requests on this stage."""
        return self._live.bytes

    @property
    def prefix_cache_bytes(self) -> int:
        return self._earlier.prefixes.bytes


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
            yield Retold(step.done, step.total, text.take())
            continue
        yield step
