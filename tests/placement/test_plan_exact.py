"""`plan` against every subset, order and split, on random clusters with fixed seeds.

The oracle knows the model's sums in its own words: it shares no code with the planner but the card.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, permutations

import pytest
from cards import MTP, card

from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, LayerProfile, LinkFacts, NodeFacts
from exo_node.placement.errors import InsufficientMemory
from exo_node.placement.ids import NodeId
from exo_node.placement.options import PlanOptions
from exo_node.placement.plan import Preview, preview
from exo_node.placement.split_refusal import MAY_BE_SPLIT, SplitRefusal


@dataclass(frozen=True)
class Case:
    card: ModelCard
    view: ClusterView
    options: PlanOptions
    refusal: SplitRefusal = MAY_BE_SPLIT


def random_case(seed: int, *, unlike: bool = False, nodes: int = 6, fewest: int = 1) -> Case:
    """A cluster of `fewest` to `nodes` nodes around a model that may need one of them or all.

    `unlike`: only some of its layers have a KV cache.
    """
    rng = random.Random(seed)
    layers = rng.randint(2, 8)
    cached = rng.randint(1, layers - 1) if unlike else rng.choice([0, layers])
    mtp = MTP if rng.random() < 0.5 else None
    model = card(
        layers,
        hidden_size=rng.choice([64, 512]),
        vocab_size=rng.choice([100, 5000]),
        num_attention_layers=cached,
        num_key_value_heads=2,
        head_dim=rng.choice([8, 64]),
        context_length=1000,
        weight_bytes=rng.randint(20, 60) * 1_000_000,
        tie_word_embeddings=rng.random() < 0.3,
        native_mtp=mtp,
    )
    size = rng.randint(fewest, nodes)
    share = model.weight_bytes * rng.choice([0.3, 0.6, 1.5])
    facts = tuple(
        NodeFacts(
            NodeId(f"n{i}"),
            f"node-{i}",
            int(rng.uniform(0.1, 1.6) * share),
            rng.choice([0.0, 1e9, 1e9, rng.uniform(1e9, 2e10)]),
            profile=random_profile(rng) if rng.random() < 0.3 else None,
        )
        for i in range(size)
    )
    pairs = [pair for pair in combinations(facts, 2) for _ in range(rng.choice([0, 1, 1, 2]))]
    links = tuple(
        LinkFacts(b.id, a.id, rng.uniform(1e-5, 6e-3), rng.uniform(1e6, 1e9)) for a, b in pairs
    )
    least = rng.randint(1, min(size, layers, rng.choice([1, 1, 2, 3])))
    options = PlanOptions(
        min_nodes=least,
        max_nodes=rng.choice([None, rng.randint(least, size)]),
        context=rng.choice([None, 1, 700]),
    )
    return Case(model, ClusterView(facts, links), options)


def random_profile(rng: random.Random) -> LayerProfile:
    return LayerProfile(
        decode_s=rng.uniform(1e-4, 6e-3),
        verify_s=rng.choice([0.0, rng.uniform(1e-4, 8e-3)]),
        tail_s=rng.choice([0.0, rng.uniform(1e-4, 1e-2)]),
        mtp_speedup=rng.choice([0.0, 0.0, 0.7, 1.9]),
        verify_rows=2,
    )


def least_seconds(case: Case) -> float:
    """The least seconds a token of all placements; infinite where nothing fits."""
    layers, view = case.card.num_layers, case.view
    most = min(case.options.max_nodes or len(view.nodes), layers)
    best, borders = math.inf, case.refusal.borders or frozenset(range(layers))
    for size in range(case.options.min_nodes, most + 1):
        for nodes in permutations(view.nodes, size):
            fixed = hops(case.card, view, nodes) + tail(case.card, nodes[0])
            if size > 1 and fixed >= best:
                continue
            for counts in shares(layers, size):
                if not set(accumulate(counts[:-1])) <= borders:
                    continue
                plain = fixed + sum(
                    n * layer(case.card, node) for n, node in zip(counts, nodes, strict=True)
                )
                if (size == 1 or plain < best) and fit(case, nodes, counts):
                    best = min(best, plain / speedup(case, nodes))
    return best


def shares(layers: int, size: int) -> Iterator[tuple[int, ...]]:
    for cut in combinations(range(1, layers), size - 1):
        yield tuple(b - a for a, b in zip((0, *cut), (*cut, layers), strict=True))


def layer(card: ModelCard, node: NodeFacts) -> float:
    if node.profile is not None:
        return node.profile.decode_s
    return card.active_layer_bytes / (node.memory_bandwidth or 50e9)


def tail(card: ModelCard, node: NodeFacts) -> float:
    if node.profile is not None and node.profile.tail_s:
        return node.profile.tail_s
    return card.vocab_size * card.hidden_size * 2 / (node.memory_bandwidth or 50e9)


def hops(card: ModelCard, view: ClusterView, nodes: tuple[NodeFacts, ...]) -> float:
    if len(nodes) == 1:
        return 0.0
    total = 0.0
    for at, node in enumerate(nodes):
        following = nodes[(at + 1) % len(nodes)]
        between = [k for k in view.links if {k.a, k.b} == {node.id, following.id}]
        ways = [(k.round_trip_s, k.bandwidth) for k in between] or [(1e-3, 125e6)]
        total += min(trip / 2 + card.hidden_size * 2 / rate for trip, rate in ways) + 1e-4
    return total


def speedup(case: Case, nodes: tuple[NodeFacts, ...]) -> float:
    card, generator = case.card, next(iter(nodes))
    if len(nodes) > 1 or card.native_mtp is None:
        return 1.0
    if not fit(case, nodes, (card.num_layers,), head=True):
        return 1.0
    profile = generator.profile
    if profile is not None and profile.mtp_speedup:
        return max(1.0, profile.mtp_speedup)
    if profile is not None and profile.verify_s:
        one, end = layer(card, generator), tail(card, generator)
        plain = card.num_layers * one + end
        drafted = card.num_layers * profile.verify_s + end + one + end
        return max(1.0, 1.7 * plain / drafted)  # K = 1: a token, and a second one 70 % of the time
    return 1.2


def fit(
    case: Case, nodes: tuple[NodeFacts, ...], counts: tuple[int, ...], *, head: bool = False
) -> bool:
    card, first = case.card, 0
    context = case.options.context or card.context_length
    cache = context * 2 * card.num_key_value_heads * card.head_dim * 2
    for node, count in zip(nodes, counts, strict=True):
        # Evenly spread: of the first `end` layers, floor(end * cached / all) hold a cache.
        caches = ((first + count) * card.num_attention_layers) // card.num_layers
        caches -= first * card.num_attention_layers // card.num_layers
        need = count * card.mean_layer_bytes + caches * cache
        if first == 0:
            matrices = 1 if card.tie_word_embeddings else 2
            need += matrices * card.vocab_size * card.hidden_size * 2
            need += card.mtp_bytes + cache if head else 0
        if need * 12 > node.memory_bytes * 10:
            return False
        first += count
    return True


def planned(case: Case) -> Preview | None:
    try:
        return preview(case.card, case.view, case.options, case.refusal)
    except InsufficientMemory:
        return None


@pytest.mark.parametrize("hundred", range(3))
def test_the_plan_is_the_best_of_everything_there_is(hundred: int) -> None:
    split = drafting = refused = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        case = random_case(seed)
        result, least = planned(case), least_seconds(case)
        if result is None:
            assert math.isinf(least), seed
            refused += 1
            continue
        assert abs(result.best.score - least) <= 1e-9, seed
        assert result.bound_s == result.best.score, seed
        split += len(result.best.stages) > 1
        drafting += bool(result.best.stages[1:] == () and case.card.native_mtp)
    # The seeds cover every kind of answer.
    assert min(split, drafting, refused) >= 5


def test_of_layers_with_unequal_caches_the_plan_is_the_best_too() -> None:
    split = 0
    for seed in range(1000, 1080):
        case = random_case(seed, unlike=True, nodes=5)
        result, least = planned(case), least_seconds(case)
        assert (result is None) is math.isinf(least), seed
        if result is not None:
            assert abs(result.best.score - least) <= 1e-9, seed
            assert result.bound_s == result.best.score, seed
            split += len(result.best.stages) > 1
    assert split >= 10


def test_where_only_some_borders_are_allowed_the_plan_is_the_best_too() -> None:
    split = refused = 0
    for seed in range(3000, 3080):
        case = random_case(seed, unlike=seed % 2 == 0, nodes=5)
        rng, layers = random.Random(seed), case.card.num_layers
        borders = frozenset(rng.sample(range(1, layers), rng.randint(1, layers - 1)))
        case = replace(case, refusal=SplitRefusal("layers share caches", borders))
        result, least = planned(case), least_seconds(case)
        assert (result is None) is math.isinf(least), seed
        refused += result is None
        if result is not None:
            assert abs(result.best.score - least) <= 1e-9, seed
            split += len(result.best.stages) > 1
    assert min(split, refused) >= 5


@pytest.mark.parametrize("unlike", [False, True])
def test_seven_and_eight_nodes_are_searched_exactly(unlike: bool) -> None:
    long = 0
    for seed in range(4000, 4012):
        case = random_case(seed, unlike=unlike, nodes=8, fewest=7)
        result, least = planned(case), least_seconds(case)
        assert (result is None) is math.isinf(least), seed
        if result is not None:
            assert abs(result.best.score - least) <= 1e-9, seed
            assert result.bound_s == result.best.score, seed
            long += len(result.best.stages) > 3
    assert long >= 1


def test_the_runner_up_is_the_best_without_the_best_set() -> None:
    compared = 0
    for seed in range(2000, 2080):
        case = random_case(seed, nodes=4)
        result = planned(case)
        if result is None or result.runner_up is None:
            continue
        used = {stage.node for stage in result.best.stages}
        others = [
            least_seconds(replace(case, view=part, options=replace(case.options, **size)))
            for part, size in parts(case)
            if {node.id for node in part.nodes} != used
        ]
        assert abs(result.runner_up.score - min(others)) <= 1e-9, seed
        compared += 1
    assert compared >= 20


def parts(case: Case) -> Iterator[tuple[ClusterView, dict[str, int]]]:
    """Every set of nodes, all of them to be used."""
    layers = case.card.num_layers
    most = min(case.options.max_nodes or len(case.view.nodes), layers)
    for size in range(case.options.min_nodes, most + 1):
        for nodes in combinations(case.view.nodes, size):
            part = ClusterView(nodes, case.view.links)
            yield part, {"min_nodes": size, "max_nodes": size}
