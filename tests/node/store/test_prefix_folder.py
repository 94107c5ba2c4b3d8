"""The bound of cached prefixes on disk."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from exo_node.node.placements.stage_runners import MAX_DEFAULT_BYTES, disk_bound, prefix_root

GB = 10**9


@pytest.mark.parametrize(
    ("gigabytes", "free", "own", "bound"),
    [
        (0.0, 900 * GB, 0, 0),
        (1.5, 1, 0, 3 * GB // 2),
        (None, 90 * GB, 0, 9 * GB),
        (None, 90 * GB, 1000, 9 * GB + 100),  # what it has already does not shrink it
        (None, 900 * GB, 0, MAX_DEFAULT_BYTES),
        (None, 0, 0, 0),
    ],
)
def test_the_bound_is_the_setting_or_a_share_of_the_free_space(
    gigabytes: float | None,
    free: int,
    own: int,
    bound: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = prefix_root(tmp_path)
    if own:
        folder = root / f"4-{'a' * 32}"
        folder.mkdir(parents=True)
        _ = (folder / f"{'b' * 40}.safetensors").write_bytes(bytes(own))

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert disk_bound(root, gigabytes) == bound
