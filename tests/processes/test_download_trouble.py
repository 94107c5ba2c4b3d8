"""Downloads on real nodes: a full disk, several at once, deletions in the middle."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_stub import exo_node
from disks import FilledDisk, small_disk
from endless_hub import endless
from hub import MODEL, REPOSITORY, FakeHub, serve
from models import DEMO, make_checkpoint
from nodes import Node, eventually, node

from exo_node.node.store.model_folder import is_model_file

PULL = "/v1/models/pull"
PATH = f"/v1/models/{REPOSITORY}"
PIECES_S = 0.03
"""Before each 64 KiB of weights, so that a download takes seconds."""
WITHIN_S = 200.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_checkpoint(tmp_path / "source", "qwen3_5", hidden=256)
    hub = FakeHub({path.name: path.read_bytes() for path in folder.iterdir()})
    with serve(hub):
        yield hub


@pytest.fixture
def chatting(hub: FakeHub) -> FakeHub:
    """The hub with the demo's files, which have a chat template."""
    hub.files = {
        each.name: each.read_bytes() for each in DEMO.iterdir() if is_model_file(each.name)
    }
    return hub


def settings(hub: FakeHub, root: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(root / "hf"),
        "EXO_PROFILES_FILE": str(root / "profiles.toml"),
    }


def until(holds: Callable[[], object]) -> None:
    eventually(holds, WITHIN_S)


def begin(running: Node) -> None:
    reply = running.call("POST", PULL, {"model": REPOSITORY, "stream": False})
    assert reply.status == 200, reply


def pull(running: Node) -> Any:
    """The only unfinished download, or {}."""
    downloads: list[dict[str, Any]] = running.call("GET", PULL).body["data"]
    return downloads[0] if downloads else {}


def entry(running: Node) -> Any:
    """The model in the list, or None."""
    models = running.call("GET", "/v1/models").body["data"]
    return next((each for each in models if each["id"] == REPOSITORY), None)


def arrived_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.incomplete"))


def test_a_full_disk_fails_a_download_with_one_error_and_it_resumes_once_there_is_room(
    hub: FakeHub, tmp_path: Path
) -> None:
    disk = tmp_path / "hf"
    hub.slow_s = PIECES_S
    with (
        small_disk(disk, "20m"),
        node(tmp_path / "data", "--no-mdns", env=settings(hub, tmp_path)) as running,
    ):
        begin(running)
        until(lambda: arrived_bytes(disk) > len(hub.files[MODEL]) // 4)
        FilledDisk().begin(disk)
        until(lambda: pull(running)["status"] == "failed")
        assert "No space left on device" in pull(running)["error"]
        assert "Check its disk" in pull(running)["error"]
        assert "error" in entry(running)  # it is not shown as a model that can be used
        partial_bytes = arrived_bytes(disk)
        assert 0 < partial_bytes < len(hub.files[MODEL])
        log = running.log.read_text()
        assert log.count("No space left") == 1 and "Traceback" not in log
        assert running.chat("Who are you?", max_tokens=2)  # the node is alive
        FilledDisk().end(disk)
        hub.slow_s = 0
        begin(running)
        until(lambda: pull(running) == {})
        assert "error" not in entry(running)
        assert hub.ranges(MODEL) == [None, f"bytes={partial_bytes}-"]


def test_a_model_that_two_clients_and_a_command_pull_at_once_is_fetched_once(
    chatting: FakeHub, tmp_path: Path
) -> None:
    hub = chatting
    hub.slow_s = PIECES_S / 3
    env = settings(hub, tmp_path)
    with node(tmp_path / "data", "--no-mdns", env=env) as running, ThreadPoolExecutor() as pool:
        begin(running)
        begin(running)
        command = pool.submit(
            exo_node, "models", "pull", REPOSITORY, **env, EXO_DATA_DIR=str(tmp_path / "data")
        )
        assert command.result().returncode == 0, command.result().stderr
        until(lambda: pull(running) == {})
        weights = [name for name in hub.files if name.endswith(".safetensors")]
        assert [hub.ranges(name) for name in weights] == [[None]] * len(weights)
        assert running.chat("Who are you?", model=REPOSITORY, max_tokens=2)
        assert "Traceback" not in running.log.read_text()


def test_files_in_use_are_not_deleted(chatting: FakeHub, tmp_path: Path) -> None:
    """Deletions while a load reads the files, and while an answer is given."""
    with node(tmp_path / "data", "--no-mdns", env=settings(chatting, tmp_path)) as running:
        begin(running)
        until(lambda: pull(running) == {})
        refusals: list[Any] = []
        loaded = threading.Event()

        def delete() -> None:
            while not loaded.is_set():
                refusals.append(running.call("DELETE", PATH))

        with ThreadPoolExecutor() as pool:
            loading = pool.submit(running.call, "POST", "/v1/placements", {"model": REPOSITORY})
            until(lambda: running.call("GET", "/v1/placements").body["data"])
            deleting = pool.submit(delete)
            try:
                reply = loading.result()
            finally:
                loaded.set()
            deleting.result()
        assert reply.status == 200, reply
        assert {(each.status, each.body["error"]["param"]) for each in refusals} == {(409, "model")}
        with running.stream("Count from 1 to 200.", model=REPOSITORY, max_tokens=400) as events:
            _ = next(events)
            assert running.call("DELETE", PATH).status == 409
            assert list(events)[-1] == "[DONE]"
        assert entry(running)["loaded"] is True


@pytest.mark.parametrize("way", ["dripping list", "flood"])
def test_a_hub_that_never_ends_delays_neither_a_stop_nor_anybody(tmp_path: Path, way: str) -> None:
    with endless(way) as (url, began):
        env = settings(FakeHub({}, url=url), tmp_path)
        with node(tmp_path / "data", "--no-mdns", env=env) as running:
            if way == "flood":
                searched = running.call("GET", "/v1/models/search?q=tiny")
                assert searched.status == 503 and "over 16,777,216 bytes" in str(searched.body)
                return
            cards = running.call("GET", "/v1/models/search?q=QWEN3%204b&source=cards").body["data"]
            assert cards and all("qwen3" in card["id"].lower() for card in cards)
            begin(running)
            assert began.wait(WITHIN_S)
            before = time.monotonic()
            searched = running.call("GET", "/v1/models/search?q=tiny")
            assert (searched.status, searched.body["error"]["param"]) == (503, "HF_ENDPOINT")
            assert time.monotonic() - before < 40, "its limit is 8 s"
            before = time.monotonic()
            assert running.stop() == 0
            assert time.monotonic() - before < 30
