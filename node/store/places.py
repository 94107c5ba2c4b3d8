"""The places of models on this disk: folders, and the Hugging Face cache. Blocks."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...placement.errors import RemovalRefused
from ...placement.ids import ModelId
from ...shard.checkpoint.files import access_fault
from .hub_cache import HubCache, is_own, paths_of
from .identifiers import FolderName
from .model_folder import CONFIG, COPY_FILE, Place, bytes_in, read_origin


def all_places(folders: Sequence[Path]) -> list[Place]:
    """Every model on this disk, of the same id in the order in which they count."""
    return [*in_folders(folders), *HubCache().models()]


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


def copy_folder(root: Path, model: str) -> Path | None:
    """The folder for a copy of the model in exo-node's own `root`, or None if its id is no path."""
    name = FolderName.read(model)
    return None if name is None else root / name


@dataclass(frozen=True, slots=True)
class Removal:
    """A model's files and folders that can be deleted, and the bytes that are free then.

    `own`: exo-node made them, no other program that shares the Hugging Face cache.
    """

    model: ModelId
    paths: Sequence[Path]
    freed_bytes: int
    own: bool

    def carry_out(self) -> None:
        """Deletes them. Raises RemovalRefused."""
        try:
            for path in self.paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except OSError as error:
            raise not_deleted(self.model, error) from error


def find_removal(model: ModelId, own_folder: Path) -> Removal | None:
    """The removal of a model of the cache, or of exo-node's own folder, whole or partial; or None.

    Raises RemovalRefused.
    """
    try:
        for place in HubCache().models():
            if place.id == model and place.fault:
                raise RemovalRefused(place.fault, param="model")
            if place.id == model:
                return removal_of(model, place.folder)
        for place in in_folders((own_folder,)):
            if place.id == model:
                return Removal(model, [place.folder], bytes_in(place.folder), own=True)
    except OSError as error:
        raise not_deleted(model, error) from error
    return None


def removal_of(model: ModelId, snapshot: Path) -> Removal:
    """The removal of a snapshot of the cache. Raises OSError."""
    paths = paths_of(snapshot)
    return Removal(model, paths, sum(map(bytes_in, paths)), is_own(snapshot))


def not_deleted(model: str, error: OSError) -> RemovalRefused:
    return RemovalRefused(
        f"{model} could not be deleted ({error}); mend the permissions and try again", param="model"
    )


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
