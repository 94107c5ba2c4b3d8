"""The event log, and its stream over HTTP."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes import FakeChat, FakeOperations
from http_node import no_files, serving_fakes

from exo_node.node.api.http.sse import comment
from exo_node.node.api.operations.events_api import EventsApi
from exo_node.node.api.server import HttpServer, Services, build_app
from exo_node.node.machine.events import BACKLOG, EventLog
from exo_node.node.machine.timing import LOCAL


def log_of(count: int, capacity: int = 1000) -> EventLog:
    log = EventLog(capacity, clock=lambda: 12.5)
    for number in range(1, count + 1):
        _ = log.add("joined", f"n{number} joined", node=f"n{number}")
    return log


# ------------------------------------------------------------------------------ the log


def test_events_are_numbered_without_gaps_and_the_oldest_go_first() -> None:
    log = log_of(5, capacity=3)
    assert [event.sequence for event in log.entries()] == [3, 4, 5]
    assert [event.id for event in log.entries()] == [f"{log.name}-{n}" for n in (3, 4, 5)]


def test_a_person_finds_the_same_sentence_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log = EventLog()
        _ = log.add("joined", "desk joined")
        _ = log.add("died", "desk is dead")
    records = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert records == [("INFO", "desk joined"), ("WARNING", "desk is dead")]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        *((None, 3), (0, 3), (2, 1), (3, 0), ("{log}-2", 1)),
        *((99, 3), ("{log}-99", 3)),  # what this log has not reached
        ("00000000-2", 3),  # an id of another log
    ],
)
def test_what_follows_the_last_known_event(after: str | int | None, expected: int) -> None:
    log = log_of(3)
    position = after.format(log=log.name) if isinstance(after, str) else after
    assert len(log.entries(position)) == expected


async def test_a_listener_gets_what_is_held_and_what_happens_until_the_log_closes() -> None:
    log = log_of(2)
    news = log.subscribe(after=1)
    assert (await anext(news)).text == "n2 joined"
    _ = log.add("left", "n1 left")
    _ = log.add("left", "n2 left")
    log.close()
    assert [event.text async for event in news] == ["n1 left", "n2 left"]
    assert [event async for event in log.subscribe(after=4)] == []


async def test_a_listener_that_does_not_read_is_dropped_and_told_where_to_continue() -> None:
    log = log_of(1)
    slow, quick = log.subscribe(), log.subscribe()
    for news in (slow, quick):
        assert (await anext(news)).sequence == 1
    for number in range(BACKLOG + 5):
        _ = log.add("joined", str(number))
        assert (await anext(quick)).text == str(number)
    received = [event async for event in slow]
    assert [event.sequence for event in received[:-1]] == list(range(2, BACKLOG + 2))
    assert (received[-1].kind, received[-1].id) == ("dropped", received[-2].id)
    assert len(log.entries(received[-1].id)) == 5
    _ = log.add("joined", "last")
    assert (await anext(quick)).text == "last"


# ---------------------------------------------------------------------------- over HTTP


def parsed(body: bytes) -> list[dict[str, str]]:
    """The fields of each event."""
    blocks = body.decode().split("\n\n")
    rows = [[r.split(": ", 1) for r in b.splitlines() if not r.startswith(":")] for b in blocks]
    return [{name: value for name, value in row} for row in rows if row]


def test_an_event_has_its_id_its_kind_and_everything_as_json() -> None:
    log = log_of(1)
    with serving_fakes(events=log) as node:
        reply = node.ask("GET", "/v1/events?follow=0")
    assert reply.headers["content-type"].startswith("text/event-stream")
    [event] = parsed(reply.body)
    assert (event["id"], event["event"]) == (f"{log.name}-1", "joined")
    assert json.loads(event["data"]) == {
        "id": f"{log.name}-1",
        "sequence": 1,
        "time": 12.5,
        "kind": "joined",
        "text": "n1 joined",
        "facts": {"node": "n1"},
    }


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [1, 2, 3]),
        ("&limit=2", [2, 3]),
        ("&limit=0", []),
        ("&after={log}-2", [3]),
        ("&after=00000000-2&limit=1", [3]),
        ("&scope=node", [1, 2, 3]),
        ("&scope=cluster", [1, 2, 3]),
    ],
)
def test_a_query_chooses_events(query: str, expected: list[int]) -> None:
    log = log_of(3)
    with serving_fakes(events=log) as node:
        reply = node.ask("GET", f"/v1/events?follow=0{query.format(log=log.name)}")
        assert [json.loads(e["data"])["sequence"] for e in parsed(reply.body)] == expected


def test_a_browser_that_reconnects_gets_what_it_missed() -> None:
    log = log_of(3)
    with serving_fakes(events=log) as node:
        headers = {"Last-Event-ID": f"{log.name}-2"}
        reply = node.ask("GET", "/v1/events?follow=0&after=0", headers=headers)
    assert [event["id"] for event in parsed(reply.body)] == [f"{log.name}-3"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("since=3", "since"),
        ("after=", "after"),
        ("after=-1", "after"),
        ("after=x-1", "after"),
        ("after=1&after=2", "after"),
        ("limit=-1", "limit"),
        ("limit=1001", "limit"),
        ("limit=%D9%A3", "limit"),
        ("limit=99999999999999999999", "limit"),
        ("follow=yes", "follow"),
        ("scope=all", "scope"),
    ],
)
def test_a_wrong_query_is_refused_by_name(query: str, param: str) -> None:
    with serving_fakes(events=EventLog()) as node:
        reply = node.ask("GET", f"/v1/events?{query}")
        assert (reply.status, reply.error["param"]) == (400, param)
        assert node.ask("GET", "/v1/events?follow=0").status == 200


def test_events_are_behind_the_key() -> None:
    with serving_fakes(api_key="k") as node:
        assert node.ask("GET", "/v1/events?follow=0").status == 401


@asynccontextmanager
async def served(log: EventLog, query: str = "") -> AsyncGenerator[asyncio.StreamReader]:
    """The bytes of `GET /v1/events` from a server in this loop."""
    server = HttpServer(
        build_app(Services(FakeChat(), FakeOperations(), log), no_files, LOCAL), grace_s=5
    )
    await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"GET /v1/events{query} HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n"
    writer.write(head.encode())
    try:
        yield reader
    finally:
        await server.close()
        writer.close()
        await writer.wait_closed()


async def test_a_stream_continues_with_what_happens_and_ends_with_the_log() -> None:
    log = log_of(1)
    async with served(log) as reader:
        _ = await reader.readuntil(b"n1 joined")
        _ = log.add("left", "n1 left")
        _ = await reader.readuntil(b"n1 left")
        log.close()  # as a node does that ends: its server need not wait for listeners
        _ = await reader.readuntil(b"\r\n0\r\n\r\n")


async def test_a_stream_begins_with_the_latest_events_that_its_limit_allows() -> None:
    log = log_of(3)
    async with served(log, "?limit=1") as reader:
        past = await reader.readuntil(b"n3 joined")
        assert b": past events: 1" in past
        assert b"n2 joined" not in past
        log.close()


async def test_silence_is_filled_with_comments() -> None:
    bodies: list[bytes] = []
    enough = asyncio.Event()

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))
        if len(bodies) > 4:
            enough.set()

    async def receive() -> Any:
        _ = await enough.wait()
        return {"type": "http.disconnect"}

    [route] = EventsApi(EventLog(), keep_alive_s=0.01).routes()
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/events", "headers": []}
    await route.app({**scope, "query_string": b""}, receive, send)
    assert bodies[2:5] == [comment("no news")] * 3


def test_one_listener_too_many_is_refused_and_told_how_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("exo_node.node.api.operations.events_api.MAX_LISTENERS", 2)
    with serving_fakes(events=log_of(1)) as node:
        request = f"GET /v1/events HTTP/1.1\r\nHost: localhost:{node.port}\r\n\r\n".encode()
        with node.raw(request) as one, node.raw(request) as two:
            for connection in (one, two):
                while b"id: " not in connection.recv(65536):
                    pass
            fault = node.ask("GET", "/v1/events")
            assert (fault.status, fault.error["code"]) == (429, "queue_full")
            assert "follow=0" in fault.error["message"]
            assert node.ask("GET", "/v1/events?follow=0").status == 200
