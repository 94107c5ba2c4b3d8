"""The node's counters in Prometheus' text format, under vLLM's names where vLLM has one.

Names, labels and buckets are those of vLLM's `v1/metrics/loggers.py` and
`v1/spec_decode/metrics.py`, so that dashboards made for it show this node: they select by
`model_name` and `engine`, which is "0" here. What vLLM has no name for is `exo_node_*`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Literal, Self, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ...placement.errors import InvalidRequest, NumericError, QueueFull
from ...placement.ids import ModelId
from .requests import Embedded, Event, Finished, Started, TextDelta
from .scrape import ENGINE, LABELS, NodeState, Scrape
from .totals import Totals

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Ending = Literal["stop", "length", "abort", "error", "rejected"]
"""vLLM's reasons, and `rejected`: refused for its content, or because too many requests wait."""

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


class Metrics:
    """The metrics of this node's requests; the sums over drafts are those of `totals`.

    Everything runs on the node's event loop. `clock` gives seconds from any origin.
    """

    def __init__(self, totals: Totals, clock: Callable[[], float] = time.monotonic) -> None:
        self.totals = totals
        self._clock = clock
        self._registry = CollectorRegistry()
        self._families = _Families(self._registry)

    def now(self) -> float:
        """The present time, which `answer` takes as a request's arrival."""
        return self._clock()

    def answer(self, model: ModelId, arrived: float | None = None) -> "AnswerMeter":
        """A context that measures one request, which arrived at `arrived`; None: now.

        `model` becomes a label, so it must be a known one: names are not bounded otherwise.
        """
        return AnswerMeter(self._families, (str(model), ENGINE), self._clock, arrived)

    def render(self, state: NodeState) -> bytes:
        """Every metric, as `CONTENT_TYPE`."""
        return generate_latest(self._registry) + generate_latest(Scrape(self.totals, state))


class _Families:
    """The counters, gauges and histograms of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, documentation: str) -> Gauge:
            return Gauge(name, documentation, LABELS, registry=registry)

        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name, documentation, (*LABELS, *labels), registry=registry)

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
        self.spread = _Histograms(registry)

    def introduce(self, labels: tuple[str, str]) -> None:
        """Creates a model's series at 0, so that a rate counts its first request."""
        for ending in get_args(Ending):
            _ = self.endings.labels(*labels, ending)
        for counter in (
            self.prompt_tokens,
            self.prefix_queries,
            self.prefix_hits,
            self.generation_tokens,
            self.numeric_errors,
        ):
            _ = counter.labels(*labels)


class _Histograms:
    """The histograms of answers: times and sizes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, documentation, LABELS, registry=registry, buckets=buckets)

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


class AnswerMeter:
    """Measures one answer from its events, and counts it once by its ending."""

    def __init__(
        self,
        families: _Families,
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
        self._ended = False

    def __enter__(self) -> Self:
        self._families.introduce(self._labels)
        self._families.waiting.labels(*self._labels).inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, _: TracebackType | None
    ) -> None:
        match fault:
            case None | GeneratorExit() | asyncio.CancelledError():
                self._end("abort")  # the client left, unless the answer had ended
            case InvalidRequest() | QueueFull():
                self._end("rejected")
            case _:
                if isinstance(fault, NumericError):
                    self._families.numeric_errors.labels(*self._labels).inc()
                self._end("error")

    def mark_running(self) -> None:
        """Records that the request's turn has come and its model is loaded.

        A further call, after a lost runner, changes nothing.
        """
        if self._ran is None:
            self._ran = self._clock()
            self._families.waiting.labels(*self._labels).dec()
            self._families.running.labels(*self._labels).inc()

    def record(self, event: Event) -> None:
        """Counts an event. Call it before the event is passed on."""
        match event:
            case Started(prompt_ids):
                self._prompt_tokens = len(prompt_ids)
                self._families.prompt_tokens.labels(*self._labels).inc(self._prompt_tokens)
            case Embedded():
                self._prompt_tokens += event.tokens
                self._families.prompt_tokens.labels(*self._labels).inc(event.tokens)
            case TextDelta() if event.token_ids:
                self._record_tokens(len(event.token_ids))
            case Finished():
                families = self._families
                families.prefix_queries.labels(*self._labels).inc(event.prompt_tokens)
                families.prefix_hits.labels(*self._labels).inc(event.cached_tokens)
                batched = event.stats.get("batched_tokens", 0)
                families.batched_tokens.labels(*self._labels).inc(batched)
                self._end(event.reason)
            case _:
                pass

    def _record_tokens(self, tokens: int) -> None:
        now = self._clock()
        if self._first is None:
            self._first = now
            self._observe(self._families.spread.first_token, now - self._arrived)
        else:
            self._observe(self._families.spread.between_rounds, now - self._last)
        self._last = now
        self._tokens += tokens
        self._families.generation_tokens.labels(*self._labels).inc(tokens)

    def _end(self, ending: Ending) -> None:
        if self._ended:
            return
        self._ended = True
        families = self._families
        gauge = families.waiting if self._ran is None else families.running
        gauge.labels(*self._labels).dec()
        families.endings.labels(*self._labels, ending).inc()
        if ending in ("stop", "length"):
            self._measure(families.spread, self._clock())

    def _measure(self, spread: _Histograms, now: float) -> None:
        self._observe(spread.answer, now - self._arrived)
        self._observe(spread.prompt, self._prompt_tokens)
        self._observe(spread.generation, self._tokens)
        if self._ran is None or self._first is None:
            return
        self._observe(spread.queue, self._ran - self._arrived)
        self._observe(spread.prefill, self._first - self._ran)
        self._observe(spread.decode, self._last - self._first)
        if self._tokens > 1:
            self._observe(spread.each_token, (self._last - self._first) / (self._tokens - 1))

    def _observe(self, histogram: Histogram, value: float) -> None:
        histogram.labels(*self._labels).observe(value)
