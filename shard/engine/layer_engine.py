"""Reads layers of prompts that other runners answer: as requests of any engine, and the engine of a
runner that has upper layers only."""

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Protocol, cast

from ...mtp.sampler import Sampler
from ...mtp.targets import Target
from ...mtp.types import CacheTier, FinishReason, Sampling
from ...proto import peer_pb2 as pb
from ..checkpoint.prefix_files import ReceivedPrefix
from ..model.load import Loaded
from .engine import Engine
from .executor import LocalExecutor
from .options import EngineOptions
from .reading.layer_read import Deliver, LayerRead
from .reading.layer_rows import LayerForm
from .reading.views import LayerViews, PartReader
from .request import Parameters, Request
from .scheduler import Scheduler
from .step_times import StepTimes

OnFault = Callable[[BaseException], None]


class ReadsLayers(Protocol):
    """An engine that reads layers. All methods run on the compute thread."""

    num_layers: int
    """Layers of the model."""
    first_layer: int
    """The first of those that are here; the others follow, up to the last."""

    def layer_form(self, first: int, end: int) -> LayerForm:
        """The form of the caches of layers [first, end). Raises one of VIEW_FAULTS."""
        ...

    def begin_read(
        self,
        begin: pb.ReadBegin,
        prefix: ReceivedPrefix | None,
        deliver: Deliver,
        on_fault: OnFault,
    ) -> Request:
        """Adds the reading of some layers of a prompt; `cancel` ends it. Raises one of VIEW_FAULTS,
        and one of `encoding.CONTENT_FAULTS` for a wrong `prefix`. `on_fault` gets an error of its
        forwards."""
        ...

    def cancel(self, request: Request) -> None:
        """Ends it, unless it has ended."""
        ...

    def step(self) -> bool:
        """Does a piece of work; False if there is none."""
        ...


class _NeverStops:
    """The stop condition of a request without an answer."""

    def push(self, token: int) -> FinishReason | None:
        raise AssertionError(f"token {token} of a request without an answer")


def read_request(
    views: LayerViews,
    begin: pb.ReadBegin,
    prefix: ReceivedPrefix | None,
    deliver: Deliver,
    on_fault: OnFault,
) -> Request:
    """See `ReadsLayers.begin_read`."""
    read, prompt = LayerRead(views, begin, prefix, deliver), list(begin.tokens)
    name, sharing = f"read-{begin.request}", pb.Sharing(cache=False)
    parameters = Parameters(
        name, begin.attempt, prompt, Sampling(), pb.Limits(), pb.Drafting(), sharing=sharing
    )

    def finish(end: FinishReason | BaseException) -> None:
        if isinstance(end, BaseException):
            on_fault(end)

    sampler, ends = Sampler(Sampling(), 0), list(accumulate(begin.schedule))
    return Request(
        parameters, ends, sampler, _NeverStops(), read=read, uses_cache=False, finish=finish
    )


class LayerEngine:
    """`ReadsLayers` of a runner that has upper layers only, and answers nothing."""

    def __init__(self, loaded: Loaded, options: EngineOptions, clock: Callable[[], float]) -> None:
        stage = loaded.model
        self.first_layer, self.num_layers = stage.first, stage.num_layers
        self._views = LayerViews(
            stage,
            None,
            hidden_size=loaded.expected.hidden_size,
            dtype=options.dtype,
            context_length=options.context_length,
            require_splittable=loaded.require_splittable,
        )
        # Each request computes by its `LayerRead`: no other forward is asked of the target.
        target = cast("Target", PartReader(stage, last_apart=False))
        self._executor = LocalExecutor(target, stage.make_caches, None, clock)
        scheduler = Scheduler(options.context_length, options.prefill_chunk)
        self._engine = Engine(self._executor, scheduler, clock, keeps_chunk=options.keeps_chunk)
        self.step_times = StepTimes()
        self.prefix_cache_bytes = 0
        self.prefix_hits: Mapping[CacheTier, int] = {}

    def layer_form(self, first: int, end: int) -> LayerForm:
        return self._views.form(first, end)

    def begin_read(
        self,
        begin: pb.ReadBegin,
        prefix: ReceivedPrefix | None,
        deliver: Deliver,
        on_fault: OnFault,
    ) -> Request:
        request = read_request(self._views, begin, prefix, deliver, on_fault)
        self._engine.add(request)
        return request

    def cancel(self, request: Request) -> None:
        self._engine.cancel(request)

    def step(self) -> bool:
        return self._engine.step()

    @property
    def live_requests(self) -> int:
        """Prompts that are being read."""
        return self._engine.live_requests

    def cache_bytes(self) -> int:
        """Bytes of their caches."""
        return self._executor.bytes

    def save_prefix(self) -> bool:
        """Keeps none."""
        return False
