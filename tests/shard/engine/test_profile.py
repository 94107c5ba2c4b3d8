"""Measurements of adaptive drafting outlive a runner, and a bad file costs nothing but itself."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clocks import Clock

from exo_node.mtp.drafting.costs import CostTable, Form
from exo_node.shard.engine.answers.draft_profile import SAVE_EVERY_S, DraftProfile, DraftProfileKey

KEY = DraftProfileKey("chip", "f" * 64, "bfloat16", "0.32.4", 0)


def learned(folder: Path, clock: Clock) -> DraftProfile:
    profile = DraftProfile.open(str(folder), KEY, clock)
    profile.costs = CostTable([1.0, 1.5], {(2, 1): [0.25, 0.5, 0.75]})
    profile.prior.add(2, 1)
    profile.save()
    return profile


def test_a_profile_is_what_was_saved(tmp_path: Path) -> None:
    saved = learned(tmp_path / "profiles", Clock())
    again = DraftProfile.open(str(tmp_path / "profiles"), KEY, Clock())
    assert again.costs.probed == (1.0, 1.5)
    assert list(again.costs.cells()) == [(2, 1, (0.25, 0.5, 0.75))]
    assert (again.prior.counts, again.prior.hits) == (saved.prior.counts, saved.prior.hits)


@pytest.mark.parametrize("change", [{"device": "other"}, {"dtype": "float32"}, {"software": "1"}])
def test_another_device_dtype_or_version_has_a_profile_of_its_own(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    _ = learned(tmp_path, Clock())
    assert DraftProfile.open(str(tmp_path), replace(KEY, **change), Clock()).costs.probed == ()


def edited(change: Callable[[Any], None]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        value = json.loads(text)
        change(value)
        return json.dumps(value)

    return edit


BAD: dict[str, Callable[[str], str]] = {
    "cut short": lambda text: text[:-5],
    "another's": edited(lambda v: v["key"].update(device="other")),
    "a negative time": edited(lambda v: v["probed"].append(-1.0)),
    "a time that is 0 as a quotient": edited(lambda v: v["cells"][0].update(seconds=[5e-324] * 3)),
    "an unknown field": edited(lambda v: v.update(code="x")),
    "more accepted than seen": edited(lambda v: v.update(accepted=[9.0, 9.0])),
    "counts of two lengths": edited(lambda v: v.update(accepted=[])),
    "too large": lambda text: text + " " * (1 << 20),
}


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD.keys())
def test_a_file_that_does_not_fit_is_named_and_learned_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
) -> None:
    _ = learned(tmp_path, Clock())
    path = tmp_path / KEY.file
    _ = path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        profile = DraftProfile.open(str(tmp_path), KEY, Clock())
    assert profile.costs.probed == ()
    assert profile.prior.counts == []
    assert KEY.file in caplog.text


def test_it_is_saved_now_and_then_only(tmp_path: Path) -> None:
    clock = Clock()
    profile = learned(tmp_path, clock)
    before = (tmp_path / KEY.file).read_text()
    profile.prior.add(1, 1)
    profile.save()
    assert (tmp_path / KEY.file).read_text() == before
    clock.now += SAVE_EVERY_S
    profile.save()
    assert (tmp_path / KEY.file).read_text() != before
    assert [path.name for path in tmp_path.iterdir()] == [KEY.file]


def test_a_folder_that_cannot_be_written_is_said_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        _ = learned(tmp_path / "file", Clock())
    assert "could not be saved" in caplog.text


@pytest.mark.parametrize("seconds", [4000.0, 0.0, -1.0, float("inf"), float("nan")])
def test_seconds_that_no_round_can_take_are_dropped(tmp_path: Path, seconds: float) -> None:
    """A round in which the process was stopped takes that long."""
    profile = learned(tmp_path, clock := Clock())
    profile.costs.add(Form.of(1, 100, 2, 2), seconds)
    clock.now += SAVE_EVERY_S
    profile.save()
    again = DraftProfile.open(str(tmp_path), KEY, Clock())
    assert list(again.costs.cells()) == [(2, 1, (0.25, 0.5, 0.75))]


def test_what_a_profile_cannot_hold_is_said_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = learned(tmp_path, clock := Clock())
    profile.costs = CostTable([4000.0])
    clock.now += SAVE_EVERY_S
    with caplog.at_level(logging.WARNING):
        profile.save()
    assert "could not be saved: probed.0: Input should be less than" in caplog.text
