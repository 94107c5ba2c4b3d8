"""The node's counters in Prometheus' text format, under vLLM's names where vLLM has one.

Names, labels and buckets are those of vLLM's `v1/metrics/loggers.py` and
`v1/spec_decode/metrics.py`, so that dashboards made for it show this node: they select by
`model_name` and `engine`, which is "0" here. What vLLM has no name for is `exo_node_*`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
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

_WAITING: Final = "vllm:num_requests_waiting"
_RUNNING: Final = "vllm:num_requests_running"
_GAUGES: Final[Mapping[str, str]] = {
    _WAITING: "Requests that wait for their turn or for their model.",
    _RUNNING: "Requests that a runner works on.",
}
_COUNTERS: Final[Mapping[str, str]] = {
    "vllm:prompt_tokens": "Tokens of prompts.",
    "vllm:prefix_cache_queries": "Tokens of prompts that were looked for among read ones.",
    "vllm:prefix_cache_hits": "Those of them that were found, and not read again.",
    "vllm:generation_tokens": "Tokens emitted, those of answers that broke off among them.",
    "exo_node_batched_tokens": "Those of finished answers that other requests shared a step of.",
    "exo_node_numeric_errors": "Answers that ended because the model gave NaN or infinity.",
}
_HISTOGRAMS: Final[Mapping[str, tuple[str, Sequence[float]]]] = {
    "vllm:time_to_first_token_seconds": (
        "From a request's arrival to its first token, waiting and loading included.",
        _FIRST_TOKEN_S,
    ),
    "vllm:inter_token_latency_seconds": (
        "Between the tokens of one round and those of the next; a round may emit several.",
        _EACH_TOKEN_S,
    ),
    "vllm:request_time_per_output_token_seconds": (
        "The mean time of an answer's tokens after the first.",
        _EACH_TOKEN_S,
    ),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end of a whole answer.", _ANSWER_S),
    "vllm:request_queue_time_seconds": ("Waiting for the turn and for the model.", _ANSWER_S),
    "vllm:request_prefill_time_seconds": ("From then to the first token.", _ANSWER_S),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", _ANSWER_S),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "vllm:request_generation_tokens": ("Tokens of a whole answer.", _TOKENS),
}


class Metrics:
    """The metrics of this node's requests; the sums of final stats go to `totals`.

    Everything runs on the node's event loop. `clock` gives seconds from any origin.
    """

    def __init__(self, totals: Totals, clock: Callable[[], float] = time.monotonic) -> None:
        self.totals = totals
        self.now = clock
        """The present time, which `answer` takes as a request's arrival."""
        self._registry = registry = CollectorRegistry()
        self.gauges = {
            name: Gauge(name, documentation, LABELS, registry=registry)
            for name, documentation in _GAUGES.items()
        }
        self.counters = {
            name: Counter(name, documentation, LABELS, registry=registry)
            for name, documentation in _COUNTERS.items()
        }
        self.histograms = {
            name: Histogram(name, documentation, LABELS, registry=registry, buckets=buckets)
            for name, (documentation, buckets) in _HISTOGRAMS.items()
        }
        self.endings = Counter(
            "vllm:request_success",
            "Answers that ended, by how: stop, length, abort (the client left), error (the node's "
            "fault), rejected (for what it asked, or because too many wait).",
            (*LABELS, "finished_reason"),
            registry=registry,
        )

    def answer(self, model: ModelId, arrived: float | None = None) -> "AnswerMeter":
        """A context that measures one request, which arrived at `arrived`, by default now.

        `model` becomes a label, so it must be a known one: names are not bounded otherwise.
        """
        return AnswerMeter(self, model, self.now() if arrived is None else arrived)

    def introduce(self, labels: tuple[str, str]) -> None:
        """Creates a model's series at 0, so that a rate counts its first request."""
        for ending in get_args(Ending):
            _ = self.endings.labels(*labels, ending)
        for counter in self.counters.values():
            _ = counter.labels(*labels)

    def render(self, state: NodeState) -> bytes:
        """Every metric, as `CONTENT_TYPE`."""
        return generate_latest(self._registry) + generate_latest(Scrape(self.totals, state))


class AnswerMeter:
    """Measures one answer from its events, and counts it once by its ending."""

    def __init__(self, metrics: Metrics, model: ModelId, arrived: float) -> None:
        self._metrics = metrics
        self._model = model
        self._labels = (str(model), ENGINE)
        self._arrived = self._last = arrived
        self._ran: float | None = None
        self._first: float | None = None
        self._prompt_tokens = 0
        self._tokens = 0
        self._ended = False

    def __enter__(self) -> Self:
        self._metrics.introduce(self._labels)
        self._move(_WAITING, 1)
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
                    self._count("exo_node_numeric_errors", 1)
                self._end("error")

    def mark_running(self) -> None:
        """Records that the request's turn has come and its model is loaded.

        A further call, after a lost runner, changes nothing.
        """
        if self._ran is None:
            self._ran = self._metrics.now()
            self._move(_WAITING, -1)
            self._move(_RUNNING, 1)

    def record(self, event: Event) -> None:
        """Counts an event. Call it before the event is passed on."""
        match event:
            case Started(prompt_ids):
                self._prompt_tokens = len(prompt_ids)
                self._count("vllm:prompt_tokens", self._prompt_tokens)
            case Embedded():
                self._prompt_tokens += event.tokens
                self._count("vllm:prompt_tokens", event.tokens)
            case TextDelta() if event.token_ids:
                self._record_tokens(len(event.token_ids))
            case Finished():
                self._count("vllm:prefix_cache_queries", event.prompt_tokens)
                self._count("vllm:prefix_cache_hits", event.cached_tokens)
                self._count("exo_node_batched_tokens", event.stats.get("batched_tokens", 0))
                self._metrics.totals.add(
                    self._model, event.completion_tokens, event.stats, event.prompt_tokens
                )
                self._end(event.reason)
            case _:
                pass

    def _record_tokens(self, tokens: int) -> None:
        now = self._metrics.now()
        if self._first is None:
            self._first = now
            self._observe("vllm:time_to_first_token_seconds", now - self._arrived)
        else:
            self._observe("vllm:inter_token_latency_seconds", now - self._last)
        self._last = now
        self._tokens += tokens
        self._count("vllm:generation_tokens", tokens)

    def _end(self, ending: Ending) -> None:
        if self._ended:
            return
        self._ended = True
        self._move(_WAITING if self._ran is None else _RUNNING, -1)
        self._metrics.endings.labels(*self._labels, ending).inc()
        if ending in ("stop", "length"):
            self._measure(self._metrics.now())

    def _measure(self, now: float) -> None:
        self._observe("vllm:e2e_request_latency_seconds", now - self._arrived)
        self._observe("vllm:request_prompt_tokens", self._prompt_tokens)
        self._observe("vllm:request_generation_tokens", self._tokens)
        if self._ran is None or self._first is None:
            return
        decode_s = self._last - self._first
        self._observe("vllm:request_queue_time_seconds", self._ran - self._arrived)
        self._observe("vllm:request_prefill_time_seconds", self._first - self._ran)
        self._observe("vllm:request_decode_time_seconds", decode_s)
        if self._tokens > 1:
            each_s = decode_s / (self._tokens - 1)
            self._observe("vllm:request_time_per_output_token_seconds", each_s)

    def _move(self, gauge: str, by: int) -> None:
        self._metrics.gauges[gauge].labels(*self._labels).inc(by)

    def _count(self, counter: str, by: int) -> None:
        self._metrics.counters[counter].labels(*self._labels).inc(by)

    def _observe(self, histogram: str, value: float) -> None:
        self._metrics.histograms[histogram].labels(*self._labels).observe(value)
