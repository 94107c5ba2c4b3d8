"""Requests that belong to the head: what a client gets when the head is lost on the way."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

import pytest
from fake_files import FakeFiles
from fakes import FakeChat, FakeOperations
from http_node import Reply, no_files, serving, serving_fakes
from starlette.types import ASGIApp

from exo_node.node.api.forward import HeadForwarder, answer_forwarded
from exo_node.node.api.plan_request import named_node
from exo_node.node.api.server import Services, build_app
from exo_node.node.api.session_api import SESSION_PATH, TICKET_PATH
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LOCAL
from exo_node.placement.errors import PeerLost
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb

OLD, NEW, OWN = NodeId("old"), NodeId("new"), NodeId("own")
Chunks = AsyncGenerator[pb.HttpChunk, None]
SSE = {"content-type": "text/event-stream"}


@dataclass
class Heads:
    """Connections to heads whose answers the test scripts."""

    answers: dict[NodeId, Callable[[], Chunks]]
    first: NodeId | None = OLD
    then: NodeId | None = NEW
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[tuple[NodeId, str]] = field(default_factory=list[tuple[NodeId, str]])

    async def head_elsewhere(self, other_than: NodeId | None = None) -> NodeId | None:
        return self.first if other_than is None else self.then

    def node_elsewhere(self, name: str) -> NodeId | None:
        node = named_node("node", name, {OLD: "mac-old", NEW: "mac-new", OWN: "mac-own"})
        return None if node == OWN else node

    async def until_gone(self, node: NodeId) -> None:
        _ = await self.lost.wait()

    async def http(self, head: NodeId, request: pb.HttpRequest) -> Chunks:
        self.requests.append((head, request.body.decode()))
        async for chunk in self.answers[head]():
            yield chunk


async def whole() -> Chunks:
    yield pb.HttpChunk(status=200, headers={"content-type": "application/json"})
    yield pb.HttpChunk(body=b'{"from": "a head"}')


async def refused() -> Chunks:
    raise PeerLost("gone")
    yield pb.HttpChunk()


async def breaks_off() -> Chunks:
    yield pb.HttpChunk(status=200, headers=SSE)
    yield pb.HttpChunk(body=b'data: {"n": 1}\n\n')
    raise PeerLost("gone")


def ask(heads: Heads, method: str = "POST", path: str = "/v1/settings") -> Reply:
    def forwarding(app: ASGIApp) -> ASGIApp:
        return HeadForwarder(app, heads)

    services = Services(FakeChat(), FakeOperations(), EventLog(), files=FakeFiles())
    app = build_app(services, no_files, LOCAL, between=forwarding)
    with serving(app) as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        body = b'{"a": 1}' if method == "POST" else None
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        reply = Reply(answer.status, names, answer.read())
        connection.close()
    return reply


def test_a_stream_whose_head_is_lost_ends_with_an_error_event() -> None:
    reply = ask(Heads({OLD: breaks_off}))
    events = [json.loads(line[6:]) for line in reply.body.decode().splitlines() if line]
    assert events[0] == {"n": 1}
    assert events[1]["error"]["code"] == "peer_lost"
    assert len(events) == 2


def test_so_does_one_whose_head_stopped_without_a_word() -> None:
    heads = Heads({})

    async def stops() -> Chunks:
        yield pb.HttpChunk(status=200, headers=SSE)
        yield pb.HttpChunk(body=b'data: {"n": 1}\n\n')
        heads.lost.set()  # the membership gives the head up; nothing more comes from it
        _ = await asyncio.Event().wait()

    heads.answers[OLD] = stops
    reply = ask(heads)
    assert reply.body.count(b"data: ") == 2
    assert b"peer_lost" in reply.body


def test_a_request_that_nobody_began_to_answer_goes_to_the_next_head_with_its_body() -> None:
    heads = Heads({OLD: refused, NEW: whole})
    reply = ask(heads)
    assert (reply.status, reply.json) == (200, {"from": "a head"})
    assert heads.requests == [(OLD, '{"a": 1}'), (NEW, '{"a": 1}')]


def test_or_is_answered_here_where_this_node_is_the_next_head() -> None:
    reply = ask(Heads({OLD: refused}, then=None), "POST", "/v1/placements")
    assert reply.status == 400  # from the API itself, which saw the body
    assert "model" in reply.error["message"] or "'a'" in reply.error["message"]


def test_where_the_next_head_is_lost_too_the_client_is_told_to_try_again() -> None:
    reply = ask(Heads({OLD: refused, NEW: refused}))
    assert (reply.status, reply.error["code"]) == (503, "peer_lost")
    assert reply.headers["retry-after"].isdecimal()


@pytest.mark.parametrize(
    ("path", "is_forwarded"),
    [
        ("/v1/models", True),
        ("/v1/events?follow=0", True),
        ("/v1/events?follow=0&scope=cluster", True),
        ("/v1/events?follow=0&scope=node", False),
        ("/v1/cluster", False),
        ("/v1/cluster/reach", False),
        ("/version", False),
        ("/metrics", False),
        ("/v1/models/search?q=x", False),
        ("/v1/models/pull", False),
    ],
)
def test_which_requests_go_to_the_head(path: str, is_forwarded: bool) -> None:
    heads = Heads({OLD: whole})
    assert ask(heads, "GET", path).status == 200
    assert [head for head, _ in heads.requests] == ([OLD] if is_forwarded else [])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models/pull"),
        ("POST", "/v1/models/pull"),
        ("POST", "/v1/models/pull/pause"),
        ("POST", "/v1/models/pull/cancel"),
        ("DELETE", "/v1/models/owner/tiny"),
    ],
)
def test_requests_about_files_go_to_the_node_that_they_name(method: str, path: str) -> None:
    heads = Heads({OLD: whole, NEW: whole})
    assert ask(heads, method, f"{path}?node=mac-new").json == {"from": "a head"}
    assert [node for node, _ in heads.requests] == [NEW]
    for own in (path, f"{path}?node=mac-own"):
        assert ask(heads, method, own).status != 503
    unknown = ask(heads, method, f"{path}?node=x")
    assert (unknown.status, unknown.error["param"]) == (400, "node")
    assert len(heads.requests) == 1
    lost = ask(Heads({NEW: refused}), method, f"{path}?node=mac-new")
    assert (lost.status, lost.error["code"]) == (503, "peer_lost")


async def test_a_node_answers_what_was_forwarded_to_it_about_its_files() -> None:
    """Whatever it is called in its own view."""
    heads = Heads({})
    services = Services(FakeChat(), FakeOperations(), files=FakeFiles())
    app = build_app(services, no_files, LOCAL, between=lambda app: HeadForwarder(app, heads))
    request = pb.HttpRequest(method="GET", path="/v1/models/pull?node=mac-new")
    chunks = [chunk async for chunk in answer_forwarded(app, request, "127.0.0.1:80", {})]
    assert chunks[0].status == 200 and heads.requests == []


@pytest.mark.parametrize("path", [SESSION_PATH, TICKET_PATH])
def test_a_page_is_signed_in_by_the_node_that_serves_it(path: str) -> None:
    heads = Heads({OLD: whole})
    assert ask(heads, "POST", path).status == 404  # these nodes have no users to tell apart
    assert heads.requests == []


@pytest.mark.parametrize(
    ("method", "end"), [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")]
)
def test_a_stored_response_is_read_at_the_node_that_answered(method: str, end: str) -> None:
    heads = Heads({OLD: whole})
    reply = ask(heads, method, f"/v1/responses/resp_1{end}")
    assert (reply.status, reply.error["code"]) == (404, "response_not_found")
    assert heads.requests == []


def test_a_client_that_reconnects_tells_the_head_what_it_saw() -> None:
    requests: list[Any] = []

    class Watching(Heads):
        async def http(self, head: NodeId, request: pb.HttpRequest) -> Chunks:
            requests.append(dict(request.headers))
            async for chunk in whole():
                yield chunk

    def forwarding(app: ASGIApp) -> ASGIApp:
        return HeadForwarder(app, Watching({}))

    with serving_fakes(between=forwarding) as node:
        _ = node.ask("GET", "/v1/events", headers={"Last-Event-ID": "0a0a0a0a-3"})
    assert requests[0]["last-event-id"] == "0a0a0a0a-3"
