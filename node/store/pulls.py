"""Downloads that people asked a node for: each may be followed, paused, resumed and cancelled.

There is one at a time of each model; a second request joins it. The bytes that arrived stay on the
disk, so an unfinished download is a paused one, also after the node was killed.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ...placement.errors import (
    DownloadFailed,
    ExoNodeError,
    InvalidRequest,
    InvalidSettings,
    ModelNotFound,
    RemovalRefused,
)
from ...placement.ids import ModelId
from ..machine.events import EventLog
from ..machine.tasks import background, cancel
from .hub_cache import HubCache, checked_names, missing_files, progress
from .identifiers import RepositoryName, Revision
from .library import ModelLibrary
from .places import Removal, not_deleted, removal_of
from .stop_signal import Stopped, StopSignal, in_daemon
from .transfers import Progress

Status = Literal["waiting", "downloading", "pausing", "paused", "failed", "done", "cancelled"]
_ENDED: Final = ("paused", "failed", "done", "cancelled")
_AT_ONCE: Final = 2
"""Downloads that run at the same time, each with several connections; others wait."""
_PAUSE_TICKS: Final = 4
"""A request to pause or cancel waits so long for the thread to end."""
_STALLED_S: Final = 5.0
"""A download without news for so long has no speed and no expected end."""
_LOG: Final = logging.getLogger(__name__)

Download = Callable[[str, str | None, Callable[[Progress], None], StopSignal], object]
"""Fetches a revision of a repository, reports its progress, and raises DownloadFailed. It raises
Stopped once the signal is set."""


@dataclass(slots=True, eq=False)
class Pull:
    """One download, until it ends or is paused."""

    model: str
    repository: RepositoryName
    revision: Revision | None
    status: Status = "waiting"
    progress: Progress = field(default_factory=lambda: Progress(0, 0, ""))
    error: ExoNodeError | None = None
    stop: StopSignal = field(default_factory=StopSignal)
    task: "asyncio.Task[None] | None" = None
    thread: "Future[object] | None" = None
    first: tuple[float, int] | None = None
    """When bytes began to arrive, and how many were here then."""
    latest: float = 0.0
    """When bytes arrived last."""

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    @property
    def fetching(self) -> bool:
        """Whether its thread runs. That of a paused download may wait for an answer of the hub."""
        return self.thread is not None and not self.thread.done()

    def note(self, progress: Progress) -> None:
        """Called from the threads of the download."""
        self.latest = time.monotonic()
        if self.first is None:
            self.first = (self.latest, progress.done_bytes)
        self.progress = progress

    def describe(self) -> dict[str, Any]:
        """The state in the form of the API; `total_bytes` is null before the hub has listed it."""
        now = self.progress
        rate = self._rate() if self.status == "downloading" else 0.0
        remaining_bytes = now.total_bytes - now.done_bytes
        return {
            "object": "model.pull",
            "model": self.model,
            "status": self.status,
            "done_bytes": now.done_bytes,
            "total_bytes": now.total_bytes or None,
            "bytes_per_second": round(rate) or None,
            "seconds_left": round(remaining_bytes / rate, 1) if rate else None,
            "files": [
                {"path": path, "done_bytes": file.done_bytes, "total_bytes": file.total_bytes}
                for path, file in sorted(now.files.items())
            ],
            **({"error": self.error.message} if self.error else {}),
        }

    def _rate(self) -> float:
        """Bytes a second since they began to arrive; 0 where none are arriving."""
        began, before = self.first or (0.0, 0)
        now = time.monotonic()
        seconds = now - began
        if now - self.latest > _STALLED_S:
            return 0.0
        return (self.progress.done_bytes - before) / seconds if self.first and seconds > 1 else 0.0


@dataclass(eq=False, repr=False)
class Pulls:
    """The downloads of one node; its methods are called on the event loop."""

    _library: ModelLibrary
    _events: EventLog
    _tick_s: float
    """The interval of looks at the progress."""
    _download: Download
    _rescan: Callable[[], Awaitable[None]]
    """Called when a model is whole, before its followers learn of it."""

    def __post_init__(self) -> None:
        self._pulls: dict[str, Pull] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._deleting = asyncio.Lock()
        """Held while files are deleted: a download that began meanwhile would lose some of its
        own, and its record that exo-node made them."""

    async def start(self, name: str, revision: str | None, bits: int | None) -> Pull:
        """Begins or resumes a download, or joins the one that runs.

        Raises InvalidRequest for a name that no repository can have.
        """
        async with self._deleting:
            pull = self._named(name, revision, bits)
            if pull.status == "pausing":
                await self._halt(pull)
                pull = self._pulls.get(pull.model, pull)
            if pull.task is None or pull.ended:
                before, pull = pull, Pull(pull.model, pull.repository, pull.revision)
                pull.progress = before.progress
                self._pulls[pull.model] = pull
                pull.task = background(self._run(pull), f"the download of {pull.model}")
            return pull

    async def follow(self, pull: Pull) -> AsyncGenerator[dict[str, Any]]:
        """The states of a download, each once, to its end. Raises the error that it ended with."""
        last: dict[str, Any] = {}
        while not pull.ended:
            if (state := pull.describe()) != last:
                yield state
                last = state
            await asyncio.sleep(self._tick_s)
        if pull.error is not None:
            raise pull.error
        yield pull.describe()

    async def unfinished(self) -> list[dict[str, Any]]:
        """The downloads that run or failed, and the paused ones, also of an earlier process."""
        here = await asyncio.to_thread(self._on_disk)
        own_pulls = {pull.model: pull for pull in self._pulls.values()}
        rest = [pull for model, pull in here.items() if model not in own_pulls]
        return [pull.describe() for pull in (*own_pulls.values(), *rest)]

    async def pause(self, model: str) -> dict[str, Any]:
        """Stops a download; what arrived stays. Raises ModelNotFound."""
        pull = await self._find(model)
        await self._halt(pull)
        return pull.describe()

    async def cancel(self, model: str) -> dict[str, Any]:
        """Stops a download and deletes what arrived; the state has `freed_bytes`.

        Raises ModelNotFound. Files that another program had begun to fetch stay.
        """
        async with self._deleting:
            pull = await self._find(model)
            await self._halt(pull)
            if pull.status == "done":  # its last byte was quicker
                return pull.describe() | {"freed_bytes": 0}
            removal = await asyncio.to_thread(_discard, pull)
            pull.status, pull.error = "cancelled", None
            _ = self._pulls.pop(model, None)
        if pull.thread is not None and pull.fetching:
            pull.thread.add_done_callback(lambda _: self._discard_rest(pull, removal))
        return pull.describe() | {"freed_bytes": removal.freed_bytes if removal else 0}

    async def remove(self, model: str, remove: Callable[[], Awaitable[None]]) -> None:
        """Has a model's files deleted, and takes its paused or failed download off the list.

        Raises RemovalRefused, and what `remove` raises.
        """
        async with self._deleting:
            self.refuse_active(model)
            await remove()
            _ = self._pulls.pop(model, None)

    def refuse_active(self, model: str) -> None:
        """Refuses to remove a model whose files are arriving. Raises RemovalRefused."""
        pull = self._pulls.get(model)
        if pull is not None and (not pull.ended or pull.fetching):
            raise RemovalRefused(
                f"{model} is being downloaded; cancel that with POST /v1/models/pull/cancel or on "
                "the page",
                param="model",
            )

    async def close(self) -> None:
        """Pauses all downloads."""
        pulls = [pull for pull in self._pulls.values() if not pull.ended]
        for pull in pulls:
            self._stop(pull)
        await cancel(pull.task for pull in pulls if pull.task is not None)

    async def _run(self, pull: Pull) -> None:
        try:
            async with self._slots:
                pull.status = "downloading"
                pull.thread = in_daemon(
                    lambda: self._download(pull.repository, pull.revision, pull.note, pull.stop),
                    "download",
                )
                _ = await asyncio.wrap_future(pull.thread)
            await self._rescan()
            pull.status = "done"
            _ = self._pulls.pop(pull.model, None)
            self._record("pulled", f"{pull.model} was downloaded", pull)
        except (Stopped, asyncio.CancelledError):
            pull.status = "paused"
        except ExoNodeError as fault:
            pull.status, pull.error = "failed", fault
            self._record("pull_failed", f"the download of {pull.model} failed: {fault}", pull)
        except Exception:  # the edge of this task: its followers wait for an end
            _LOG.exception("the download of %s failed unexpectedly", pull.model)
            text = f"the download of {pull.model} failed unexpectedly; the node's log has the cause"
            pull.status, pull.error = "failed", DownloadFailed(text, param="model")

    def _record(self, kind: Literal["pulled", "pull_failed"], text: str, pull: Pull) -> None:
        _ = self._events.add(kind, text, model=pull.model, bytes=pull.progress.done_bytes)

    def _stop(self, pull: Pull) -> None:
        if pull.status == "waiting" and pull.task is not None:
            pull.status = "paused"  # a task that is cancelled before its first step does not say so
            _ = pull.task.cancel()
        elif pull.status == "downloading":
            pull.status = "pausing"
        pull.stop.set()

    async def _halt(self, pull: Pull) -> None:
        """Ends a download. A thread that waits for the hub is left behind, to fetch no weights."""
        self._stop(pull)
        if pull.task is not None:
            _ = await asyncio.wait([pull.task], timeout=_PAUSE_TICKS * self._tick_s)
            if pull.fetching:
                _ = pull.task.cancel()
            _ = await asyncio.wait([pull.task])

    def _discard_rest(self, pull: Pull, removal: Removal | None) -> None:
        """Deletes the small files that the thread of a cancelled download has brought since."""
        if pull.model not in self._pulls:
            with suppress(ExoNodeError):
                removal.carry_out() if removal else _discard(pull)

    def _named(self, name: str, revision: str | None, bits: int | None) -> Pull:
        """The download of that model, which need not have begun."""
        try:
            repository, pinned = self._library.repository(name, bits)
        except InvalidSettings as fault:  # it names the command's flag
            what = fault.message.replace("--quant", "'quant'")
            raise InvalidRequest(what, param="quant") from None
        text, _, named = repository.partition("@")
        try:
            checked, tag = checked_names(text, revision or named or pinned)
        except DownloadFailed as fault:
            raise InvalidRequest(fault.message, param=fault.param) from None
        is_main = tag in (None, "main")
        model = checked if is_main else f"{checked}@{tag}"
        return self._pulls.get(model) or Pull(model, checked, None if is_main else tag)

    async def _find(self, model: str) -> Pull:
        pull = self._pulls.get(model) or (await asyncio.to_thread(self._on_disk)).get(model)
        if pull is None:
            raise ModelNotFound(
                f"no download of {model[:200]!r} is under way or paused on this node; "
                "`GET /v1/models/pull` lists those that are",
                param="model",
            )
        return pull

    def _on_disk(self) -> dict[str, Pull]:
        """The downloads that lack files, by model. Blocks."""
        pulls: dict[str, Pull] = {}
        for place in HubCache().models():
            if place.missing:
                text, _, named = place.id.partition("@")
                names = checked_names(text, named or None)
                here = Progress(*progress(place.folder), "")
                pulls[place.id] = Pull(place.id, *names, "paused", here)
        return pulls


def _discard(pull: Pull) -> Removal | None:
    """Deletes an unfinished snapshot that exo-node began, if there is one."""
    snapshot = HubCache().revision_folder(pull.repository, pull.revision)
    if snapshot is None or not missing_files(snapshot):
        return None
    try:
        removal = removal_of(ModelId(pull.model), snapshot)
    except OSError as error:
        raise not_deleted(pull.model, error) from error
    if not removal.own:
        return None
    removal.carry_out()
    return removal
