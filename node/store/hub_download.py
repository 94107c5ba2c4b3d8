"""Downloads a model from the Hugging Face hub into its ordinary cache: only what the engine reads.

The hub's client (2.4) throws a partial file away when its process ends, does not hash what plain
HTTP brought, and makes paths of commits and ETags that a hub chooses. So files are written here, as
it would have laid them out. It takes a third of a second of a CPU to import, so this module is
imported by the first download.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import httpx2
from huggingface_hub import hf_hub_url
from huggingface_hub.utils import WeakFileLock

from ...placement.errors import DownloadFailed
from ...shard.checkpoint.checkpoint import HEAD_FILES, is_weight_file
from .hub_cache import HubCache, checked_names, missing_files, offline_by
from .hub_client import HubLists, answer, explain, hub_client, wrong_answer
from .identifiers import Commit, FileHash, FilePath, RepositoryName, Revision
from .stop_signal import StopSignal, in_daemons
from .transfers import FileProgress, Meter, PartialFile, Progress, RemoteFile, require_room

Choose = Callable[[Path, frozenset[str]], frozenset[str]]
"""From the snapshot with its small files, and the names of all files: the weight files to fetch."""

_COMMIT_HEADER: Final = "X-Repo-Commit"
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
    download and reaches the caller. `choose` names the weight files to fetch, by default all.
    `endpoint` is by default the hub, or the mirror that HF_ENDPOINT names. Setting `stop` ends the
    download with Stopped, once its connections have noticed.
    """
    name, checked = checked_names(repository, revision)
    cache = cache or HubCache()
    if fault := cache.access_fault(name):
        raise DownloadFailed(fault, param="model")
    if variable := offline_by(offline):
        return _from_cache_only(name, checked, cache, variable)
    try:
        timeout = httpx2.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        with hub_client(timeout=timeout) as client:
            one = _Download(name, endpoint, cache, stop or StopSignal(), client)
            return one.run(checked, on_progress, choose)
    except (httpx2.HTTPError, OSError) as error:
        raise DownloadFailed(explain(error, repository, revision), param="model") from error


def _from_cache_only(
    repository: RepositoryName, revision: Revision | None, cache: HubCache, variable: str
) -> Path:
    """A snapshot that lacks at most a head's own file; without that MTP is off."""
    snapshot = cache.snapshot(repository, revision)
    missing = missing_files(snapshot) if snapshot else ["config.json"]
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

    repository: RepositoryName
    endpoint: str | None
    cache: HubCache
    stop: StopSignal
    client: httpx2.Client

    def run(
        self,
        revision: Revision | None,
        on_progress: Callable[[Progress], None],
        choose: Choose | None,
    ) -> Path:
        self.stop.check()
        lists = HubLists(self.client, self.endpoint, self.stop)
        commit = Commit.read(revision) or lists.newest_commit(self.repository, revision)
        listed = files = lists.files(self.repository, commit)
        self.stop.check()
        if choose is not None:
            self.cache.claim(self.repository, revision, commit, listed)
            small = [file for file in files if not is_weight_file(file.path)]
            meter = Meter(self._here(small, commit), lambda _: None, every_bytes=1)
            self._fetch_all(small, commit, meter)
            names = choose(
                self.cache.snapshot_of(self.repository, commit),
                frozenset(file.path for file in files),
            )
            files = [f for f in files if f.path in names or not is_weight_file(f.path)]
        here = self._here(files, commit)
        needed = sum(each.total_bytes - each.done_bytes for each in here.values())
        self.cache.repository(self.repository).mkdir(parents=True, exist_ok=True)
        remedy = "set HF_HUB_CACHE to a folder on another disk"
        reserved = int(needed * _HEADROOM)
        require_room(self.cache.folder, reserved, self.repository, remedy, "HF_HUB_CACHE")
        self.cache.claim(self.repository, revision, commit, listed)
        meter = Meter(here, on_progress, every_bytes=_REPORT_BYTES)
        # The small ones first: with its config.json a model that is half here can be listed.
        for are_weights in (False, True):
            some = [file for file in files if is_weight_file(file.path) == are_weights]
            self._fetch_all(some, commit, meter)
        meter.finish()
        return self.cache.snapshot_of(self.repository, commit)

    def _here(self, files: Sequence[RemoteFile], commit: Commit) -> dict[str, FileProgress]:
        """The bytes of each file that need not be fetched."""
        here = dict[str, FileProgress]()
        for file in files:
            done_bytes = file.size
            if not self._is_placed(file, commit) and not self._blob(file).exists():
                done_bytes = PartialFile(self._blob(file), file.size).arrived_bytes()
            here[file.path] = FileProgress(done_bytes, file.size)
        return here

    def _is_placed(self, file: RemoteFile, commit: Commit) -> bool:
        return (self.cache.snapshot_of(self.repository, commit) / file.path).exists()

    def _blob(self, file: RemoteFile) -> Path:
        return self.cache.blob(self.repository, _hash_of(file))

    def _fetch_all(self, files: Sequence[RemoteFile], commit: Commit, meter: Meter) -> None:
        work = [partial(self._fetch, file, commit, meter) for file in files]
        jobs = in_daemons(work, _STREAMS, "download")
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            self.stop.set()
            for job in jobs:
                _ = job.cancel()
            _ = wait(jobs)
            raise

    def _fetch(self, file: RemoteFile, commit: Commit, meter: Meter) -> None:
        """Makes a blob, under the lock that the hub's client takes for it, and its name.

        Raises DownloadFailed, Stopped, OSError and what the meter raises.
        """
        if self._is_placed(file, commit):
            return
        blob, hash = self._blob(file), _hash_of(file)
        locks = self.cache.folder / ".locks" / blob.parent.parent.name
        locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / f"{hash}.lock"):
            if not blob.exists():  # else another process has fetched it meanwhile
                arriving = PartialFile(blob, file.size)
                self._fetch_rest(file, arriving, commit, meter)
                if (digest := arriving.finish(hash, self.stop.check)) != hash:
                    raise DownloadFailed(
                        f"{file.path} arrived damaged (its hash is {digest}, not {hash}). "
                        "Start the download again; it begins anew with this file.",
                        param=file.path,
                    )
            self.cache.place(self.repository, commit, file)

    def _fetch_rest(
        self, file: RemoteFile, partial: PartialFile, commit: Commit, meter: Meter
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

    def _attempt(self, file: RemoteFile, partial: PartialFile, commit: Commit, meter: Meter) -> str:
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
    def _open(
        self, path: FilePath, commit: Commit, start: int
    ) -> Generator[httpx2.Response, None, None]:
        """Starts a GET from byte `start` on; raises for every refusal below 500, and for a file of
        another commit."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        url = hf_hub_url(self.repository, path, revision=commit, endpoint=self.endpoint)
        with answer(self.client, url, self.stop, (), **headers) as response:
            for each in (*response.history, response) if response.status_code < 500 else ():
                if (other := each.headers.get(_COMMIT_HEADER, commit)) != commit:
                    fault = f"it gives {path} of commit {other[:80]!r} for {commit}"
                    raise wrong_answer(self.repository, fault)
            yield response


def _hash_of(file: RemoteFile) -> FileHash:
    assert file.hash is not None, f"the hub has a hash of {file.path}"
    return file.hash
