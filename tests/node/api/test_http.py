"""The whole HTTP surface over a real server: routes, bad requests, limits, start and end."""

import asyncio
import gzip
import json
import signal
import socket
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial

import pytest
from fakes import hangs, repeats, says
from http_node import PATIENCE_S, Node, Reply, chat_body, raw_chat, serving_fakes
from many_clients import ask, at_once, never_reads, wrong
from starlette.types import Receive, Scope, Send

from exo_node.node.api.http.connection_limits import ConnectionLimits
from exo_node.node.api.http.errors import fault_of
from exo_node.node.api.server import HttpServer
from exo_node.node.chat.requests import Started, TextDelta
from exo_node.placement.errors import (
    HeadGone,
    InvalidSettings,
    PeerLost,
    PeerRefused,
    QueueFull,
    StateLost,
)

PAGE = b"<!doctype html><p>exo-node"
LARGE = b"let a = 1;\n" * 200


def files(path: str) -> tuple[bytes, str] | None:
    shipped = {
        "index.html": (PAGE, "text/html; charset=utf-8"),
        "vendor/a.js": (b"1", "text/javascript; charset=utf-8"),
        "large.js": (LARGE, "text/javascript; charset=utf-8"),
    }
    return shipped.get(path)


@pytest.fixture(scope="module")
def shared() -> Generator[Node]:
    with serving_fakes(static=files) as running:
        yield running


@pytest.fixture
def node() -> Generator[Node]:
    with serving_fakes() as running:
        yield running


def test_models_are_listed_and_found_by_id(shared: Node) -> None:
    listed = shared.ask("GET", "/v1/models").json
    assert listed["object"] == "list"
    for entry in listed["data"]:
        assert shared.ask("GET", f"/v1/models/{entry['id']}").json == entry
    assert shared.ask("GET", "/v1/models/owner%2Flarge-model").json["id"] == "owner/large-model"


def test_an_unknown_model_is_answered_as_a_chat_with_it_is(shared: Node) -> None:
    reply = shared.ask("GET", "/v1/models/large-model")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert reply.error == shared.chat_reply(model="large-model").error
    ollama_reply = shared.ask("POST", "/api/show", {"model": "large-model"})
    assert (ollama_reply.status, ollama_reply.json["error"]) == (404, reply.error["message"])


def test_placements_are_made_listed_and_removed(node: Node) -> None:
    reply = node.ask("POST", "/v1/placements", {"model": "demo", "min_nodes": 2})
    assert (reply.status, reply.json) == (200, {"id": "p0", "model": "demo", "min_nodes": 2})
    assert node.ask("POST", "/v1/placements", {"model": "demo"}).json["min_nodes"] == 1
    assert len(node.ask("GET", "/v1/placements").json["data"]) == 2
    assert node.ask("DELETE", "/v1/placements/p0").json["deleted"] is True
    assert [p["id"] for p in node.ask("GET", "/v1/placements").json["data"]] == ["p1"]
    again = node.ask("DELETE", "/v1/placements/p0")
    assert (again.status, again.error["code"]) == (404, "placement_not_found")


def test_a_preview_takes_the_query_and_refuses_what_it_does_not_know(shared: Node) -> None:
    path = "/v1/placements/preview?model=demo&nodes=a,b&layers=a:8,b:4"
    body = shared.ask("GET", path).json
    assert (body["model"], body["nodes"]) == ("demo", ["a", "b"])
    assert body["layers"] == [{"node": "a", "layers": 8}, {"node": "b", "layers": 4}]
    wrong = shared.ask("GET", "/v1/placements/preview?model=demo&min_node=2")
    assert (wrong.status, wrong.error["param"]) == (400, "min_node")


def test_a_setting_is_changed_alone(node: Node) -> None:
    assert node.ask("GET", "/v1/settings").json["native_mtp_enabled"]["value"] is True
    changed = node.ask("PATCH", "/v1/settings", {"native_mtp_enabled": False})
    assert changed.json["native_mtp_enabled"]["value"] is False
    assert node.operations.enabled is False


def test_a_setting_that_is_fixed_says_why(shared: Node) -> None:
    reply = shared.ask("PATCH", "/v1/settings", {"native_mtp_async_draft_eval": False})
    assert (reply.status, reply.error["param"]) == (400, "native_mtp_async_draft_eval")
    assert "fixed by a variable" in reply.error["message"]


def test_health_tells_live_from_ready(node: Node) -> None:
    assert node.ask("GET", "/health/ready").status == 200
    node.operations.is_ready = False
    unready = node.ask("GET", "/health/ready")
    assert (unready.status, unready.headers["retry-after"]) == (503, "5")
    assert unready.json == {"status": "unready", "reason": "a placement is failed"}
    assert node.ask("GET", "/health/live").status == 200


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_under_other_servers_names_is_empty_where_the_node_is_ready(
    node: Node, path: str
) -> None:
    reply = node.ask("GET", path)
    assert (reply.status, reply.body) == (200, b"")
    node.operations.is_ready = False
    unready = node.ask("GET", path)
    assert (unready.status, unready.json["reason"]) == (503, "a placement is failed")


def test_the_page_and_its_files_are_served(shared: Node) -> None:
    page = shared.ask("GET", "/")
    assert (page.status, page.body) == (200, PAGE)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    script = shared.ask("GET", "/static/vendor/a.js")
    assert (script.body, script.headers["content-type"]) == (b"1", "text/javascript; charset=utf-8")


def test_files_are_compressed_for_those_who_take_it(shared: Node) -> None:
    for offer, encoded in (
        ("gzip, deflate", "gzip"),
        ("br;q=1.0, gzip;q=0.8", "gzip"),
        ("gzip;q=0", None),
        ("identity", None),
    ):
        reply = shared.ask("GET", "/static/large.js", headers={"Accept-Encoding": offer})
        assert reply.headers.get("content-encoding") == encoded
        body = gzip.decompress(reply.body) if encoded else reply.body
        assert body == LARGE
        assert reply.headers["vary"] == "Accept-Encoding"
    small = shared.ask("GET", "/static/vendor/a.js", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in small.headers


def test_a_file_that_has_not_changed_is_not_sent_again(shared: Node) -> None:
    first = shared.ask("GET", "/static/large.js")
    tag = first.headers["etag"]
    again = shared.ask("GET", "/static/large.js", headers={"If-None-Match": tag})
    assert (again.status, again.body) == (304, b"")
    other = shared.ask("GET", "/static/large.js", headers={"If-None-Match": '"other"'})
    assert (other.status, other.body) == (200, LARGE)
    # Its compressed form is another representation.
    headers = {"If-None-Match": tag, "Accept-Encoding": "gzip"}
    assert shared.ask("GET", "/static/large.js", headers=headers).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/../../etc/passwd",
        "/static/../../etc/passwd",
        "/static/%2e%2e/%2e%2e/etc/passwd",
        "/static/",
        "/v1/rerank",
        "//v1/models",
    ],
)
def test_a_path_that_is_not_there_is_404_in_the_apis_shape(shared: Node, path: str) -> None:
    reply = shared.ask("GET", path)
    assert (reply.status, reply.error["type"]) == (404, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/", "GET, HEAD, OPTIONS"),
        ("/v1/chat/completions", "OPTIONS, POST"),
        ("/v1/settings", "GET, HEAD, OPTIONS, PATCH"),
        ("/v1/placements", "GET, HEAD, OPTIONS, POST"),
    ],
)
def test_options_and_refusals_of_others_have_the_methods_of_all_routes_of_a_path(
    shared: Node, path: str, methods: str
) -> None:
    reply = shared.ask("OPTIONS", path)
    assert (reply.status, reply.headers["allow"], reply.body) == (204, methods, b"")
    for headers in ({}, {"Content-Type": "application/json"}):
        reply = shared.ask("PUT", path, b"", headers)
        assert (reply.status, reply.headers["allow"]) == (405, methods)
        assert reply.error["code"] == "method_not_allowed"


BAD_BODIES: list[tuple[str, str, object, str]] = [
    ("POST", "/v1/chat/completions", [], "body"),
    ("POST", "/v1/chat/completions", b"[" * 100_000, "body"),
    ("POST", "/v1/chat/completions", b'{"\xed\x9f\xbf": 1, "a": "\\ud800"}', "a"),
    ("POST", "/v1/chat/completions", {"model": "m", "messages": [], "x": 1}, "x"),
    ("POST", "/v1/chat/completions", b'{"a":{"\\ud800":1,"\\ud800":2}}', "\ud800"),
    ("POST", "/v1/chat/completions", b" " * 300_000, "body"),
    ("POST", "/v1/placements", {}, "model"),
    ("POST", "/v1/placements", {"model": "demo", "min_nodes": 0}, "min_nodes"),
    ("POST", "/v1/placements", {"model": "demo", "min_nodes": True}, "min_nodes"),
    ("POST", "/v1/placements", {"model": "demo", "nodes": 2}, "nodes"),
    *(
        ("POST", "/v1/placements", {"model": "demo", "kv_bits": bits}, "kv_bits")
        for bits in (3, "4", -1, 1e9, 10**20, 8.5, True, False)
    ),
    *(
        ("POST", "/v1/placements", {"model": "demo", "drafter": name}, "drafter")
        for name in ("", 3, True, ["a"], "x" * 300)
    ),
    ("PATCH", "/v1/settings", {}, "body"),
    ("PATCH", "/v1/settings", {"native_mtp_enabled": None}, "native_mtp_enabled"),
    ("PATCH", "/v1/settings", {"native_mtp_enabled": 1}, "native_mtp_enabled"),
    ("PATCH", "/v1/settings", {"native_mtp": True}, "native_mtp"),
]


@pytest.mark.parametrize("case", BAD_BODIES, ids=[f"{c[1]} {str(c[2])[:40]}" for c in BAD_BODIES])
def test_a_bad_body_is_400_with_its_field_and_the_next_request_is_served(
    shared: Node, case: tuple[str, str, object, str]
) -> None:
    method, path, body, param = case
    reply = shared.ask(method, path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["type"] == "invalid_request_error"
    assert shared.chat_reply().status == 200


def head(*lines: str) -> Callable[[int], bytes]:
    text = "\r\n".join(("POST /v1/chat/completions HTTP/1.1", *lines, "", ""))
    return lambda port: text.replace("PORT", str(port)).encode("latin-1")


HOST, JSON = "Host: localhost:PORT", "Content-Type: application/json"
BAD_HEADS: dict[str, tuple[Callable[[int], bytes], int]] = {
    "another host": (head("Host: evil.example", JSON, "Content-Length: 0"), 421),
    "no host": (head(JSON, "Content-Length: 0"), 400),
    "two hosts": (head(HOST, "Host: evil", JSON, "Content-Length: 0"), 400),
    "33 MiB, none of it sent": (head(HOST, JSON, f"Content-Length: {33 * 2**20}"), 413),
    "negative length": (head(HOST, JSON, "Content-Length: -1"), 400),
    "two lengths": (head(HOST, JSON, "Content-Length: 1", "Content-Length: 2"), 400),
    "NUL in a header": (head(HOST, JSON, "Authorization: Bearer \xe9\0"), 400),
    "no HTTP": (lambda _: b"\x16\x03\x01 hello\r\n\r\n", 400),
    "a chunk of no size": (
        lambda port: head(HOST, JSON, "Transfer-Encoding: chunked")(port) + b"zz\r\n",
        400,
    ),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_bad_head_is_refused_in_the_apis_shape_and_the_next_request_is_served(
    shared: Node, name: str
) -> None:
    build, status = BAD_HEADS[name]
    with shared.raw(build(shared.port)) as connection:
        reply = b""
        while b"\r\n\r\n" not in reply or not reply.endswith(b"}"):
            reply += (piece := connection.recv(65536))
            assert piece, reply
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())
    assert set(json.loads(reply.partition(b"\r\n\r\n")[2])["error"]) == {
        "message",
        "type",
        "param",
        "code",
    }
    assert shared.chat_reply().status == 200


def test_the_line_about_a_bad_head_names_who_sent_it(
    shared: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with shared.raw(b"no HTTP at all\r\n\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
    lines = [r.getMessage() for r in caplog.records if "Invalid HTTP" in r.getMessage()]
    assert lines == ["Invalid HTTP request received. (from 127.0.0.1)"]
    assert shared.ask("GET", "/health/live").status == 200  # the connection's end is orderly
    assert [r for r in caplog.records if r.exc_info] == []


def test_a_head_may_have_32_kib(shared: Node) -> None:
    def padded(length: int) -> Reply:
        return shared.ask("GET", "/health/live", headers={"X-Padding": "a" * length})

    assert padded(30_000).status == 200
    for length in (33_000, 66_000, 300_000):
        too_long = padded(length)
        assert (too_long.status, too_long.error["code"]) == (400, "invalid_http"), length


def test_many_small_headers_are_as_long_as_one(shared: Node) -> None:
    def with_headers(count: int) -> Reply:
        return shared.ask("GET", "/health/live", headers={f"X-{i}": "v" for i in range(count)})

    assert with_headers(2000).status == 200
    assert with_headers(5000).status == 400


def test_a_target_and_a_trailer_count_as_well(shared: Node) -> None:
    assert shared.ask("GET", "/health/live?" + "a" * 33_000).status == 400
    start = head(HOST, JSON, "Transfer-Encoding: chunked")(shared.port)
    with shared.raw(start + b"0\r\nX: " + b"a" * 33_000 + b"\r\n\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_an_endless_chunked_body_is_refused_and_its_sender_cut_off() -> None:
    with serving_fakes(limits=ConnectionLimits(head_s=0.2)) as node:
        start = head(HOST, JSON, "Transfer-Encoding: chunked")(node.port)
        chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        num_chunks = 0
        with node.raw(start) as connection, pytest.raises(ConnectionError):
            while True:
                connection.sendall(chunk)
                num_chunks += 1
        assert num_chunks >= 8
        assert node.chat_reply().status == 200


def test_a_body_of_33_mib_that_is_sent_in_full_is_answered_413(shared: Node) -> None:
    reply = shared.ask("POST", "/v1/chat/completions", b" " * (33 * 2**20))
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def ended(connection: socket.socket) -> bytes:
    """Everything that the server sent before it closed the connection."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize("part", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_client_that_sends_no_whole_head_is_closed(part: bytes) -> None:
    with serving_fakes(limits=ConnectionLimits(head_s=0.05)) as node:
        with node.raw(part) as connection:
            assert ended(connection) == b""
        assert node.chat_reply().status == 200


def test_a_long_answer_outlives_the_limit_of_the_head() -> None:
    with serving_fakes(limits=ConnectionLimits(head_s=0.05), keep_alive_s=0.05) as node:
        node.chat.scripts["slow"] = hangs(Started((1,)))
        request = raw_chat(model="slow", stream=True).replace(b"{port}", str(node.port).encode())
        with node.raw(request) as connection:
            received = b""
            while received.count(b'"delta":{}') < 4:
                received += (piece := connection.recv(4096))
                assert piece


def test_a_client_that_never_reads_is_cut_off_and_its_backlog_is_bounded() -> None:
    with serving_fakes(limits=ConnectionLimits(blocked_s=0.3)) as node:
        node.chat.scripts["flood"] = repeats(TextDelta("x" * 65536, ()))
        request = raw_chat(model="flood", stream=True).replace(b"{port}", str(node.port).encode())
        with node.raw(request):
            assert node.chat.closed.wait(PATIENCE_S)
        # What the kernel buffers on both sides, and uvicorn's own 64 KiB.
        assert node.chat.events * 65536 < 32 * 2**20
        assert node.chat_reply().status == 200


def test_a_hundred_clients_are_served_or_refused_and_one_that_never_reads_is_in_nobodys_way() -> (
    None
):
    with serving_fakes() as node:
        node.chat.scripts["flood"] = repeats(TextDelta("x" * 65536, ()))
        node.chat.scripts["busy"] = says(then=QueueFull("too many wait"))
        headers = {"Content-Type": "application/json"}
        path = "/v1/chat/completions"
        bodies = [chat_body(model=("demo", "busy")[n % 2], stream=n % 4 == 0) for n in range(100)]
        with never_reads(node.port, path, chat_body(model="flood")):
            outcomes = at_once([partial(ask, node.port, path, body, headers) for body in bodies])
    assert wrong(outcomes) == []
    assert Counter(outcome.status for outcome in outcomes) == {200: 50, 429: 50}


def test_closing_cancels_streams_that_do_not_end() -> None:
    with serving_fakes(grace_s=0) as node:
        node.chat.scripts["slow"] = hangs(Started((1,)))
        request = raw_chat(model="slow", stream=True).replace(b"{port}", str(node.port).encode())
        connection = node.raw(request)
        assert node.chat.began.wait(PATIENCE_S)
    assert node.chat.closed.is_set()
    with connection:
        assert b"[DONE]" not in ended(connection)


async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nobody asks")


def refused_start(host: str, port: int) -> InvalidSettings:
    with pytest.raises(InvalidSettings) as caught:
        asyncio.run(HttpServer(nobody).start(host, port))
    return caught.value


def test_a_port_in_use_is_refused_with_the_next_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        fault = refused_start("127.0.0.1", port)
        assert fault.param == "--port"
        named = int(fault.message.partition("use --port ")[2].partition(",")[0])
        assert named > port
        with socket.create_server(("127.0.0.1", named)):
            again = refused_start("127.0.0.1", port)
            assert f"--port {named}," not in again.message


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_refused_by_name(host: str) -> None:
    assert refused_start(host, 0).param == "--host"


async def test_the_server_leaves_the_signals_to_its_node() -> None:
    server = HttpServer(nobody)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    await server.start("127.0.0.1", 0)
    assert {each: signal.getsignal(each) for each in before} == before
    await server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


@pytest.mark.parametrize("lost", [PeerLost, PeerRefused, StateLost, HeadGone])
def test_each_kind_of_lost_node_says_when_to_try_again(lost: type[PeerLost]) -> None:
    fault = fault_of(lost("it is gone"))
    assert (fault.status, fault.code) == (503, lost.code)
    assert dict(fault.headers) == {"Retry-After": "2", "x-should-retry": "true"}
