"""The engine of a generator: answers requests, from ids to text and final stats."""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

from ...mtp.batch_caches import can_batch, can_read_together
from ...mtp.family import family_of
from ...mtp.finite import DraftNotFinite, NotFinite
from ...mtp.head import DraftHead
from ...mtp.probe import Costs, Draft
from ...mtp.sampler import Sampler
from ...mtp.schedule import prefill_ends
from ...mtp.seams import StopCondition
from ...mtp.stats import StatsCollector
from ...mtp.steps import Prefilled, Rebuilt, Step
from ...mtp.types import FinishReason, Round
from ...placement.errors import InvalidRequest, NumericError, StateLost
from ..kernels.first_choices import choose_first
from ..model.numeric import numeric_error
from ..model.stage_model import MODEL_FAULTS, StageModel, headline
from ..model.tensors import DTYPES
from ..pipeline.link import Link
from .compute import ComputeThread, as_exception
from .draft_profile import Profile, ProfileKey
from .drafter import new_draft
from .drafting import Drafting
from .engine import Engine
from .events import Delta, Done, EngineEvent, Retold
from .executor import LocalExecutor, computes_behind
from .options import EngineOptions
from .pipeline_executor import PipelineExecutor
from .prefix_cache import PrefixCache
from .prefix_disk import PrefixDisk
from .prefix_store import PrefixStore
from .probing import (
    Subject,
    probe_batch_identity,
    probe_costs,
    probe_fixed_rows,
    probe_identity,
)
from .request import MOST_UNREAD, EngineRequest, Request
from .request_limits import RequestLimits
from .scheduler import Scheduler
from .stage_prefixes import StagePrefixes
from .targets import FamilyTarget, Target, WholeTarget

if TYPE_CHECKING:
    from ..text.codec import TextCodec, TextStream

log = logging.getLogger(__name__)

COUNTS_ON_DEVICE: Final = frozenset({"traced_layer", "row_attention"})
"""Kernels that take positions, and states of several rows, from the device: with them rounds whose
kept rows only the device knows are computed as the others are, bit for bit."""
ALONE: Final = "begun anew after a fault, it shares no forward that may fail again"
NO_PROFILE = ProfileKey("", "", "", "", 0, 0)


class Answering:
    """One answer on its way from tokens to text. Runs on the compute thread."""

    def __init__(
        self, asked: EngineRequest, text: "TextStream", clock: Callable[[], float]
    ) -> None:
        self.asked = asked
        self.text = text
        self.stats = StatsCollector(clock)
        for recorded in asked.replay:
            self.stats.add(recorded, replayed=True)

    def event(self, step: Step) -> EngineEvent:
        """What is told of a step."""
        match step:
            case Round():
                self.stats.add(step)
                return Delta(step, self.text.take())
            case Rebuilt():
                return Retold(step.done, step.total, self.text.take())
            case Prefilled():
                return step


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
        `runs_ahead`: whether rounds are built while others run; None: where the device computes
        meanwhile, rounds with drafts where `kernels` make it exact.
        """
        self._codec = codec
        self._stage = stage
        self._options = options
        self._kernels = kernels
        self._clock = clock
        self._link = link
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
        self._turn_ends = codec.end_tokens if options.prefix_cache_bytes else frozenset[int]()
        self._alone = self._why_alone()
        self._names: set[tuple[str, int]] = set()
        self.identity = "off"
        self.batch_identity = "off"
        """Measured by `probe`; "off" where no answers are decoded together."""
        self._prefixes = PrefixStore(
            PrefixCache(options.prefix_cache_bytes, stage.make_caches),
            prefix_disk,
            self._turn_ends,
        )
        self._local: LocalExecutor | None = None
        self._staged: PipelineExecutor | None = None
        """One of both: where the whole model is here, or a part of it."""
        self._engine = self._whole(runs_ahead) if link is None else self._split(link)

    def _why_alone(self) -> str:
        """Why requests share no forwards; empty where they may."""
        if self._options.fixed_rows:
            return "strict mode computes each request by forwards of its own"
        if not self._options.batching:
            return "EXO_BATCHING_ENABLED is 0"
        caches = self._stage.make_caches()
        if not can_batch(caches):
            others = {type(cache).__name__ for cache in caches if not can_batch([cache])}
            kinds = ", ".join(sorted(others))
            return f"this model's caches ({kinds}) are not computed in batches"
        return ""

    def _whole(self, runs_ahead: bool | None) -> Engine:
        behind = computes_behind() if runs_ahead is None else runs_ahead
        exact = set(self._kernels) >= COUNTS_ON_DEVICE if runs_ahead is None else runs_ahead
        self._local = LocalExecutor(
            self._target,
            self._stage.make_caches,
            self.drafting.model(),
            self._clock,
            prefixes=self._prefixes,
            fixed_rows=self._fixed_rows,
            counts_on_device=exact and self._options.async_draft_eval and not self._fixed_rows,
            overlaps=behind,
        )
        options = self._options
        scheduler = Scheduler(
            options.context_length, options.prefill_chunk, depth=2 if behind else 1
        )
        return Engine(self._local, scheduler, self._clock)

    def _split(self, link: Link) -> Engine:
        memory, options = self._prefixes.memory, self._options
        prefixes = StagePrefixes(memory) if memory.enabled else None
        self._staged = PipelineExecutor(
            self._stage, link, options, prefixes, self._turn_ends, self._clock
        )
        scheduler = Scheduler(
            options.context_length, options.prefill_chunk, stages=max(2, options.stages)
        )
        return Engine(self._staged, scheduler, self._clock)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Any thread. Raises InvalidRequest."""
        return self._codec.encode_chat(messages)

    def probe(self) -> None:
        """Measures both identities for the largest K and what rounds cost, or finds them in the
        profile. Warms the kernels up as well.
        """
        subject, k = self._subject(), self.drafting.max_k
        choose_first(self.limits.vocabulary, k, DTYPES[self._options.dtype])
        if self._staged is not None and not self._alone:
            rounds = self._staged.rounds
            rounds.probe(0, self.limits.vocabulary, self._options.context_length)
            self._alone = rounds.refused
        elif not self._alone:
            self._probe_batch(subject, k)
        if not k:
            return
        if self._fixed_rows:
            if why := probe_fixed_rows(subject, self._fixed_rows):
                self.drafting.turn_off(why)
                self._fixed_rows = 0
                if self._local is not None:
                    self._local.fixed_rows = 0
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
            self._alone = f"this model cannot be computed in batches ({headline(fault)})"
            log.warning("%s: its requests take turns", self._alone)
            if self._local is not None:
                self._local.counts_on_device = False  # by a batch's caches
            return
        self._profile.save(at_once=True)

    def measure_costs(self, prompt: Sequence[int], k: int, repeats: int) -> Costs:
        """What verifies and drafts up to `k` cost here; see `mtp.probe`."""
        return self._subject().costs(prompt, k, repeats)

    def _subject(self) -> Subject:
        def make_drafter() -> Draft:
            model = self.drafting.model()
            assert model is not None
            return new_draft(model)

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

    def drive(
        self,
        compute: ComputeThread,
        asked: EngineRequest,
        deliver: Callable[[EngineEvent], None],
        done: Callable[[BaseException | None], None],
    ) -> "Driven":
        """Any thread: answers on the compute thread, which calls `deliver` and, once, `done`."""
        compute.attach(self._engine.step)
        if self._link is not None:
            self._link.listen(lambda: compute.post(lambda: None))  # it goes on
        driven = Driven(self, compute)
        compute.post(lambda: driven.begin(asked, deliver, done))
        return driven

    def begin(
        self,
        asked: EngineRequest,
        deliver: Callable[[EngineEvent], None],
        done: Callable[[BaseException | None], None],
    ) -> Request:
        """Adds a request to the engine. Raises InvalidRequest.

        `deliver` takes its events, and `done` its end: None behind its `Done`, or what went wrong.
        """
        asked = self._entered(asked)
        try:
            answering = self._answering(asked)
            request = self._request(asked, answering.text)
        except BaseException:  # whatever it met: the name is free again
            self._names.discard((asked.request, asked.attempt))
            raise

        def finish(why: FinishReason | BaseException) -> None:
            self._names.discard((asked.request, asked.attempt))
            try:
                if isinstance(why, BaseException):
                    raise why
                deliver(self._done(answering, request, why))
            except BaseException as fault:  # SystemExit of a library, too
                done(self._told(asked, as_exception(fault)))
            else:
                done(None)
            finally:
                mx.clear_cache()

        request.deliver = lambda step: deliver(answering.event(step))
        request.finish = finish
        self._engine.add(request)
        return request

    def cancel(self, asked: EngineRequest, request: Request) -> None:
        """Ends a request that `begin` added, if it is not over, without another word."""
        if request.phase != "finished":
            self._names.discard((asked.request, asked.attempt))
            self._engine.cancel(request)
            mx.clear_cache()

    def generate(self, asked: EngineRequest) -> Generator[EngineEvent | None, None, None]:
        """Drives one answer; closing the generator frees its state here and on every stage.

        Whoever asks for what is not computed yet has the engine do its next step. None: there is
        nothing to do but to wait.
        """
        events, ends = deque[EngineEvent](), list[BaseException | None]()
        request = self.begin(asked, events.append, ends.append)
        try:
            while True:
                while events:
                    event = events.popleft()
                    request.taken += 1
                    yield event
                if ends:
                    (fault,) = ends
                    if fault is not None:
                        raise fault
                    return
                if not self._engine.step():
                    yield None
        finally:
            self.cancel(asked, request)

    def _entered(self, asked: EngineRequest) -> EngineRequest:
        """The request as it is granted; its name is its own from here on. Raises InvalidRequest."""
        self.drafting.check(asked.k)
        key = (asked.request, asked.attempt)
        if key in self._names:
            raise InvalidRequest(
                f"attempt {asked.attempt} of request {asked.request} is running already; a "
                "request needs a name of its own",
                param="request",
            )
        self._names.add(key)
        return self.drafting.granted(asked)

    def _answering(self, asked: EngineRequest) -> Answering:
        text = self._codec.stream(
            asked.stop_strings(), ignore_end=asked.ignore_end, continues=asked.continues
        )
        return Answering(asked, text, self._clock)

    def _request(self, asked: EngineRequest, ending: StopCondition) -> Request:
        # Strict mode has forwards of one size, which `identity` says nothing of.
        same = self.identity == "bitwise" and not self._fixed_rows
        if self._local is not None:
            self._local.rebuild_rows = self.drafting.max_k + 1 if same else 0
        together = self.batch_identity == "bitwise" and isinstance(self._target, FamilyTarget)
        caches = self._stage.make_caches()
        self._engine.scheduler.reads_together = together and can_read_together(caches)
        return Request(
            asked.prompt,
            prefill_ends(asked.prompt, self._options.prefill_chunk, self._turn_ends),
            asked.max_tokens,
            Sampler(
                asked.sampling,
                secrets.randbits(63),
                self._codec.special_tokens,
                asked.prompt,
                asked.grammar,
            ),
            ending,
            name=asked.request,
            attempt=asked.attempt,
            k=asked.k,
            depth=self.drafting.depth(asked),
            log=asked.replay,
            top_logprobs=asked.top_logprobs,
            background=asked.background,
            alone=ALONE if asked.alone else self._alone,
            after_fault=asked.alone,
            overlap=(
                self._options.async_draft_eval
                if asked.async_draft_eval is None
                else asked.async_draft_eval
            ),
            cache_salt=asked.cache_salt,
        )

    def _done(self, answering: Answering, request: Request, reason: FinishReason) -> Done:
        asked = answering.asked
        self.drafting.park(request.parked_at)
        final = answering.stats.finish(
            prompt_tokens=len(asked.prompt),
            rule=asked.sampling.rule_of(asked.k),
            policy=asked.policy,
            k=asked.k,
            reason=asked.drafting_reason or self.drafting.parked,
            resumes=asked.attempt - 1,
            parked=bool(self.drafting.parked),
            kernels=self._kernels,
            cached=request.cached,
            alone_because=request.alone,
        )
        if asked.adaptive:
            self._profile.save()
        identity = self.identity if asked.k else "off"
        if self._staged is not None:
            self.batch_identity = "bitwise" if self._staged.rounds.is_same else "near_tie"
        batched = self.batch_identity if final.batched_tokens else "off"
        text = answering.text
        return Done(reason, text.finish(), final, identity, batched, text.stopped_by)

    def _told(self, asked: EngineRequest, fault: Exception) -> Exception:
        """What went wrong with an answer, as its reader is told of it."""
        failed = asked.grammar.failed if asked.grammar is not None else ""
        if failed and isinstance(fault, NotFinite | DraftNotFinite | StateLost):
            return InvalidRequest(failed)
        if isinstance(fault, NotFinite | NumericError):
            self._prefixes.memory.clear()
        if isinstance(fault, NotFinite):
            alone = self._link is None
            return numeric_error(fault.position, self._options.dtype, alone=alone)
        if isinstance(fault, DraftNotFinite):
            # Its entry node has all that it was told: the next attempt shows whose fault it is.
            return StateLost(str(fault))
        return fault

    @property
    def live_requests(self) -> int:
        """Requests that have begun."""
        return self._engine.live_requests

    def cache_bytes(self) -> int:
        """Bytes of KV and recurrent state of all live requests on this stage."""
        return self._engine.executor.bytes

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of what is kept of prompts; they go where requests need the room."""
        return self._prefixes.memory.bytes


class Driven:
    """An answer that the compute thread works on. `read` and `cancel`: any thread."""

    def __init__(self, engine: TextEngine, compute: ComputeThread) -> None:
        self._engine = engine
        self._compute = compute
        self._asked: EngineRequest | None = None
        self._request: Request | None = None
        self._cancelled = False

    def begin(
        self,
        asked: EngineRequest,
        deliver: Callable[[EngineEvent], None],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """On the compute thread."""
        if self._cancelled:
            done(None)
            return
        try:
            self._asked, self._request = asked, self._engine.begin(asked, deliver, done)
        except BaseException as fault:  # the edge of the compute thread
            done(as_exception(fault))

    def read(self) -> None:
        """The reader took an event."""
        if (request := self._request) is not None:
            request.taken += 1
            if request.delivered - request.taken == MOST_UNREAD - 1:
                self._compute.post(lambda: None)  # it goes on

    def cancel(self) -> None:
        """Ends the answer, unless it is over."""
        self._compute.post(self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._asked is not None and self._request is not None:
            self._engine.cancel(self._asked, self._request)
