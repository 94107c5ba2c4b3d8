"""Which numbers of rows agree is measured once for a machine, MLX and checkpoint."""

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import pytest
from chips import M3_MAX, on_chip
from engines import load_quietly
from mlx import nn
from small import small_spec

from exo_node.shard.kernels import row_groups, row_sets
from exo_node.shard.kernels.install import used
from exo_node.shard.kernels.row_groups import group_rows
from exo_node.shard.kernels.row_sets import RowRange
from exo_node.shard.model import stored_rows
from exo_node.shard.model.stored_rows import StoredRows

RANGES = {"a": RowRange(2, 12), "b": RowRange(1, 1024)}


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    StoredRows(str(tmp_path), "f").write(RANGES)
    assert StoredRows(str(tmp_path), "f").read() == RANGES


@pytest.mark.parametrize("changed", ["checkpoint", "mlx", "device"])
def test_that_of_another_checkpoint_mlx_or_device_is_not_believed(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoredRows(str(tmp_path), "f").write(RANGES)
    [file] = tmp_path.iterdir()
    if changed == "mlx":
        monkeypatch.setattr(stored_rows, "version", "{}9.9".format)
    if changed == "device":
        monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "applegpu_g13s"})
    other = StoredRows(str(tmp_path), "other" if changed == "checkpoint" else "f")
    assert other.read() == {}
    other.write({})
    [moved] = set(tmp_path.iterdir()) - {file}
    _ = file.replace(moved)  # under the other one's name
    assert other.read() == {}


@pytest.mark.parametrize(
    "ranges",
    [
        {"a": [0, 4]},
        {"a": [5, 2]},
        {"a": [1, 10**9]},
        {"a": [1]},
        {"a": "x"},
        [],
        None,
        {"a": [1.5, 2]},
    ],
)
def test_nonsense_is_measured_again(ranges: Any, tmp_path: Path) -> None:
    StoredRows(str(tmp_path), "f").write(RANGES)
    [file] = tmp_path.iterdir()
    _ = file.write_text(json.dumps(json.loads(file.read_text()) | {"ranges": ranges}))
    assert StoredRows(str(tmp_path), "f").read() == {}
    for content in (b"", b"\xff\x00", b"[" * 100_000, b"x" * (1 << 20)):
        _ = file.write_bytes(content)
        assert StoredRows(str(tmp_path), "f").read() == {}


def test_without_a_folder_or_a_checkpoint_nothing_is_written(tmp_path: Path) -> None:
    StoredRows("", "f").write(RANGES)
    StoredRows(str(tmp_path), "").write(RANGES)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_costs_a_measurement_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _ = (tmp_path / "file").write_text("")
    StoredRows(str(tmp_path / "file"), "f").write(RANGES)
    assert "could not be saved" in caplog.text


def test_a_second_load_of_a_checkpoint_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(profile_folder=str(tmp_path))
    monkeypatch.setattr(row_sets, "VALUES", 64)
    with on_chip(M3_MAX):
        first = load_quietly(spec).kernels
        monkeypatch.setattr(row_groups, "measure", None)
        assert load_quietly(spec).kernels == first
    assert row_groups.NAME in used(first)


def test_known_products_are_not_measured_and_new_ones_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = list[int]()

    def measure(_layer: Any, kind: Any) -> RowRange:
        measured.append(kind.outputs)
        return RowRange(2, 5)

    monkeypatch.setattr(row_groups, "measure", measure)
    known = dict[str, RowRange]()
    with on_chip(M3_MAX):
        for outputs in ([32], [32, 64], [64]):
            layers = [nn.Linear(32, each, bias=False) for each in outputs]
            assert all(each.used for each in group_rows(layers, mx.float32, perf_counter, known))
    assert measured == [32, 64] and len(known) == 2
