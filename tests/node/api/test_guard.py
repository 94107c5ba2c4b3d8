"""The requests that the guard admits and the headers of its answers, over ASGI without a server."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exo_node.node.api.http.guard import Access, Guard
from exo_node.node.trust.local_token import TOKEN_HEADER, LocalToken
from exo_node.placement.errors import PeerLost

KEY = "a-secret-key"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Headers
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says how many bytes came."""
    body = await Request(scope, receive).body()
    await Response(f"let in with {len(body)}")(scope, receive, send)


def scope_of(
    method: str, path: str, headers: Mapping[str, str], server: tuple[str, int] | None
) -> Scope:
    all_headers = {"host": "localhost:52415", **headers}
    return {
        "type": "http",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "server": server,
        "headers": [(name.encode(), text.encode("latin-1")) for name, text in all_headers.items()],
    }


def ask(
    guard: Guard,
    method: str = "GET",
    path: str = "/v1/models",
    headers: Mapping[str, str] | None = None,
    body: Sequence[bytes] = (b"",),
    server: tuple[str, int] | None = ("127.0.0.1", 52415),
    then: Message | None = None,
    *,
    stalls: bool = False,
) -> Reply:
    """The answer to a request whose body comes in these pieces, with `then` or silence after
    them."""
    more = stalls or then is not None
    pieces: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": more or i < len(body) - 1}
        for i, piece in enumerate(body)
    ]
    messages: list[Message] = []

    async def receive() -> Message:
        if pieces:
            return pieces.pop(0)
        if then is None:
            await asyncio.Event().wait()
        assert then is not None
        return then

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(guard(scope_of(method, path, headers or {}, server), receive, send))
    if not messages:
        return Reply(0, Headers(), b"")
    answer = b"".join(message.get("body", b"") for message in messages[1:])
    return Reply(messages[0]["status"], Headers(raw=messages[0]["headers"]), answer)


NAMES = ("Mac.lan", "host.docker.internal", "tunnel.example:8443")
FIRST = ("127.0.0.1", 52415)


@pytest.mark.parametrize(
    ("host", "server"),
    [
        *((name, FIRST) for name in ("localhost:52415", "LOCALHOST:52415", "127.0.0.1:52415")),
        *((name, FIRST) for name in ("[::1]:52415", "mac.lan:52415", "host.docker.internal")),
        *((name, FIRST) for name in ("Host.Docker.internal:8080", "tunnel.example:8443")),
        *((name, ("10.0.0.5", 80)) for name in ("10.0.0.5:80", "10.0.0.5")),
        ("[fe80::1]:81", ("fe80::1", 81)),
    ],
)
def test_own_named_and_connected_hosts_are_let_in(host: str, server: tuple[str, int]) -> None:
    guard = Guard(app, Access(hosts=NAMES))
    assert ask(guard, headers={"host": host}, server=server).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:52415", "localhost", "localhost:80", "localhost:52416", ""),
        *("127.0.0.1.evil.example:52415", "localhost:52415.evil.example", "localhost.:52415"),
        *("user@localhost:52415", "10.0.0.6:52415", "host.docker.internal:evil"),
        *("host.docker.internal.evil.example:52415", "tunnel.example:52415"),
    ],
)
def test_another_host_is_misdirected(host: str) -> None:
    for access in (Access(), Access(hosts=NAMES)):
        reply = ask(Guard(app, access), headers={"host": host})
        assert (reply.status, reply.error["code"]) == (421, "misdirected_request")


@pytest.mark.parametrize(("key", "status"), [(KEY, 200), ("wrong", 421), (None, 421)])
def test_who_shows_the_key_may_use_any_host(key: str | None, status: int) -> None:
    key_header = {} if key is None else {"x-api-key": key}
    reply = ask(Guard(app, Access(api_key=KEY)), headers={"host": "anything.example", **key_header})
    assert reply.status == status


PAGE = "http://localhost:3000"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_a_page_of_an_allowed_origin_may_ask_and_read() -> None:
    guard = Guard(app, Access(origins=[PAGE]))
    headers = {"origin": PAGE, "sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}
    reply = ask(guard, headers=headers)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["vary"] == "Origin"
    assert ask(guard, headers={"origin": "http://localhost:3001"}).status == 403
    assert "access-control-allow-origin" not in ask(guard).headers


def test_an_allowed_origin_needs_the_key_all_the_same_and_can_read_why() -> None:
    reply = ask(Guard(app, Access(api_key=KEY, origins=[PAGE])), headers={"origin": PAGE})
    assert reply.status == 401
    assert reply.headers["access-control-allow-origin"] == PAGE


def test_a_preflight_is_answered_for_allowed_origins_only() -> None:
    """A browser sends it without the key, so it comes before the key is asked for."""
    guard = Guard(app, Access(api_key=KEY, origins=[PAGE]))
    reply = ask(guard, "OPTIONS", "/v1/chat/completions", PREFLIGHT)
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in reply.headers["access-control-allow-methods"]
    other = ask(guard, "OPTIONS", "/v1/chat/completions", {**PREFLIGHT, "origin": "http://e.com"})
    assert other.status == 403
    assert "access-control-allow-origin" not in other.headers


def test_an_allowed_page_changes_no_more_than_anybody_may() -> None:
    guard = Guard(app, Access(origins=[PAGE], token=LocalToken("t" * 32)))
    headers = {**JSON, "origin": PAGE}
    assert ask(guard, "POST", "/v1/chat/completions", headers).status == 200
    assert ask(guard, "POST", "/v1/placements", headers).status == 403


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models/search"),
        ("POST", "/v1/models/pull"),
        ("POST", "/v1/models/pull/cancel"),
        ("DELETE", "/v1/models/owner/tiny"),
        ("PATCH", "/v1/settings"),
    ],
)
def test_other_users_of_the_machine_neither_search_the_hub_nor_change_files_and_settings(
    method: str, path: str
) -> None:
    guard = Guard(app, Access(token=LocalToken("t" * 32)))
    reply = ask(guard, method, path, JSON)
    assert reply.status == 403 and b"this is for the node's own user" in reply.body
    assert ask(guard, method, path, {**JSON, TOKEN_HEADER: "t" * 32}).status == 200


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:1", "https://localhost:52415", "file://"],
)
def test_a_page_of_another_origin_is_refused_and_gets_no_cors_header(
    method: str, origin: str
) -> None:
    reply = ask(Guard(app), method, headers={"origin": origin, **JSON})
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none, cross-site", ""])
@pytest.mark.parametrize(
    "how", [{}, {"sec-fetch-mode": "no-cors"}, {"sec-fetch-mode": "navigate"}], ids=str
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_what_another_sites_page_loads_is_refused_though_it_names_no_origin(
    method: str, how: dict[str, str], site: str
) -> None:
    headers = {"sec-fetch-site": site, "sec-fetch-dest": "image", **how, **JSON}
    reply = ask(Guard(app), method, headers=headers)
    assert reply.status == 403
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
        {
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "navigate",
            "sec-fetch-dest": "document",
        },
    ],
    ids=["its own page", "typed by a person", "a link that was followed"],
)
def test_what_a_person_does_in_a_browser_is_let_in(headers: dict[str, str]) -> None:
    assert ask(Guard(app), headers=headers).status == 200


def test_the_nodes_own_page_is_let_in() -> None:
    reply = ask(Guard(app), headers={"origin": "http://localhost:52415"})
    assert reply.status == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT"])
@pytest.mark.parametrize(
    "headers", [{}, {"content-type": "text/plain"}, {"content-type": "application/json5"}]
)
def test_only_json_bodies_are_taken(method: str, headers: dict[str, str]) -> None:
    for framing in ({"content-length": "2"}, {"transfer-encoding": "chunked"}):
        reply = ask(Guard(app), method, headers={**headers, **framing}, body=(b"{}",))
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}, {"content-length": "0"}])
def test_a_request_without_a_body_needs_no_type(headers: dict[str, str]) -> None:
    assert ask(Guard(app), "POST", headers=headers, body=(b"",)).status == 200
    foreign = {**headers, "origin": "http://evil.example"}
    assert ask(Guard(app), "POST", headers=foreign, body=(b"",)).status == 403


def test_a_json_body_arrives_whole() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert ask(Guard(app), "POST", headers=headers, body=(b"{", b"}")).body == b"let in with 2"


def test_a_long_body_is_refused_before_it_is_read() -> None:
    unread = (b"x" * 100,)
    headers = {**JSON, "content-length": str(33 * 2**20)}
    reply = ask(Guard(app, body_timeout_s=0.01), "POST", headers=headers, body=unread)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def test_a_chunked_body_is_refused_where_it_becomes_too_long() -> None:
    guard = Guard(app, max_body_bytes=10)
    headers = {**JSON, "transfer-encoding": "chunked"}
    assert ask(guard, "POST", headers=headers, body=(b"x" * 6, b"x" * 4)).status == 200
    reply = ask(guard, "POST", headers=headers, body=(b"x" * 6, b"x" * 5, b"never read"))
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


def test_two_lengths_of_one_body_are_refused() -> None:
    both = {**JSON, "content-length": "2", "transfer-encoding": "chunked"}
    reply = ask(Guard(app), "POST", headers=both, body=(b"{}",))
    assert (reply.status, reply.error["param"]) == (400, "Content-Length")


def test_half_a_body_and_silence_is_a_timeout() -> None:
    reply = ask(Guard(app, body_timeout_s=0.02), "POST", headers=JSON, body=(b"{",), stalls=True)
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")
    assert reply.headers["connection"] == "close"


def test_a_client_that_leaves_within_its_body_gets_nothing_and_reaches_nothing() -> None:
    reached: list[Scope] = []

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope)

    disconnect: Message = {"type": "http.disconnect"}
    assert ask(Guard(watched), "POST", headers=JSON, body=(b"{",), then=disconnect).status == 0
    assert reached == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": KEY},
        {"authorization": "Basic " + KEY},
        {"authorization": "Bearer "},
        {"authorization": "Bearer é"},
        {"authorization": f"Bearer {KEY}x"},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": ""},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("DELETE", "/v1/placements/p"), ("GET", "/version")]
)
def test_the_api_needs_its_key(method: str, path: str, headers: dict[str, str]) -> None:
    reply = ask(Guard(app, Access(api_key=KEY)), method, path, headers)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert KEY not in reply.body.decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "authorization": "Bearer other"},
    ],
)
def test_either_way_of_giving_the_key_opens_the_api(headers: dict[str, str]) -> None:
    assert ask(Guard(app, Access(api_key=KEY)), headers=headers).status == 200


def test_a_key_of_any_characters_can_be_given() -> None:
    guard = Guard(app, Access(api_key="schlüssel"))
    bearer = "Bearer " + "schlüssel".encode().decode("latin-1")
    assert ask(guard, headers={"authorization": bearer}).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/static/app.js", "/health/live", "/health/ready", "/health", "/ping"]
)
def test_the_page_and_the_health_paths_need_no_key(path: str) -> None:
    assert ask(Guard(app, Access(api_key=KEY)), path=path).status == 200


def test_without_a_configured_key_the_api_is_open() -> None:
    assert ask(Guard(app)).status == 200


def test_the_key_is_in_no_representation_of_the_guard() -> None:
    assert KEY not in repr(Guard(app, Access(api_key=KEY)))


def test_html_carries_the_content_security_policy_and_json_does_not() -> None:
    page = ask(Guard(HTMLResponse("<p>")), path="/")
    assert set(page.headers["content-security-policy"].split("; ")) == {
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "style-src-attr 'unsafe-inline'",
        "font-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    }
    assert "content-security-policy" not in ask(Guard(app)).headers


def test_every_answer_has_its_own_request_id_and_is_not_sniffed() -> None:
    replies = [ask(Guard(app)), ask(Guard(app)), ask(Guard(app), headers={"host": "evil"})]
    assert all(reply.headers["x-content-type-options"] == "nosniff" for reply in replies)
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == 3
    assert all(id.startswith("req_") for id in ids)


def breaks(error: Exception, *messages: Message) -> ASGIApp:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        raise error

    return broken


def head(media_type: bytes) -> Message:
    headers = [(b"content-type", media_type)]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def test_something_else_that_was_cancelled_is_a_defect_and_no_broken_connection() -> None:
    """gRPC cancels the calls of a channel that is closed; the request was not cancelled."""

    async def waits(_: Scope, _receive: Receive, _send: Send) -> None:
        raise asyncio.CancelledError

    reply = ask(Guard(waits))
    assert (reply.status, reply.error["code"]) == (500, "internal_error")


def test_a_defect_is_a_500_that_tells_nothing_but_where_the_log_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply = ask(Guard(breaks(RuntimeError("the secret"))))
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert b"secret" not in reply.body
    assert reply.headers["x-request-id"] in reply.error["message"]
    assert "the secret" in caplog.text


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("the secret"), "internal_error"), (PeerLost("b"), "peer_lost")],
)
def test_a_stream_that_breaks_ends_with_an_error_event(error: Exception, code: str) -> None:
    first_body: Message = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
    reply = ask(Guard(breaks(error, head(b"text/event-stream"), first_body)))
    assert reply.body.startswith(b'data: 1\n\ndata: {"error":{"message":')
    assert f'"code":"{code}"'.encode() in reply.body
    assert reply.body.endswith(b"}\n\n")
    assert b"secret" not in reply.body


def test_another_answer_that_breaks_is_cut_off_not_completed() -> None:
    first_body: Message = {"type": "http.response.body", "body": b"[1,", "more_body": True}
    with pytest.raises(ConnectionError, match="middle of its answer"):
        ask(Guard(breaks(RuntimeError("x"), head(b"application/json"), first_body)))


def test_a_request_is_logged_without_its_body(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ask(Guard(app), "POST", "/v1/x", JSON, (b'{"prompt": "canary"}',))
    assert "POST /v1/x 200" in caplog.text
    assert "canary" not in caplog.text


def test_a_websocket_is_closed_unheard() -> None:
    messages: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(Guard(app)({"type": "websocket"}, receive, send))
    assert messages == [{"type": "websocket.close", "code": 1008}]
