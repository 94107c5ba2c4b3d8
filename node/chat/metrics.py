"""The node's counters in Prometheus' text format, under vLLM's names where vLLM has one.

Names, labels and buckets are those of vLLM's `v1/metrics/loggers.py` and
`v1/spec_decode/metrics.py`, so that dashboards made for it show this node: they select by
`model_name` and `engine`, which is "0" here. What vLLM has no name for is `exo_node_*`.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from ...placement.errors import InvalidRequest, NumericError, QueueFull
from ...placement.ids import ModelId
from .metric_families import ENGINE, Ending, Families
from .requests import Event, Finished, Started, TextDelta
from .scrape import NodeState, Scrape
from .totals import Totals

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What happened to requests on this node; the sums over drafts are those of `totals`.

    Everything runs on the node's event loop. `clock` gives seconds from any origin.
    """

    def __init__(self, totals: Totals, clock: Callable[[], float] = time.monotonic) -> None:
        self._totals = totals
        self._clock = clock
        self._registry = CollectorRegistry()
        self._families = Families(self._registry)

    def now(self) -> float:
        """When a request arrives, for `answer`."""
        return self._clock()

    def answer(self, model: ModelId, arrived: float | None = None) -> "AnswerMeter":
        """Measures the block that it is the context of: a request that `arrived` then, or now.

        `model` becomes a label, so it must be one that is known.
        """
        return AnswerMeter(self._families, (str(model), ENGINE), self._clock, arrived)

    def render(self, state: NodeState) -> bytes:
        """All of it, as `CONTENT_TYPE`."""
        return generate_latest(self._registry) + generate_latest(Scrape(self._totals, state))


class AnswerMeter:
    """One answer, counted once by how it ended; told of its events in order, it counts them too."""

    def __init__(
        self,
        families: "Families",
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

    def _measure(self, families: "Families", now: float) -> None:
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
