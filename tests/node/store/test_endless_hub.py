"""A hub whose answers never end, or drip: each operation ends by itself, and at once on a stop."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from endless_hub import endless
from hub import REPOSITORY

from exo_node.node.store import hub_client
from exo_node.node.store.hub_cache import HubCache
from exo_node.node.store.hub_download import download
from exo_node.node.store.hub_search import HubSearch
from exo_node.node.store.stop_signal import Stopped, StopSignal, stoppable
from exo_node.placement.errors import DownloadFailed


def get(url: str, cache: Path, stop: StopSignal | None = None) -> object:
    hub = HubCache(cache)
    return download(
        REPOSITORY, None, lambda _: None, offline=False, endpoint=url, cache=hub, stop=stop
    )


WAYS = {
    "flood": "over 1,000,000 bytes",
    "empty pages": "pages without files",
    "full pages": "too many files",
    "dripping list": "did not end its answer about owner/tiny within",
    "dripping head": "did not end its answer about owner/tiny within",
    "dripping error": "404",
    "endless error": "404",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_list_without_end_ends_the_download_with_its_reason(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "_LIST_S", 0.5 if "dripping" in way else 60.0)
    monkeypatch.setattr(hub_client, "_PAGE_BYTES", 1_000_000)
    with endless(way) as (url, _), pytest.raises(DownloadFailed, match=WAYS[way]):
        _ = get(url, tmp_path)
    assert [*tmp_path.rglob("*.json")] == []


@pytest.mark.parametrize("way", ["flood", "dripping list", "dripping head"])
def test_a_search_ends_in_its_time_whatever_the_hub_sends(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "_PAGE_BYTES", 1_000_000)
    match = "over 1,000,000 bytes" if way == "flood" else "about a search within 0 s"
    with endless(way) as (url, _), pytest.raises(DownloadFailed, match=match):
        _ = HubSearch(url).find("tiny", 10, StopSignal(), 60.0 if way == "flood" else 0.4)


@pytest.mark.parametrize("way", ["dripping list", "dripping head"])
@pytest.mark.parametrize("is_search", [True, False])
def test_a_stop_wakes_what_reads_a_list(way: str, tmp_path: Path, *, is_search: bool) -> None:
    with endless(way) as (url, began):
        stop = StopSignal()
        stopping = threading.Thread(target=lambda: began.wait() and stop.set())
        stopping.start()
        before = time.monotonic()
        with pytest.raises(Stopped):
            if is_search:
                _ = HubSearch(url).find("tiny", 10, stop, 60.0)
            else:
                _ = get(url, tmp_path, stop)
        assert time.monotonic() - before < 30, "the limits are 60 s"
        stopping.join()


async def test_work_that_nothing_stops_is_left_behind() -> None:
    """Such as the lookup of a name, which no signal ends."""
    never, signals = threading.Event(), list[StopSignal]()

    def work(stop: StopSignal) -> None:
        signals.append(stop)
        _ = never.wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await stoppable(work, "a test's")
    [thread] = [each for each in threading.enumerate() if each.name == "a test's"]
    assert signals[0].is_set() and thread.daemon
    never.set()
    thread.join()
