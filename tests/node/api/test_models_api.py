"""Search, downloads and deletions over HTTP, in the node's own form and in Ollama's."""

import asyncio
import json
import socket
from collections.abc import Generator
from typing import Any

import pytest
from fake_files import FakePull, state
from http_node import PATIENCE_S, Node, Reply, serving_fakes
from starlette.requests import ClientDisconnect

from exo_node.node.api.http.sse import while_attended
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
    assert node.files.calls == [("pull", "owner/tiny", "v1", None)]


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


def test_a_refusal_has_a_status(node: Node) -> None:
    node.files.refusal = InvalidRequest("no repository; write owner/name", param="model")
    assert node.ask("POST", "/v1/models/pull", {"model": "x"}).status == 400
    node.files.refusal = RemovalRefused("it is loaded; unload it", param="model")
    reply = node.ask("DELETE", "/v1/models/owner/tiny")
    assert (reply.status, reply.error["code"]) == (409, "removal_refused")


def test_a_silent_download_sends_signs_of_life_and_ends_with_its_client(node: Node) -> None:
    node.files.running = pull = FakePull([state("downloading", 4)], waits=True)
    body = json.dumps({"model": "owner/tiny"}).encode()
    head = f"POST /v1/models/pull HTTP/1.1\r\nHost: 127.0.0.1:{node.port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = node.raw(head.encode() + body)
    received = b""
    while received.count(b": no news") < 3:
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


def test_ollamas_clients_find_the_server(node: Node) -> None:
    with serving_fakes(static=lambda _: (b"<p>page</p>", "text/html"), api_key="right") as locked:
        reply = locked.ask("HEAD", "/")
    assert (reply.status, reply.body) == (200, b"")


def test_a_body_of_a_deletion_is_bounded(node: Node) -> None:
    length = 64 << 20
    head = f"DELETE /v1/models/owner/tiny HTTP/1.1\r\nHost: 127.0.0.1:{node.port}\r\n"
    connection = node.raw(
        f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()
    )
    assert b" 413 " in connection.recv(4096)
    connection.close()


def test_everybody_may_see_what_is_downloaded() -> None:
    with serving_fakes(token=LocalToken("secret")) as node:
        assert node.ask("GET", "/v1/models/pull").status == 200
