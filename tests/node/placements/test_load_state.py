"""The states of a placement: what leads from one to the next, and what a person is told of each."""

import pytest

from exo_node.node.placements.activity import Activity
from exo_node.node.placements.load_state import Degraded, Failed, Load, Loading, Ready, Restoring


def test_a_placement_loads_answers_loses_a_stage_and_answers_again() -> None:
    load = Load()
    seen = [(load.status, load.step, load.error)]
    for change in (
        lambda: load.advance("downloading 3 %"),
        load.ready,
        lambda: load.lose("its runner ended"),
        lambda: load.advance("loading"),
        load.ready,
    ):
        change()
        seen.append((load.status, load.step, load.error))
    assert seen == [
        ("loading", "", ""),
        ("loading", "downloading 3 %", ""),
        ("ready", "", ""),
        ("restoring", "", "its runner ended"),
        ("restoring", "loading", "its runner ended"),
        ("ready", "", ""),
    ]


def test_a_stage_that_is_lost_under_a_load_fails_it_whatever_its_runners_say_then() -> None:
    load = Load()
    load.lose("its node died")
    load.advance("loading 80 %")
    assert load.state == Failed("its node died")
    with pytest.raises(AssertionError):
        load.ready()


def test_one_that_is_given_up_says_what_was_lost_last() -> None:
    load = Load(Ready())
    load.lose("again")
    load.give_up()
    assert (load.state, load.error) == (Degraded("again"), "again")


def test_a_restore_that_was_cancelled_begins_anew() -> None:
    load = Load(Restoring("x", "loading"))
    load.lose("y")
    assert load.state == Restoring("y")


@pytest.mark.parametrize("state", [Degraded("x"), Failed("x")])
def test_what_is_lost_for_good_is_not_lost_again(state: Degraded | Failed) -> None:
    with pytest.raises(AssertionError):
        Load(state).lose("y")


@pytest.mark.parametrize("state", [Loading(), Ready(), Degraded("x"), Failed("x")])
def test_only_what_is_being_restored_is_given_up(
    state: Loading | Ready | Degraded | Failed,
) -> None:
    with pytest.raises(AssertionError):
        Load(state).give_up()


def test_a_placement_is_idle_while_no_request_uses_it() -> None:
    activity = Activity()
    assert activity.idle.is_set() and activity.worked_at == float("-inf")
    activity.begin()
    activity.begin()
    activity.end()
    assert not activity.idle.is_set()
    activity.end()
    assert activity.idle.is_set()
    activity.stepped_at, activity.probed_at = 1.0, 2.0
    assert activity.worked_at == 2.0
