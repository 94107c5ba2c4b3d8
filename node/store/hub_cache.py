"""The Hugging Face cache: its snapshots, whole or not, and their removal. Blocks.

A repository's folder has `blobs`, `snapshots/COMMIT` with links to them, and `refs` with a commit
for each branch and tag. All paths are made of checked identifiers.
"""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants

from ...placement.errors import DownloadFailed, InvalidCheckpoint
from ...placement.ids import ModelId
from ...shard.checkpoint.checkpoint import indexed_files, is_weight_file, read_config
from ...shard.checkpoint.embedders import POOLING_FILE, is_encoder
from ...shard.checkpoint.files import access_fault, write_atomic
from ...shard.checkpoint.model_classes import has_class
from .identifiers import Commit, FileHash, FilePath, RepositoryName, Revision
from .model_folder import CONFIG, Place, is_model_file
from .transfers import RemoteFile

_OWN: Final = ".exo-node"
"""The folder of a repository with a file for each commit that exo-node downloaded: the sizes and
hashes of its files, and whether exo-node made the snapshot itself. The hub's client keeps sizes."""
_MAIN: Final = Revision("main")


def offline_by(offline: bool) -> str:
    """The setting that forbids to ask the hub; "" where none does."""
    if offline:
        return "EXO_OFFLINE"
    return "HF_HUB_OFFLINE" if constants.is_offline_mode() else ""


def checked_names(repository: str, revision: str | None) -> tuple[RepositoryName, Revision | None]:
    """Checks names. Raises DownloadFailed for one that no repository or revision can have."""
    if (name := RepositoryName.read(repository)) is None:
        raise DownloadFailed(
            f"{repository[:120]!r} is no repository of the hub. Write owner/name, as on "
            "huggingface.co; `exo-node models recommend` names some that fit.",
            param="model",
        )
    checked = Revision.read(revision)
    if revision is not None and checked is None:
        raise DownloadFailed(
            f"{revision[:120]!r} is no revision. Name a branch, a tag or a commit.",
            param="revision",
        )
    return name, checked


class HubCache:
    """The cache in one folder, without any network traffic."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: by default the one that HF_HUB_CACHE or HF_HOME names."""
        self.folder = (folder or Path(constants.HF_HUB_CACHE)).expanduser().resolve()

    def repository(self, repository: RepositoryName) -> Path:
        """The folder of a repository, whether it exists or not."""
        return self.folder / f"models--{repository.replace('/', '--')}"

    def snapshot_of(self, repository: RepositoryName, commit: Commit) -> Path:
        """The folder of a commit, whether it exists or not."""
        return self.repository(repository) / "snapshots" / commit

    def blob(self, repository: RepositoryName, hash: FileHash) -> Path:
        """The bytes of a file of a repository, whether they are here or not."""
        return self.repository(repository) / "blobs" / hash

    def locate(self, repository: str, revision: str | None = None) -> Path | None:
        """The folder of a whole snapshot; None where there is none.

        `repository` is `owner/name`; `revision` a branch, tag or commit, None for the main branch.
        Raises DownloadFailed for malformed names, InvalidCheckpoint for a malformed index and for
        what cannot be read.
        """
        name, checked = checked_names(repository, revision)
        if fault := self.access_fault(name):
            raise InvalidCheckpoint(fault, param="model")
        snapshot = self.snapshot(name, checked)
        return None if snapshot is None or missing_files(snapshot) else snapshot

    def find(self, model: ModelId) -> Path | None:
        """The whole snapshot of the model that `models` calls so, or None if there is none.

        Raises InvalidCheckpoint for one that cannot be read.
        """
        repository, _, revision = model.partition("@")
        if repository.count("/") != 1:
            return None
        try:
            return self.locate(repository, revision or None)
        except DownloadFailed:  # a name that no repository can have
            return None

    def access_fault(self, repository: RepositoryName) -> str:
        """Why a repository's files cannot be read, with the remedy; "" where they can."""
        folder = self.repository(repository)
        parts = (self.folder, folder, *(folder / name for name in ("snapshots", "refs", "blobs")))
        for part in chain(parts, (folder / "snapshots").glob("*")):
            if fault := access_fault(part):
                return fault
        return ""

    def models(self) -> Iterator[Place]:
        """Every snapshot that mlx-lm may run: `owner/name`, or with `@revision`.

        A commit is listed once, as the main branch where it is that, else under its branch or tag,
        else under its hash. A cache also has tokenizers, image models and the like; those are left
        out. A folder that cannot be read is a place with its fault.
        """
        if fault := access_fault(self.folder):
            yield Place(ModelId(str(self.folder)), self.folder, hub=True, fault=fault)
            return
        for folder in sorted(self.folder.glob("models--*--*")):
            if (repository := RepositoryName.read(_name_of(folder))) is None:
                continue
            fault = self.access_fault(repository)
            try:
                models = [] if fault else self._models_of(repository)
            except OSError as error:
                models, fault = [], _unreadable(error, folder)
            if fault:
                yield Place(ModelId(repository), folder, hub=True, fault=fault)
            yield from models

    def snapshot(self, repository: RepositoryName, revision: Revision | None) -> Path | None:
        """The folder of a snapshot that has its config.json, whole or not, or None.

        Raises InvalidCheckpoint where the revision's commit cannot be read.
        """
        folder = self.revision_folder(repository, revision)
        return folder if folder is not None and (folder / CONFIG).is_file() else None

    def revision_folder(self, repository: RepositoryName, revision: Revision | None) -> Path | None:
        """The folder of a revision whose commit is known here; it need not exist.

        Raises InvalidCheckpoint where the revision's commit cannot be read.
        """
        commit = Commit.read(revision)
        ref = self.repository(repository) / "refs" / (revision or _MAIN)
        try:
            if commit is None and ref.is_file():
                commit = Commit.read(ref.read_text(errors="replace").strip())
        except OSError as error:
            raise InvalidCheckpoint(_unreadable(error, self.folder), param="model") from error
        return None if commit is None else self.snapshot_of(repository, commit)

    def claim(
        self,
        repository: RepositoryName,
        revision: Revision | None,
        commit: Commit,
        files: Sequence[RemoteFile],
    ) -> None:
        """Records a download before its first file; a snapshot that is there is not exo-node's."""
        folder = self.repository(repository)
        if revision != commit:
            _write(folder / "refs" / (revision or _MAIN), commit.encode())
        path = folder / _OWN / commit
        if path.exists():
            return
        own = not self.snapshot_of(repository, commit).exists()
        record = {"own": own, "files": {file.path: (file.size, file.hash or "") for file in files}}
        _write(path, json.dumps(record, indent=1).encode())

    def place(self, repository: RepositoryName, commit: Commit, file: RemoteFile) -> None:
        """Makes a blob that is here a file of the snapshot."""
        assert file.hash is not None, f"{file.path} has no blob"
        blob = self.blob(repository, file.hash)
        path = self.snapshot_of(repository, commit) / file.path
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link to a blob that was deleted
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except FileExistsError:  # another process has placed it
            return
        except OSError:  # a disk without links, such as one in exFAT
            os.replace(blob, path)

    def _models_of(self, repository: RepositoryName) -> list[Place]:
        places: list[Place] = []
        for revision, folder in _revisions(self.repository(repository)):
            if not os.path.lexists(folder / CONFIG):
                continue
            try:
                missing = tuple(missing_files(folder))
            except InvalidCheckpoint:  # its index is malformed: reading the checkpoint names it
                missing = ()
            if _is_model(folder, whole=not missing):
                id = ModelId(repository + (f"@{revision}" if revision else ""))
                places.append(Place(id, folder, hub=True, missing=missing))
        return places


def missing_files(snapshot: Path) -> list[str]:
    """The files that a snapshot lacks: by the record of its download, by the listing that the hub's
    client kept, or by its index. Raises InvalidCheckpoint for a malformed index."""
    files = {file.path for file in _record(snapshot)[1]} or _listed_files(snapshot)
    names = (*files, *(path.name for path in snapshot.glob("*")))
    if not any(map(is_weight_file, names)):
        files.add(FilePath("model.safetensors"))
    return sorted(path for path in files if not (snapshot / path).exists())


def _listed_files(snapshot: Path) -> set[FilePath]:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    cache, name = snapshot.parents[2], _name_of(snapshot.parents[1])
    try:
        listing = get_cached_repo_tree(name, revision=snapshot.name, cache_dir=cache)
        names = {file.path for file in listing if is_model_file(file.path)}
    except CachedRepoTreeNotFoundError:
        names = indexed_files(snapshot)
    return {path for name in names if (path := FilePath.read(name)) is not None}


def is_own(snapshot: Path) -> bool:
    """Whether exo-node made the snapshot, and no other program."""
    return _record(snapshot)[0]


def progress(snapshot: Path) -> tuple[int, int]:
    """The bytes of a snapshot's files that are here, and those of all of them.

    Of a download by another program both are the bytes that are here.
    """
    blobs, files = snapshot.parents[1] / "blobs", _record(snapshot)[1]
    here = {path: _size(path) for path in snapshot.rglob("*") if not path.is_dir()}
    done_bytes = sum(here.values())
    for file in files:
        if snapshot / file.path not in here and file.hash:
            names = (file.hash, f"{file.hash}.incomplete")
            done_bytes += max(_size(blobs / name) for name in names)
    return done_bytes, max(done_bytes, sum(file.size for file in files))


def paths_of(snapshot: Path) -> list[Path]:
    """The files and folders that go with a snapshot: its own, its names, its blobs.

    Blobs that another snapshot uses stay. The whole repository's folder goes with its last one.
    Raises OSError.
    """
    folder = snapshot.parents[1]
    others = [path for path in (folder / "snapshots").glob("*") if path != snapshot]
    if not others:
        return [folder]
    links = (path for other in others for path in other.rglob("*") if path.is_symlink())
    shared_blobs = {link.resolve() for link in links}
    targets = {path.resolve() for path in snapshot.rglob("*") if path.is_symlink()}
    own = {path for path in targets if path.parent == folder.resolve() / "blobs"}
    partial = _partial_blobs(snapshot).difference(*map(_partial_blobs, others))
    refs = [ref for ref, commit in _refs(folder) if commit == snapshot.name]
    rest = (folder / "trees" / f"{snapshot.name}.json", folder / _OWN / snapshot.name)
    return [snapshot, *filter(Path.exists, (*(own - shared_blobs), *partial, *rest)), *refs]


def _partial_blobs(snapshot: Path) -> set[Path]:
    blobs, files = snapshot.parents[1] / "blobs", _record(snapshot)[1]
    return {blobs / f"{file.hash}.incomplete" for file in files if file.hash}


def _record(snapshot: Path) -> tuple[bool, Sequence[RemoteFile]]:
    """The record that `HubCache.claim` wrote; a file with anything else claims nothing."""
    try:
        path = snapshot.parents[1] / _OWN / Commit(snapshot.name)
        raw: dict[str, Any] = json.loads(path.read_bytes())
        files = [
            RemoteFile(FilePath(path), int(size), FileHash(hash) if hash else None)
            for path, (size, hash) in raw["files"].items()
        ]
        return raw["own"] is True, files
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False, ()


def _name_of(folder: Path) -> str:
    """The name of the repository that a folder of the cache is of."""
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def _is_model(snapshot: Path, *, whole: bool) -> bool:
    """Whether its config.json is a model's; of an incomplete one, weights must have arrived."""
    weights = snapshot.glob("model*.safetensors")
    try:
        config = read_config(snapshot)
    except InvalidCheckpoint:
        return any(weights)
    if is_encoder(config) and not (snapshot / POOLING_FILE).exists():
        return False  # other programs' encoders seldom embed
    partial_files = (snapshot.parent.parent / "blobs").glob("*.incomplete")
    return has_class(config) and (whole or any(weights) or any(partial_files))


def _revisions(repository: Path) -> list[tuple[str | None, Path]]:
    """The snapshots of one repository's folder, each under the name that a person used for it."""
    folders = (path for path in (repository / "snapshots").glob("*") if path.is_dir())
    snapshots = {path.name: path for path in folders if Commit.read(path.name)}
    names: dict[str, str] = {}
    for ref, commit in _refs(repository):
        name = ref.relative_to(repository / "refs").as_posix()
        if Revision.read(name) and (commit not in names or name == _MAIN):
            names[commit] = name
    named = ((names.get(commit, commit), path) for commit, path in sorted(snapshots.items()))
    return [(None if name == _MAIN else name, path) for name, path in named]


def _refs(repository: Path) -> list[tuple[Path, str]]:
    """The files of all branches and tags, and the commit that each contains."""
    files = sorted(path for path in (repository / "refs").rglob("*") if path.is_file())
    return [(path, path.read_text(errors="replace").strip()) for path in files]


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data, mode=0o644)


def _size(path: Path) -> int:
    """The bytes of a file, links followed; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _unreadable(error: OSError, folder: Path) -> str:
    path = error.filename or folder
    return f"{path} cannot be read ({error.strerror}); mend its permissions"
