"""The node's counters in Prometheus' text format, under vLLM's names where vLLM has one.

Names, labels and buckets are those of vLLM's `v1/metrics/loggers.py` and
`v1/spec_decode/metrics.py`, so that dashboards made for it show this node: they select by
`model_name` and `engine`, which is "0" here. What vLLM has no name for is `exo_node_*`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...placement.errors import InvalidRequest, NumericError, QueueFull
from ...placement.ids import ModelId
from .requests import Event, Finished, Started, TextDelta
from .totals import Totals

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Ending = Literal["stop", "length", "abort", "error", "rejected"]
"""vLLM's reasons, and `rejected`: refused for what it asked, or because too many wait."""
ENDINGS: Final[tuple[Ending, ...]] = ("stop", "length", "abort", "error", "rejected")

_LABELS: Final = ("model_name", "engine")
_ENGINE: Final = "0"
_FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_EACH_TOKEN_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_ANSWER_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS: Final = tuple(step * 10**power for power in range(5) for step in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class RunnerMemory:
    """What one runner of this node holds, in bytes."""

    model: str
    stage: int
    weights: int
    cache: int
    prefixes: int
    peak: int


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is true of the node when it is asked; the counts are by status, zeros included."""

    version: str
    nodes: Mapping[str, int]
    placements: Mapping[str, int]
    runners: Sequence[RunnerMemory]


class Metrics:
    """What happened to requests on this node; the sums over drafts are those of `totals`.

    Everything runs on the node's event loop. `clock` gives seconds from any origin.
    """

    def __init__(self, totals: Totals, clock: Callable[[], float] = time.monotonic) -> None:
        self._totals = totals
        self._clock = clock
        self._registry = CollectorRegistry()
        self._families = _Families(self._registry)

    def now(self) -> float:
        """When a request arrives, for `answer`."""
        return self._clock()

    def answer(self, model: ModelId, arrived: float | None = None) -> "AnswerMeter":
        """Measures the block that it is the context of: a request that `arrived` then, or now.

        `model` becomes a label, so it must be one that is known.
        """
        return AnswerMeter(self._families, (str(model), _ENGINE), self._clock, arrived)

    def render(self, state: NodeState) -> bytes:
        """All of it, as `CONTENT_TYPE`."""
        return generate_latest(self._registry) + generate_latest(_Scrape(self._totals, state))


class AnswerMeter:
    """One answer, counted once by how it ended; told of its events in order, it counts them too."""

    def __init__(
        self,
        families: "_Families",
        labels: tuple[str, str],
        clock: Callable[[], float],
        arrived: float | None = None,
    ) -> None:
        self._families = families
        self._labels = labels
        self._clock = clock
        self._arrived = self._last = clock() if arrived is None else arrived
        self._ran: float | None = None
        self._first: float | None = None
        self._prompt_tokens = 0
        self._tokens = 0
        self._over = False

    def __enter__(self) -> Self:
        self._families.introduce(self._labels)
        self._families.waiting.labels(*self._labels).inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, _: TracebackType | None
    ) -> None:
        match fault:
            case None | GeneratorExit() | asyncio.CancelledError():
                self._end("abort")  # the client left, unless the end was seen before
            case InvalidRequest() | QueueFull():
                self._end("rejected")
            case _:
                if isinstance(fault, NumericError):
                    self._families.numeric_errors.labels(*self._labels).inc()
                self._end("error")

    def running(self) -> None:
        """Its turn has come and its model is loaded; said again after a lost runner."""
        if self._ran is None:
            self._ran = self._clock()
            self._families.waiting.labels(*self._labels).dec()
            self._families.running.labels(*self._labels).inc()

    def saw(self, event: Event) -> None:
        """Call before the event is handed on."""
        match event:
            case Started(prompt_ids):
                self._prompt_tokens = len(prompt_ids)
                self._families.prompt_tokens.labels(*self._labels).inc(self._prompt_tokens)
            case TextDelta() if event.token_ids:
                self._emitted(len(event.token_ids))
            case Finished():
                families = self._families
                families.prefix_queries.labels(*self._labels).inc(event.prompt_tokens)
                families.prefix_hits.labels(*self._labels).inc(event.cached_tokens)
                batched = event.stats.get("batched_tokens", 0)
                families.batched_tokens.labels(*self._labels).inc(batched)
                self._end(event.reason)
            case _:
                pass

    def _emitted(self, tokens: int) -> None:
        now = self._clock()
        if self._first is None:
            self._first = now
            self._observe(self._families.spread.first_token, now - self._arrived)
        else:
            self._observe(self._families.spread.between_rounds, now - self._last)
        self._last = now
        self._tokens += tokens
        self._families.generation_tokens.labels(*self._labels).inc(tokens)

    def _end(self, how: Ending) -> None:
        if self._over:
            return
        self._over = True
        families = self._families
        held = families.waiting if self._ran is None else families.running
        held.labels(*self._labels).dec()
        families.endings.labels(*self._labels, how).inc()
        if how in ("stop", "length"):
            self._measure(families, self._clock())

    def _measure(self, families: "_Families", now: float) -> None:
        self._observe(families.spread.answer, now - self._arrived)
        self._observe(families.spread.prompt, self._prompt_tokens)
        self._observe(families.spread.generation, self._tokens)
        if self._ran is None or self._first is None:
            return
        self._observe(families.spread.queue, self._ran - self._arrived)
        self._observe(families.spread.prefill, self._first - self._ran)
        self._observe(families.spread.decode, self._last - self._first)
        if self._tokens > 1:
            each = (self._last - self._first) / (self._tokens - 1)
            self._observe(families.spread.each_token, each)

    def _observe(self, histogram: Histogram, value: float) -> None:
        histogram.labels(*self._labels).observe(value)


class _Spread:
    """The histograms of answers: times and sizes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, says: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, says, _LABELS, registry=registry, buckets=buckets)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token, waiting and loading included.",
            _FIRST_TOKEN_S,
        )
        self.between_rounds = histogram(
            "vllm:inter_token_latency_seconds",
            "Between the tokens of one round and those of the next; a round may emit several.",
            _EACH_TOKEN_S,
        )
        self.each_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "The mean time of an answer's tokens after the first.",
            _EACH_TOKEN_S,
        )
        self.answer = histogram(
            "vllm:e2e_request_latency_seconds",
            "From arrival to the end of a whole answer.",
            _ANSWER_S,
        )
        self.queue = histogram(
            "vllm:request_queue_time_seconds", "Waiting for the turn and for the model.", _ANSWER_S
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds", "From then to the first token.", _ANSWER_S
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _ANSWER_S
        )
        self.prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.generation = histogram(
            "vllm:request_generation_tokens", "Tokens of a whole answer.", _TOKENS
        )


class _Families:
    """The metrics of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, says: str) -> Gauge:
            return Gauge(name, says, _LABELS, registry=registry)

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(name, says, (*_LABELS, *labels), registry=registry)

        self.running = gauge("vllm:num_requests_running", "Requests that a runner works on.")
        self.waiting = gauge(
            "vllm:num_requests_waiting", "Requests that wait for their turn or for their model."
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.prefix_queries = counter(
            "vllm:prefix_cache_queries", "Tokens of prompts that were looked for among read ones."
        )
        self.prefix_hits = counter(
            "vllm:prefix_cache_hits", "Those of them that were found, and not read again."
        )
        self.generation_tokens = counter(
            "vllm:generation_tokens", "Tokens emitted, those of answers that broke off among them."
        )
        self.batched_tokens = counter(
            "exo_node_batched_tokens",
            "Those of finished answers that other requests shared a step of.",
        )
        self.endings = counter(
            "vllm:request_success",
            "Answers that ended, by how: stop, length, abort (the client left), error (the node's "
            "fault), rejected (for what it asked, or because too many wait).",
            "finished_reason",
        )
        self.numeric_errors = counter(
            "exo_node_numeric_errors",
            "Answers that ended because the model gave NaN or infinity.",
        )
        self.spread = _Spread(registry)

    def introduce(self, labels: tuple[str, str]) -> None:
        """A model's series at 0, so that a rate sees its first request."""
        for how in ENDINGS:
            _ = self.endings.labels(*labels, how)
        for counter in (
            self.prompt_tokens,
            self.prefix_queries,
            self.prefix_hits,
            self.generation_tokens,
            self.numeric_errors,
        ):
            _ = counter.labels(*labels)


class _Scrape(Collector):
    """What is summed or known elsewhere, as metrics; made anew each time it is asked."""

    def __init__(self, totals: Totals, state: NodeState) -> None:
        self._totals = totals
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._drafts()
        yield from self._draft_details()
        yield from self._node()
        yield from self._runners()

    def _drafts(self) -> Iterator[Metric]:
        rounds = CounterMetricFamily(
            "vllm:spec_decode_num_drafts", "Rounds with at least one draft.", labels=_LABELS
        )
        proposed = CounterMetricFamily(
            "vllm:spec_decode_num_draft_tokens", "Drafts proposed.", labels=_LABELS
        )
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens", "Drafts that were emitted.", labels=_LABELS
        )
        for model, totals in self._totals:
            labels = (str(model), _ENGINE)
            rounds.add_metric(labels, totals.spec_decode_rounds)
            proposed.add_metric(labels, totals.proposed_draft_tokens)
            accepted.add_metric(labels, totals.accepted_draft_tokens)
        yield from (rounds, proposed, accepted)

    def _draft_details(self) -> Iterator[Metric]:
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were emitted, by their place in the round, from 0.",
            labels=(*_LABELS, "position"),
        )
        by_k = CounterMetricFamily(
            "exo_node_draft_rounds", "Rounds by how much they drafted.", labels=(*_LABELS, "k")
        )
        answers = CounterMetricFamily(
            "exo_node_answers",
            "Whole answers by how K was chosen and drafts accepted.",
            labels=(*_LABELS, "draft_policy", "acceptance_rule"),
        )
        parked = CounterMetricFamily(
            "exo_node_head_parked_answers",
            "Whole answers in or before which the draft head gave NaN or infinity.",
            labels=_LABELS,
        )
        identity = InfoMetricFamily(
            "exo_node_greedy_identity",
            "Whether a verify computes what single steps do, as the last drafted answer reported.",
            labels=_LABELS,
        )
        for model, totals in self._totals:
            labels = (str(model), _ENGINE)
            for position, count in enumerate(totals.accepted_per_position):
                per_position.add_metric((*labels, str(position)), count)
            for k, count in enumerate(totals.draft_k_histogram):
                by_k.add_metric((*labels, str(k)), count)
            for how, count in totals.by_policy_and_rule.items():
                answers.add_metric((*labels, *how), count)
            parked.add_metric(labels, totals.parked_requests)
            if totals.greedy_identity is not None:
                identity.add_metric(labels, {"greedy_identity": totals.greedy_identity})
        yield from (per_position, by_k, answers, parked, identity)

    def _node(self) -> Iterator[Metric]:
        state = self._state
        build = InfoMetricFamily("exo_node_build", "This node's version.")
        build.add_metric((), {"version": state.version})
        nodes = GaugeMetricFamily(
            "exo_node_nodes", "Nodes of the cluster as this one sees them.", labels=("status",)
        )
        placements = GaugeMetricFamily(
            "exo_node_placements", "Placements that this node holds as head.", labels=("status",)
        )
        for family, counts in ((nodes, state.nodes), (placements, state.placements)):
            for status, count in counts.items():
                family.add_metric((status,), count)
        yield from (build, nodes, placements)

    def _runners(self) -> Iterator[Metric]:
        labels = ("model_name", "stage")
        weights = GaugeMetricFamily(
            "exo_node_runner_weights_bytes", "Weights in memory.", labels=labels
        )
        cache = GaugeMetricFamily(
            "exo_node_runner_cache_bytes", "Caches of answers in progress.", labels=labels
        )
        prefixes = GaugeMetricFamily(
            "exo_node_runner_prefix_cache_bytes", "Kept of prompts that were read.", labels=labels
        )
        peak = GaugeMetricFamily(
            "exo_node_runner_peak_memory_bytes", "Most memory so far.", labels=labels
        )
        for runner in self._state.runners:
            at = (runner.model, str(runner.stage))
            weights.add_metric(at, runner.weights)
            cache.add_metric(at, runner.cache)
            prefixes.add_metric(at, runner.prefixes)
            peak.add_metric(at, runner.peak)
        yield from (weights, cache, prefixes, peak)
