"""Where models lie on this machine: folders of folders, and the Hugging Face cache. Blocks."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from ...placement.errors import DownloadFailed, InvalidCheckpoint
from ...placement.ids import ModelId
from ...shard.checkpoint.checkpoint import HEAD_FILES, read_config
from ...shard.checkpoint.files import closed
from ...shard.checkpoint.hub_cache import Cached, cached, locate
from ...shard.checkpoint.model_classes import has_class

Source = Literal["package", "folder", "cache"]
Stamp = tuple[tuple[str, int, int], ...]

CONFIG: Final = "config.json"
COPY_FILE: Final = "exo-copy.json"
"""In a folder that was copied from a peer: where it comes from, and whether it is whole."""


@dataclass(frozen=True, slots=True)
class Place:
    """One model's folder, and the id that requests use for it."""

    id: ModelId
    folder: Path
    source: Source
    missing: tuple[str, ...] = ()
    """Files that a download has not brought yet."""
    fault: str = ""
    """Why it may not be read."""


def in_folders(folders: Sequence[Path]) -> Iterator[Place]:
    """Models in `--models-dir` folders: `name`, and one level deeper `publisher/name`.

    Where two folders hold the same id the first one counts. A folder that is gone holds nothing;
    one that may not be read is a place with its fault, a whole `--models-dir` under its path.
    A copy of another node's model counts once it is whole, as a model of the hub where it is one.
    """
    seen: set[str] = set()
    for root in folders:
        if fault := closed(root):
            yield Place(ModelId(str(root)), root, "folder", fault=fault)
            continue
        for name, folder in _two_levels(root):
            if (fault := closed(folder)) and name not in seen:
                seen.add(name)
                yield Place(ModelId(name), folder, "folder", fault=fault)
                continue
            origin = copied(folder)
            if name not in seen and (origin is None or origin.whole):
                seen.add(name)
                hub = origin is not None and origin.from_hub
                yield Place(ModelId(name), folder, "cache" if hub else "folder")


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copied folder's `COPY_FILE` says; `fingerprint` as `Checkpoint.fingerprint`."""

    model: str
    from_hub: bool
    fingerprint: str
    whole: bool


def copied(folder: Path) -> Copied | None:
    """None: the folder is no copy, or what it says of itself cannot be read."""
    try:
        raw: object = json.loads((folder / COPY_FILE).read_bytes())
        return Copied(**cast("dict[str, Any]", raw))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError):
        return Copied(folder.name, from_hub=False, fingerprint="", whole=False)


@dataclass(frozen=True, slots=True)
class Part:
    """What is here of another node's model: one stage's files, or a copy that broke off."""

    id: ModelId
    folder: Path
    nbytes: int


def parts(folders: Sequence[Path]) -> Iterator[Part]:
    """Copies that are not whole, whatever has arrived of them."""
    for root in folders:
        for outer in _subfolders(root):
            for folder in (outer, *_subfolders(outer)):
                origin = copied(folder)
                if origin is not None and not origin.whole and not closed(folder):
                    name = folder.relative_to(root).as_posix()
                    yield Part(ModelId(name), folder, bytes_in(folder))


def bytes_in(folder: Path) -> int:
    """Of all files below it; links count as themselves."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def hub_folder(folder: Path) -> Path | None:
    """Of a snapshot in the hub's cache its repository's folder, which holds its files.

    A whole copy of a hub's model is its own folder. None: a folder of another kind.
    """
    above = folder.resolve().parent
    if above.name == "snapshots" and above.parent.name.startswith("models--"):
        return above.parent
    origin = copied(folder)
    return folder if origin is not None and origin.from_hub else None


def in_cache() -> Iterator[Place]:
    """Models of the Hugging Face cache that mlx-lm may run: `owner/name`, or with `@revision`.

    A cache also holds tokenizers, image models and the like; those are no models here.
    """
    for entry in cached():
        if _is_model(entry):
            name = entry.repository + (f"@{entry.revision}" if entry.revision else "")
            yield Place(ModelId(name), entry.snapshot, "cache", entry.missing, entry.fault)


def from_cache(model: ModelId) -> Path | None:
    """The whole snapshot that `owner/name` or `owner/name@revision` means; None: there is none.

    Raises InvalidCheckpoint for one that may not be read.
    """
    repository, _, revision = model.partition("@")
    if repository.count("/") != 1:
        return None
    try:
        return locate(repository, revision or None)
    except DownloadFailed:  # a name that no repository can have
        return None


def stamp(folder: Path) -> Stamp:
    """What changes whenever a file of the folder does: names, sizes and times, links followed."""
    found: list[tuple[str, int, int]] = []
    nested = [folder / name for name in HEAD_FILES if "/" in name]
    try:
        paths = [Path(entry.path) for entry in os.scandir(folder)]
    except OSError:
        return ()
    for path in (*sorted(paths), *nested):
        try:
            status = path.stat()
        except OSError:
            if os.path.islink(path):
                found.append((path.name, -1, 0))
            continue
        # Of changes, not of contents: permissions count, too.
        found.append((path.name, status.st_size, status.st_ctime_ns))
    return tuple(found)


def _two_levels(root: Path) -> Iterator[tuple[str, Path]]:
    for folder in _subfolders(root):
        if closed(folder) or os.path.lexists(folder / CONFIG):
            yield folder.name, folder
            continue
        for inner in _subfolders(folder):
            if closed(inner) or os.path.lexists(inner / CONFIG):
                yield f"{folder.name}/{inner.name}", inner


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    except OSError:
        return []


def _is_model(entry: Cached) -> bool:
    """By its config.json; and of one that is not whole, weights must have begun to arrive."""
    if entry.fault:  # nobody knows what it is
        return True
    try:
        config = read_config(entry.snapshot)
    except InvalidCheckpoint:
        return bool(list(entry.snapshot.glob("model*.safetensors")))
    if not has_class(config):
        return False
    if not entry.missing:
        return True
    blobs = entry.snapshot.parent.parent / "blobs"
    arrived = entry.snapshot.glob("model*.safetensors"), blobs.glob("*.incomplete")
    return any(path for paths in arrived for path in paths)
