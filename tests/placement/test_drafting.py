from itertools import product

import pytest
from cards import MTP, card

from exo_node.placement.card import ModelCard
from exo_node.placement.drafting import (
    Drafting,
    DraftPolicy,
    EnabledState,
    HeadState,
    choose_drafting,
    initial_depth,
    opted_out_reason,
    split_reason,
)
from exo_node.placement.errors import InvalidRequest
from exo_node.placement.ids import ModelId
from exo_node.placement.library import packaged_cards

DECLARED = card(native_mtp={"default_k": 2, "max_k": 3})
UNDECLARED = card()

LOADED = HeadState(True)
MISSING = HeadState(False, "no mtp.* tensors were found; download them with `exo-node pull tiny`")
SILENT = HeadState(False)
ON = EnabledState(True)
BY_VARIABLE = EnabledState(False, "EXO_NATIVE_MTP_ENABLED=0")
BY_PAGE = EnabledState(False, "the settings page")


@pytest.mark.parametrize(("asked", "k"), [(None, 2), (1, 1), (2, 2), (3, 3)])
def test_the_head_drafts_the_cards_k_or_the_requests(asked: int | None, k: int) -> None:
    drafting = choose_drafting(DECLARED, 1, LOADED, ON, asked)
    assert (drafting.kind, drafting.k) == ("native_mtp", k)


@pytest.mark.parametrize(
    ("requested_k", "policy", "adaptive", "default_k", "expected"),
    [
        # (K at most, initial K, adaptive)
        (None, None, True, 0, (3, 2, True)),
        (None, None, False, 0, (2, 2, False)),
        (None, "adaptive", False, 0, (3, 2, True)),
        (None, "fixed", True, 0, (2, 2, False)),
        (1, None, True, 3, (1, 1, False)),
        (3, None, True, 1, (3, 3, False)),
        (1, "adaptive", False, 0, (1, 1, True)),
        (3, "adaptive", False, 0, (3, 2, True)),
        (None, None, True, 1, (3, 1, True)),
        (None, None, True, 8, (3, 3, True)),
        (None, None, False, 3, (3, 3, False)),
    ],
)
def test_adaptive_depth_begins_at_the_default_and_may_reach_max_k(
    requested_k: int | None,
    policy: DraftPolicy | None,
    adaptive: bool,
    default_k: int,
    expected: tuple[int, int, bool],
) -> None:
    drafting = choose_drafting(
        DECLARED, 1, LOADED, ON, requested_k, policy, adaptive=adaptive, default_k=default_k
    )
    assert (drafting.k, drafting.initial_k, drafting.adaptive) == expected


@pytest.mark.parametrize(
    ("default_k", "expected"),
    [
        (0, (2, "the model's default")),
        (1, (1, "EXO_NATIVE_MTP_DEFAULT_K=1")),
        (5, (3, "EXO_NATIVE_MTP_DEFAULT_K=5, limited to the model's max_k")),
    ],
)
def test_the_initial_depth_names_its_source(default_k: int, expected: tuple[int, str]) -> None:
    assert DECLARED.native_mtp is not None
    assert initial_depth(DECLARED.native_mtp, default_k) == expected


@pytest.mark.parametrize(
    ("card", "stages", "head", "enabled", "asked", "says", "remedy"),
    [
        (UNDECLARED, 1, SILENT, ON, None, "does not declare", "models graft"),
        (UNDECLARED, 1, SILENT, ON, 0, "does not declare", "models graft"),
        (UNDECLARED, 1, SILENT, ON, 99, "num_draft_tokens = 99 had no effect", "models graft"),
        (DECLARED, 1, MISSING, ON, None, "no mtp.* tensors were found", "exo-node pull"),
        (DECLARED, 1, SILENT, ON, None, "is not loaded", "load the model again"),
        (DECLARED, 1, LOADED, BY_VARIABLE, None, "off by EXO_NATIVE_MTP_ENABLED=0", "set EXO_"),
        (DECLARED, 1, LOADED, BY_PAGE, 2, "turned off on the settings page", "turn it on there"),
        (DECLARED, 2, LOADED, ON, None, "has 2 stages", "place it on one node"),
        (DECLARED, 1, LOADED, ON, 0, "num_draft_tokens = 0", "leave it out or ask for 1 to 3"),
        # Of several reasons the most lasting is told.
        (UNDECLARED, 2, SILENT, BY_PAGE, 0, "does not declare", "models graft"),
        (DECLARED, 2, MISSING, BY_PAGE, 0, "turned off", "turn it on"),
        (DECLARED, 2, MISSING, ON, 0, "stages", "place it on one node"),
        (DECLARED, 1, MISSING, ON, 0, "tensors were found", "exo-node pull"),
    ],
)
def test_every_no_says_why_and_what_to_do(
    card: ModelCard,
    stages: int,
    head: HeadState,
    enabled: EnabledState,
    asked: int | None,
    says: str,
    remedy: str,
) -> None:
    drafting = choose_drafting(card, stages, head, enabled, asked)
    assert (drafting.kind, drafting.k) == ("none", 0)
    assert says in drafting.reason
    assert remedy in drafting.reason


REMEDIES = ("exo-node models graft", "load", "set EXO", "turn it on", "place it", "leave it out")


def test_no_combination_drafts_beyond_its_rules_or_declines_without_a_remedy() -> None:
    everything = product(
        (DECLARED, UNDECLARED),
        (1, 2, 5),
        (LOADED, MISSING, SILENT),
        (ON, BY_VARIABLE, BY_PAGE),
        (None, 0, 1, 2, 3),
    )
    for model, stages, head, enabled, asked in everything:
        drafting = choose_drafting(model, stages, head, enabled, asked)
        may = model is DECLARED and stages == 1 and head.loaded and enabled.enabled and asked != 0
        assert (drafting.kind == "native_mtp") is may
        assert (drafting.k > 0) is may
        if not may:
            assert any(remedy in drafting.reason for remedy in REMEDIES), drafting.reason


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("head", [LOADED, MISSING])
@pytest.mark.parametrize("enabled", [ON, BY_PAGE])
def test_a_k_above_the_cards_is_refused_whether_or_not_it_would_draft(
    stages: int, head: HeadState, enabled: EnabledState
) -> None:
    with pytest.raises(InvalidRequest, match=r"drafts at most 3 tokens .* 0 \(off\) to 3") as bad:
        choose_drafting(DECLARED, stages, head, enabled, 4)
    assert bad.value.param == "num_draft_tokens"


def test_a_card_of_seven_drafts_grants_them_and_a_head_of_one_layer_all() -> None:
    seven = packaged_cards()[ModelId("Qwen/Qwen3.6-27B")]
    assert seven.native_mtp is not None and seven.native_mtp.num_layers == 1
    fixed = choose_drafting(seven, 1, LOADED, ON, 7, adaptive=True)
    assert (fixed.k, fixed.adaptive) == (7, False)
    adapts = choose_drafting(seven, 1, LOADED, ON, None, adaptive=True)
    assert (adapts.k, adapts.initial_k, adapts.adaptive) == (7, 2, True)
    with pytest.raises(InvalidRequest, match="drafts at most 7 tokens"):
        choose_drafting(seven, 1, LOADED, ON, 8)


@pytest.mark.parametrize("card", [DECLARED, UNDECLARED])
def test_a_negative_k_is_refused(card: ModelCard) -> None:
    with pytest.raises(InvalidRequest, match=r"num_draft_tokens is -1; ask for 0 \(off\)") as bad:
        choose_drafting(card, 1, LOADED, ON, -1)
    assert bad.value.param == "num_draft_tokens"


def test_the_reasons_are_the_planners_and_the_loaders_too() -> None:
    split = choose_drafting(DECLARED, 3, LOADED, ON, None)
    assert split == Drafting("none", 0, split_reason(3))
    off = choose_drafting(DECLARED, 1, SILENT, BY_VARIABLE, None)
    assert off == Drafting("none", 0, opted_out_reason(BY_VARIABLE))


DRAFTED = card(drafter={"model": "a/drafter", "default_k": 2, "max_k": 5}, native_mtp=MTP)


def test_a_drafter_that_a_card_names_sets_the_drafts_of_a_round() -> None:
    drafting = choose_drafting(DRAFTED, 1, HeadState(True), EnabledState(True), None, adaptive=True)
    assert drafting == Drafting("block_drafter", 5, "the model's default", True, 2)
    with pytest.raises(InvalidRequest, match="at most 5"):
        _ = choose_drafting(DRAFTED, 1, HeadState(True), EnabledState(True), 6)


def test_what_turns_a_drafter_off_names_it() -> None:
    split = choose_drafting(DRAFTED, 2, HeadState(True), EnabledState(True), None)
    assert split.reason.startswith("the block drafter a/drafter needs the whole model on one node")
    off = choose_drafting(DRAFTED, 1, HeadState(True), BY_VARIABLE, None)
    assert off.reason.startswith("the block drafter a/drafter is off by EXO_NATIVE_MTP_ENABLED=0")
