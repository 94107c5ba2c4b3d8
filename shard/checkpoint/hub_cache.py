"""The Hugging Face cache: which models it holds, whole or not, and how one is removed."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from ...placement.errors import DownloadFailed, InvalidCheckpoint
from .checkpoint import HEAD_FILES, indexed_files, is_weight_file
from .files import closed

_REPOSITORY = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")

_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken")
_TEXT_NAMES = ("merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Cached:
    """One revision of a repository in the cache.

    `revision` None is the main branch. `missing`: the files that it lacks, empty where it is whole.
    `fault`: why nothing more is known of it; of the cache itself with its path for a repository.
    """

    repository: str
    revision: str | None
    snapshot: Path
    missing: tuple[str, ...]
    fault: str = ""


def is_wanted(path: str) -> bool:
    """Whether a repository's file is downloaded: weights, configs, tokenizer, chat template.

    Never code (.py) and never a pickle (.bin, .pt), and no folder but the MTP head's.
    """
    if "/" in path:
        return path in HEAD_FILES
    return is_weight_file(path) or path in _TEXT_NAMES or path.endswith(_TEXT_SUFFIXES)


def locate(
    repository: str, revision: str | None = None, *, cache_dir: Path | None = None
) -> Path | None:
    """The snapshot in the Hugging Face cache if it is complete, without any network traffic.

    `repository` is `owner/name`; `revision` a branch, tag or commit, None for the main branch.
    Raises DownloadFailed on malformed names, InvalidCheckpoint on a malformed index and on what may
    not be read.
    """
    check_names(repository, revision)
    cache = cache_folder(cache_dir)
    if fault := closed_part(repository, cache):
        raise InvalidCheckpoint(fault, param="model")
    snapshot = snapshot_of(repository, revision, cache)
    if snapshot is None or missing_files(repository, snapshot, cache):
        return None
    return snapshot


def closed_part(repository: str, cache: Path) -> str:
    """Why what the cache holds of a repository cannot be read, with the remedy; "": it can."""
    folder = _folder(repository, cache)
    for part in (cache, folder, folder / "snapshots", folder / "refs", folder / "blobs"):
        if fault := closed(part):
            return fault
    snapshots = (folder / "snapshots").glob("*")
    return next(filter(None, map(closed, snapshots)), "")


def cached(cache_dir: Path | None = None) -> list[Cached]:
    """Every model of the cache that has a config.json, without any network traffic.

    A commit is listed once, under the main branch where it is that, else under its branch or tag,
    else under its hash. What is no model is left out.
    """
    cache = cache_folder(cache_dir)
    if fault := closed(cache):
        return [Cached(str(cache), None, cache, (), fault)]
    found: list[Cached] = []
    for folder in sorted(cache.glob("models--*--*")):
        owner, _, name = folder.name.removeprefix("models--").partition("--")
        repository = f"{owner}/{name}"
        if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in name:
            continue
        if fault := closed_part(repository, cache):
            found.append(Cached(repository, None, folder, (), fault))
            continue
        try:
            found += _of_repository(repository, folder, cache)
        except OSError as error:
            found.append(Cached(repository, None, folder, (), _not_read(error, folder)))
    return found


def _of_repository(repository: str, folder: Path, cache: Path) -> list[Cached]:
    found: list[Cached] = []
    for revision, snapshot in _revisions(folder):
        if not os.path.lexists(snapshot / "config.json"):
            continue
        try:
            missing = tuple(missing_files(repository, snapshot, cache))
        except InvalidCheckpoint:  # its index: whoever opens the model says what is wrong
            missing = ()
        found.append(Cached(repository, revision, snapshot, missing))
    return found


def _revisions(folder: Path) -> list[tuple[str | None, Path]]:
    """The snapshots of one repository's folder, each under the name that a person used for it."""
    snapshots = {path.name: path for path in (folder / "snapshots").glob("*") if path.is_dir()}
    named: dict[str, str] = {}
    refs = folder / "refs"
    for ref in sorted(path for path in refs.rglob("*") if path.is_file()):
        commit, name = ref.read_text(errors="replace").strip(), ref.relative_to(refs).as_posix()
        if _REVISION.fullmatch(name) and (commit not in named or name == "main"):
            named[commit] = name
    shown = ((named.get(commit, commit), path) for commit, path in sorted(snapshots.items()))
    return [(None if name == "main" else name, path) for name, path in shown]


def check_names(repository: str, revision: str | None) -> None:
    """Raises DownloadFailed for what no repository or revision is called."""
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise DownloadFailed(
            f"{repository[:120]!r} is no repository of the hub. Write owner/name.", param="model"
        )
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise DownloadFailed(
            f"{revision[:120]!r} is no revision. Name a branch, a tag or a commit.",
            param="revision",
        )


def cache_folder(cache_dir: Path | None = None) -> Path:
    """Where the cache is, by HF_HUB_CACHE or HF_HOME."""
    return (cache_dir or Path(constants.HF_HUB_CACHE)).expanduser().resolve()


def snapshot_of(repository: str, revision: str | None, cache: Path) -> Path | None:
    """The snapshot of a revision, whole or not; None where there is none.

    Raises InvalidCheckpoint where its name may not be read.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(
            repository, "config.json", cache_dir=cache, revision=revision
        )
    except OSError as error:
        raise InvalidCheckpoint(_not_read(error, cache), param="model") from error
    return Path(config).parent if isinstance(config, str) else None


def missing_files(repository: str, snapshot: Path, cache: Path) -> list[str]:
    """What a snapshot lacks by the listing that the hub's client kept, else by its index."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        listing = get_cached_repo_tree(repository, revision=snapshot.name, cache_dir=cache)
        wanted = {file.path for file in listing if is_wanted(file.path)}
    except CachedRepoTreeNotFoundError:
        wanted = set(indexed_files(snapshot))
    if not any(is_weight_file(path) for path in wanted) and not any(
        is_weight_file(path.name) for path in snapshot.iterdir()
    ):
        wanted.add("model.safetensors")
    return sorted(path for path in wanted if not (snapshot / path).exists())


def remove(repository: str, snapshot: Path, *, cache_dir: Path | None = None) -> int:
    """Deletes one snapshot, the files that no other one uses, and its names; the bytes freed.

    The whole repository's folder goes with its last snapshot. Raises OSError.
    """
    folder = _folder(repository, cache_folder(cache_dir))
    before = _bytes(folder)
    others = [path for path in (folder / "snapshots").iterdir() if path != snapshot]
    if not others:
        shutil.rmtree(folder)
        return before
    kept = {path.resolve() for other in others for path in other.rglob("*") if path.is_symlink()}
    for path in snapshot.rglob("*"):
        if path.is_symlink() and (blob := path.resolve()) not in kept:
            blob.unlink(missing_ok=True)
    shutil.rmtree(snapshot)
    for ref in (path for path in (folder / "refs").rglob("*") if path.is_file()):
        if ref.read_text(errors="replace").strip() == snapshot.name:
            ref.unlink()
    return before - _bytes(folder)


def _not_read(error: OSError, folder: Path) -> str:
    path = error.filename or folder
    return f"{path} cannot be read ({error.strerror}); mend its permissions"


def _folder(repository: str, cache: Path) -> Path:
    return cache / f"models--{repository.replace('/', '--')}"


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
