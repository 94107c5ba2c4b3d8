"""The states of a placement: what leads from one to the next, and what a person is told of each."""

import pytest

from exo_node.node.placements.activity import Activity
from exo_node.node.placements.load_state import Failed, Load, Restoring


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


def test_a_restore_that_was_cancelled_begins_anew() -> None:
    load = Load(Restoring("x", "loading"))
    load.lose("y")
    assert load.state == Restoring("y")


def test_what_is_lost_for_good_is_not_lost_again() -> None:
    with pytest.raises(AssertionError):
        Load(Failed("x")).lose("y")


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
