"""Whose bits the attention caches of a placement have, and what that changes in its plan."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cards
import pytest

from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.errors import InvalidCard, InvalidRequest
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.kv_bits import KvBits, choose_kv_bits, load_refusal, refusal_in, source_of
from exo_node.placement.options import PlanOptions
from exo_node.placement.plan import plan, planned_bytes

GB = 10**9
HERE = NodeFacts(NodeId("a"), "desk", 4 * GB, 1e11)
VIEW = ClusterView((HERE,))


def card(**changes: object) -> ModelCard:
    facts = {"hidden_size": 1024, "vocab_size": 1000, "num_key_value_heads": 8, "head_dim": 128}
    facts |= {"context_length": 262_144, "weight_bytes": GB}
    return cards.card(16, **facts | changes)


LATENTS = {"kv_row_width": 576}


@pytest.mark.parametrize(
    ("of_card", "setting", "requested", "choice"),
    [
        (None, None, None, KvBits()),
        (8, None, None, KvBits(8, "card", "the card says so")),
        (8, 4, None, KvBits(4, "setting", "EXO_KV_BITS=4 on the head")),
        (8, 0, None, KvBits(0, "setting", "EXO_KV_BITS=0 on the head")),
        (None, 0, None, KvBits()),
        (None, 4, None, KvBits(4, "setting", "EXO_KV_BITS=4 on the head")),
        (8, 8, 4, KvBits(4, "placement", "kv_bits = 4 was requested")),
        (4, 8, 0, KvBits(0, "placement", "kv_bits = 0 was requested")),
    ],
)
def test_a_placements_field_wins_over_the_heads_setting_and_that_over_the_card(
    of_card: int | None, setting: int | None, requested: int | None, choice: KvBits
) -> None:
    view = replace(VIEW, kv_bits=setting)
    assert choose_kv_bits(card(kv_bits=of_card), view, requested) == choice


def test_quantised_caches_leave_room_for_a_longer_context_and_the_plan_says_why() -> None:
    plain, eight = plan(card(), VIEW), plan(card(), VIEW, PlanOptions(kv_bits=8))
    assert plain.context_length < eight.context_length
    assert "attention caches" not in plain.reason
    reason = "attention caches have 8 bits a number, 53 % of their bytes in bfloat16: kv_bits = 8"
    assert reason in eight.reason and "room for a context of" in eight.reason
    requested = PlanOptions(context=32_768)
    same = plan(card(), VIEW, replace(requested, kv_bits=8))
    assert planned_bytes(card(), same, 0) < planned_bytes(card(), plan(card(), VIEW, requested), 0)


def test_a_placement_without_quantised_caches_takes_the_bytes_of_whole_ones() -> None:
    requested = PlanOptions(context=32_768)
    whole = plan(card(), VIEW, requested)
    removed = plan(card(kv_bits=4), VIEW, replace(requested, kv_bits=0))
    assert planned_bytes(card(kv_bits=4), removed, 0) == planned_bytes(card(), whole, 0)
    assert "attention caches are not quantised: kv_bits = 0 was requested" in removed.reason


@pytest.mark.parametrize("facts", [LATENTS, {"head_dim": 80}, {"num_attention_layers": 0}])
def test_a_placement_is_refused_for_the_reason_that_refuses_a_card(
    facts: Mapping[str, Any],
) -> None:
    with pytest.raises(InvalidCard) as of_card:
        _ = card(**facts, kv_bits=8)
    with pytest.raises(InvalidRequest) as caught:
        _ = plan(card(**facts), VIEW, PlanOptions(kv_bits=8))
    reason = of_card.value.message.removeprefix("test.toml: ").removesuffix(": remove it")
    remedy = "leave kv_bits out of the placement, or send 0"
    assert (caught.value.message, caught.value.param) == (f"{reason}; {remedy}", "kv_bits")
    assert plan(card(**facts), VIEW, PlanOptions(kv_bits=0)).kv_bits.bits == 0


def test_a_setting_does_not_apply_to_a_model_that_it_would_make_unloadable() -> None:
    planned = plan(card(**LATENTS), replace(VIEW, kv_bits=8))
    assert planned.kv_bits.bits == 0
    assert (
        "attention caches are not quantised: EXO_KV_BITS=8 on the head does not apply, because "
        "kv_row_width says that this model's attention keeps no plain keys and values"
        in planned.reason
    )


def test_a_load_that_could_not_quantise_the_caches_counts_for_that_model_alone() -> None:
    view = replace(VIEW, kv_bits=8, kv_refusals=((ModelId("m"), "its caches are windows"),))
    assert plan(card(), view).kv_bits.bits == 0
    assert plan(card(id="other"), view).kv_bits.bits == 8
    with pytest.raises(InvalidRequest, match="kv_bits is 4, and its caches are windows; leave"):
        _ = plan(card(), view, PlanOptions(kv_bits=4))


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("card", "remove kv_bits from the card"),
        ("setting", "unset EXO_KV_BITS"),
        ("placement", "leave kv_bits out of the placement, or send 0"),
        ("", "remove kv_bits from the card"),
    ],
)
def test_the_remedy_names_the_place_that_the_bits_came_from(source: str, remedy: str) -> None:
    fault = load_refusal("the caches are windows; mostly", source_of(source))
    assert (fault.message, fault.param) == (f"the caches are windows; mostly; {remedy}", "kv_bits")
    assert refusal_in(fault.message) == "the caches are windows; mostly"
