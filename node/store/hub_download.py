"""Downloads a model from the Hugging Face hub into its ordinary cache: only what the engine reads.

The hub's client (2.4) throws a partial file away when its process ends, and does not hash what
plain HTTP brought. Weights are therefore fetched here into the blobs that the client would have
written; it finds them there and does the rest. It takes a third of a second of a CPU to import, so
this module is imported by the first download.
"""

import glob
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import httpx2
from huggingface_hub import (
    HfApi,
    ResolvedRevision,
    constants,
    hf_hub_url,
    set_client_factory,
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
    hf_raise_for_status,
    tqdm,
)

from ...placement.errors import DownloadFailed
from ...shard.checkpoint.checkpoint import HEAD_FILES, is_weight_file
from .hub_cache import HubCache, check_names, offline_by
from .model_folder import is_model_file
from .stop_signal import StopSignal
from .transfers import SHA256, FileProgress, Meter, PartialFile, Progress, RemoteFile, require_room

Choose = Callable[[Path, frozenset[str]], frozenset[str]]
"""From the snapshot with its small files, and the names of all files: the weight files to fetch."""

_MOST_ENTRIES: Final = 100_000
_MOST_FILES: Final = 2_000
"""Limit of one repository; the largest models have some hundred files."""
_STREAMS: Final = 4
_TIMEOUT_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 10.0
"""A stopped download of weights waits so long for a connection that is not made."""
_HEADROOM: Final = 1.05
_REPORT_BYTES: Final = 256 << 10
_ENOUGH_BYTES: Final = 1 << 20
_PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before each attempt after a broken connection; `_ENOUGH_BYTES` of new data start the row."""


def download(
    repository: str,
    revision: str | None,
    on_progress: Callable[[Progress], None],
    *,
    offline: bool,
    endpoint: str | None = None,
    cache: HubCache | None = None,
    choose: Choose | None = None,
    stop: StopSignal | None = None,
) -> Path:
    """Brings a model into the cache and returns its snapshot; blocks, and raises DownloadFailed.

    A download that an earlier call left unfinished resumes. `on_progress` is called from several
    threads, one at a time, and never with fewer bytes than before; an error that it raises ends the
    download and reaches the caller. `choose` names the weight files to fetch, None: all. `endpoint`
    None is the hub, or the mirror that HF_ENDPOINT names. Setting `stop` ends the download with
    Stopped, once its connections have noticed.
    """
    check_names(repository, revision)
    cache = cache or HubCache()
    if fault := cache.access_fault(repository):
        raise DownloadFailed(fault, param="model")
    if variable := offline_by(offline):
        return _from_cache_only(repository, revision, cache, variable)
    try:
        timeout = httpx2.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        with httpx2.Client(timeout=timeout, follow_redirects=True) as client:
            one = _Download(repository, endpoint, cache, stop or StopSignal(), client)
            return one.run(revision, on_progress, choose)
    except (httpx2.HTTPError, RevisionResolutionError, OSError) as error:
        raise DownloadFailed(explain(error, repository, revision), param="model") from error


def _from_cache_only(repository: str, revision: str | None, cache: HubCache, variable: str) -> Path:
    """A snapshot that lacks at most a head's own file; without that MTP is off."""
    snapshot = cache.snapshot(repository, revision)
    missing = cache.missing_files(repository, snapshot) if snapshot else ["config.json"]
    if snapshot is not None and set(missing) <= set(HEAD_FILES):
        return snapshot
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    raise DownloadFailed(
        f"{repository} is not complete in {cache.folder} (missing: {', '.join(missing[:3])}{more}) "
        f"and this node is offline. Unset {variable}, or copy the model into --models-dir.",
        param=variable,
    )


@dataclass(frozen=True, slots=True)
class _Download:
    """One repository on its way into the cache; `stop` ends its streams, which are `client`'s."""

    repository: str
    endpoint: str | None
    cache: HubCache
    stop: StopSignal
    client: httpx2.Client

    @property
    def _folder(self) -> Path:
        return self.cache.repository(self.repository)

    def run(
        self,
        revision: str | None,
        on_progress: Callable[[Progress], None],
        choose: Choose | None,
    ) -> Path:
        self.stop.check()
        hub = HfApi(endpoint=self.endpoint, library_name="exo-node")
        resolved = hub.resolve_revision(
            self.repository, revision=revision, cache_dir=self.cache.folder
        )
        listed = files = list_files(hub, self.repository, resolved.resolved)
        self.stop.check()
        # The small ones first: with its config.json a model that is half here can be listed.
        small = [file for file in files if not file.sha256]
        if choose is not None:
            self.cache.claim(self.repository, resolved.resolved, files)
            folder = self._into_snapshot(small, resolved)
            names = choose(folder, frozenset(file.path for file in files))
            files = [f for f in files if f.path in names or not is_weight_file(f.path)]
        absent = [file for file in files if not self._is_here(file, resolved.resolved)]
        here = {file.path: FileProgress(file.size, file.size) for file in files}
        for file in absent:
            here[file.path] = FileProgress(self._arrived_bytes(file), file.size)
        needed = sum(each.total_bytes - each.done_bytes for each in here.values())
        (self._folder / "blobs").mkdir(parents=True, exist_ok=True)
        remedy = "set HF_HUB_CACHE to a folder on another disk"
        reserved = int(needed * _HEADROOM)
        require_room(self.cache.folder, reserved, self.repository, remedy, "HF_HUB_CACHE")
        self.cache.claim(self.repository, resolved.resolved, listed)
        meter = Meter(here, on_progress, every_bytes=_REPORT_BYTES)
        _ = self._into_snapshot(small, resolved)
        for file in small:
            meter.add(file.size - here[file.path].done_bytes, file.path)
        self.stop.check()
        self._fetch_all(absent, resolved.resolved, meter)
        snapshot = self._into_snapshot(files, resolved)
        meter.finish()
        return snapshot

    def _into_snapshot(self, files: Sequence[RemoteFile], revision: ResolvedRevision) -> Path:
        """Fills the snapshot by the hub's client, which uses the blobs that are there already."""
        folder = snapshot_download(
            self.repository,
            revision=revision,
            cache_dir=self.cache.folder,
            endpoint=self.endpoint,
            allow_patterns=[glob.escape(file.path) for file in files],
            tqdm_class=_NoBar,
        )
        return Path(folder)

    def _is_here(self, file: RemoteFile, commit: str) -> bool:
        if (self._folder / "snapshots" / commit / file.path).exists():
            return True
        return bool(file.sha256) and self._blob(file).exists()

    def _arrived_bytes(self, file: RemoteFile) -> int:
        return PartialFile(self._blob(file), file.size).arrived_bytes() if file.sha256 else 0

    def _blob(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / file.sha256

    def _fetch_all(self, files: Sequence[RemoteFile], commit: str, meter: Meter) -> None:
        pool = ThreadPoolExecutor(_STREAMS, thread_name_prefix="download")
        jobs = [pool.submit(self._fetch, file, commit, meter) for file in files if file.sha256]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:
            self.stop.set()
            pool.shutdown(cancel_futures=True)

    def _fetch(self, file: RemoteFile, commit: str, meter: Meter) -> None:
        """Makes a blob, under the lock that the hub's client takes for it.

        Raises DownloadFailed, Stopped, OSError and what the meter raises.
        """
        locks = self.cache.folder / ".locks" / self._folder.name
        locks.mkdir(parents=True, exist_ok=True)
        blob = self._blob(file)
        with WeakFileLock(locks / f"{file.sha256}.lock"):
            if blob.exists():  # another process has fetched it meanwhile
                return
            partial = PartialFile(blob, file.size)
            self._fetch_rest(file, partial, commit, meter)
            if (digest := partial.finish(file.sha256, self.stop.check)) != file.sha256:
                raise DownloadFailed(
                    f"{file.path} arrived damaged (SHA-256 {digest}, not {file.sha256}). "
                    "Start the download again; it begins anew with this file.",
                    param=file.path,
                )

    def _fetch_rest(
        self, file: RemoteFile, partial: PartialFile, commit: str, meter: Meter
    ) -> None:
        """Connects again where a connection breaks, until all bytes are here."""
        failures = 0
        while (before := partial.arrived_bytes()) < file.size:
            why = self._attempt(file, partial, commit, meter)
            self.stop.check()
            here = partial.arrived_bytes()
            if here >= file.size:
                return
            failures = 1 if here - before >= _ENOUGH_BYTES else failures + 1
            if failures > len(_PAUSES_S):
                raise DownloadFailed(
                    f"{file.path} broke off at {here} of {file.size} bytes too often ({why}). "
                    "Check the network and start the download again; it goes on from there.",
                    param=file.path,
                )
            self.stop.pause(_PAUSES_S[failures - 1])

    def _attempt(self, file: RemoteFile, partial: PartialFile, commit: str, meter: Meter) -> str:
        """Appends the bytes of one connection; returns why it ended, if another may help."""
        position = partial.arrived_bytes()
        try:
            self.stop.check()
            with self._open(file.path, commit, position) as response:
                if response.status_code >= 500:
                    return f"the server answered {response.status_code}"
                restart = position > 0 and response.status_code != 206  # it ignores ranges
                if restart:
                    meter.add(-position, file.path)
                    position = 0
                with partial.writer(restart=restart) as write:
                    for chunk in response.iter_bytes():
                        self.stop.check()
                        write(chunk)
                        meter.add(len(chunk), file.path)
                        position += len(chunk)
                        if position >= file.size:  # a server may send more: that is not read
                            break
        except httpx2.TransportError as error:
            return str(error) or type(error).__name__
        return "the server ended its answer early"

    @contextmanager
    def _open(self, path: str, commit: str, start: int) -> Generator[httpx2.Response, None, None]:
        """Starts a GET from byte `start` on; raises for every refusal below 500.

        A redirect to another host loses the token: the client takes care of that.
        """
        headers = build_hf_headers(library_name="exo-node") | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        url = hf_hub_url(self.repository, path, revision=commit, endpoint=self.endpoint)
        watched = {"trace": self.stop.trace}
        with self.client.stream("GET", url, headers=headers, extensions=watched) as response:
            if response.status_code < 500:
                hf_raise_for_status(response)
            yield response


def _session() -> httpx2.Client:
    """A session for the hub's client, some of whose requests would wait for an answer for ever."""
    return httpx2.Client(timeout=None, follow_redirects=True, event_hooks={"request": [_bound]})


def _bound(request: httpx2.Request) -> None:
    limits: Mapping[str, float | None] = request.extensions["timeout"]
    bounded = {phase: _TIMEOUT_S if limit is None else limit for phase, limit in limits.items()}
    request.extensions["timeout"] = bounded


set_client_factory(_session)


def list_files(hub: HfApi, repository: str, commit: str) -> list[RemoteFile]:
    """The files that a download fetches. Raises DownloadFailed where they are no model."""
    tree = hub.list_repo_tree(repository, recursive=True, revision=commit)
    entries = list(islice(tree, _MOST_ENTRIES + 1))
    model_files = [f for f in entries if isinstance(f, RepoFile) and is_model_file(f.path)]
    if len(entries) > _MOST_ENTRIES or len(model_files) > _MOST_FILES:
        raise DownloadFailed(
            f"{repository} has too many files for a model: over {_MOST_ENTRIES:,}, or over "
            f"{_MOST_FILES:,} of weights, configs and tokenizers. Choose another repository.",
            param="model",
        )
    files = [_remote_file(file) for file in model_files]
    names = {file.path for file in files}
    if "config.json" not in names or not any(map(is_weight_file, names - set(HEAD_FILES))):
        raise DownloadFailed(
            f"{repository} has no config.json with model*.safetensors beside it. Choose "
            "a repository in safetensors format; GGUF and .bin files are not read.",
            param="model",
        )
    return files


class _NoBar(tqdm):
    """The progress bar that the hub's client requires, turned off: a node has no terminal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})  # pyright: ignore[reportUnknownMemberType]


def _remote_file(file: RepoFile) -> RemoteFile:
    """The hub has hashes only of files in LFS, where it keeps all weights."""
    if file.lfs is None:
        return RemoteFile(file.path, file.size, "")
    if not SHA256.fullmatch(file.lfs.sha256):  # it becomes a file's name
        raise DownloadFailed(
            f"the hub gives {file.path} the malformed hash {file.lfs.sha256[:80]!r}. "
            "Unset HF_ENDPOINT to use the hub itself.",
            param="HF_ENDPOINT",
        )
    return RemoteFile(file.path, file.lfs.size, file.lfs.sha256)


def explain(error: Exception, repository: str, revision: str | None) -> str:
    """The fault between here and the hub, and its remedy."""
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
                f"the hub could not be reached for {repository} ({error.__cause__ or error}). "
                "Check the network and HF_ENDPOINT, and start the download again; it resumes where "
                "it stopped."
            )
        case _:
            return (
                f"{repository} could not be written to {constants.HF_HUB_CACHE} ({error}). Check "
                "its disk and permissions, or set HF_HUB_CACHE to another folder."
            )
