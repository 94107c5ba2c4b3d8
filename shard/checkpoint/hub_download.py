"""Asks the Hugging Face hub for a model, and fetches what the engine reads into its cache.

The hub's client (2.4) throws a partial file away when its process ends, and does not hash what
plain HTTP brought. Weights are therefore fetched here into the blobs that the client would have
written; it finds them there and does the rest.
"""

import glob
import re
import shutil
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import (
    HfApi,
    ResolvedRevision,
    constants,
    hf_hub_url,
    snapshot_download,  # pyright: ignore[reportUnknownVariableType]
)
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
    get_session,
    hf_raise_for_status,
    tqdm,
)

from ...placement.errors import DownloadFailed
from .checkpoint import HEAD_FILES, is_weight_file
from .fetch import Fetch, Meter
from .hub_cache import is_wanted
from .progress import Choose, Progress, partial_of, size_of

_SHA256 = re.compile(r"[0-9a-f]{64}")

_STREAMS = 4
_TIMEOUT_S = 30.0
_HEADROOM = 1.05


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    """One file of a repository; `sha256` only where the hub keeps it in LFS, as it does weights."""

    path: str
    size: int
    sha256: str | None


def fetch_model(
    repository: str,
    revision: str | None,
    on_progress: Callable[[Progress], None],
    *,
    endpoint: str | None,
    cache: Path,
    choose: Choose | None,
) -> Path:
    """What `download` does where it may ask the hub."""
    work = _Download(repository, endpoint, cache, threading.Event())
    try:
        return work.run(revision, on_progress, choose)
    except (httpx2.HTTPError, RevisionResolutionError, OSError) as error:
        raise DownloadFailed(_explain(error, repository, revision), param="model") from error


@dataclass(frozen=True, slots=True)
class _Download:
    """One repository on its way into the cache; `stop` ends its streams."""

    repository: str
    endpoint: str | None
    cache: Path
    stop: threading.Event

    @property
    def _folder(self) -> str:
        return f"models--{self.repository.replace('/', '--')}"

    @property
    def _blobs(self) -> Path:
        return self.cache / self._folder / "blobs"

    def run(
        self,
        revision: str | None,
        on_progress: Callable[[Progress], None],
        choose: Choose | None,
    ) -> Path:
        hub = HfApi(endpoint=self.endpoint, library_name="exo-node")
        resolved = hub.resolve_revision(self.repository, revision=revision, cache_dir=self.cache)
        files = self._list(hub, resolved.resolved)
        # The small ones first: with its config.json a model that is half here can be listed.
        small = [file for file in files if file.sha256 is None]
        if choose is not None:
            folder = self._into_snapshot(small, resolved)
            names = choose(folder, frozenset(file.path for file in files))
            files = [f for f in files if f.path in names or not is_weight_file(f.path)]
        absent = [file for file in files if not self._is_here(file, resolved.resolved)]
        needed = sum(file.size - self._partial_bytes(file) for file in absent)
        self._check_space(needed)
        total = sum(file.size for file in files)
        meter = Meter(total, total - needed, on_progress)
        _ = self._into_snapshot(small, resolved)
        self._fetch_all(absent, resolved.resolved, meter)
        snapshot = self._into_snapshot(files, resolved)
        meter.finish()
        return snapshot

    def _into_snapshot(self, files: Sequence[_RemoteFile], revision: ResolvedRevision) -> Path:
        """By the hub's client, which finds what is there already."""
        folder = snapshot_download(
            self.repository,
            revision=revision,
            cache_dir=self.cache,
            endpoint=self.endpoint,
            allow_patterns=[glob.escape(file.path) for file in files],
            tqdm_class=_NoBar,
        )
        return Path(folder)

    def _list(self, hub: HfApi, commit: str) -> list[_RemoteFile]:
        tree = hub.list_repo_tree(self.repository, recursive=True, revision=commit)
        files = [_remote_file(f) for f in tree if isinstance(f, RepoFile) and is_wanted(f.path)]
        names = {file.path for file in files}
        if "config.json" not in names or not any(map(is_weight_file, names - set(HEAD_FILES))):
            raise DownloadFailed(
                f"{self.repository} has no config.json with model*.safetensors beside it. Choose "
                "a repository in safetensors format; GGUF and .bin files are not read.",
                param="model",
            )
        return files

    def _is_here(self, file: _RemoteFile, commit: str) -> bool:
        if (self.cache / self._folder / "snapshots" / commit / file.path).exists():
            return True
        return file.sha256 is not None and (self._blobs / file.sha256).exists()

    def _partial_bytes(self, file: _RemoteFile) -> int:
        if file.sha256 is None:
            return 0
        return min(size_of(partial_of(self._blobs / file.sha256)), file.size)

    def _check_space(self, needed: int) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._blobs).free
        if needed * _HEADROOM > free:
            raise DownloadFailed(
                f"{self.repository} needs {needed * _HEADROOM / 1e9:,.2f} GB more in {self.cache}, "
                f"where {free / 1e9:,.2f} GB are free. Free some space, or set HF_HUB_CACHE to a "
                "folder on another disk.",
                param="HF_HUB_CACHE",
            )

    def _fetch_all(self, files: Sequence[_RemoteFile], commit: str, meter: Meter) -> None:
        pool = ThreadPoolExecutor(_STREAMS, thread_name_prefix="download")
        jobs = [pool.submit(self._fetch, f, f.sha256, commit, meter) for f in files if f.sha256]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:
            self.stop.set()
            pool.shutdown(cancel_futures=True)

    def _fetch(self, file: _RemoteFile, sha256: str, commit: str, meter: Meter) -> None:
        """Make a blob, under the lock that the hub's client takes for it."""
        locks = self.cache / ".locks" / self._folder
        locks.mkdir(parents=True, exist_ok=True)
        target = self._blobs / sha256
        with WeakFileLock(locks / f"{sha256}.lock"):
            if not target.exists():  # else another process brought it meanwhile
                Fetch(
                    name=file.path,
                    size=file.size,
                    sha256=sha256,
                    target=target,
                    open_at=lambda start: self._open(file.path, commit, start),
                    meter=meter,
                    stop=self.stop,
                ).run()

    @contextmanager
    def _open(self, path: str, commit: str, start: int) -> Generator[httpx2.Response, None, None]:
        """A redirect to another host loses the token: the session takes care of that."""
        headers = build_hf_headers(library_name="exo-node") | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        url = hf_hub_url(self.repository, path, revision=commit, endpoint=self.endpoint)
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S
        ) as response:
            if response.status_code < 500:
                hf_raise_for_status(response)
            yield response


class _NoBar(tqdm):
    """The hub's client wants a bar; a node has no terminal to draw it on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})  # pyright: ignore[reportUnknownMemberType]


def _remote_file(file: RepoFile) -> _RemoteFile:
    if file.lfs is None:
        return _RemoteFile(file.path, file.size, None)
    if not _SHA256.fullmatch(file.lfs.sha256):  # it becomes a file's name
        raise DownloadFailed(
            f"the hub gives {file.path} the malformed hash {file.lfs.sha256[:80]!r}. "
            "Unset HF_ENDPOINT to use the hub itself.",
            param="HF_ENDPOINT",
        )
    return _RemoteFile(file.path, file.lfs.size, file.lfs.sha256)


def _explain(error: Exception, repository: str, revision: str | None) -> str:
    """What went wrong between here and the hub, and what a person can do about it."""
    match error:
        case GatedRepoError():
            return (
                f"{repository} is gated. Accept its terms on its page at the hub, then log in with "
                "`hf auth login` or set HF_TOKEN."
            )
        case RepositoryNotFoundError():
            return (
                f"the hub has no model repository {repository}, or it is private. Check the name; "
                "for a private one log in with `hf auth login` or set HF_TOKEN."
            )
        case RevisionNotFoundError():
            return f"{repository} has no revision {revision or 'main'}. Check it on the hub."
        case DisabledRepoError():
            return f"the hub has disabled {repository}. Choose another repository."
        case HfHubHTTPError():
            status = error.response.status_code
            return f"the hub answered {status} for {repository}. Try again later."
        case httpx2.HTTPError() | RevisionResolutionError() | LocalEntryNotFoundError():
            return (
                f"the hub could not be reached for {repository} ({error}). Check the network and "
                "HF_ENDPOINT, and start the download again; it goes on where it broke off."
            )
        case _:
            return (
                f"{repository} could not be written to {constants.HF_HUB_CACHE} ({error}). Check "
                "its disk and permissions, or set HF_HUB_CACHE to another folder."
            )
