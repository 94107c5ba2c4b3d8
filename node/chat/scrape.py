"""Metrics of what is summed or known elsewhere: drafts, nodes, placements, runners."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .metric_families import ENGINE, LABELS
from .totals import Totals


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


class Scrape(Collector):
    """Made for one reading of the metrics."""

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
            "vllm:spec_decode_num_drafts", "Rounds with at least one draft.", labels=LABELS
        )
        proposed = CounterMetricFamily(
            "vllm:spec_decode_num_draft_tokens", "Drafts proposed.", labels=LABELS
        )
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens", "Drafts that were emitted.", labels=LABELS
        )
        for model, totals in self._totals:
            labels = (str(model), ENGINE)
            rounds.add_metric(labels, totals.spec_decode_rounds)
            proposed.add_metric(labels, totals.proposed_draft_tokens)
            accepted.add_metric(labels, totals.accepted_draft_tokens)
        yield from (rounds, proposed, accepted)

    def _draft_details(self) -> Iterator[Metric]:
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were emitted, by their place in the round, from 0.",
            labels=(*LABELS, "position"),
        )
        by_k = CounterMetricFamily(
            "exo_node_draft_rounds", "Rounds by how much they drafted.", labels=(*LABELS, "k")
        )
        answers = CounterMetricFamily(
            "exo_node_answers",
            "Whole answers by how K was chosen and drafts accepted.",
            labels=(*LABELS, "draft_policy", "acceptance_rule"),
        )
        parked = CounterMetricFamily(
            "exo_node_head_parked_answers",
            "Whole answers in or before which the draft head gave NaN or infinity.",
            labels=LABELS,
        )
        identity = InfoMetricFamily(
            "exo_node_greedy_identity",
            "Whether a verify computes what single steps do, as the last drafted answer reported.",
            labels=LABELS,
        )
        for model, totals in self._totals:
            labels = (str(model), ENGINE)
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
