"""Where an MTP head is taken from: this disk, or as little of a repository as holds it. Blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...placement.errors import InvalidCheckpoint, ModelNotFound
from ...placement.ids import ModelId
from ...shard.checkpoint.checkpoint import HEAD_FILES, is_weight_file, read_config
from ...shard.checkpoint.download import download
from ...shard.checkpoint.head_tensors import files_of_head
from ...shard.checkpoint.progress import Progress
from .library import ModelLibrary


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """`files`: those weight files of it that are there; empty: all."""

    folder: Path
    files: tuple[str, ...] = ()


def local_folder(library: ModelLibrary, name: str) -> Path:
    """The folder of a model on this disk, by id or path. Raises ModelNotFound."""
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.absolute()
    known = library.get(ModelId(name))
    if known.folder is None:
        raise ModelNotFound(f"{name} is not on this machine; `exo-node models pull {name}` gets it")
    return known.folder


def head_folder(
    library: ModelLibrary,
    name: str,
    revision: str | None,
    on_progress: Callable[[Progress], None],
    *,
    offline: bool,
) -> HeadFolder:
    """What `--from` names; a repository's shards that hold no tensor of the head stay away.

    Raises ModelNotFound, DownloadFailed and InvalidCheckpoint.
    """
    try:
        return HeadFolder(local_folder(library, name))
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

    folder = download(name, revision, on_progress, offline=offline, choose=choose)
    return HeadFolder(folder, tuple(chosen))
