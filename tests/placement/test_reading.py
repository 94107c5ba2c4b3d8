"""Which layers of a prompt other nodes compute: against every split, and against pipes in time."""

import heapq
import random
from itertools import product
from math import inf

import pytest

from exo_node.placement import reading
from exo_node.placement.cluster import LinkFacts
from exo_node.placement.ids import NodeId
from exo_node.placement.reading import (
    MOST_READERS,
    WORTHWHILE,
    ReaderNode,
    ReadingPlan,
    ReadingSizes,
    plan_reading,
    reader_of,
)

QWEN = ReadingSizes(layers=64, chunk=512, row_bytes=1024, hidden_bytes=10_240, state_bytes=1.17e6)
"""Qwen3.6-27B: 64 KiB of cache and 10 KiB of hidden state a token, 75 MB of states."""
GBIT = 125e6
OWN_S = 1 / 1000 / 64
"""1,000 tokens a second."""


@pytest.fixture
def files_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes in time know the links and the layers alone."""
    monkeypatch.setattr(reading, "FILE_BYTES_S", inf)


def node(number: int, row_s: float = OWN_S, bandwidth: float = 10 * GBIT) -> ReaderNode:
    return ReaderNode(NodeId(f"n{number}"), row_s, 1e-3, bandwidth)


def planned(
    rows: int, readers: list[ReaderNode], cached: int = 0, sizes: ReadingSizes = QWEN
) -> ReadingPlan:
    return plan_reading(rows, cached, OWN_S, readers, sizes, {})


def piped(
    rows: int, own_row_s: float, counts: tuple[int, ...], readers: list[ReaderNode], s: ReadingSizes
) -> float:
    """Seconds until the last rows are back: each node and the answering one's port does one thing
    at a time, in the order in which things are ready."""
    free, port, done = [0.0] * len(counts), 0.0, 0.0
    chunks = [min(s.chunk, rows - begin) for begin in range(0, rows, s.chunk)]
    computed = [(own_row_s * counts[0] * sum(chunks[: n + 1]), n, 0) for n in range(len(chunks))]
    heapq.heapify(computed)
    while computed:
        at, chunk, part = heapq.heappop(computed)
        if part:  # its rows go back, and the hidden states of the next part come with them
            nbytes = counts[part] * s.row_bytes + 2 * s.hidden_bytes
            port = at = max(port, at) + nbytes * chunks[chunk] / readers[part - 1].bandwidth
        if part == len(readers):
            done = max(done, at)
            continue
        own = readers[part].row_s * counts[part + 1] * chunks[chunk]
        free[part + 1] = max(free[part + 1], at) + own
        heapq.heappush(computed, (free[part + 1], chunk, part + 1))
    states = (c * s.state_bytes / r.bandwidth for c, r in zip(counts[1:], readers, strict=True))
    return done + sum(states)


@pytest.mark.usefixtures("files_cost_nothing")
def test_equal_nodes_share_the_layers() -> None:
    plan = planned(32_768, [node(1)])
    (layers,) = plan.readers
    assert (layers.first_layer, layers.end_layer) == (32, 64)
    assert plan.seconds / 32.768 < 0.53
    three = planned(32_768, [node(1), node(2)])
    assert [(each.first_layer, each.end_layer) for each in three.readers] == [(22, 44), (44, 64)]
    assert three.seconds / 32.768 < 0.37


@pytest.mark.usefixtures("files_cost_nothing")
def test_a_gigabit_carries_a_thousand_tokens_a_second_and_no_more() -> None:
    assert planned(32_768, [node(1, bandwidth=GBIT)]).seconds / 32.768 < 0.56
    fast = [node(1, OWN_S / 8, GBIT)]
    slow_link = plan_reading(32_768, 0, OWN_S / 8, fast, QWEN, {})
    assert slow_link.readers == () and slow_link.reason.startswith("alone: ")


@pytest.mark.usefixtures("files_cost_nothing")
@pytest.mark.parametrize("seed", range(15))
def test_it_is_within_a_tenth_of_the_best_split_of_unequal_nodes(seed: int) -> None:
    draw = random.Random(seed)
    sizes = ReadingSizes(12, 256, 800.0, 4096, 50_000.0)
    own_s = draw.choice([1e-5, 3e-5])
    readers = [
        node(i, draw.choice([1e-5, 3e-5, 5e-5]), draw.choice([GBIT, 10 * GBIT]))
        for i in range(draw.choice([1, 2]))
    ]
    plan = plan_reading(16_384, 0, own_s, readers, sizes, {})
    by_speed = sorted(readers, key=lambda reader: (reader.row_s, reader.node))
    best = 16_384 * own_s * sizes.layers
    for count in range(1, len(readers) + 1):
        for counts in product(range(1, sizes.layers), repeat=count + 1):
            if sum(counts) == sizes.layers:
                best = min(best, piped(16_384, own_s, counts, by_speed[:count], sizes))
    alone = 16_384 * own_s * sizes.layers
    mine = alone
    if plan.readers:
        taken = [each.end_layer - each.first_layer for each in plan.readers]
        chosen = [next(r for r in readers if r.node == each.node) for each in plan.readers]
        mine = piped(16_384, own_s, (sizes.layers - sum(taken), *taken), chosen, sizes)
        assert mine == pytest.approx(plan.seconds, rel=0.1)
    assert mine <= best * 1.1


def test_a_short_prompt_is_read_alone() -> None:
    plan = planned(600, [node(1)])
    assert (
        plan.readers == () and plan.reason == "alone: 600 tokens are 2 forwards, too few to share"
    )
    plan = planned(1100, [node(1, bandwidth=GBIT / 2)])
    assert plan.readers == () and "1100 tokens take 1.1 s" in plan.reason
    assert planned(4096, [node(1)]).readers


def test_what_is_cached_counts_as_it_has_to_be_sent() -> None:
    near, far = planned(40_000, [node(1)], 36_000), planned(4000, [node(1)])
    assert far.readers and near.seconds > far.seconds
    assert not planned(40_000, [node(1, bandwidth=GBIT / 8)], 36_000).readers


def test_of_many_nodes_the_fastest_read() -> None:
    nodes = [node(i, OWN_S * (1 + i % 5)) for i in range(12)]
    plan = planned(100_000, nodes)
    assert 0 < len(plan.readers) <= MOST_READERS
    assert {each.node for each in plan.readers} <= {f"n{i}" for i in range(12) if i % 5 < 2}
    assert plan.seconds < WORTHWHILE * 100


def test_layers_follow_each_other_up_to_the_last() -> None:
    plan = planned(50_000, [node(1, OWN_S / 3), node(2, OWN_S * 2)])
    ends = [each.end_layer for each in plan.readers]
    assert [each.first_layer for each in plan.readers][1:] == ends[:-1]
    assert ends[-1] == 64 and plan.readers[0].first_layer >= 1


def test_without_others_there_is_no_reason() -> None:
    plan = planned(50_000, [])
    assert (plan.readers, plan.reason) == ((), "") and plan.seconds == pytest.approx(50.0)


def test_a_node_without_a_measured_link_does_not_read() -> None:
    a, b = NodeId("a"), NodeId("b")
    assert reader_of(b, OWN_S, []) is None
    for wrong in (0.0, inf, float("nan"), -1.0):
        assert reader_of(b, OWN_S, [LinkFacts(a, b, 1e-3, wrong)]) is None
        assert reader_of(b, wrong, [LinkFacts(a, b, 1e-3, GBIT)]) is None
    links = [LinkFacts(a, b, 1e-3, GBIT), LinkFacts(a, b, 2e-3, 10 * GBIT)]
    reader = reader_of(b, OWN_S, links, busy=1)
    assert reader == ReaderNode(b, 2 * OWN_S, 2e-3, 10 * GBIT)


def test_nodes_that_read_faster_than_files_pass_read_alone() -> None:
    """However fast their link is; two that compute for as long as files take read together."""
    for seconds, is_shared in ((9.1, True), (1.8, False)):
        own_s = seconds / 32_000 / 64
        plan = plan_reading(32_000, 0, own_s, [node(1, own_s, 1e10)], QWEN, {})
        assert bool(plan.readers) is is_shared, plan.reason
