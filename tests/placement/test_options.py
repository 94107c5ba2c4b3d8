"""Options of a placement in a person's words."""

import pytest

from exo_node.placement.ids import NodeId
from exo_node.placement.options import ANY, PlanOptions

A, B = NodeId("a"), NodeId("b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ANY, ""),
        (PlanOptions(min_nodes=3), "at least 3 nodes"),
        (PlanOptions(max_nodes=1, context=8192), "at most 1 node, 8,192 tokens of context"),
        (PlanOptions(nodes=(A, B), kv_bits=8), "on A and B, caches of 8 bits"),
        (PlanOptions(layers=((B, 3), (A, 13)), kv_bits=0), "3 layers on B, 13 layers on A, caches"),
        (PlanOptions(exclude=frozenset({B, A})), "not on A or B"),
    ],
)
def test_only_bounds_that_were_given_are_named(options: PlanOptions, words: str) -> None:
    assert options.describe(str.upper).removesuffix(" not quantised") == words
