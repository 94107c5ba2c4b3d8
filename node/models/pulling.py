"""Models brought to this disk and deleted from it, by a person's command. Blocks."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...placement.errors import ExoNodeError, InvalidSettings, ModelNotFound
from ...placement.ids import ModelId
from ...shard.checkpoint.download import download
from ...shard.checkpoint.hub_cache import remove as remove_from_cache
from ...shard.checkpoint.progress import Progress
from .library import DEMO, ModelLibrary
from .places import bytes_in, in_cache, in_folders, parts


def repository_of(library: ModelLibrary, id: str, quant: int | None) -> tuple[str, str | None]:
    """What `pull` downloads for `id`: a repository, and the revision that its card names.

    Raises ModelNotFound, and InvalidSettings where no such quantisation is known.
    """
    if id == DEMO:
        raise ModelNotFound(f"{DEMO} ships with exo-node; there is nothing to download")
    known = library.catalogue().get(ModelId(id))
    if quant is None:
        card = known.card if known else None
        return (card.repository or id, card.revision) if card else (id, None)
    variants = known.card.variants if known else ()
    for variant in variants:
        if variant.bits == quant:
            return variant.repository, None
    bits = sorted({variant.bits for variant in variants})
    there = f"there is one of {' and of '.join(map(str, bits))} bits; " if bits else ""
    raise InvalidSettings(
        f"--quant: no quantisation of {id} to {quant} bits is known; {there}give a repository's "
        "own id",
        param="--quant",
    )


def pull(
    repository: str,
    revision: str | None,
    on_progress: Callable[[Progress], None],
    *,
    offline: bool,
) -> Path:
    """Raises DownloadFailed."""
    return download(repository, revision, on_progress, offline=offline)


def remove(library: ModelLibrary, id: str, own: Path) -> int:
    """Deletes a model of the cache, or of exo-node's folder `own`; the bytes that are free again.

    Of a model that was copied in part, that part.

    Raises ModelNotFound, and ExoNodeError where it is not exo-node's to delete.
    """
    if id == DEMO:
        raise ExoNodeError(f"{DEMO} is part of exo-node and stays")
    for place in in_cache():
        if place.id == id:
            repository = id.partition("@")[0]
            return _deleted(id, partial(remove_from_cache, repository, place.folder))
    for place in in_folders((own,)):
        if place.id == id:
            return _deleted(id, partial(_rmtree, place.folder))
    for part in parts((own,)):
        if part.id == id:
            return _deleted(id, partial(_rmtree, part.folder))
    folder = library.get(ModelId(id)).folder
    if folder is None:
        raise ModelNotFound(f"{id} is not on this machine; there is nothing to delete")
    raise ExoNodeError(f"{id} lies in {folder}, a folder of yours; delete that folder yourself")


def _rmtree(folder: Path) -> int:
    size = bytes_in(folder)
    shutil.rmtree(folder)
    return size


def _deleted(id: str, work: Callable[[], int]) -> int:
    try:
        return work()
    except OSError as error:
        raise ExoNodeError(
            f"{id} could not be deleted ({error}); mend the permissions and try again"
        ) from error
