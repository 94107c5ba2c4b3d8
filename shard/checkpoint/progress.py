"""How far a download or a copy is, and which weight files it is to bring."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Choose = Callable[[Path, frozenset[str]], frozenset[str]]
"""From the snapshot with its small files, and the names of all files: the weight files to fetch."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of the whole model that are here; `file` is the one that just grew, or empty."""

    done_bytes: int
    total_bytes: int
    file: str


def partial_of(target: Path) -> Path:
    """Where a file's bytes gather until it is whole."""
    return target.with_name(f"{target.name}.incomplete")


def size_of(path: Path) -> int:
    """The bytes of a file, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0
