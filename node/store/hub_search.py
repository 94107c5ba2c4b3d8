"""Searches the Hugging Face hub for models, with what planning needs of each: size and config.json.

Nothing is written to this disk. Importing the hub's client takes a third of a second of a CPU, so
this module is imported by the first search.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx2
from huggingface_hub import hf_hub_url

from ...placement.errors import DownloadFailed, ExoNodeError
from ...shard.checkpoint.checkpoint import MAX_CONFIG_BYTES, is_weight_file, parse_config
from ...shard.checkpoint.model_classes import has_class, lacking
from .hub_client import Entry, HubLists, answer, explain, hub_client, read
from .identifiers import Commit, RepositoryName
from .model_folder import CONFIG
from .stop_signal import Stopped, StopSignal, in_daemons

_STREAMS: Final = 6
_KEPT: Final = 512


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of one commit of a repository; `fault`: why exo-node cannot use it."""

    download_bytes: int = 0
    weight_bytes: int = 0
    config: Mapping[str, Any] | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """A repository that the hub found. `updated`: the time of its last commit, ISO 8601."""

    repository: RepositoryName
    contents: Contents
    downloads: int
    likes: int
    gated: bool
    updated: str | None


class HubSearch:
    """Keeps the contents of commits; `endpoint`: by default the hub, or HF_ENDPOINT's."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._cache: dict[tuple[RepositoryName, Commit], Contents] = {}

    def find(self, query: str, limit: int, stop: StopSignal, within_s: float) -> list[Hit]:
        """Repositories with safetensors, the most downloaded first. Blocks, until `stop` at most.

        What the hub does not say in time of one of them is its fault. Raises DownloadFailed where
        the hub does not answer in time, and Stopped.
        """
        deadline = time.monotonic() + within_s
        with hub_client(timeout=within_s) as client, stop.limit(within_s, "a search"):
            lists = HubLists(client, self._endpoint, stop)
            try:
                entries = lists.search(query, limit)
            except httpx2.HTTPError as error:
                raise DownloadFailed(
                    f"the hub could not be searched ({error}). Check the network and HF_ENDPOINT, "
                    "and search again",
                    param="HF_ENDPOINT",
                ) from error
            names = [(name, e) for e in entries if (name := RepositoryName.read(e.get("id")))]
            work = [partial(self._contents, lists, name, entry) for name, entry in names]
            jobs = in_daemons(work, _STREAMS, "search")
            try:
                _ = wait(jobs, timeout=deadline - time.monotonic())
                return [
                    _hit(name, entry, _in_time(job))
                    for (name, entry), job in zip(names, jobs, strict=True)
                ]
            finally:
                stop.set()

    def _contents(self, lists: HubLists, repository: RepositoryName, entry: Entry) -> Contents:
        """The contents of the newest commit; those of a commit never change."""
        commit = Commit.read(sha := entry.get("sha"))
        if commit is None:
            return Contents(fault=f"the hub names no commit of it ({str(sha)[:80]!r})")
        key = (repository, commit)
        if (contents := self._cache.get(key)) is not None:
            return contents
        try:
            contents = self._read(lists, *key)
        except ExoNodeError as fault:
            contents = Contents(fault=fault.message)
        except Stopped:
            return Contents(fault=_LATE)
        except httpx2.HTTPError as error:  # this may be otherwise at the next search
            return Contents(fault=explain(error, repository, commit))
        if len(self._cache) >= _KEPT:
            self._cache.clear()
        self._cache[key] = contents
        return contents

    def _read(self, lists: HubLists, repository: RepositoryName, commit: Commit) -> Contents:
        files = lists.files(repository, commit)
        url = hf_hub_url(repository, CONFIG, revision=commit, endpoint=self._endpoint)
        with answer(lists.client, url, lists.stop) as response:
            content = read(response.raise_for_status(), MAX_CONFIG_BYTES, f"its {CONFIG}")
        config = parse_config(Path(repository) / CONFIG, content)
        has_model_class = has_class(config)
        return Contents(
            download_bytes=sum(file.size for file in files),
            weight_bytes=sum(file.size for file in files if is_weight_file(file.path)),
            config=config if has_model_class else None,
            fault="" if has_model_class else lacking(config),
        )


_LATE: Final = "the hub did not say in time what is in it; search again"


def _in_time(job: "Future[Contents]") -> Contents:
    """The outcome of a job, which is cancelled where there is none yet."""
    _ = job.cancel()
    return job.result() if job.done() and not job.cancelled() else Contents(fault=_LATE)


def _hit(repository: RepositoryName, entry: Entry, contents: Contents) -> Hit:
    updated = entry.get("lastModified")
    return Hit(
        repository,
        contents,
        _count(entry.get("downloads")),
        _count(entry.get("likes")),
        bool(entry.get("gated")),
        updated if isinstance(updated, str) and len(updated) < 40 else None,
    )


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 53 else 0
