"""The Hugging Face cache: its snapshots, whole or not, and their removal. Blocks.

A repository's folder has `blobs`, `snapshots/COMMIT` with links to them, and `refs` with a commit
for each branch and tag.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants

from ...placement.errors import DownloadFailed, InvalidCheckpoint
from ...placement.ids import ModelId
from ...shard.checkpoint.checkpoint import indexed_files, is_weight_file, read_config
from ...shard.checkpoint.encoders import is_encoder
from ...shard.checkpoint.files import access_fault, write_atomic
from ...shard.checkpoint.model_classes import has_class
from ...shard.checkpoint.pooling import POOLING_FILE
from .model_folder import CONFIG, Place, is_model_file
from .transfers import RemoteFile

_REPOSITORY: Final = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_OWN: Final = ".exo-node"
"""The folder of a repository with a file for each commit that exo-node downloaded: the sizes and
hashes of its files, and whether exo-node made the snapshot itself. The hub's client keeps sizes."""
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def offline_by(offline: bool) -> str:
    """The setting that forbids to ask the hub; "" where none does."""
    if offline:
        return "EXO_OFFLINE"
    return "HF_HUB_OFFLINE" if constants.is_offline_mode() else ""


def _is_repository(name: str) -> bool:
    """Whether the hub's client takes the name; it raises for others, such as `owner/name.git`."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(_REPOSITORY.fullmatch(name))


def check_names(repository: str, revision: str | None) -> None:
    """Raises DownloadFailed for a name that no repository or revision can have."""
    if not _is_repository(repository):
        raise DownloadFailed(
            f"{repository[:120]!r} is no repository of the hub. Write owner/name.", param="model"
        )
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise DownloadFailed(
            f"{revision[:120]!r} is no revision. Name a branch, a tag or a commit.",
            param="revision",
        )


class HubCache:
    """The cache in one folder, without any network traffic."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` None: the one that HF_HUB_CACHE or HF_HOME names."""
        self.folder = (folder or Path(constants.HF_HUB_CACHE)).expanduser().resolve()

    def repository(self, repository: str) -> Path:
        """The folder of a repository, whether it exists or not."""
        return self.folder / f"models--{repository.replace('/', '--')}"

    def locate(self, repository: str, revision: str | None = None) -> Path | None:
        """The folder of a whole snapshot; None where there is none.

        `repository` is `owner/name`; `revision` a branch, tag or commit, None for the main branch.
        Raises DownloadFailed for malformed names, InvalidCheckpoint for a malformed index and for
        what cannot be read.
        """
        check_names(repository, revision)
        if fault := self.access_fault(repository):
            raise InvalidCheckpoint(fault, param="model")
        snapshot = self.snapshot(repository, revision)
        if snapshot is None or self.missing_files(repository, snapshot):
            return None
        return snapshot

    def find(self, model: ModelId) -> Path | None:
        """The whole snapshot of the model that `models` calls so; None: there is none.

        Raises InvalidCheckpoint for one that cannot be read.
        """
        repository, _, revision = model.partition("@")
        if repository.count("/") != 1:
            return None
        try:
            return self.locate(repository, revision or None)
        except DownloadFailed:  # a name that no repository can have
            return None

    def access_fault(self, repository: str) -> str:
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
            owner, _, name = folder.name.removeprefix("models--").partition("--")
            repository = f"{owner}/{name}"
            if not _is_repository(repository):
                continue
            fault = self.access_fault(repository)
            try:
                models = [] if fault else self._models_of(repository)
            except OSError as error:
                models, fault = [], _unreadable(error, folder)
            if fault:
                yield Place(ModelId(repository), folder, hub=True, fault=fault)
            yield from models

    def snapshot(self, repository: str, revision: str | None) -> Path | None:
        """The folder of a snapshot, whole or not; None where there is none.

        Raises InvalidCheckpoint where the revision's name cannot be read.
        """
        from huggingface_hub import try_to_load_from_cache

        try:
            config = try_to_load_from_cache(
                repository, "config.json", cache_dir=self.folder, revision=revision
            )
        except OSError as error:
            raise InvalidCheckpoint(_unreadable(error, self.folder), param="model") from error
        return Path(config).parent if isinstance(config, str) else None

    def missing_files(self, repository: str, snapshot: Path) -> list[str]:
        """The files that a snapshot lacks by the listing that the hub's client kept, or its index.

        Raises InvalidCheckpoint for a malformed index.
        """
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            listing = get_cached_repo_tree(
                repository, revision=snapshot.name, cache_dir=self.folder
            )
            files = {file.path for file in listing if is_model_file(file.path)}
        except CachedRepoTreeNotFoundError:
            files = set(indexed_files(snapshot))
        names = (*files, *(path.name for path in snapshot.iterdir()))
        if not any(map(is_weight_file, names)):
            files.add("model.safetensors")
        return sorted(path for path in files if not (snapshot / path).exists())

    def claim(self, repository: str, commit: str, files: Sequence[RemoteFile]) -> None:
        """Records a download before its first file; a snapshot that is there is not exo-node's."""
        folder = self.repository(repository)
        path = folder / _OWN / commit
        if path.exists():
            return
        own = not (folder / "snapshots" / commit).exists()
        record = {"own": own, "files": {file.path: (file.size, file.sha256) for file in files}}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(record, indent=1).encode(), mode=0o644)

    def is_own(self, repository: str, snapshot: Path) -> bool:
        """Whether exo-node made the snapshot, and no other program."""
        return self._record(repository, snapshot.name)[0]

    def progress(self, repository: str, snapshot: Path) -> tuple[int, int]:
        """The bytes of a snapshot's files that are here, and those of all of them.

        Of a download by another program both are the bytes that are here.
        """
        blobs = self.repository(repository) / "blobs"
        files = self._record(repository, snapshot.name)[1]
        here = {path: _size(path) for path in snapshot.rglob("*") if not path.is_dir()}
        done_bytes = sum(here.values())
        for file in files:
            if snapshot / file.path not in here and file.sha256:
                names = (file.sha256, f"{file.sha256}.incomplete")
                done_bytes += max(_size(blobs / name) for name in names)
        return done_bytes, max(done_bytes, sum(file.size for file in files))

    def paths_of(self, repository: str, snapshot: Path) -> list[Path]:
        """The files and folders that go with a snapshot: its own, its names, its blobs.

        Blobs that another snapshot uses stay. The whole repository's folder goes with its last one.
        Raises OSError.
        """
        folder = self.repository(repository)
        others = [path for path in (folder / "snapshots").iterdir() if path != snapshot]
        if not others:
            return [folder]
        links = (path for other in others for path in other.rglob("*") if path.is_symlink())
        shared_blobs = {link.resolve() for link in links}
        own = {path.resolve() for path in snapshot.rglob("*") if path.is_symlink()}
        partial = self._partial_blobs(repository, snapshot)
        for other in others:
            partial -= self._partial_blobs(repository, other)
        refs = [ref for ref, commit in _refs(folder) if commit == snapshot.name]
        rest = (folder / "trees" / f"{snapshot.name}.json", folder / _OWN / snapshot.name)
        return [snapshot, *filter(Path.exists, (*(own - shared_blobs), *partial, *rest)), *refs]

    def _partial_blobs(self, repository: str, snapshot: Path) -> set[Path]:
        blobs = self.repository(repository) / "blobs"
        files = self._record(repository, snapshot.name)[1]
        return {blobs / f"{file.sha256}.incomplete" for file in files if file.sha256}

    def _record(self, repository: str, commit: str) -> tuple[bool, list[RemoteFile]]:
        """The record that `claim` wrote; a file with anything else claims nothing."""
        try:
            raw: dict[str, Any] = json.loads(
                (self.repository(repository) / _OWN / commit).read_bytes()
            )
            files = [RemoteFile(path, int(size), sha) for path, (size, sha) in raw["files"].items()]
            hashes = all(re.fullmatch("[0-9a-f]{64}|", file.sha256) for file in files)
            return (raw["own"] is True, files) if hashes else (False, [])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False, []

    def _models_of(self, repository: str) -> list[Place]:
        places: list[Place] = []
        for revision, folder in _revisions(self.repository(repository)):
            if not os.path.lexists(folder / CONFIG):
                continue
            try:
                missing = tuple(self.missing_files(repository, folder))
            except InvalidCheckpoint:  # its index is malformed: reading the checkpoint names it
                missing = ()
            if _is_model(folder, whole=not missing):
                id = ModelId(repository + (f"@{revision}" if revision else ""))
                places.append(Place(id, folder, hub=True, missing=missing))
        return places


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
    snapshots = {path.name: path for path in (repository / "snapshots").glob("*") if path.is_dir()}
    names: dict[str, str] = {}
    for ref, commit in _refs(repository):
        name = ref.relative_to(repository / "refs").as_posix()
        if _REVISION.fullmatch(name) and (commit not in names or name == "main"):
            names[commit] = name
    named = ((names.get(commit, commit), path) for commit, path in sorted(snapshots.items()))
    return [(None if name == "main" else name, path) for name, path in named]


def _refs(repository: Path) -> list[tuple[Path, str]]:
    """The files of all branches and tags, and the commit that each contains."""
    files = sorted(path for path in (repository / "refs").rglob("*") if path.is_file())
    return [(path, path.read_text(errors="replace").strip()) for path in files]


def _size(path: Path) -> int:
    """The bytes of a file, links followed; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _unreadable(error: OSError, folder: Path) -> str:
    path = error.filename or folder
    return f"{path} cannot be read ({error.strerror}); mend its permissions"
