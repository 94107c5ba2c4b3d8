"""The cached prefixes on this disk: their bound, their models, their removal.

Runners write and read the files, and cope with ones that disappear.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...shard.checkpoint.prefix_files import FileSize, files_below, opened

FREE_SHARE: Final = 10
"""The default bound is the free space, divided by this."""
MAX_DEFAULT_BYTES: Final = 20 * 10**9


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """One file of a cached prefix."""

    model: str | None
    """None if the file is partial or cannot be read."""
    begin: int
    """The first row in the file; rows before it are in files of earlier states."""
    rows: int
    """Rows of the whole prefix."""
    bytes: int
    used_ns: int
    path: Path


def prefix_root(data_dir: Path) -> Path:
    """The folder of all prefixes of a node."""
    return data_dir / "prefixes"


def disk_bound(root: Path, gigabytes: float | None) -> int:
    """Bytes that all files below `root` may have. `gigabytes`: the setting."""
    if gigabytes is not None:
        return int(gigabytes * 10**9)
    own = sum(each.bytes for each in files_below(root))
    return min(MAX_DEFAULT_BYTES, (shutil.disk_usage(root.parent).free + own) // FREE_SHARE)


def stored_prefixes(root: Path) -> list[StoredPrefix]:
    """All files below `root`, the most recently used first."""
    return [_described(each) for each in reversed(files_below(root))]


def remove_prefixes(root: Path, model: str | None) -> tuple[int, int]:
    """Deletes the files of a model, or all of them. Returns their number and bytes."""
    files = [each for each in stored_prefixes(root) if model in (None, each.model)]
    for each in files:
        each.path.unlink(missing_ok=True)
    return len(files), sum(each.bytes for each in files)


def _described(file: FileSize) -> StoredPrefix:
    model, begin, rows = None, 0, 0
    try:
        with opened(file.path) as prefix:
            described = prefix.description
            model, begin, rows = described["model"], described["begin"], described["rows"]
    except (OSError, ValueError, KeyError):
        pass  # listed without a model: people may delete it
    return StoredPrefix(model, begin, rows, file.bytes, file.used_ns, file.path)
