"""The metrics of requests: counters, gauges and histograms, under vLLM's names and labels."""

from collections.abc import Sequence
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Ending = Literal["stop", "length", "abort", "error", "rejected"]
"""vLLM's reasons, and `rejected`: refused for what it asked, or because too many wait."""
ENDINGS: Final[tuple[Ending, ...]] = ("stop", "length", "abort", "error", "rejected")

LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"
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


class _Spread:
    """The histograms of answers: times and sizes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, says: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, says, LABELS, registry=registry, buckets=buckets)

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


class Families:
    """The metrics of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, says: str) -> Gauge:
            return Gauge(name, says, LABELS, registry=registry)

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(name, says, (*LABELS, *labels), registry=registry)

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
