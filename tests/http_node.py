"""A real HTTP server over fakes, in a thread of its own, and a plain client for it."""

import asyncio
import json
import socket
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from typing import Any

from fake_files import FakeFiles
from fakes import FakeChat, FakeOperations
from starlette.types import ASGIApp

from exo_node.node.api.http.connection_limits import ConnectionLimits
from exo_node.node.api.http.guard import Access
from exo_node.node.api.server import HttpServer, Services, StaticFiles, build_app
from exo_node.node.machine.timing import LOCAL

PATIENCE_S = 60.0
"""How long a test waits for what should happen at once."""
ASK: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": ASK, "max_tokens": 9},
    "/api/chat": {"messages": ASK},
    "/api/generate": {"prompt": "hi"},
}
"""The least request on each route that answers."""


def no_files(_: str) -> None:
    return None


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


@dataclass
class Node:
    """The fakes and the port that a test can reach."""

    port: int
    chat: FakeChat = field(default_factory=FakeChat)
    operations: FakeOperations = field(default_factory=FakeOperations)
    files: FakeFiles = field(default_factory=FakeFiles)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Bytes are sent as they are, other bodies as JSON; None sends none."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        own_headers = {"Content-Type": "application/json", **(headers or {})}
        try:
            connection.request(method, path, None if body is None else content, own_headers)
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, names, answer.read())
        finally:
            connection.close()

    def chat_reply(self, **fields: object) -> Reply:
        return self.ask("POST", "/v1/chat/completions", chat_body(**fields))

    def raw(self, request: bytes) -> socket.socket:
        """A connection that these bytes were sent on."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        connection.sendall(request)
        return connection


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}


def raw_chat(**fields: object) -> bytes:
    """The bytes of a chat request, for tests that care how the connection ends."""
    body = json.dumps(chat_body(**fields)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def serving(
    app: ASGIApp, *, limits: ConnectionLimits | None = None, grace_s: int = 0
) -> Generator[int]:
    """The port of a server that runs `app` in another thread."""
    ports: list[int] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        server = HttpServer(app, limits=limits, grace_s=grace_s)
        try:
            await server.start("127.0.0.1", 0)
            ports.append(server.port)
        finally:
            up.set()
        await stop.wait()
        await server.close()

    def main() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert up.wait(PATIENCE_S)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextmanager
def serving_fakes(
    *,
    limits: ConnectionLimits | None = None,
    grace_s: int = 0,
    static: StaticFiles = no_files,
    keep_alive_s: float = LOCAL.keep_alive_s,
    **options: Any,
) -> Generator[Node]:
    """The whole app over fakes; `options` are those of `build_app`, `Services` and `Access`."""
    node = Node(0)
    timing = replace(LOCAL, keep_alive_s=keep_alive_s)
    names = ("events", "profiles", "files", "responses")
    services: dict[str, Any] = {"files": node.files}
    services |= {name: options.pop(name) for name in names if name in options}
    secrets = ("api_key", "token", "tokens")
    access = Access(**{name: options.pop(name) for name in secrets if name in options})
    app = build_app(
        Services(node.chat, node.operations, **services), static, timing, access, **options
    )
    with serving(app, limits=limits, grace_s=grace_s) as port:
        node.port = port
        yield node
