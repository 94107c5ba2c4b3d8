"""Final stats in, their sums out."""

from samples import PLAIN, stats_of

from exo_node.node.chat.totals import Totals
from exo_node.placement.ids import ModelId

DEMO = ModelId("demo")


def test_totals_are_the_sums_of_the_stats_with_both_shares_of_acceptance() -> None:
    totals = Totals()
    totals.add(DEMO, 7, stats_of(7, cached_tokens=40, batched_tokens=5), prompt=50)
    totals.add(DEMO, 9, stats_of(9, accepted_per_position=(2, 1, 1), draft_k_histogram=(1, 0, 2)))
    totals.add(DEMO, 4, stats_of(4, acceptance_rule="coupled", draft_policy="adaptive"))
    copied = {"lookup_rounds": 2, "lookup_proposed_tokens": 4, "lookup_accepted_tokens": 3}
    totals.add(DEMO, 8, stats_of(8, drafter_kind="prompt_lookup", **copied))
    totals.add(DEMO, 6, stats_of(6, loop_reason="a loop of 12", **PLAIN))
    assert totals.describe() == {
        "demo": {
            "requests": 5,
            "drafted_requests": 4,
            "prompt_tokens": 50,
            "cached_tokens": 40,
            "completion_tokens": 34,
            "batched_tokens": 5,
            "spec_decode_rounds": 12,
            "proposed_draft_tokens": 24,
            "accepted_draft_tokens": 16,
            **copied,
            "looped_requests": 1,
            "accepted_per_position": [11, 4, 1],
            "draft_k_histogram": [7, 0, 11],
            "acceptance_rate": 16 / 24,
            "accepted_share_of_output": 16 / 34,
            "requests_by_draft_policy": {"fixed": 3, "adaptive": 1, "none": 1},
            "requests_by_acceptance_rule": {"greedy": 4, "coupled": 1},
            "greedy_identity": "bitwise",
            "parked_requests": 0,
            "head_parked": None,
        }
    }


def test_a_parked_head_is_told_with_its_reason() -> None:
    totals = Totals()
    totals.add(DEMO, 7, stats_of(7, head_parked=True, drafting_reason="not finite at 9"))
    totals.add(DEMO, 7, stats_of(7))
    described = totals.describe()["demo"]
    assert (described["parked_requests"], described["head_parked"]) == (1, "not finite at 9")
