"""The benches of conversations: turns after the turn before."""

import pytest
from conversation_turns import TurnAnswer, with_answer, words
from replicas import UNCACHED_ROWS, AgentTurn, in_place_share, is_behind, moved_share


def _turn(prompt: int, cached: int, node: str) -> AgentTurn:
    stats = {"placement": {"stages": [{"node": node}]}}
    return AgentTurn([], TurnAnswer(0, 1, "", (), prompt, cached, 8, stats))


@pytest.mark.parametrize(
    ("cached", "is_in_place"),
    [(996, True), (1000 - UNCACHED_ROWS, True), (999 - UNCACHED_ROWS, False), (0, False)],
)
def test_a_turn_is_in_place_after_the_turn_before(cached: int, is_in_place: bool) -> None:
    """But for rows at its end that are never cached."""
    assert is_behind(_turn(1000, 0, "a").answer, _turn(1200, cached, "a").answer) == is_in_place


def test_the_share_of_turns_in_place_and_of_those_that_moved_leaves_out_first_turns() -> None:
    stays = [_turn(1000, 0, "a"), _turn(1200, 996, "a"), _turn(1400, 1196, "a")]
    moves = [_turn(1000, 0, "a"), _turn(1200, 512, "b"), _turn(1400, 1196, "b")]
    assert (in_place_share([stays]), moved_share([stays])) == (1.0, 0.0)
    assert (in_place_share([moves]), moved_share([moves])) == (0.5, 0.5)
    assert (in_place_share([stays, moves]), moved_share([stays, moves])) == (0.75, 0.25)


def test_conversations_differ_early_and_repeat_by_their_seed() -> None:
    assert words(400, "0/1") == words(400, "0/1")
    assert len({words(400, f"0/{agent}")[:60] for agent in range(16)}) == 16
    first = [{"role": "user", "content": "a"}]
    assert [each["content"] for each in with_answer(first, "b", "c")] == ["a", "b", "c"]
    assert [each["content"] for each in first] == ["a"]
