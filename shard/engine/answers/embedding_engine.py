"""The engine of an embedder: reads inputs as prompts and ends with their pooled hidden states."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from ....mtp.batch_prompts import prefill_together
from ....mtp.probe import probe_ids
from ....mtp.sampler import Sampler
from ....mtp.schedule import prefill_ends
from ....mtp.seams import as_row
from ....mtp.stats import StatsCollector
from ....mtp.targets import FamilyTarget
from ....mtp.types import CacheTier, FinishReason, GenerationStats, Sampling
from ....placement.drafting import GENERATES_NOTHING
from ....proto import peer_pb2 as pb
from ...kernels.install import used
from ...model.embedder import PADDING, POOLINGS, Embedder
from ...model.load import Loaded
from ...model.open_model import MODEL_FAULTS, headline
from ..compute import ComputeThread, as_exception
from ..engine import Engine
from ..executor import LocalExecutor
from ..options import EngineOptions
from ..request import Embedding, Parameters, Request
from ..scheduler import Scheduler
from .probing import batching_refusal
from .public_faults import public_fault
from .request_limits import RequestLimits

MOST_RUNNING: Final = 64
"""Inputs of one request that the engine holds at once: others wait, so that the inputs of a later
request are not after all of them."""
NEAR: Final = 1e-5
"""Limit of the difference between an input's embedding in a batch and alone, in each number; where
a batch was measured to differ by more, each input has forwards of its own."""
SHORT_ROWS: Final = (40, 17, 9)
"""Rows of the inputs of the first probed batch: equal lengths would hide a wrong mask. The second
has the longest that shares a forward beside the shortest of them."""

Put = Callable[[tuple[int, bytes] | GenerationStats | BaseException], None]
"""Takes an input's index with its embedding, and last the stats or the error."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request as it reaches the engine: its inputs are tokenised, and its limits are checked."""

    name: str
    attempt: int
    prompts: Mapping[int, Sequence[int]]
    """The ids of each input, by its index in the client's request."""
    dimensions: int
    background: bool = False
    after_fault: bool = False
    """Whether a shared forward of an earlier attempt failed: then this one shares none."""


class EmbeddingEngine:
    """Computes embeddings. All methods but `drive` run on the compute thread."""

    def __init__(
        self, loaded: Loaded, options: EngineOptions, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`loaded`: a whole embedder. Raises LoadFailed."""
        stage, limits = loaded.model, loaded.expected
        self.hidden_size = limits.hidden_size
        self.limits = RequestLimits(options.context_length, limits.vocabulary)
        self.clock = clock
        self.kernels = used(loaded.kernels)
        self._options = options
        self.pooling = options.pooling
        self._embedder = Embedder(stage.model, limits.hidden_size)
        padding = PADDING if self._embedder.is_encoder else 0
        target = FamilyTarget(self._embedder, stage.rope_positions, padding)
        make_caches = list[Any] if self._embedder.is_encoder else stage.make_caches
        self.batching_reason = _sharing_refusal(options, target, make_caches, limits.vocabulary)
        """Why no inputs share forwards; empty where they may."""
        executor = LocalExecutor(target, make_caches, None, clock)
        scheduler = Scheduler(options.context_length, options.prefill_chunk)
        self._engine = Engine(executor, scheduler, clock, keeps_chunk=options.keeps_chunk)

    def drive(
        self, compute: ComputeThread, request: EmbeddingRequest, deliver: Put
    ) -> "EmbeddingRun":
        """Any thread: computes a request on the compute thread, which calls `deliver`."""
        compute.attach(self._engine.step)
        run = EmbeddingRun(self, self._engine, request, deliver)
        compute.post(run.begin)
        return run

    def new_request(self, request: EmbeddingRequest, index: int) -> Request:
        """The engine's request for one input."""
        prompt, alone = request.prompts[index], request.after_fault
        ends = prefill_ends(prompt, self._options.prefill_chunk)
        parameters = Parameters(
            f"{request.name}/{index}",
            request.attempt,
            prompt,
            Sampling(),
            pb.Limits(),
            pb.Drafting(),
            sharing=pb.Sharing(background=request.background),
        )
        return Request(
            parameters,
            # An encoder's rows attend to all others: one forward reads them.
            [len(prompt)] if self._embedder.is_encoder else ends,
            Sampler(parameters.sampling, 0),
            _NoAnswer(),
            embedding=Embedding(request.dimensions, self._options.pooling),
            batches_prompt=not (self.batching_reason or alone),
            uses_cache=False,
        )

    def public(self, fault: BaseException) -> Exception:
        """The error of a computation for its reader."""
        dtype = self._options.dtype
        return public_fault(
            as_exception(fault), None, dtype, is_whole=True, clear_prefixes=lambda: None
        )

    @property
    def live_requests(self) -> int:
        """Number of inputs that have begun and not ended."""
        return self._engine.live_requests

    def cache_bytes(self) -> int:
        """Bytes of the KV caches of all live inputs."""
        return self._engine.executor.bytes

    @property
    def prefix_cache_bytes(self) -> int:
        """0, since no input begins after another's."""
        return 0

    @property
    def prefix_hits(self) -> Mapping[CacheTier, int]:
        """Empty: see `prefix_cache_bytes`."""
        return {}

    def save_prefix(self) -> bool:
        """False: there is none to save."""
        return False


class EmbeddingRun:
    """A request in progress. All methods run on the compute thread."""

    def __init__(
        self, owner: EmbeddingEngine, engine: Engine, request: EmbeddingRequest, deliver: Put
    ) -> None:
        self._owner = owner
        self._engine = engine
        self._request = request
        self._deliver = deliver
        prompts = request.prompts
        # Inputs of similar length share a forward with little padding.
        self._waiting = deque(sorted(prompts, key=lambda index: -len(prompts[index])))
        self._running = set[Request]()
        self._stats = StatsCollector(owner.clock)
        self._has_ended = False

    def begin(self) -> None:
        """Adds as many inputs to the engine as may run; ends where none is left."""
        while not self._has_ended and self._waiting and len(self._running) < MOST_RUNNING:
            index = self._waiting.popleft()
            request = self._owner.new_request(self._request, index)
            request.finish = lambda end, request=request, index=index: self._finish(
                request, index, end
            )
            self._running.add(request)
            self._engine.add(request)
        if not (self._running or self._has_ended):
            self._has_ended = True
            self._deliver(self._final_stats())
            mx.clear_cache()

    def cancel(self) -> None:
        """Ends it, unless it has ended; nothing more is put."""
        self._has_ended = True
        running, self._running = self._running, set[Request]()
        for request in running:
            self._engine.cancel(request)

    def _finish(self, request: Request, index: int, end: FinishReason | BaseException) -> None:
        self._running.discard(request)
        if isinstance(end, BaseException):
            self.cancel()
            self._deliver(self._owner.public(end))
            return
        assert request.embedding is not None
        self._deliver((index, request.embedding.vector))
        self.begin()

    def _final_stats(self) -> GenerationStats:
        stats = GenerationStats(
            drafting_reason=GENERATES_NOTHING,
            prompt_tokens=sum(map(len, self._request.prompts.values())),
            resumes=self._request.attempt - 1,
            kernels=self._owner.kernels,
            batching_reason=self._owner.batching_reason,
        )
        return self._stats.finish(stats)


class _NoAnswer:
    """The stop condition of a request without an answer."""

    def push(self, token: int) -> FinishReason | None:
        raise AssertionError(f"an embedder gave the token {token}")


def _sharing_refusal(
    options: EngineOptions,
    target: FamilyTarget,
    make_caches: Callable[[], list[Any]],
    vocabulary: int,
) -> str:
    """Why inputs share no forward, measured on the loaded weights; "" where they may."""
    if reason := batching_refusal(options, make_caches()):
        return reason
    pool = POOLINGS[options.pooling]

    def unit(hidden: mx.array) -> mx.array:
        return pool(hidden) / mx.linalg.norm(pool(hidden))

    def change(rows: Sequence[int]) -> float:
        """The largest that a batch of inputs of these rows makes to any number; NaN is larger."""
        prompts = [as_row(probe_ids(vocabulary, 9 * i, 9 * i + n)) for i, n in enumerate(rows)]
        caches = [make_caches() for _ in prompts]
        together = map(unit, prefill_together(target, prompts, caches, [0] * len(prompts)))
        alone = (unit(target.hidden_batch(ids[None], make_caches())) for ids in prompts)
        return float(mx.abs(mx.stack([*alone]) - mx.stack([*together])).max())

    try:
        if (difference := change(SHORT_ROWS)) <= NEAR:
            longest = min(options.prefill_chunk // 2, options.context_length)
            difference = change((longest, SHORT_ROWS[-1]))
    except MODEL_FAULTS as fault:
        return f"this model cannot be computed in batches ({headline(fault)})"
    if difference <= NEAR:
        return ""
    return f"a batch changes embeddings by {difference:.1g} here, more than {NEAR:.0e}"
