"""Requests that belong to the head: what a client gets when the head is lost on the way."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from typing import Any

import pytest
from fake_files import FakeFiles
from fakes import FakeChat, FakeOperations, Json
from http_node import Reply, no_files, serving, serving_fakes
from starlette.types import ASGIApp

from exo_node.node.api.forward import HeadForwarder, answer_forwarded
from exo_node.node.api.http.session_api import SESSION_PATH, TICKET_PATH
from exo_node.node.api.operations.plan_request import PlacementBody, live_node
from exo_node.node.api.server import Services, build_app
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LOCAL
from exo_node.placement.errors import ExoNodeError, HeadGone, LoadFailed, PeerLost, PeerRefused
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb

OLD, NEW, OWN = NodeId("old"), NodeId("new"), NodeId("own")
QUICK = replace(LOCAL, heartbeat_s=0.02, tick_s=0.01)
PLACEMENT = b'{"model": "demo"}'
Chunks = AsyncGenerator[pb.HttpChunk, None]
SSE = {"content-type": "text/event-stream"}


@dataclass
class Heads:
    """Connections to heads whose answers the test scripts."""

    answers: dict[NodeId, Callable[[], Chunks]]
    heads: list[NodeId | None] = field(default_factory=lambda: [OLD, NEW])
    """One after the other; the last one stays. None: this node."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[tuple[NodeId, str]] = field(default_factory=list[tuple[NodeId, str]])

    async def head_elsewhere(self) -> NodeId | None:
        return self.heads.pop(0) if len(self.heads) > 1 else self.heads[0]

    def node_elsewhere(self, name: str) -> NodeId | None:
        node = live_node("node", name, {OLD: "mac-old", NEW: "mac-new", OWN: "mac-own"})
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


async def breaks() -> Chunks:
    raise PeerLost("gone")
    yield pb.HttpChunk()


async def refuses() -> Chunks:
    raise PeerRefused("nobody listens")
    yield pb.HttpChunk()


class Losing(FakeOperations):
    """Its first placements fail."""

    def __init__(self, *errors: ExoNodeError) -> None:
        super().__init__()
        self.errors = list(errors)

    async def place(self, body: PlacementBody) -> Json:
        if self.errors:
            raise self.errors.pop(0)
        return await super().place(body)


async def breaks_off() -> Chunks:
    yield pb.HttpChunk(status=200, headers=SSE)
    yield pb.HttpChunk(body=b'data: {"n": 1}\n\n')
    raise PeerLost("gone")


def ask(
    heads: Heads,
    method: str = "POST",
    path: str = "/v1/settings",
    *,
    operations: FakeOperations | None = None,
    body: bytes | None = None,
) -> Reply:
    def forwarding(app: ASGIApp) -> ASGIApp:
        return HeadForwarder(app, heads, QUICK)

    services = Services(FakeChat(), operations or FakeOperations(), EventLog(), files=FakeFiles())
    app = build_app(services, no_files, LOCAL, between=forwarding)
    with serving(app) as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        content = body or (b'{"a": 1}' if method == "POST" else None)
        connection.request(method, path, content, {"Content-Type": "application/json"})
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


@pytest.mark.parametrize("heads", [[OLD, NEW], [OLD, OLD, OLD, NEW]])
def test_a_request_that_nobody_began_to_answer_goes_to_the_next_head_with_its_body(
    heads: list[NodeId | None],
) -> None:
    calls = [(head, '{"a": 1}') for head in heads]
    script = Heads({OLD: breaks, NEW: whole}, heads)
    reply = ask(script)
    assert (reply.status, reply.json) == (200, {"from": "a head"})
    assert script.requests == calls


def test_or_is_answered_here_where_this_node_is_the_next_head() -> None:
    reply = ask(Heads({OLD: breaks}, [OLD, None]), "POST", "/v1/placements")
    assert reply.status == 400  # from the API itself, which saw the body
    assert "model" in reply.error["message"] or "'a'" in reply.error["message"]


def test_where_no_head_answers_in_the_time_of_an_election_the_client_is_told_to_try_again() -> None:
    heads = Heads({OLD: breaks, NEW: breaks})
    reply = ask(heads)
    assert (reply.status, reply.error["code"]) == (503, "peer_lost")
    assert reply.headers["retry-after"].isdecimal()
    assert len(heads.requests) > 2


@pytest.mark.parametrize("heads", [[None, NEW], [None, None, NEW]])
def test_a_placement_is_asked_of_the_next_head_where_this_node_is_the_head_no_longer(
    heads: list[NodeId | None],
) -> None:
    gone = [HeadGone("another node leads")] * (len(heads) - 1)
    script = Heads({NEW: whole}, heads)
    reply = ask(script, "POST", "/v1/placements", operations=Losing(*gone), body=PLACEMENT)
    assert (reply.status, reply.json) == (200, {"from": "a head"})
    assert script.requests == [(NEW, PLACEMENT.decode())]


def test_a_placement_is_made_here_once_this_node_leads_again() -> None:
    operations = Losing(HeadGone("it does not lead yet"))
    reply = ask(Heads({}, [None]), "POST", "/v1/placements", operations=operations, body=PLACEMENT)
    assert reply.status == 200 and len(operations.placed) == 1


@pytest.mark.parametrize("error", [PeerLost("a stage was lost"), LoadFailed("it broke")])
def test_a_placement_that_fails_is_not_asked_for_again(error: ExoNodeError) -> None:
    operations = Losing(error)
    reply = ask(Heads({}, [None]), "POST", "/v1/placements", operations=operations, body=PLACEMENT)
    assert (reply.status, reply.error["code"]) == (503, error.code)
    assert operations.placed == {}


def test_a_body_that_the_guard_does_not_bound_is_not_read() -> None:
    heads = Heads({OLD: whole})
    assert ask(heads, "GET", "/v1/placements", body=b"1" * 100_000).status == 200
    assert heads.requests == [(OLD, "")]


@pytest.mark.parametrize(("loss", "status"), [(breaks, 503), (refuses, 200)])
def test_a_removal_that_may_have_been_made_is_not_repeated(
    loss: Callable[[], Chunks], status: int
) -> None:
    """A head that refuses the connection has not seen it."""
    heads = Heads({OLD: loss, NEW: whole})
    assert ask(heads, "DELETE", "/v1/placements/p").status == status
    assert [head for head, _ in heads.requests] == ([OLD] if status == 503 else [OLD, NEW])


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
    lost = ask(Heads({NEW: breaks}), method, f"{path}?node=mac-new")
    assert (lost.status, lost.error["code"]) == (503, "peer_lost")


async def test_a_node_answers_what_was_forwarded_to_it_about_its_files() -> None:
    """Whatever it is called in its own view."""
    heads = Heads({})
    services = Services(FakeChat(), FakeOperations(), files=FakeFiles())
    app = build_app(services, no_files, LOCAL, between=lambda app: HeadForwarder(app, heads, QUICK))
    request = pb.HttpRequest(method="GET", path="/v1/models/pull?node=mac-new")
    chunks = [chunk async for chunk in answer_forwarded(app, request, "127.0.0.1:80", {})]
    assert chunks[0].status == 200 and heads.requests == []


@pytest.mark.parametrize("path", [SESSION_PATH, TICKET_PATH])
def test_a_page_is_signed_in_by_the_node_that_serves_it(path: str) -> None:
    heads = Heads({OLD: whole})
    assert ask(heads, "POST", path).status == 404  # these nodes have no users to tell apart
    assert heads.requests == []


def test_a_client_that_reconnects_tells_the_head_what_it_saw() -> None:
    requests: list[Any] = []

    class Watching(Heads):
        async def http(self, head: NodeId, request: pb.HttpRequest) -> Chunks:
            requests.append(dict(request.headers))
            async for chunk in whole():
                yield chunk

    def forwarding(app: ASGIApp) -> ASGIApp:
        return HeadForwarder(app, Watching({}), QUICK)

    with serving_fakes(between=forwarding) as node:
        _ = node.ask("GET", "/v1/events", headers={"Last-Event-ID": "0a0a0a0a-3"})
    assert requests[0]["last-event-id"] == "0a0a0a0a-3"
