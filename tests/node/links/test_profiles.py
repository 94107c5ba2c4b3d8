"""Stored layer times: their conditions, restarts, and damaged files."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from exo_node.node.links import layer_profiles
from exo_node.node.links.layer_profiles import LayerProfiles
from exo_node.placement.gpu_faults import ChunkLimit, GpuFault
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
        "layer_bytes": 1000,
    }
    return pb.LayerTimes(**(fields | changes))


def open_profiles(folder: Path, device: str = "M4, metal", mlx: str = "1") -> LayerProfiles:
    return LayerProfiles(folder, device, mlx)


def test_a_profile_outlives_the_process(tmp_path: Path) -> None:
    open_profiles(tmp_path).store("f1", times())
    again = open_profiles(tmp_path)
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
def test_another_condition_is_another_profile(
    tmp_path: Path, checkpoint: str, dtype: str, device: str, mlx: str
) -> None:
    open_profiles(tmp_path).store("f1", times())
    profiles = open_profiles(tmp_path, device, mlx)
    assert profiles.missing(checkpoint, dtype, generator=False)
    # Profiles of another device or MLX are not published; those of another model are.
    same_machine = (device, mlx) == ("M4, metal", "1")
    assert profiles.times() == ([times()] if same_machine else [])


def test_a_start_reads_the_latest_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_profiles, "MAX_FILES", 2)
    profiles = open_profiles(tmp_path)
    for at in range(4):
        before = set(tmp_path.iterdir())
        profiles.store(f"f{at}", times(model=f"m{at}"))
        [new_file] = set(tmp_path.iterdir()) - before
        os.utime(new_file, (at, at))
    again = open_profiles(tmp_path)
    assert [each.model for each in again.times()] == ["m2", "m3"]
    assert again.missing("f0", "float32", generator=False)


def test_a_generators_tail_is_measured_once(tmp_path: Path) -> None:
    profiles = open_profiles(tmp_path)
    profiles.store("f1", times(tail_s=0.0))
    assert not profiles.missing("f1", "float32", generator=False)
    assert profiles.missing("f1", "float32", generator=True)
    profiles.store("f1", times())
    profiles.store("f1", times(decode_s=2e-3, tail_s=0.0))
    assert open_profiles(tmp_path).times() == [times(decode_s=2e-3)]


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
def test_a_file_that_is_no_profile_is_named_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    open_profiles(tmp_path).store("f1", times())
    [file] = tmp_path.iterdir()
    _ = file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        profiles = open_profiles(tmp_path)
    assert file.name in caplog.text
    assert profiles.missing("f1", "float32", generator=False)
    profiles.store("f1", times())
    assert open_profiles(tmp_path).times() == [times()]


@pytest.mark.parametrize("target", ["/dev/zero", "itself", "nowhere", ""])
def test_what_is_no_file_neither_stops_nor_ends_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    """A link to `target`; "": a pipe."""
    open_profiles(tmp_path).store("f1", times())
    [file] = tmp_path.iterdir()
    file.unlink()
    if target:
        file.symlink_to(file.name if target == "itself" else target)
    else:
        os.mkfifo(file)
    with caplog.at_level(logging.WARNING):
        profiles = open_profiles(tmp_path)
    assert file.name in caplog.text
    assert profiles.times() == []


def test_a_file_under_another_profiles_name_is_ignored(tmp_path: Path) -> None:
    open_profiles(tmp_path).store("f1", times())
    [file] = tmp_path.iterdir()
    open_profiles(tmp_path).store("f2", times(decode_s=9.0))
    [other] = set(tmp_path.iterdir()) - {file}
    _ = file.replace(other)
    assert open_profiles(tmp_path).times() == []


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_figure_that_is_no_time_is_refused(tmp_path: Path, figure: float) -> None:
    profiles = open_profiles(tmp_path)
    with pytest.raises(ValidationError):
        profiles.store("f1", times(decode_s=figure))
    assert list(tmp_path.iterdir()) == []
    assert profiles.times() == []


def test_a_folder_that_cannot_be_written_costs_the_file_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    profiles = open_profiles(tmp_path / "file")
    profiles.store("f1", times())
    assert profiles.times() == [times()]
    assert "could not be saved" in caplog.text


@pytest.mark.parametrize(("fault", "outlives"), [("watchdog", True), ("memory", False)])
def test_a_chunk_that_a_gpu_fault_left_is_published_and_that_of_a_watchdog_kept(
    tmp_path: Path, fault: GpuFault, *, outlives: bool
) -> None:
    """Memory may be there another time."""
    spec = pb.StageSpec(model="demo", checkpoint_sha256="f1", dtype="float32")
    limited = times(chunk_limit=256, chunk_fault=fault)
    profiles, limit = open_profiles(tmp_path), ChunkLimit(256, fault)
    save = profiles.limit_chunk(spec, limit)
    save()  # nothing is measured yet
    unmeasured = pb.LayerTimes(model="demo", chunk_limit=256, chunk_fault=limit.fault)
    assert profiles.times() == [unmeasured]
    profiles.store("f1", times())
    assert profiles.times() == [limited]
    assert profiles.chunk_limit("demo") == limit
    assert profiles.chunk_limit("other") is None
    assert open_profiles(tmp_path).times() == [limited if outlives else times()]
    assert open_profiles(tmp_path, mlx="2").chunk_limit("demo") is None


def test_want_of_memory_takes_no_limit_of_the_watchdog_from_the_disk(tmp_path: Path) -> None:
    spec = pb.StageSpec(model="demo", checkpoint_sha256="f1", dtype="float32")
    profiles, watchdog = open_profiles(tmp_path), ChunkLimit(128, "watchdog")
    profiles.store("f1", times())
    profiles.limit_chunk(spec, watchdog)()
    profiles.limit_chunk(spec, ChunkLimit(64, "memory"))()
    profiles.correct(spec, 1.0)  # writes the file as well
    assert profiles.chunk_limit("demo") == ChunkLimit(64, "memory")
    assert open_profiles(tmp_path).chunk_limit("demo") == watchdog
    profiles.limit_chunk(spec, ChunkLimit(32, "watchdog"))()
    assert profiles.is_short_of_memory("demo"), "a second want of memory shortens nothing"
    assert profiles.chunk_limit("demo") == ChunkLimit(32, "watchdog")


def test_after_a_restart_the_shortest_chunk_of_a_model_counts(tmp_path: Path) -> None:
    profiles = open_profiles(tmp_path)
    for dtype, rows in (("float32", 256), ("bfloat16", 128)):
        profiles.store("f1", times(dtype=dtype))
        spec = pb.StageSpec(model="demo", checkpoint_sha256="f1", dtype=dtype)
        profiles.limit_chunk(spec, ChunkLimit(rows, "watchdog"))()
    for path in tmp_path.iterdir():  # that of 256 is the later one
        os.utime(path, (1, 2 if '"chunk_limit":256' in path.read_text() else 1))
    assert open_profiles(tmp_path).chunk_limit("demo") == ChunkLimit(128, "watchdog")
