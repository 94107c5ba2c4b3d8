"""Metrics as Prometheus' own parser reads them, and the stats that they are made of."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from exo_node.mtp.types import GenerationStats
from exo_node.node.chat.wire import stats_to_json
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.runner.generator_wire import stats_to_wire

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]


def sampled(text: bytes) -> Samples:
    """Every sample by name and labels, read by Prometheus' own parser; each is there once."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def of_demo(samples: Samples, name: str, **labels: str) -> float | None:
    expected = {"engine": "0", "model_name": "demo", **labels}
    return samples.get((name, tuple(sorted(expected.items()))))


def wire_stats_of(tokens: int = 7) -> pb.Stats:
    """The final stats of one answer: 3 rounds of K = 2, of 6 drafts 4 accepted."""
    drafted: dict[str, Any] = {
        "spec_decode_rounds": 3,
        "proposed_draft_tokens": 6,
        "accepted_draft_tokens": 4,
        "accepted_per_position": (3, 1),
        "draft_k_histogram": (0, 0, 3),
        "draft_policy": "fixed",
    }
    stats = GenerationStats("native_mtp", 2, "", "greedy", 5, tokens, **drafted)
    return stats_to_wire(stats, "bitwise")


def stats_of(tokens: int = 7, **changes: Any) -> dict[str, Any]:
    """The same as `generation_stats`."""
    return {**stats_to_json(wire_stats_of(tokens)), **changes}


PLAIN: Mapping[str, Any] = {
    "drafter_kind": "none",
    "spec_decode_rounds": 0,
    "proposed_draft_tokens": 0,
    "accepted_draft_tokens": 0,
    "accepted_per_position": (),
    "draft_k_histogram": (6,),
    "draft_policy": "none",
    "greedy_identity": "off",
}
