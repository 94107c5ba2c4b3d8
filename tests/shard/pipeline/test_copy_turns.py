"""Every request has its copies: none waits while another is copied twice."""

import random

import pytest

from exo_node.shard.pipeline.copy_turns import CopyTurns


@pytest.mark.parametrize("seed", range(5))
def test_requests_that_ask_in_any_order_are_copied_equally_often(seed: int) -> None:
    turns, draw = CopyTurns(), random.Random(seed)
    copied = dict.fromkeys("abcd", 0)
    for number in range(400):
        order = sorted(copied, key=lambda _: draw.random())
        for place, name in enumerate(order):
            # A copy may be made rarely, and most often when the same one asks.
            copied[name] += turns.ask(name, free=number % 3 == 0 and place == number % 2)
    # A request whose turn it is, and that asks when no copy may be made, waits for the next time.
    assert max(copied.values()) - min(copied.values()) <= 5


def test_the_first_to_ask_does_not_take_every_turn() -> None:
    turns = CopyTurns()
    copied = [name for _ in range(3) for name in "abc" if turns.ask(name, free=True)]
    assert copied == ["a", "b", "c"] * 3
    # One copy for every four questions: without turns "a" would have them all.
    rounds = [(name, turns.ask(name, free=name != "d")) for _ in range(12) for name in "abcd"]
    assert {name for name, had in rounds if had} == {"a", "b", "c"}


def test_one_that_stopped_asking_holds_nobody_up() -> None:
    turns = CopyTurns()
    assert not turns.ask("stalled", free=False)
    assert turns.ask("goes on", free=True)  # neither had a turn yet
    assert not turns.ask("goes on", free=False)
    assert turns.ask("goes on", free=True)  # the other did not ask again


def test_one_that_never_had_a_turn_goes_before_one_that_had() -> None:
    turns = CopyTurns()
    assert turns.ask("old", free=True)
    assert not turns.ask("new", free=False)
    assert not turns.ask("old", free=True)
    assert turns.ask("new", free=True)
    assert turns.ask("old", free=True)


def test_one_that_is_over_is_forgotten() -> None:
    turns = CopyTurns()
    assert turns.ask("old", free=True)
    assert not turns.ask("over", free=False)
    turns.forget("over")
    assert turns.ask("old", free=True)
