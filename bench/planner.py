"""Times the planner for 2 to 16 nodes: `python bench/planner.py`.

Random clusters of nine kinds of node, links of 0.1 to 6 ms, models of which some need every node.
Exit status 1 if a plan took more than LIMIT_S of processor time.
"""

import random
import statistics
import sys
import time

from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, LinkFacts, NodeFacts
from exo_node.placement.errors import InsufficientMemory
from exo_node.placement.ids import NodeId
from exo_node.placement.library import parse_card
from exo_node.placement.plan import Preview, preview

CLUSTERS = 40
LIMIT_S = 0.25
MEMORY_GB = (16, 24, 32, 48, 64, 96, 128, 192, 512)
BANDWIDTH_GB = (100, 120, 150, 273, 300, 400, 410, 546, 819)


def main() -> int:
    print("nodes  plans  stages  proven  median s  worst s")
    worst = 0.0
    for size in (2, 4, 8, 12, 16):
        seconds, stages, proven = _measure(size)
        worst = max(worst, *seconds)
        median = statistics.median(seconds)
        stage_range = f"{min(stages)}-{max(stages)}"
        print(
            f"{size:5}  {len(seconds):5}  {stage_range:>6}  {proven / len(seconds):6.0%}  "
            f"{median:8.3f}  {max(seconds):7.3f}"
        )
    return int(worst > LIMIT_S)


def _measure(size: int) -> tuple[list[float], list[int], int]:
    seconds: list[float] = []
    stages: list[int] = []
    proven = 0
    for seed in range(CLUSTERS):
        rng = random.Random(1000 * size + seed)
        card, view = _case(rng, size)
        started = time.process_time()
        result = _plan(card, view)
        plan_s = time.process_time() - started
        if result is not None:
            seconds.append(plan_s)
            stages.append(len(result.best.stages))
            proven += result.bound_s == result.best.score
    return seconds, stages, proven


def _plan(card: ModelCard, view: ClusterView) -> Preview | None:
    try:
        return preview(card, view)
    except InsufficientMemory:
        return None


def _case(rng: random.Random, size: int) -> tuple[ModelCard, ClusterView]:
    nodes = tuple(_node(rng, f"n{i:02}") for i in range(size))
    links = tuple(
        LinkFacts(a.id, b.id, rng.uniform(1e-4, 6e-3), rng.choice([1e8, 1e9, 5e9]))
        for at, a in enumerate(nodes)
        for b in nodes[:at]
    )
    layers = rng.choice([32, 48, 64, 80])
    facts = {
        "id": "m",
        "model_type": "llama",
        "num_layers": layers,
        "hidden_size": 5120,
        "vocab_size": 150_000,
        "num_attention_layers": rng.choice([layers, layers, layers // 4]),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "context_length": 32_768,
        "weight_bytes": int(sum(n.memory_bytes for n in nodes) * rng.uniform(0.05, 0.75)),
    }
    return parse_card(facts, "bench"), ClusterView(nodes, links)


def _node(rng: random.Random, name: str) -> NodeFacts:
    kind = rng.randrange(len(MEMORY_GB))
    memory, bandwidth = int(MEMORY_GB[kind] * 0.75e9), BANDWIDTH_GB[kind] * rng.uniform(9e8, 1e9)
    return NodeFacts(NodeId(name), name, memory, bandwidth)


if __name__ == "__main__":
    sys.exit(main())
