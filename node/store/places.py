"""The places of models on this disk: folders, and the Hugging Face cache. Blocks."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from ...placement.errors import DownloadFailed, ExoNodeError, InvalidCheckpoint
from ...placement.ids import ModelId
from ...placement.library import CARD_FILE
from ...shard.checkpoint.checkpoint import HEAD_FILES, read_config
from ...shard.checkpoint.files import access_fault, write_atomic
from ...shard.checkpoint.model_classes import has_class
from .hub_cache import HubCache, Snapshot, bytes_in, is_model_file

Stamp = tuple[tuple[str, int, int], ...]

CONFIG: Final = "config.json"
COPY_FILE: Final = "exo-copy.json"
"""In a folder that was copied from a peer: a `CopyOrigin`."""
_PART: Final = re.compile(r"(?!\.)[^/\\\0]{1,200}")


@dataclass(frozen=True, slots=True)
class Place:
    """One model's folder, and the id that requests use for it.

    `hub`: its files are a hub repository's, so that a card of that id holds for it.
    """

    id: ModelId
    folder: Path
    hub: bool = False
    partial: bool = False
    """Whether it is a copy from a peer that is not whole: a stage's files, or an unfinished one."""
    missing: tuple[str, ...] = ()
    """Files that an unfinished download lacks."""
    fault: str = ""
    """Why it cannot be read."""


@dataclass(frozen=True, slots=True)
class CopyOrigin:
    """The model that a folder was copied from; `fingerprint` as `Checkpoint.fingerprint`."""

    model: str
    from_hub: bool
    fingerprint: str
    whole: bool


def read_origin(folder: Path) -> CopyOrigin | None:
    """None: the folder is no copy. A `COPY_FILE` that cannot be read is a partial copy's."""
    try:
        raw: object = json.loads((folder / COPY_FILE).read_bytes())
        return CopyOrigin(**cast("dict[str, Any]", raw))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError):
        return CopyOrigin(folder.name, from_hub=False, fingerprint="", whole=False)


def write_origin(folder: Path, origin: CopyOrigin) -> None:
    write_atomic(folder / COPY_FILE, json.dumps(asdict(origin), indent=1).encode(), mode=0o644)


def in_folders(folders: Sequence[Path]) -> Iterator[Place]:
    """Models in `--models-dir` folders: `name`, and one level deeper `publisher/name`.

    Where two folders have the same id the first one counts, but a partial copy hides none. A folder
    that does not exist has no models; one that cannot be read is a place with its fault, a whole
    `--models-dir` under its path.
    """
    ids: set[str] = set()
    for root in folders:
        if fault := access_fault(root):
            yield Place(ModelId(str(root)), root, fault=fault)
            continue
        for folder in _model_folders(root):
            place = _place(ModelId(folder.relative_to(root).as_posix()), folder)
            if place.partial:
                yield place
            elif place.id not in ids:
                ids.add(place.id)
                yield place


def in_cache() -> Iterator[Place]:
    """Models of the Hugging Face cache that mlx-lm may run: `owner/name`, or with `@revision`.

    A cache also has tokenizers, image models and the like; those are left out.
    """
    for snapshot in HubCache().snapshots():
        if _is_model(snapshot):
            revision = f"@{snapshot.revision}" if snapshot.revision else ""
            yield Place(
                ModelId(snapshot.repository + revision),
                snapshot.folder,
                hub=True,
                missing=snapshot.missing,
                fault=snapshot.fault,
            )


def locate_in_cache(model: ModelId) -> Path | None:
    """The whole snapshot that `owner/name` or `owner/name@revision` means; None: there is none.

    Raises InvalidCheckpoint for one that cannot be read.
    """
    repository, _, revision = model.partition("@")
    if repository.count("/") != 1:
        return None
    try:
        return HubCache().locate(repository, revision or None)
    except DownloadFailed:  # a name that no repository can have
        return None


def copy_folder(root: Path, model: str) -> Path | None:
    """The folder for a copy of the model in exo-node's own `root`; None: its id is no path."""
    parts = model.split("/")
    if len(parts) > 2 or not all(_PART.fullmatch(part) and part.isprintable() for part in parts):
        return None
    return root.joinpath(*parts)


def repository_folder(folder: Path) -> Path | None:
    """The folder with all files of a hub model: a snapshot's repository, or a whole copy itself.

    None: the model is not from the hub.
    """
    above = folder.resolve().parent
    if above.name == "snapshots" and above.parent.name.startswith("models--"):
        return above.parent
    origin = read_origin(folder)
    return folder if origin is not None and origin.from_hub else None


def is_copied_file(path: str) -> bool:
    """Whether peers copy a model's file: what a download fetches, and the card beside it."""
    return path == CARD_FILE or (is_model_file(path) and path != COPY_FILE)


def delete(model: ModelId, own_folder: Path) -> int | None:
    """Deletes a model of the cache, or of exo-node's own folder, whole or partial.

    Returns the bytes that are free again; None: no such model is there. Raises ExoNodeError.
    """
    try:
        for place in in_cache():
            if place.id == model:
                return HubCache().remove(model.partition("@")[0], place.folder)
        for place in in_folders((own_folder,)):
            if place.id == model:
                size = bytes_in(place.folder)
                shutil.rmtree(place.folder)
                return size
    except OSError as error:
        raise ExoNodeError(
            f"{model} could not be deleted ({error}); mend the permissions and try again"
        ) from error
    return None


def stamp(folder: Path) -> Stamp:
    """The names, sizes and times of a folder's files, links followed: equal while none changes."""
    entries: list[tuple[str, int, int]] = []
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
                entries.append((path.name, -1, 0))
            continue
        # The time of changes, not of contents: permissions count, too.
        entries.append((path.name, status.st_size, status.st_ctime_ns))
    return tuple(entries)


def _place(id: ModelId, folder: Path) -> Place:
    if fault := access_fault(folder):
        return Place(id, folder, fault=fault)
    origin = read_origin(folder)
    if origin is None:
        return Place(id, folder)
    whole = origin.whole and os.path.lexists(folder / CONFIG)
    return Place(id, folder, hub=origin.from_hub, partial=not whole)


def _model_folders(root: Path) -> Iterator[Path]:
    for folder in _subfolders(root):
        if _is_model_folder(folder):
            yield folder
        if not os.path.lexists(folder / CONFIG):
            yield from filter(_is_model_folder, _subfolders(folder))


def _is_model_folder(folder: Path) -> bool:
    files = (folder / CONFIG, folder / COPY_FILE)
    return bool(access_fault(folder)) or any(map(os.path.lexists, files))


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    except OSError:
        return []


def _is_model(snapshot: Snapshot) -> bool:
    """Whether its config.json is a model's; of an incomplete one, weights must have arrived."""
    if snapshot.fault:  # its config.json cannot be read
        return True
    try:
        config = read_config(snapshot.folder)
    except InvalidCheckpoint:
        return bool(list(snapshot.folder.glob("model*.safetensors")))
    if not has_class(config):
        return False
    if not snapshot.missing:
        return True
    blobs = snapshot.folder.parent.parent / "blobs"
    arrived = snapshot.folder.glob("model*.safetensors"), blobs.glob("*.incomplete")
    return any(path for paths in arrived for path in paths)
