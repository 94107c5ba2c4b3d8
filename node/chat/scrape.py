"""Metrics of sums and states that other objects hold: drafts, nodes, placements, runners."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .totals import ModelTotals, Totals

LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"
PREFIX_TIERS: Final = ("memory", "disk", "peer")


@dataclass(frozen=True, slots=True)
class RunnerMemory:
    """The memory of one runner of this node, in bytes."""

    model: str
    stage: int
    weights: int
    cache: int
    prefixes: int
    prefixes_on_disk: int
    prefix_rows: Mapping[str, int]
    """Tokens of prompts that were not read again, by the tier that had their state."""
    peak: int


@dataclass(frozen=True, slots=True)
class NodeState:
    """The node at the time of one scrape; the counts are by status, zeros included."""

    version: str
    nodes: Mapping[str, int]
    placements: Mapping[str, int]
    runners: Sequence[RunnerMemory]


class Scrape(Collector):
    """The metrics of one scrape."""

    def __init__(self, totals: Totals, state: NodeState) -> None:
        self._totals = totals
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._drafts()
        yield from self._node()
        yield from self._runners()

    def _counter(
        self,
        name: str,
        documentation: str,
        samples: Callable[[ModelTotals], Mapping[tuple[str, ...], int]],
        *labels: str,
    ) -> Metric:
        family = CounterMetricFamily(name, documentation, labels=(*LABELS, *labels))
        for model, totals in self._totals:
            for values, count in samples(totals).items():
                family.add_metric((str(model), ENGINE, *values), count)
        return family

    def _drafts(self) -> Iterator[Metric]:
        yield self._counter(
            "vllm:spec_decode_num_drafts",
            "Rounds with at least one draft.",
            lambda totals: {(): totals.spec_decode_rounds},
        )
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens",
            "Drafts proposed.",
            lambda totals: {(): totals.proposed_draft_tokens},
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Drafts that were emitted.",
            lambda totals: {(): totals.accepted_draft_tokens},
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were emitted, by their place in the round, from 0.",
            lambda totals: _by_index(totals.accepted_per_position),
            "position",
        )
        yield self._counter(
            "exo_node_draft_rounds",
            "Rounds by how much they drafted.",
            lambda totals: _by_index(totals.draft_k_histogram),
            "k",
        )
        yield self._counter(
            "exo_node_answers",
            "Whole answers by how K was chosen and drafts accepted.",
            lambda totals: totals.by_policy_and_rule,
            "draft_policy",
            "acceptance_rule",
        )
        yield self._counter(
            "exo_node_head_parked_answers",
            "Whole answers in or before which the draft head gave NaN or infinity.",
            lambda totals: {(): totals.parked_requests},
        )
        yield self._counter(
            "exo_node_looped_answers",
            "Answers with tools that ended because they repeated themselves.",
            lambda totals: {(): totals.looped_requests},
        )
        identity = InfoMetricFamily(
            "exo_node_greedy_identity",
            "Whether a verify computes what single steps do, as the last drafted answer reported.",
            labels=LABELS,
        )
        for model, totals in self._totals:
            if totals.greedy_identity is not None:
                value = {"greedy_identity": totals.greedy_identity}
                identity.add_metric((str(model), ENGINE), value)
        yield identity

    def _node(self) -> Iterator[Metric]:
        build = InfoMetricFamily("exo_node_build", "This node's version.")
        build.add_metric((), {"version": self._state.version})
        yield build

        def by_status(name: str, documentation: str, counts: Mapping[str, int]) -> Metric:
            family = GaugeMetricFamily(name, documentation, labels=("status",))
            for status, count in counts.items():
                family.add_metric((status,), count)
            return family

        nodes, placements = self._state.nodes, self._state.placements
        yield by_status("exo_node_nodes", "Nodes of the cluster as this one sees them.", nodes)
        yield by_status(
            "exo_node_placements", "Placements that this node holds as head.", placements
        )

    def _runners(self) -> Iterator[Metric]:
        def gauge(name: str, documentation: str, nbytes: Callable[[RunnerMemory], int]) -> Metric:
            family = GaugeMetricFamily(name, documentation, labels=("model_name", "stage"))
            for runner in self._state.runners:
                family.add_metric((runner.model, str(runner.stage)), nbytes(runner))
            return family

        yield gauge(
            "exo_node_runner_weights_bytes", "Weights in memory.", lambda each: each.weights
        )
        yield gauge(
            "exo_node_runner_cache_bytes",
            "Caches of answers in progress.",
            lambda each: each.cache,
        )
        yield gauge(
            "exo_node_runner_prefix_cache_bytes",
            "Kept of prompts that were read.",
            lambda each: each.prefixes,
        )
        yield gauge(
            "exo_node_runner_prefix_disk_bytes",
            "Kept of prompts that were read, on disk.",
            lambda each: each.prefixes_on_disk,
        )
        hits = CounterMetricFamily(
            "exo_node_runner_prefix_tokens",
            "Tokens of prompts that were not read again, by where their state was.",
            labels=("model_name", "stage", "tier"),
        )
        for runner in self._state.runners:
            for tier, rows in runner.prefix_rows.items():
                hits.add_metric((runner.model, str(runner.stage), tier), rows)
        yield hits
        yield gauge(
            "exo_node_runner_peak_memory_bytes", "Most memory so far.", lambda each: each.peak
        )


def _by_index(counts: Sequence[int]) -> dict[tuple[str, ...], int]:
    return {(str(index),): count for index, count in enumerate(counts)}
