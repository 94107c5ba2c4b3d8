"""Search, downloads and deletions over HTTP, in the node's own form and in Ollama's."""

import asyncio
import json
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from fake_files import FakePull, state
from http_node import PATIENCE_S, Node, Reply, serving_fakes
from starlette.requests import ClientDisconnect

from exo_node.node.api.http.sse import while_attended
from exo_node.node.api.shared.profile_file import ProfileFile
from exo_node.node.trust.local_token import LocalToken
from exo_node.placement.errors import DownloadFailed, InvalidRequest, RemovalRefused


@pytest.fixture
def node() -> Generator[Node]:
    with serving_fakes(keep_alive_s=0.05) as running:
        yield running


def events(reply: Reply) -> list[Any]:
    """The data of a stream, the last one as text."""
    lines = reply.body.decode().split("\n")
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def lines(reply: Reply) -> list[Any]:
    return [json.loads(line) for line in reply.body.splitlines()]


def test_a_search_is_passed_on_with_its_limit(node: Node) -> None:
    assert node.ask("GET", "/v1/models/search?q=qwen%203&limit=7").status == 200
    assert node.ask("GET", "/v1/models/search?q=x&source=cards").status == 200
    assert node.files.calls == [("search", "qwen 3", 7, "hub"), ("search", "x", 10, "cards")]


async def test_work_for_a_client_that_leaves_is_cancelled() -> None:
    leaves, ended = asyncio.Event(), list[str]()

    async def receive() -> Any:
        _ = await leaves.wait()
        return {"type": "http.disconnect"}

    async def work() -> str:
        try:
            leaves.set()
            _ = await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return ""

    with pytest.raises(ClientDisconnect):
        _ = await while_attended(work(), receive)
    assert ended == ["cancelled"]
    leaves.clear()
    assert await while_attended(asyncio.sleep(0, "done"), receive) == "done"


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/models/search", "q"),
        ("/v1/models/search?q=%20", "q"),
        (f"/v1/models/search?q={'x' * 201}", "q"),
        ("/v1/models/search?q=x&q=y", "q"),
        ("/v1/models/search?q=x&limit=0", "limit"),
        ("/v1/models/search?q=x&limit=21", "limit"),
        ("/v1/models/search?q=x&limit=ten", "limit"),
        (f"/v1/models/search?q=x&limit={15 * '0'}19999", "limit"),
        (f"/v1/models/search?q=x&limit={5000 * '0'}1", "limit"),
        ("/v1/models/search?q=x&limit=", "limit"),
        ("/v1/models/search?q=x&page=2", "page"),
        ("/v1/models/search?q=x&source=both", "source"),
        ("/v1/models/pull?nodes=a", "nodes"),
    ],
)
def test_a_bad_query_names_the_parameter(node: Node, path: str, param: str) -> None:
    reply = node.ask("GET", path)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert node.files.calls == []


def test_a_download_streams_its_states_to_the_end(node: Node) -> None:
    reply = node.ask("POST", "/v1/models/pull", {"model": "owner/tiny", "revision": "v1"})
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *states, end = events(reply)
    assert states == node.files.running.script and end == "[DONE]"
    assert node.files.calls == [("pull", "owner/tiny", "v1", None, True)]


def test_without_a_stream_the_state_comes_at_once(node: Node) -> None:
    node.files.running.waits = True
    reply = node.ask("POST", "/v1/models/pull", {"model": "owner/tiny", "stream": False})
    assert reply.json == node.files.running.script[0]


def test_a_failure_ends_the_stream_with_its_error(node: Node) -> None:
    fault = DownloadFailed("the disk is full; free some space", param="HF_HUB_CACHE")
    node.files.running = FakePull([state("downloading", 4)], fault)
    *_, last = events(node.ask("POST", "/v1/models/pull", {"model": "owner/tiny"}))
    assert last["error"]["code"] == "download_failed"
    assert (last["error"]["message"], last["error"]["param"]) == (fault.message, "HF_HUB_CACHE")
    ollama = lines(node.ask("POST", "/api/pull", {"model": "owner/tiny"}))
    assert ollama[-1] == {"error": fault.message}
    whole = node.ask("POST", "/api/pull", {"model": "owner/tiny", "stream": False})
    assert (whole.status, whole.json) == (503, {"error": fault.message})


def test_a_refusal_has_a_status(node: Node) -> None:
    node.files.refusal = InvalidRequest("no repository; write owner/name", param="model")
    assert node.ask("POST", "/v1/models/pull", {"model": "x"}).status == 400
    assert node.ask("POST", "/api/pull", {"model": "x"}).status == 400
    node.files.refusal = RemovalRefused("it is loaded; unload it", param="model")
    reply = node.ask("DELETE", "/v1/models/owner/tiny")
    assert (reply.status, reply.error["code"]) == (409, "removal_refused")
    assert node.ask("DELETE", "/api/delete", {"model": "owner/tiny"}).status == 409


@pytest.mark.parametrize("path", ["/v1/models/pull", "/api/pull"])
def test_a_silent_download_sends_signs_of_life_and_ends_with_its_client(
    node: Node, path: str
) -> None:
    node.files.running = pull = FakePull([state("downloading", 4)], waits=True)
    body = json.dumps({"model": "owner/tiny"}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{node.port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = node.raw(head.encode() + body)
    received, sign = b"", b": no news" if path.startswith("/v1") else b'"completed":4'
    while received.count(sign) < 3:
        received += connection.recv(4096)
    assert pull.left == 0
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    for _ in range(int(PATIENCE_S / 0.05)):
        if pull.left:
            break
        _ = node.ask("GET", "/health/live")
    assert pull.left == 1


def test_pause_cancel_and_the_list(node: Node) -> None:
    body = {"model": "owner/tiny"}
    assert node.ask("POST", "/v1/models/pull/pause", body).json["status"] == "paused"
    assert node.ask("POST", "/v1/models/pull/cancel", body).json["freed_bytes"] == 40
    assert node.files.calls == [("pause", "owner/tiny"), ("cancel", "owner/tiny")]
    assert node.ask("GET", "/v1/models/pull").json["own"] is False
    assert node.ask("GET", "/v1/models/pull?node=mac-1").json["own"] is True


def test_a_deletion_says_what_it_frees_before_and_after(node: Node) -> None:
    reply = node.ask("DELETE", "/v1/models/owner/tiny?dry_run=1")
    assert (reply.json["deleted"], reply.json["freed_bytes"]) == (False, 100)
    assert node.ask("DELETE", "/v1/models/owner/tiny").json["deleted"] is True
    assert node.files.calls == [("remove", "owner/tiny", True), ("remove", "owner/tiny", False)]
    assert node.ask("DELETE", "/v1/models/owner/tiny?dry_run=yes").error["param"] == "dry_run"
    assert node.ask("DELETE", "/v1/models/no/model").status == 404


# -------------------------------------------------------------------------------- Ollama


def test_ollamas_pull_has_its_lines(node: Node) -> None:
    node.files.running.script = [*node.files.running.script]
    reply = node.ask("POST", "/api/pull", b'{"name": "hf.co/owner/tiny:latest", "insecure": true}')
    assert reply.headers["content-type"] == "application/x-ndjson"
    first, progress, whole, last = lines(reply)
    assert first == {"status": "pulling manifest"} and last == {"status": "success"}
    assert (progress["total"], progress["completed"], whole["completed"]) == (100, 40, 100)
    assert progress["digest"] == whole["digest"] and progress["digest"].startswith("sha256:")
    assert node.files.calls == [("pull", "owner/tiny", None, None, False)]
    body = {"model": "owner/tiny", "stream": False, "new": 1}
    reply = node.ask("POST", "/api/pull", body)
    assert reply.json == {"status": "success"} and reply.headers["x-exo-node-ignored"] == "new"
    for body in ({}, {"model": "hf.co/"}, {"name": "huggingface.co/"}):
        reply = node.ask("POST", "/api/pull", body)
        assert reply.status == 400
        assert reply.json == {"error": "'model' is required; write owner/name"}


def test_ollamas_pull_that_somebody_paused_is_no_success(node: Node) -> None:
    node.files.running = FakePull([state("downloading", 4), state("paused", 4)])
    assert (
        "was paused by somebody else"
        in lines(node.ask("POST", "/api/pull", {"model": "owner/tiny"}))[-1]["error"]
    )


def test_the_hubs_name_alone_is_no_model(node: Node) -> None:
    reply = node.ask("DELETE", "/api/delete", {"model": "hf.co/"})
    assert (reply.status, reply.json) == (400, {"error": "'model' is required; write owner/name"})


def test_ollamas_copy_and_delete(node: Node) -> None:
    reply = node.ask("POST", "/api/copy", {"source": "owner/tiny", "destination": "short:latest"})
    assert (reply.status, reply.body, node.files.names) == (200, b"", {"short": "owner/tiny"})
    assert node.ask("DELETE", "/api/delete", {"model": "short"}).status == 200
    assert node.files.names == {} and node.files.calls == []
    assert node.ask("DELETE", "/api/delete", b'{"name": "owner/tiny"}').body == b""
    assert node.files.calls == [("remove", "owner/tiny", False)]
    assert node.ask("DELETE", "/api/delete", {"model": "no/model"}).status == 404


def test_ollamas_clients_find_the_server(node: Node) -> None:
    with serving_fakes(static=lambda _: (b"<p>page</p>", "text/html"), api_key="right") as locked:
        reply = locked.ask("HEAD", "/")
    assert (reply.status, reply.body) == (200, b"")


def test_a_body_of_a_deletion_is_bounded(node: Node) -> None:
    length = 64 << 20
    head = f"DELETE /api/delete HTTP/1.1\r\nHost: 127.0.0.1:{node.port}\r\n"
    connection = node.raw(f"{head}Content-Length: {length}\r\n\r\n".encode())
    assert b" 413 " in connection.recv(4096)
    connection.close()


def test_everybody_may_see_what_is_downloaded() -> None:
    with serving_fakes(token=LocalToken("secret")) as node:
        assert node.ask("GET", "/v1/models/pull").status == 200


# ---------------------------------------------------------------------- names in profiles.toml

MINE = "# mine\n[coder]\nmodel = 'owner/tiny'\ntemperature = 0.2\n"


async def test_a_name_is_added_after_a_persons_own_profiles_and_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "config" / "profiles.toml"
    file = ProfileFile(path)
    await file.add("first", "owner/tiny")
    assert await file.remove("first") and path.read_text() == ""
    _ = path.write_text(MINE)
    await file.add('a "name"', "owner/tiny")
    await file.refresh()
    assert set(file.all()) == {"coder", 'a "name"'} and file.faults() == {}
    assert file.all()['a "name"'].describe() == {}
    for name in ("coder", 'a "name"'):
        with pytest.raises(InvalidRequest, match="already"):
            await file.add(name, "owner/tiny")
    with pytest.raises(InvalidRequest, match=r"remove it from .* yourself"):
        _ = await file.remove("coder")
    assert await file.remove('a "name"')
    assert not await file.remove("none")
    assert path.read_text() == MINE


async def test_names_that_are_added_and_taken_away_at_once_are_all_in_the_file(
    tmp_path: Path,
) -> None:
    file = ProfileFile(tmp_path / "profiles.toml")
    names = {f"name {number}" for number in range(8)}
    _ = await asyncio.gather(*(file.add(name, "owner/tiny") for name in names))
    await file.refresh()
    assert set(file.all()) == names
    _ = await asyncio.gather(*map(file.remove, names - {"name 3"}))
    await file.refresh()
    assert set(file.all()) == {"name 3"}


@pytest.mark.parametrize(
    ("before", "model", "why"),
    [
        ("[broken", "owner/tiny", "is no TOML"),
        ("", "own\x7fer/tiny", "is no TOML"),
        ("#" * (1 << 20), "owner/tiny", "make it shorter"),
    ],
)
async def test_a_name_that_would_leave_an_unreadable_file_is_not_added(
    tmp_path: Path, before: str, model: str, why: str
) -> None:
    path = tmp_path / "profiles.toml"
    _ = path.write_text(before)
    with pytest.raises(InvalidRequest, match=why) as refusal:
        await ProfileFile(path).add("name", model)
    assert refusal.value.param == "destination"
    assert path.read_text() == before


async def test_a_link_to_a_persons_file_stays_a_link(tmp_path: Path) -> None:
    link, path = tmp_path / "profiles.toml", tmp_path / "dotfiles.toml"
    _ = path.write_text(MINE)
    link.symlink_to(path)
    await ProfileFile(link).add("name", "owner/tiny")
    assert link.is_symlink() and path.read_text().startswith(MINE)
    assert set(ProfileFile(link).all()) == {"coder", "name"}


@pytest.mark.parametrize("name", ["", " x", "a\nb", "x" * 257])
async def test_what_is_no_name_is_not_added(tmp_path: Path, name: str) -> None:
    file = ProfileFile(tmp_path / "profiles.toml")
    with pytest.raises(InvalidRequest, match="is no name"):
        await file.add(name, "owner/tiny")
    assert not (tmp_path / "profiles.toml").exists()
