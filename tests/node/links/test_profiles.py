"""Layer times are kept for what decides them, over restarts, and a bad file is measured anew."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from clocks import Clock
from pydantic import ValidationError

from exo_node.node.links.layer_profiles import LayerProfiles
from exo_node.proto import peer_pb2 as pb


def times(**changes: Any) -> pb.LayerTimes:
    fields: dict[str, Any] = {
        "model": "demo",
        "dtype": "float32",
        "decode_s": 1e-3,
        "verify_s": 2e-3,
        "verify_rows": 4,
        "prefill_s": 0.1,
        "prefill_rows": 512,
        "tail_s": 5e-4,
    }
    return pb.LayerTimes(**(fields | changes))


def mean(rows: int = 1, seconds: float = 3e-3, count: int = 45, age_s: int = 0) -> pb.LayerMean:
    return pb.LayerMean(rows=rows, seconds=seconds, count=count, age_s=age_s)


def opened(folder: Path, device: str = "M4, metal", mlx: str = "1") -> LayerProfiles:
    return LayerProfiles(folder, device, mlx)


def test_a_profile_outlives_the_process(tmp_path: Path) -> None:
    opened(tmp_path).keep("f1", times())
    again = opened(tmp_path)
    assert again.times() == [times()]
    assert not again.missing("f1", "float32", generator=True)


@pytest.mark.parametrize(
    ("checkpoint", "dtype", "device", "mlx"),
    [
        ("f2", "float32", "M4, metal", "1"),
        ("f1", "bfloat16", "M4, metal", "1"),
        ("f1", "float32", "M4, cpu", "1"),
        ("f1", "float32", "M4, metal", "2"),
    ],
)
def test_whatever_decides_speeds_asks_for_another_profile(
    tmp_path: Path, checkpoint: str, dtype: str, device: str, mlx: str
) -> None:
    opened(tmp_path).keep("f1", times())
    profiles = opened(tmp_path, device, mlx)
    assert profiles.missing(checkpoint, dtype, generator=False)
    # Of another machine, or of its past, nothing is told; of another model or dtype it is.
    same_machine = (device, mlx) == ("M4, metal", "1")
    assert profiles.times() == ([times()] if same_machine else [])


def test_a_generators_tail_is_measured_once_and_kept(tmp_path: Path) -> None:
    profiles = opened(tmp_path)
    profiles.keep("f1", times(tail_s=0.0))
    assert not profiles.missing("f1", "float32", generator=False)
    assert profiles.missing("f1", "float32", generator=True)
    profiles.keep("f1", times())
    profiles.keep("f1", times(decode_s=2e-3, tail_s=0.0))
    assert opened(tmp_path).times() == [times(decode_s=2e-3)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"key": {}}',
        b'{"key": {"x": "y"}, "model": "m"}',
        b"{}" + b" " * 70_000,
    ],
)
def test_a_file_that_is_no_profile_is_named_and_measured_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    opened(tmp_path).keep("f1", times())
    [file] = tmp_path.iterdir()
    _ = file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        profiles = opened(tmp_path)
    assert file.name in caplog.text
    assert profiles.missing("f1", "float32", generator=False)
    profiles.keep("f1", times())
    assert opened(tmp_path).times() == [times()]


def test_a_file_under_another_profiles_name_is_not_believed(tmp_path: Path) -> None:
    opened(tmp_path).keep("f1", times())
    [file] = tmp_path.iterdir()
    opened(tmp_path).keep("f2", times(decode_s=9.0))
    [other] = set(tmp_path.iterdir()) - {file}
    _ = file.replace(other)
    assert opened(tmp_path).times() == []


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_figure_that_is_no_time_is_refused(tmp_path: Path, figure: float) -> None:
    profiles = opened(tmp_path)
    with pytest.raises(ValidationError):
        profiles.keep("f1", times(decode_s=figure))
    assert list(tmp_path.iterdir()) == []
    assert profiles.times() == []


def test_a_folder_that_cannot_be_written_costs_the_file_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    profiles = opened(tmp_path / "file")
    profiles.keep("f1", times())
    assert profiles.times() == [times()]
    assert "could not be saved" in caplog.text


def test_a_correction_is_kept_beside_the_probe_and_told_with_its_age(tmp_path: Path) -> None:
    clock = Clock(1.7e9)
    profiles = LayerProfiles(tmp_path, "M4", "1", clock)
    profiles.keep("f1", times())
    profiles.correct("f1", "float32", [mean(), mean(rows=4)])
    clock.now += 60
    profiles.correct("f1", "float32", [mean(seconds=5e-3, count=50)])
    told = [times(corrected=[mean(rows=4, age_s=60), mean(seconds=5e-3, count=50)])]
    assert profiles.times() == told
    profiles.save()
    clock.now += 40
    for each in told[0].corrected:
        each.age_s += 40
    assert LayerProfiles(tmp_path, "M4", "1", clock).times() == told


def test_a_clock_that_was_set_back_makes_no_age(tmp_path: Path) -> None:
    clock = Clock(1.7e9)
    profiles = LayerProfiles(tmp_path, "M4", "1", clock)
    profiles.keep("f1", times())
    profiles.correct("f1", "float32", [mean()])
    clock.now -= 1e6
    assert profiles.times() == [times(corrected=[mean()])]


def test_a_later_probe_leaves_the_correction(tmp_path: Path) -> None:
    """It comes with the tail that a generator adds."""
    profiles = LayerProfiles(tmp_path, "M4", "1", Clock(1.7e9))
    profiles.keep("f1", times(tail_s=0.0))
    profiles.correct("f1", "float32", [mean()])
    profiles.keep("f1", times())
    assert profiles.times() == [times(corrected=[mean()])]


def test_without_a_probe_there_is_nothing_to_correct(tmp_path: Path) -> None:
    profiles = opened(tmp_path)
    profiles.correct("f1", "float32", [mean()])
    profiles.save()
    assert (profiles.times(), list(tmp_path.iterdir())) == ([], [])


def test_nothing_is_written_where_nothing_changed(tmp_path: Path) -> None:
    profiles = opened(tmp_path)
    profiles.keep("f1", times())
    profiles.correct("f1", "float32", [mean()])
    profiles.save()
    [file] = tmp_path.iterdir()
    file.unlink()
    profiles.save()
    assert list(tmp_path.iterdir()) == []


def test_the_profile_that_worked_last_is_the_one_measured_last(tmp_path: Path) -> None:
    profiles = opened(tmp_path)
    profiles.keep("f1", times())
    profiles.keep("f2", times(decode_s=9.0))
    profiles.correct("f1", "float32", [mean()])
    assert [told.decode_s for told in profiles.times()] == [9.0, 1e-3]
    profiles.save()
    assert [told.decode_s for told in opened(tmp_path).times()] == [9.0, 1e-3]


@pytest.mark.parametrize("wrong", [{"seconds": 0.0}, {"seconds": float("nan")}, {"rows": 0}])
def test_a_correction_that_is_no_time_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    profiles = opened(tmp_path)
    profiles.keep("f1", times())
    with pytest.raises(ValidationError):
        profiles.correct("f1", "float32", [mean(**wrong)])
    assert profiles.times() == [times()]


def test_a_file_from_before_corrections_is_read(tmp_path: Path) -> None:
    opened(tmp_path).keep("f1", times())
    [file] = tmp_path.iterdir()
    stored = json.loads(file.read_bytes())
    assert stored.pop("corrected") == []
    _ = file.write_text(json.dumps(stored))
    assert opened(tmp_path).times() == [times()]
