"""Downloads that people asked for: joined, followed, paused, resumed, cancelled."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import COMMIT, MODEL, REPOSITORY, FakeHub, git_hash, serve
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from loops import until
from models import make_checkpoint

from exo_node.node.machine.events import EventLog
from exo_node.node.store import hub_download
from exo_node.node.store import pulls as module
from exo_node.node.store.hub_cache import HubCache, is_own
from exo_node.node.store.hub_download import download
from exo_node.node.store.identifiers import FileHash
from exo_node.node.store.library import ModelLibrary
from exo_node.node.store.pulls import Pull, Pulls
from exo_node.node.store.stop_signal import Stopped, StopSignal
from exo_node.node.store.transfers import FileProgress, PartialFile, Progress
from exo_node.placement.errors import DownloadFailed, InvalidRequest, ModelNotFound, RemovalRefused

TICK_S = 0.01


class Fetcher:
    """A download of 100 bytes that brings 10 and then waits until it may end, or is stopped."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []
        self.may_end = threading.Event()
        self.may_stop = threading.Event()
        self.may_stop.set()
        self.error: Exception | None = None
        self.scans = 0

    async def scan(self) -> None:
        self.scans += 1

    def __call__(
        self,
        repository: str,
        revision: str | None,
        note: Callable[[Progress], None],
        stop: StopSignal,
    ) -> object:
        self.calls.append((repository, revision))
        note(Progress(0, 100, "", {"a": FileProgress(0, 100)}))
        note(Progress(10, 100, "a", {"a": FileProgress(10, 100)}))
        while not self.may_end.wait(0.005):
            if stop.is_set() and self.may_stop.is_set():
                raise Stopped
        if self.error is not None:
            raise self.error
        return None


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    fetcher = Fetcher()
    yield fetcher
    fetcher.may_end.set()  # a thread that waits would keep a failed run from ending


@pytest.fixture
def pulls(tmp_path: Path, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> Pulls:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return Pulls(ModelLibrary((), offline=False), EventLog(), TICK_S, fetcher, fetcher.scan)


async def states_of(pulls: Pulls, pull: Pull) -> list[dict[str, Any]]:
    return [state async for state in pulls.follow(pull)]


def arrived(pull: Pull) -> bool:
    return pull.progress.done_bytes == 10


async def started(pulls: Pulls, name: str = "owner/tiny") -> Pull:
    """A download of which 10 bytes are here."""
    pull = await pulls.start(name, None, None)
    await until(lambda: arrived(pull))
    return pull


async def test_two_requests_for_a_model_share_one_download(pulls: Pulls, fetcher: Fetcher) -> None:
    first = await pulls.start("owner/tiny", None, None)
    followers = [asyncio.create_task(states_of(pulls, first))]
    await until(lambda: arrived(first))
    second = await pulls.start("owner/tiny", "main", None)
    followers.append(asyncio.create_task(states_of(pulls, second)))
    assert second is first
    fetcher.may_end.set()
    for states in await asyncio.gather(*followers):
        assert states[-1]["status"] == "done"
    assert fetcher.calls == [("owner/tiny", None)] and fetcher.scans == 1
    assert await pulls.unfinished() == []


async def test_revisions_of_a_model_are_downloads_of_their_own(
    pulls: Pulls, fetcher: Fetcher
) -> None:
    one = await pulls.start("owner/tiny", None, None)
    other = await pulls.start("owner/tiny", "v1", None)
    same = await pulls.start("owner/tiny@v1", None, None)
    assert (one.model, other.model, same) == ("owner/tiny", "owner/tiny@v1", other)
    await until(lambda: arrived(one) and arrived(other))
    assert fetcher.calls == [("owner/tiny", None), ("owner/tiny", "v1")]
    await pulls.close()


async def test_progress_is_reported_by_file(pulls: Pulls) -> None:
    pull = await started(pulls)
    state = pull.describe()
    assert (state["done_bytes"], state["total_bytes"], state["status"]) == (10, 100, "downloading")
    assert state["files"] == [{"path": "a", "done_bytes": 10, "total_bytes": 100}]
    await pulls.close()


async def test_a_paused_download_is_listed_and_resumes(pulls: Pulls, fetcher: Fetcher) -> None:
    pull = await pulls.start("owner/tiny", None, None)
    follower = asyncio.create_task(states_of(pulls, pull))
    await until(lambda: arrived(pull))
    assert (await pulls.pause("owner/tiny"))["status"] == "paused"
    assert (await follower)[-1]["status"] == "paused"
    assert [each["status"] for each in await pulls.unfinished()] == ["paused"]
    fetcher.may_end.set()
    again = await pulls.start("owner/tiny", None, None)
    assert (await states_of(pulls, again))[-1]["status"] == "done"
    assert len(fetcher.calls) == 2


async def test_who_resumes_while_it_pauses_waits_for_that(pulls: Pulls, fetcher: Fetcher) -> None:
    pull = await started(pulls)
    fetcher.may_stop.clear()
    pausing = asyncio.create_task(pulls.pause("owner/tiny"))
    await until(lambda: pull.status == "pausing")
    both = (pulls.start("owner/tiny", None, None) for _ in range(2))
    again, joined = await asyncio.gather(*both)
    assert (await pausing)["status"] == pull.status == "paused"
    assert again is joined and again is not pull
    await until(lambda: len(fetcher.calls) == 2)
    fetcher.may_stop.set()
    fetcher.may_end.set()
    assert (await states_of(pulls, again))[-1]["status"] == "done"


async def test_a_third_download_waits_for_a_place_and_can_be_paused_there(
    pulls: Pulls, fetcher: Fetcher
) -> None:
    running = [await pulls.start(f"owner/m{n}", None, None) for n in (1, 2)]
    await until(lambda: all(map(arrived, running)))
    third = await pulls.start("owner/m3", None, None)
    await asyncio.sleep(5 * TICK_S)
    assert third.status == "waiting" and len(fetcher.calls) == 2
    assert (await pulls.pause("owner/m3"))["status"] == "paused"
    # Whoever changes their mind twice before it has taken a step.
    third = await pulls.start("owner/m3", None, None)
    assert (await pulls.pause("owner/m3"))["status"] == "paused"
    third = await pulls.start("owner/m3", None, None)
    fetcher.may_end.set()
    assert (await states_of(pulls, third))[-1]["status"] == "done"


async def test_a_download_is_paused_and_resumed_while_a_connection_of_it_is_silent(
    pulls: Pulls, fetcher: Fetcher
) -> None:
    pull = await started(pulls)
    fetcher.may_stop.clear()
    assert (await pulls.pause("owner/tiny"))["status"] == "paused"
    with pytest.raises(RemovalRefused, match="is being downloaded"):
        pulls.refuse_active("owner/tiny")
    one, other = await asyncio.gather(*(pulls.start("owner/tiny", None, None) for _ in range(2)))
    assert one is other and one is not pull
    await until(lambda: len(fetcher.calls) == 2)
    fetcher.may_stop.set()
    assert pull.thread is not None
    await until(pull.thread.done)
    assert (pull.status, one.status) == ("paused", "downloading")
    fetcher.may_end.set()
    await until(lambda: one.status == "done")
    assert len(fetcher.calls) == 2


async def test_downloads_that_are_left_behind_take_no_place_of_others(
    pulls: Pulls, fetcher: Fetcher
) -> None:
    fetcher.may_stop.clear()
    for name in ("owner/m1", "owner/m2"):
        _ = await started(pulls, name)
        _ = await pulls.pause(name)
    _ = await started(pulls, "owner/m3")
    await pulls.close()
    fetcher.may_stop.set()


async def test_a_download_that_fails_tells_its_followers_and_stays_listed(
    pulls: Pulls, fetcher: Fetcher
) -> None:
    fetcher.error = DownloadFailed("the disk is full; free some space", param="HF_HUB_CACHE")
    fetcher.may_end.set()
    pull = await pulls.start("owner/tiny", None, None)
    with pytest.raises(DownloadFailed, match="the disk is full"):
        _ = await states_of(pulls, pull)
    [state] = await pulls.unfinished()
    assert (state["status"], state["error"]) == ("failed", fetcher.error.message)
    fetcher.error = None
    pull = await pulls.start("owner/tiny", None, None)
    assert (await states_of(pulls, pull))[-1]["status"] == "done"
    assert await pulls.unfinished() == []


async def test_a_defect_ends_the_download_for_its_followers(
    pulls: Pulls, fetcher: Fetcher, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher.error = KeyError("a defect")
    fetcher.may_end.set()
    pull = await pulls.start("owner/tiny", None, None)
    with pytest.raises(DownloadFailed, match="log has the cause"):
        _ = await states_of(pulls, pull)
    assert "a defect" in caplog.text


async def test_a_download_continues_without_followers(pulls: Pulls) -> None:
    pull = await pulls.start("owner/tiny", None, None)
    follower = asyncio.create_task(states_of(pulls, pull))
    await until(lambda: arrived(pull))
    _ = follower.cancel()
    _ = await asyncio.gather(follower, return_exceptions=True)
    await asyncio.sleep(5 * TICK_S)
    assert pull.status == "downloading"
    await pulls.close()


@pytest.mark.parametrize(
    ("name", "revision", "bits", "error", "message"),
    [
        ("tiny", None, None, InvalidRequest, "Write owner/name"),
        ("owner/tiny.git", None, None, InvalidRequest, "Write owner/name"),
        ("owner/tiny.", None, None, InvalidRequest, "Write owner/name"),
        ("owner/tiny", "../x", None, InvalidRequest, "is no revision"),
        ("owner/tiny", None, 4, InvalidRequest, "'quant': no quantisation"),
        ("demo", None, None, ModelNotFound, "ships with exo-node"),
    ],
)
async def test_what_no_download_can_bring_is_refused_at_once(
    pulls: Pulls,
    fetcher: Fetcher,
    name: str,
    revision: str | None,
    bits: int | None,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        _ = await pulls.start(name, revision, bits)
    assert fetcher.calls == [] and await pulls.unfinished() == []


async def test_what_is_not_under_way_can_be_neither_paused_nor_cancelled(pulls: Pulls) -> None:
    for act in (pulls.pause, pulls.cancel):
        with pytest.raises(ModelNotFound, match="no download of 'owner/none'"):
            _ = await act("owner/none")


@pytest.mark.parametrize("by", ["cancel", "remove"])
async def test_a_download_begins_once_files_of_its_model_are_deleted(
    pulls: Pulls, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    deleting, may_end = threading.Event(), threading.Event()

    def discard(_: Pull) -> None:
        deleting.set()
        assert may_end.wait(60)

    async def remove() -> None:
        deleting.set()
        _ = await asyncio.to_thread(may_end.wait, 60)

    monkeypatch.setattr(module, "_discard", discard)
    _ = await started(pulls)
    _ = await pulls.pause("owner/tiny")
    deletion = pulls.cancel("owner/tiny") if by == "cancel" else pulls.remove("owner/tiny", remove)
    deleted = asyncio.create_task(deletion)
    await until(deleting.is_set)
    again = asyncio.create_task(pulls.start("owner/tiny", None, None))
    await asyncio.sleep(5 * TICK_S)
    calls = len(fetcher.calls)
    may_end.set()
    _ = await asyncio.gather(deleted, again)
    assert calls == 1
    assert [each["status"] for each in await pulls.unfinished()] == ["downloading"]
    with pytest.raises(RemovalRefused):
        await pulls.remove("owner/tiny", remove)
    await pulls.close()


# ------------------------------------------------------------------- with files in a real cache


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_checkpoint(tmp_path / "source", "qwen3_5", hidden=256)
    hub = FakeHub({path.name: path.read_bytes() for path in folder.iterdir()})
    with serve(hub):
        yield hub


def from_hub(hub: FakeHub, cache: HubCache) -> Pulls:
    def fetch(
        repository: str, revision: str | None, note: Callable[[Progress], None], stop: StopSignal
    ) -> object:
        return download(
            repository, revision, note, offline=False, endpoint=hub.url, cache=cache, stop=stop
        )

    return Pulls(ModelLibrary((), offline=False), EventLog(), TICK_S, fetch, Fetcher().scan)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return HubCache()


async def paused_halfway(hub: FakeHub, pulls: Pulls) -> int:
    """The bytes that arrived of a download that was paused."""
    hub.slow_s = 0.02
    pull = await pulls.start(REPOSITORY, None, None)
    await until(lambda: pull.progress.done_bytes > len(hub.files[MODEL]) // 4)
    _ = await pulls.pause(REPOSITORY)
    hub.slow_s = 0
    return sum(file.done_bytes for file in pull.progress.files.values())


async def test_another_process_lists_the_paused_download_and_resumes_it(
    hub: FakeHub, cache: HubCache
) -> None:
    done = await paused_halfway(hub, from_hub(hub, cache))
    later = from_hub(hub, cache)
    [state] = await later.unfinished()
    total = sum(map(len, hub.files.values()))
    assert (state["model"], state["status"]) == (REPOSITORY, "paused")
    assert (state["done_bytes"], state["total_bytes"]) == (done, total)
    pull = await later.start(REPOSITORY, None, None)
    assert (await states_of(later, pull))[-1]["done_bytes"] == total
    small = total - len(hub.files[MODEL])
    assert hub.ranges(MODEL) == [None, f"bytes={done - small}-"]
    assert cache.locate(REPOSITORY) is not None


@pytest.mark.parametrize("later", [False, True])
async def test_a_cancelled_download_leaves_nothing(
    hub: FakeHub, cache: HubCache, later: bool
) -> None:
    pulls = from_hub(hub, cache)
    done = await paused_halfway(hub, pulls)
    pulls = from_hub(hub, cache) if later else pulls
    state = await pulls.cancel(REPOSITORY)
    assert state["status"] == "cancelled" and state["freed_bytes"] >= done
    assert not cache.repository(REPOSITORY).exists()
    assert await pulls.unfinished() == []


async def test_cancelling_leaves_what_another_program_began_to_fetch(
    hub: FakeHub, cache: HubCache
) -> None:
    pulls = from_hub(hub, cache)
    _ = await paused_halfway(hub, pulls)
    snapshot = cache.snapshot(REPOSITORY, None)
    assert snapshot is not None and is_own(snapshot)
    record = cache.repository(REPOSITORY) / ".exo-node" / snapshot.name
    record.unlink()
    assert (await pulls.cancel(REPOSITORY))["freed_bytes"] == 0
    assert (snapshot / "config.json").exists()
    # Nor does exo-node own what it completes.
    pull = await pulls.start(REPOSITORY, None, None)
    assert (await states_of(pulls, pull))[-1]["status"] == "done"
    assert not is_own(snapshot)


async def test_a_pause_wakes_a_connection_that_brings_no_more_bytes(
    hub: FakeHub, cache: HubCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_download, "_TIMEOUT_S", 600.0)
    half = len(hub.files[MODEL]) // 2
    hub.silent_after = [half]
    pulls = from_hub(hub, cache)
    pull = await pulls.start(REPOSITORY, None, None)
    await until(hub.fell_silent.is_set)
    await until(lambda: pull.progress.done_bytes > half - (512 << 10))
    assert (await pulls.pause(REPOSITORY))["status"] == "paused"
    assert pull.thread is not None
    await until(pull.thread.done)
    pull = await pulls.start(REPOSITORY, None, None)
    assert (await states_of(pulls, pull))[-1]["status"] == "done"


SILENT_PATHS = (
    f"/api/models/{REPOSITORY}",
    f"/{REPOSITORY}/resolve/{COMMIT}/config.json",
    f"/{REPOSITORY}/resolve/{COMMIT}/{MODEL}",
)
"""The first requests of three steps of a download."""


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no timeout of a weight file end its request within a test."""
    monkeypatch.setattr(hub_download, "_TIMEOUT_S", 600.0)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("path", SILENT_PATHS)
async def test_a_download_whose_hub_begins_no_answer_resumes_at_once(
    hub: FakeHub, cache: HubCache, path: str
) -> None:
    hub.unanswered = path
    pulls = from_hub(hub, cache)
    _ = await pulls.start(REPOSITORY, None, None)
    await until(hub.fell_silent.is_set)
    assert (await pulls.pause(REPOSITORY))["status"] == "paused"
    pull = await pulls.start(REPOSITORY, None, None)
    assert (await states_of(pulls, pull))[-1]["status"] == "done"
    assert cache.locate(REPOSITORY) is not None


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("path", SILENT_PATHS)
async def test_a_download_whose_hub_begins_no_answer_is_cancelled_at_once(
    hub: FakeHub, cache: HubCache, path: str
) -> None:
    hub.unanswered = path
    pulls = from_hub(hub, cache)
    pull = await pulls.start(REPOSITORY, None, None)
    await until(hub.fell_silent.is_set)
    assert (await pulls.cancel(REPOSITORY))["status"] == "cancelled"
    assert cache.snapshot(REPOSITORY, None) is None
    assert pull.thread is not None
    hub.hung_up.set()  # the thread that was left behind has its answer now
    await until(pull.thread.done)
    await until(lambda: cache.snapshot(REPOSITORY, None) is None)
    assert await pulls.unfinished() == []


async def test_a_file_that_another_program_locks_does_not_come_back_after_a_cancellation(
    hub: FakeHub, cache: HubCache
) -> None:
    """The thread that waits for the lock finds the file there, and gives it a name."""
    hub.files["generation_config.json"] = b"{}"
    blob = cache.blob(REPOSITORY, FileHash(git_hash(hub.files["config.json"])))
    locks = cache.folder / ".locks" / blob.parent.parent.name
    locks.mkdir(parents=True)
    snapshot = cache.snapshot_of(REPOSITORY, COMMIT)
    pulls = from_hub(hub, cache)
    with WeakFileLock(locks / f"{blob.name}.lock"):
        pull = await pulls.start(REPOSITORY, None, None)
        await until((snapshot / "generation_config.json").exists)
        assert (await pulls.cancel(REPOSITORY))["status"] == "cancelled"
        assert pull.thread is not None and not pull.thread.done() and not snapshot.exists()
        blob.parent.mkdir(parents=True, exist_ok=True)
        _ = blob.write_bytes(hub.files["config.json"])
    await until(pull.thread.done)
    await until(lambda: not snapshot.exists())


async def test_a_cancellation_does_not_wait_for_the_hash_of_a_file(
    hub: FakeHub, cache: HubCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashing, go_on = threading.Event(), threading.Event()
    finish = PartialFile.finish

    def slowly(partial: PartialFile, expected: FileHash, check: Callable[[], None]) -> str:
        def checked() -> None:
            hashing.set()
            assert go_on.wait(60)
            check()

        return finish(partial, expected, checked)

    monkeypatch.setattr(PartialFile, "finish", slowly)
    pulls = from_hub(hub, cache)
    _ = await pulls.start(REPOSITORY, None, None)
    await until(hashing.is_set)
    cancelled = asyncio.create_task(pulls.cancel(REPOSITORY))
    await asyncio.sleep(TICK_S)
    go_on.set()
    assert (await cancelled)["status"] == "cancelled"
    assert not cache.repository(REPOSITORY).exists()
    assert await pulls.unfinished() == []
