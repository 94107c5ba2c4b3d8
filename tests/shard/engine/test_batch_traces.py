"""Answers beside others and after others' prefixes; `bench/traces.py` takes a thousand traces."""

from batch_traces import Totals, follow, warm_engine
from budget import seeds

ROOM = 600_000
"""Bytes: about what two of its conversations leave."""
FIRST = 12
"""From here on soon one finds a prefix, one is beside others, and one is cancelled."""


def test_answers_together_from_a_small_prefix_cache_are_those_of_cold_engines() -> None:
    warm, totals = warm_engine(ROOM), Totals()
    for seed in seeds(2, 30):
        totals += follow(warm, FIRST + seed, ROOM)
    assert totals.cached and totals.batched and totals.cancelled
