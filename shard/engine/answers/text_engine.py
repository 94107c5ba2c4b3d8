"""The engine of the first stage: answers requests, from ids to text and final stats."""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import mlx.core as mx

from ....mtp.caches.batch_caches import can_batch
from ....mtp.drafting.round_policy import RoundPolicy
from ....mtp.families.taped_gated_delta import row_state_bytes
from ....mtp.pieces import Pieces
from ....mtp.sampler import Sampler
from ....mtp.schedule import Schedule
from ....mtp.types import CacheTier, FinishReason
from ....placement.errors import InvalidRequest
from ....proto import peer_pb2 as pb
from ...checkpoint.prefix_files import ReceivedPrefix
from ...kernels import own_keys, row_groups
from ...kernels.install import used
from ...model.draft_pair import targets_of
from ...model.load import Loaded
from ...model.tower import embedding_of
from ...pipeline.link import StageLink
from ...text.stop_strings import StopStrings
from ..compute import ComputeThread, as_exception
from ..engine import Engine
from ..executor import LocalExecutor
from ..layer_engine import OnFault, read_request
from ..options import EngineOptions
from ..pipeline_executor import PipelineExecutor
from ..prefixes.disk import PrefixDisk
from ..prefixes.lookup import PrefixLookup
from ..prefixes.store import PrefixStore
from ..prompt_images import PromptImages, read_samples
from ..reading.layer_read import Deliver as LayerDeliver
from ..reading.layer_rows import LayerForm
from ..reading.views import LayerViews
from ..request import DraftProgress, Parameters, ReplayProgress, Request
from ..round_forms import RoundForms
from ..scheduler import Scheduler
from ..stage_copies import StageSubject
from .answer_reads import AnswerReads
from .draft_profile import DraftProfile, DraftProfileKey
from .drafting import DraftControl
from .events import AnswerEvents, AnswerHandle, Deliver, EngineEvent, OnEnd
from .final_stats import FinalStats
from .lookup_control import LookupControl
from .model_measurements import ModelMeasurements
from .public_faults import public_fault
from .request_limits import RequestLimits

if TYPE_CHECKING:
    from ...text.codec import TextStream  # a generator's only, as `load` says

log = logging.getLogger(__name__)

AFTER_FAULT: Final = "restarted after a fault, it shares no forward that may fail again"
"""`batching_reason` of a request that is retried after a fault."""
NO_PROFILE = DraftProfileKey("", "", "", "", 0)


class TextEngine:
    """Answers requests. All methods but `drive` and those of `codec` and `prefix_lookup` run on
    the compute thread."""

    def __init__(
        self,
        loaded: Loaded,
        options: EngineOptions,
        *,
        link: StageLink | None = None,
        clock: Callable[[], float] = time.perf_counter,
        profile: DraftProfile | None = None,
        prefix_disk: PrefixDisk | None = None,
        runs_ahead: bool | None = None,
    ) -> None:
        """`loaded`: a first stage. `link`: the connection to the other stages, or None if it is the
        whole model.

        `profile`: measurements of earlier engines, if any. `prefix_disk`: prefixes that outlive
        this engine. `runs_ahead`: whether rounds are issued before earlier ones are read. By
        default they are if the device computes asynchronously; rounds with drafts, if the kernels
        in use make that exact.
        """
        assert loaded.codec is not None
        codec, stage, head = loaded.codec, loaded.model, loaded.head
        vocabulary = loaded.expected.vocabulary
        self.codec = codec
        self._stage, self._options = stage, options
        self.first_layer, self.num_layers = stage.first, stage.num_layers
        self._kernels = used(loaded.kernels)
        self._clock = clock
        self._link = link
        profile = profile or DraftProfile.open("", NO_PROFILE, clock)
        self.limits = RequestLimits(options.context_length, vocabulary)
        whole = link is None
        family, self._target = targets_of(stage, head, whole=whole)
        self._measured = self._target if whole else StageSubject(stage, loaded.expected)
        self._views = self._layer_views(loaded)
        self._tower = loaded.tower
        self.images = loaded.images
        """"read", or the reason why it reads no images."""
        policy = RoundPolicy(profile.costs)
        self.drafting = DraftControl(head, family, vocabulary, options, profile, policy)
        self._schedule = Schedule(
            options.prefill_chunk,
            codec.turn_ends,  # also if none is cached: the rows of forwards may decide bits
            stage.rope_positions.joins_images,
        )
        caches = stage.make_caches()
        self.lookup = LookupControl(options, stage.model, caches, policy, is_whole=whole)
        # Many rows of one request are one call of products and attention, padding included.
        one_call = {row_groups.NAME, row_groups.SINGLE, own_keys.NAME}
        is_grouped = not one_call.isdisjoint(self._kernels)
        self._can_batch_prompts = family is not None and can_batch(caches) and not is_grouped
        self._prefixes = PrefixStore(
            options.prefix_cache_bytes, stage.make_caches, prefix_disk, self._schedule.turn_ends
        )
        self.prefix_lookup = PrefixLookup(self._prefixes, self._schedule)
        self._answer_reads = AnswerReads(self._schedule, options.context_length)
        forms = self._round_forms(caches, runs_ahead)
        self._row_bytes = row_state_bytes(stage.own_modules(outer=False))
        self._executor = self._new_executor(forms)
        self.step_times = self._executor.step_times
        self._engine = Engine(
            self._executor, self._scheduler(), clock, keeps_chunk=options.keeps_chunk
        )
        self.measurements = self._measurements(forms, profile)
        self._final_stats = FinalStats(
            self._executor,
            self.drafting,
            self.lookup,
            self.measurements,
            self._kernels,
            options.reads_any,
        )

    def _round_forms(self, caches: Sequence[object], runs_ahead: bool | None) -> RoundForms:
        drafts = self._options.async_draft_eval
        return RoundForms.of(caches, runs_ahead, kernels=self._kernels, drafts=drafts)

    def _measurements(self, forms: RoundForms, profile: DraftProfile) -> ModelMeasurements:
        return ModelMeasurements(
            forms if isinstance(self._executor, LocalExecutor) else self._executor.rounds,
            self._measured,
            self._stage.make_caches,
            self._options,
            self.drafting,
            self.lookup,
            profile,
            self.limits.vocabulary,
            self._clock,
            has_room=lambda size: self._prefixes.reserve(size, self._executor.bytes),
            modules=self._stage.own_modules(outer=True),
            row_bytes=self._row_bytes,
            read_images=None if self._tower is None or self._link else self._read_images,
        )

    def _read_images(self) -> Pieces[None]:
        assert self._tower is not None
        stage = self._stage
        embed = embedding_of(stage.model)
        return read_samples(self._tower, embed, self._target, stage.make_caches)

    def _new_executor(self, forms: RoundForms) -> LocalExecutor | PipelineExecutor:
        prefixes, clock = self._prefixes, self._clock
        if self._link is not None:
            parts = self._stage, self._link, self._options, prefixes, self._schedule.turn_ends
            return PipelineExecutor(*parts, clock, lambda: self.lookup.exact)
        return LocalExecutor(
            self._target,
            self._stage.make_caches,
            self.drafting.model,
            clock,
            prefixes=prefixes,
            policy=self.lookup.policy,
            forms=forms,
            views=self._views,
            row_bytes=self._row_bytes,
        )

    def _layer_views(self, loaded: Loaded) -> LayerViews:
        """Parts of a whole model, for prompts that several runners read."""
        return LayerViews(
            self._stage,
            self._target,
            hidden_size=loaded.expected.hidden_size,
            dtype=self._options.dtype,
            context_length=self._options.context_length,
            require_splittable=loaded.require_splittable,
        )

    def _scheduler(self) -> Scheduler:
        rows, chunk = self._options.context_length, self._options.prefill_chunk
        match self._executor:
            case LocalExecutor(overlaps=overlaps):
                return Scheduler(rows, chunk, depth=2 if overlaps else 1)
            case PipelineExecutor():
                return Scheduler(rows, chunk, stages=max(2, self._options.num_stages))

    def step(self) -> bool:
        """Does a piece of work of requests, and of a measurement if due; False if there is none."""
        busy = self._engine.step()
        return self.measurements.step(idle=not self._engine.keys) or busy

    def drive(
        self, compute: ComputeThread, parameters: Parameters, deliver: Deliver, on_end: OnEnd
    ) -> AnswerHandle:
        """Any thread: answers on the compute thread, which calls `deliver` and, once, `on_end`."""
        compute.attach(self.step)
        if self._link is not None:
            self._link.listen(lambda: compute.post(lambda: None))  # wakes the compute thread
        handle = AnswerHandle(self, compute)
        compute.post(lambda: handle.begin(parameters, deliver, on_end))
        return handle

    def begin(self, parameters: Parameters, deliver: Deliver, on_end: OnEnd) -> Request:
        """Adds a request to the engine. Raises InvalidRequest.

        `deliver` gets its events, and `on_end` None after its `AnswerEnd`, or the error.
        """
        self._check_name(parameters)
        if not self._engine.keys and isinstance(self._executor, LocalExecutor):
            self.drafting.choose_drafter()
            self._executor.draft_model = self.drafting.model
        parameters = self.drafting.grant(parameters)
        self._answer_reads.begin(parameters)
        self._engine.cancel_reads()
        answer = AnswerEvents(parameters, self.codec, self._clock)
        request = self._new_request(parameters, answer.text)

        def finish(end: FinishReason | BaseException) -> None:
            try:
                if isinstance(end, BaseException):
                    raise end
                deliver(self._final_stats.end_of(answer, request, end))
                if self._options.prefix_cache_bytes:
                    self._answer_reads.add(parameters, answer.ids)
            except BaseException as fault:  # the answer's reader gets it, SystemExit too
                on_end(self._public_fault(parameters, as_exception(fault)))
            else:
                on_end(None)
            finally:
                mx.clear_cache()

        request.deliver = lambda step: deliver(answer.event(step))
        request.finish = finish
        self._engine.add(request)
        return request

    def begin_read(
        self,
        begin: pb.ReadBegin,
        prefix: ReceivedPrefix | None,
        deliver: LayerDeliver,
        on_fault: OnFault,
    ) -> Request:
        """See `ReadsLayers`."""
        request = read_request(self._views, begin, prefix, deliver, on_fault)
        self._engine.cancel_reads()
        self._engine.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request that `begin` added, unless it has ended; nothing more is delivered."""
        if request.phase != "finished":
            self._engine.cancel(request)
            mx.clear_cache()

    def generate(self, parameters: Parameters) -> Generator[EngineEvent | None, None, None]:
        """Drives one answer; closing the generator frees its state here and on every stage.

        Reading an event that is not computed yet makes the engine do its next step. It yields None
        if there is nothing to do here until another stage answers.
        """
        events, ends = deque[EngineEvent](), list[BaseException | None]()
        request = self.begin(parameters, events.append, ends.append)
        try:
            while True:
                while events:
                    event = events.popleft()
                    request.events_read += 1
                    yield event
                if ends:
                    (fault,) = ends
                    if fault is not None:
                        raise fault
                    return
                if not self._engine.step():
                    yield None
        finally:
            self.cancel(request)

    def _check_name(self, parameters: Parameters) -> None:
        """Checks that the request's attempt is not in progress already. Raises InvalidRequest."""
        name, attempt = key = parameters.key
        if key in self._engine.keys:
            raise InvalidRequest(
                f"attempt {attempt} of request {name} is running already; a request needs a name "
                "of its own",
                param="request",
            )

    def read_answer(self) -> None:
        """Begins to read an answer that has ended as a prompt, if no request is in progress: the
        next turn of its conversation then begins after it."""
        if self._engine.keys or (reading := self._answer_reads.take()) is None:
            return
        parameters, end = reading
        request = self._new_request(parameters, self.codec.stream(StopStrings(()), ignore_end=True))
        request.reads_to, request.finish = end, _log_failed_read
        self._engine.add(request)

    def _new_request(self, parameters: Parameters, text: "TextStream") -> Request:
        prompt, drafting, measured = parameters.prompt, parameters.drafting, self.measurements
        scores_prompt, has_own = parameters.output.prompt_logprobs, "async_draft_eval"
        overlap = drafting if drafting.HasField(has_own) else self._options
        sampler = Sampler(
            parameters.sampling,
            secrets.randbits(63),
            self.codec.special_tokens,
            prompt,
            parameters.grammar,
            text.ends,
        )
        return Request(
            parameters,
            self._schedule.ends(prompt, is_scored=scores_prompt),
            sampler,
            text,
            drafts=DraftProgress(
                self.drafting.demand(parameters),
                self.lookup.lookup(parameters),
                overlap.async_draft_eval,
            ),
            replay=ReplayProgress(
                parameters.replay,
                self.drafting.depth + 1 if measured.identity == "bitwise" else 0,
            ),
            loop_guard=parameters.loop_guard(),
            images=self._prompt_images(parameters),
            batching_reason=AFTER_FAULT if parameters.sharing.alone else measured.batching_reason,
            batches_prompt=self._can_batch_prompts
            and measured.shares_prompts
            and not (parameters.images or scores_prompt),
            uses_cache=parameters.uses_cache and not scores_prompt and self._prefixes.enabled,
        )

    def _prompt_images(self, request: Parameters) -> PromptImages | None:
        if not request.images:
            return None
        assert self._tower is not None, "the service refuses them"
        embed = embedding_of(self._stage.model)
        return PromptImages(request.prompt, request.images, self._tower, embed)

    @property
    def reads_any(self) -> bool:
        """Whether other kinds of machines may have read rows of prompts."""
        return self._options.reads_any

    @property
    def depth_reason(self) -> str:
        """Why rounds draft as many tokens as they do at present, or at most; empty before the first
        where K has no limit but the card's."""
        if (request := self._engine.drafting_request) is not None:
            _ = self._final_stats.note_depth(request)
        return self.drafting.depth_reason or self.drafting.limit_reason

    def _public_fault(self, parameters: Parameters, fault: Exception) -> Exception:
        whole, clear = self._link is None, self._prefixes.clear
        dtype = self._options.dtype
        return public_fault(fault, parameters.grammar, dtype, is_whole=whole, clear_prefixes=clear)

    def layer_form(self, first: int, end: int) -> LayerForm:
        """See `ReadsLayers`."""
        return self._views.form(first, end)

    @property
    def placeholder(self) -> int:
        """The id that stands for an image in a rendered prompt, or -1 if it reads none."""
        return -1 if self._tower is None else self._tower.vision.placeholder

    @property
    def is_whole(self) -> bool:
        """Whether all layers of the model are here."""
        return self._link is None

    @property
    def live_requests(self) -> int:
        """Number of requests that have begun and not ended."""
        return self._engine.live_requests

    def cache_bytes(self) -> int:
        """Bytes of KV caches and recurrent states of all live requests on this stage."""
        return self._executor.bytes

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of the prefix cache, which shrinks when requests need the room."""
        return self._prefixes.bytes

    @property
    def prefix_hits(self) -> Mapping[CacheTier, int]:
        """See `PrefixCache.hits`."""
        return self._prefixes.hits

    def save_prefix(self) -> bool:
        """See `PrefixDisk.save_next`; does nothing while there is a request."""
        return not self._engine.keys and self._prefixes.save_next()


def _log_failed_read(end: FinishReason | BaseException) -> None:
    log.warning("an answer could not be read for the next turn", exc_info=cast("Any", end))
