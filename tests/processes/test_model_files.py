"""Downloads over HTTP from a hub on loopback: killed, stopped, and made for another node."""

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import MODEL, REPOSITORY, FakeHub, serve
from models import make_checkpoint
from nodes import Node, copy_key, eventually, grpc_address, node, sees

PULL = "/v1/models/pull"
PIECES_S = 0.03
"""Before each 64 KiB of weights, so that a download takes seconds."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_checkpoint(tmp_path / "source", "qwen3_5", hidden=256)
    hub = FakeHub({path.name: path.read_bytes() for path in folder.iterdir()})
    with serve(hub):
        yield hub


def settings(hub: FakeHub, root: Path, **extra: str) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(root / "hf"),
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "",
        "EXO_PROFILES_FILE": str(root / "profiles.toml"),
        **extra,
    }


def until(holds: Callable[[], bool]) -> None:
    eventually(holds, 120)


def cached(root: Path) -> list[Path]:
    """The repositories in the Hugging Face cache."""
    return list(root.glob("hf/hub/models--*"))


def pulls(running: Node, path: str = PULL) -> list[dict[str, Any]]:
    return running.call("GET", path).body["data"]


def begin(running: Node, path: str = PULL) -> None:
    reply = running.call("POST", path, {"model": REPOSITORY, "stream": False})
    assert reply.status == 200, reply


def halfway(hub: FakeHub, root: Path) -> Callable[[], bool]:
    return lambda: arrived_bytes(root) > len(hub.files[MODEL]) // 3


def arrived_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.incomplete"))


def follow(running: Node) -> list[dict[str, Any]]:
    """The states of a download, to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=300)
    token = (running.data_dir / "local.token").read_text().strip()
    headers = {"Content-Type": "application/json", "X-Exo-Token": token}
    connection.request("POST", PULL, json.dumps({"model": REPOSITORY}), headers)
    text = connection.getresponse().read().decode()
    connection.close()
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_download_continues_after_kill_9(hub: FakeHub, tmp_path: Path) -> None:
    hub.slow_s = PIECES_S
    env = settings(hub, tmp_path)
    with node(tmp_path / "data", "--no-mdns", env=env) as running:
        begin(running)
        until(halfway(hub, tmp_path))
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
    (tmp_path / "data" / "node.json").unlink()
    partial_bytes = arrived_bytes(tmp_path)
    hub.slow_s = 0
    with node(tmp_path / "data", "--no-mdns", env=env) as running:
        [paused] = pulls(running)
        small = sum(map(len, hub.files.values())) - len(hub.files[MODEL])
        assert (paused["status"], paused["done_bytes"]) == ("paused", partial_bytes + small)
        assert follow(running)[-1]["status"] == "done"
        assert hub.ranges(MODEL) == [None, f"bytes={partial_bytes}-"]


def test_a_stopped_node_pauses_its_download_and_ends_at_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.slow_s = PIECES_S
    with node(tmp_path / "data", "--no-mdns", env=settings(hub, tmp_path)) as running:
        results: list[list[dict[str, Any]]] = []
        thread = threading.Thread(target=lambda: results.append(follow(running)))
        thread.start()
        until(halfway(hub, tmp_path))
        running.process.terminate()
        assert running.process.wait(timeout=60) == 0  # the drain's limit is 180 s
        thread.join()
    assert results[0][-1]["status"] == "paused"
    assert 0 < arrived_bytes(tmp_path) < len(hub.files[MODEL])


def test_a_node_downloads_pauses_and_deletes_for_another(hub: FakeHub, tmp_path: Path) -> None:
    hub.slow_s = PIECES_S
    env = {name: settings(hub, tmp_path / name) for name in ("one", "two")}
    with node(tmp_path / "one/data1", "--no-mdns", env=env["one"]) as one:
        folder = copy_key(one, tmp_path / "two/data2")
        flags = ("--no-mdns", "--peer", grpc_address(one))
        with node(folder, *flags, env=env["two"]) as two:
            until(lambda: sees(one, 2) and sees(two, 2))
            begin(one, f"{PULL}?node=data2")
            until(halfway(hub, tmp_path / "two"))
            until(lambda: [each["node"] for each in pulls(one)] == ["data2"])  # or unreachable
            assert [each["node"] for each in pulls(two)] == ["data2"]
            assert pulls(one, f"{PULL}?node=data1") == []
            paused = one.call("POST", f"{PULL}/pause?node=data2", {"model": REPOSITORY}).body
            assert (paused["status"], paused["node"]) == ("paused", "data2")
            hub.slow_s = 0
            begin(two)
            until(lambda: pulls(one) == [])
            assert not cached(tmp_path / "one")
            path = f"/v1/models/{REPOSITORY}"
            assert one.call("DELETE", path).status == 404
            assert one.call("DELETE", f"{path}?node=data2").body["node"] == "data2"
            assert not cached(tmp_path / "two")
