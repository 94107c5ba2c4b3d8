"""Metrics of sums and states that other objects hold: drafts, nodes, placements, runners."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...proto import peer_pb2 as pb
from .totals import Totals

LABELS: Final = ("model_name", "engine")
ENGINE: Final = "0"
_PREFIX_TIERS: Final = ("memory", "disk", "peer")

_TOTALS: Final = (
    ("vllm:spec_decode_num_drafts", "Rounds with at least one draft.", "spec_decode_rounds"),
    ("vllm:spec_decode_num_draft_tokens", "Drafts proposed.", "proposed_draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Drafts that were emitted.", "accepted_draft_tokens"),
    (
        "exo_node_head_parked_answers",
        "Whole answers in or before which the draft head gave NaN or infinity.",
        "parked_requests",
    ),
    (
        "exo_node_looped_answers",
        "Answers with tools that ended because they repeated themselves.",
        "looped_requests",
    ),
)
"""Counters of numbers of `ModelTotals`: name, documentation, and the number's."""
_LISTS: Final = (
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were emitted, by their place in the round, from 0.",
        "accepted_per_position",
        "position",
    ),
    ("exo_node_draft_rounds", "Rounds by how much they drafted.", "draft_k_histogram", "k"),
)
"""The same of lists, whose index is a label."""
_RUNNERS: Final = (
    ("exo_node_runner_weights_bytes", "Weights in memory.", "weight_bytes"),
    ("exo_node_runner_cache_bytes", "Caches of answers in progress.", "cache_bytes"),
    ("exo_node_runner_prefix_cache_bytes", "Kept of prompts that were read.", "prefix_cache_bytes"),
    (
        "exo_node_runner_prefix_disk_bytes",
        "Kept of prompts that were read, on disk.",
        "prefix_disk_bytes",
    ),
    ("exo_node_runner_peak_memory_bytes", "Most memory so far.", "peak_memory_bytes"),
)
"""Gauges of `StageState`: name, documentation, and the field."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """The node at the time of one scrape; the counts are by status, zeros included."""

    version: str
    nodes: Mapping[str, int]
    placements: Mapping[str, int]
    runners: Sequence[pb.StageState]
    """The runners of this node."""
    gpu_faults: Mapping[tuple[str, str], int]
    """Runners of this node that GPU faults ended, by model and fault."""


class Scrape(Collector):
    """The metrics of one scrape."""

    def __init__(self, totals: Totals, state: NodeState) -> None:
        self._totals = totals
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._drafts()
        yield from self._node()
        yield from self._runners()

    def _drafts(self) -> Iterator[Metric]:
        models = [((str(model), ENGINE), totals) for model, totals in self._totals]
        for name, documentation, field in _TOTALS:
            family = CounterMetricFamily(name, documentation, labels=LABELS)
            yield _filled(family, ((model, getattr(totals, field)) for model, totals in models))
        for name, documentation, field, label in _LISTS:
            family = CounterMetricFamily(name, documentation, labels=(*LABELS, label))
            samples = (
                ((*model, str(index)), count)
                for model, totals in models
                for index, count in enumerate(getattr(totals, field))
            )
            yield _filled(family, samples)
        answers = CounterMetricFamily(
            "exo_node_answers",
            "Whole answers by how K was chosen and drafts accepted.",
            labels=(*LABELS, "draft_policy", "acceptance_rule"),
        )
        by_rule = ((model, each) for model, t in models for each in t.by_policy_and_rule.items())
        yield _filled(answers, (((*model, *rule), count) for model, (rule, count) in by_rule))
        identity = InfoMetricFamily(
            "exo_node_greedy_identity",
            "Whether a verify computes what single steps do, as the last drafted answer reported.",
            labels=LABELS,
        )
        for model, totals in models:
            if totals.greedy_identity is not None:
                identity.add_metric(model, {"greedy_identity": totals.greedy_identity})
        yield identity

    def _node(self) -> Iterator[Metric]:
        build = InfoMetricFamily("exo_node_build", "This node's version.")
        build.add_metric((), {"version": self._state.version})
        yield build
        for name, documentation, counts in (
            ("exo_node_nodes", "Nodes of the cluster as this one sees them.", self._state.nodes),
            (
                "exo_node_placements",
                "Placements that this node holds as head.",
                self._state.placements,
            ),
        ):
            family = GaugeMetricFamily(name, documentation, labels=("status",))
            yield _filled(family, (((status,), count) for status, count in counts.items()))

    def _runners(self) -> Iterator[Metric]:
        faults = CounterMetricFamily(
            "exo_node_gpu_faults", "Runners that a GPU fault ended.", labels=("model_name", "fault")
        )
        yield _filled(faults, self._state.gpu_faults.items())
        labels = ("model_name", "stage")
        runners = [((each.model, str(each.stage)), each) for each in self._state.runners]
        for name, documentation, field in _RUNNERS:
            family = GaugeMetricFamily(name, documentation, labels=labels)
            yield _filled(family, ((runner, getattr(state, field)) for runner, state in runners))
        hits = CounterMetricFamily(
            "exo_node_runner_prefix_tokens",
            "Tokens of prompts that were not read again, by where their state was.",
            labels=(*labels, "tier"),
        )
        samples = (
            ((*runner, tier), getattr(state, f"prefix_{tier}_rows"))
            for runner, state in runners
            for tier in _PREFIX_TIERS
        )
        yield _filled(hits, samples)


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
