"""The source of an MTP head: this disk, or as little of a repository as has it. Blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...placement.errors import InvalidCheckpoint, ModelNotFound
from ...shard.checkpoint.checkpoint import HEAD_FILES, is_weight_file, read_config
from ...shard.checkpoint.head_tensors import files_of_head
from .library import ModelLibrary
from .transfers import Progress


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """`files`: the weight files of it that are there, or empty if all are."""

    folder: Path
    files: tuple[str, ...] = ()


def head_folder(
    library: ModelLibrary, name: str, revision: str | None, on_progress: Callable[[Progress], None]
) -> HeadFolder:
    """The folder that `--from` names; a repository's shards without a head's tensor stay away.

    Raises ModelNotFound, DownloadFailed and InvalidCheckpoint.
    """
    try:
        return HeadFolder(library.folder(name))
    except ModelNotFound:
        if name.count("/") != 1:
            raise
    chosen: list[str] = []

    def choose(folder: Path, files: frozenset[str]) -> frozenset[str]:
        weights = frozenset(file for file in files if is_weight_file(file))
        own = weights & frozenset(HEAD_FILES)
        chosen.extend(sorted(own or files_of_head(folder, read_config(folder), weights)))
        if not chosen:
            raise InvalidCheckpoint(f"{name} holds no MTP head; name the original repository")
        return frozenset(chosen)

    from .hub_download import download

    folder = download(name, revision, on_progress, offline=library.offline, choose=choose)
    return HeadFolder(folder, tuple(chosen))
