"""Which of a model's drafters drafts the next answer, by their expected speeds."""

from exo_node.mtp.drafting.drafter_comparison import TRIAL_EVERY, DrafterComparison
from exo_node.mtp.types import DrafterKind


def after(first: DrafterKind, *speeds: tuple[float, float]) -> DrafterComparison:
    """`speeds` of the block drafter and the head at the beginning of each answer."""
    comparison = DrafterComparison(first)
    for drafter, head in speeds:
        comparison.choose({"block_drafter": drafter, "native_mtp": head})
    return comparison


def test_one_drafts_until_its_speed_is_known_then_the_other_then_the_faster_one() -> None:
    assert after("block_drafter", (0, 0), (0, 0)).kind == "block_drafter"
    assert after("block_drafter", (0, 0), (1.5, 0)).kind == "native_mtp"
    assert after("block_drafter", (0, 0), (1.5, 0), (1.5, 0)).kind == "native_mtp"
    slower = after("block_drafter", (0, 0), (1.5, 0), (1.5, 1.2))
    assert slower.kind == "block_drafter"
    assert slower.reason == (
        "the block drafter drafts; times plain decoding: the block drafter 1.50, native MTP 1.20"
    )
    assert after("block_drafter", (0, 0), (1.5, 0), (1.5, 1.8)).kind == "native_mtp"


def test_a_little_more_speed_changes_nothing() -> None:
    assert after("block_drafter", (1.50, 1.55)).kind == "block_drafter"
    assert after("native_mtp", (1.55, 1.50)).kind == "native_mtp"
    assert after("native_mtp", (1.60, 1.50)).kind == "block_drafter"


def test_the_slower_one_is_tried_again_at_intervals_for_one_answer() -> None:
    speeds = [(1.5, 1.2)] * TRIAL_EVERY
    assert after("block_drafter", *speeds[1:]).kind == "block_drafter"
    trial = after("block_drafter", *speeds)
    assert trial.kind == "native_mtp" and "native MTP is tried again" in trial.reason
    assert after("block_drafter", *speeds, (1.5, 1.2)).kind == "block_drafter"
    assert after("block_drafter", *speeds, (1.5, 1.7)).kind == "native_mtp"
