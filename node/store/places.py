"""The places of models on this disk: folders, and the Hugging Face cache. Blocks."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ...placement.errors import ExoNodeError
from ...placement.ids import ModelId
from ...shard.checkpoint.files import access_fault
from .hub_cache import HubCache
from .model_folder import CONFIG, COPY_FILE, Place, bytes_in, read_origin

_PART: Final = re.compile(r"(?!\.)[^/\\\0]{1,200}")


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
    """The folder for a copy of the model in exo-node's own `root`; None: its id is no path."""
    parts = model.split("/")
    if len(parts) > 2 or not all(_PART.fullmatch(part) and part.isprintable() for part in parts):
        return None
    return root.joinpath(*parts)


def delete(model: ModelId, own_folder: Path) -> int | None:
    """Deletes a model of the cache, or of exo-node's own folder, whole or partial.

    Returns the bytes that are free again; None: no such model is there. Raises ExoNodeError.
    """
    try:
        cache = HubCache()
        for place in cache.models():
            if place.id == model:
                return cache.remove(model.partition("@")[0], place.folder)
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
