"""Two offline nodes on an isolated network: a model of one is copied to the other and answers."""

import shutil
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import STORY
from listening import events
from models import DEMO
from namespaces import KEY, Network, is_whole, network
from nodes import Node, eventually

WITHIN_S = 400.0
"""Long, so that a loaded machine fails no test."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def net() -> Generator[Network]:
    with network("one", "two") as switch:
        yield switch


def listed(running: Node) -> list[str]:
    return [entry["id"] for entry in running.call("GET", "/v1/models").body["data"]]


def test_a_copy_outlives_kill_9_and_answers_with_the_same_tokens(
    net: Network, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    _ = key.write_text(KEY)
    key.chmod(0o600)
    source = tmp_path / "given" / "mini"
    _ = shutil.copytree(DEMO, source, ignore=shutil.ignore_patterns("recipe"))
    _ = shutil.copytree(source, source.with_name("other"))
    flags = ("--cluster-key-file", str(key), "--dtype", "float32", "--offline")
    copied = tmp_path / "two" / "models" / "mini"
    with net.node("one", tmp_path / "one", *flags, "--models-dir", str(source.parent)) as one:
        with net.node("two", tmp_path / "two", *flags) as two:
            eventually(lambda: is_whole({"one": one, "two": two}), WITHIN_S)
            eventually(lambda: "mini" in listed(two), WITHIN_S)
            _ = net.shape(delay_ms=20)
            with ThreadPoolExecutor(1) as pool:
                loading = pool.submit(two.call, "POST", "/v1/placements", placement_on(two))
                eventually(lambda: bytes_in_progress(copied) > 1 << 20, WITHIN_S)
                two.process.kill()
                _ = two.process.wait()
                assert loading.exception() is not None
        partial_bytes = bytes_in_progress(copied)
        assert partial_bytes > 1 << 20
        _ = net.shape()
        (tmp_path / "two" / "node.json").unlink()  # of the process that was killed
        with net.node("two", tmp_path / "two", *flags) as two:
            eventually(lambda: is_whole({"one": one, "two": two}), WITHIN_S)
            eventually(lambda: "mini" in listed(two), WITHIN_S)
            assert two.call("GET", "/v1/cluster").body["offline"] == "EXO_OFFLINE"
            reply = two.call("POST", "/v1/placements", placement_on(two))
            assert reply.status == 200, reply
            # Of a load that a new head repeats, the second one finds the files of the first.
            assert {*copies(two)} <= {"mini was copied from one"}
            assert {stage["node"] for stage in reply.body["stages"]} == {two.itself()["id"]}
            body = two.chat(STORY["prompt"], model="mini", max_tokens=24, return_token_ids=True)
            assert body["choices"][0]["token_ids"] == STORY["greedy_ids"][:24]
            for path in source.glob("*.safetensors"):
                assert (copied / path.name).read_bytes() == path.read_bytes()
            assert_a_stage_has_the_whole_model(one, two, copied.with_name("other"))


def assert_a_stage_has_the_whole_model(one: Node, two: Node, copied: Path) -> None:
    split = [{"node": two.itself()["id"], "layers": 4}, {"node": one.itself()["id"], "layers": 12}]
    reply = two.call("POST", "/v1/placements", {"model": "other", "layers": split})
    assert reply.status == 200, reply
    assert len([*copied.glob("*.safetensors")]) == 3
    body = two.chat(STORY["prompt"], model="other", max_tokens=24, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == STORY["greedy_ids"][:24]
    eventually(lambda: len(entry_of(two, "other")["nodes"]) == 2, WITHIN_S)


def entry_of(running: Node, model: str) -> dict[str, Any]:
    entries = running.call("GET", "/v1/models").body["data"]
    return next(each for each in entries if each["id"] == model)


def copies(running: Node) -> list[str]:
    return [event["text"] for event in events(running) if event["kind"] == "copied"]


def placement_on(on: Node) -> dict[str, object]:
    return {"model": "mini", "nodes": [on.itself()["id"]]}


def bytes_in_progress(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.incomplete"))
