"""A stub of the node's HTTP API, and the CLI as a process to point at it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typer.testing import CliRunner, Result

from exo_node.node.cli.main import app

COMMAND = [sys.executable, "-c", "from exo_node.node.cli.main import main; main()"]
DEMO = {"id": "demo", "loaded": False, "context_length": 4096, "native_mtp": None}
QWEN = {
    "id": "Qwen/Qwen3.6-27B",
    "loaded": True,
    "context_length": 262144,
    "native_mtp": {"default_k": 3, "max_k": 5, "weights": "found", "enabled": True, "reason": ""},
}
Reply = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Stub:
    """A node's HTTP API, one canned reply a path."""

    port: int = 0
    replies: dict[str, Reply] = field(default_factory=dict[str, Reply])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    deleted: list[str] = field(default_factory=list[str])
    keys: list[str | None] = field(default_factory=list[str | None])


def as_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        handler.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            handler.send_header(name, text)
        handler.end_headers()
        handler.wfile.write(content)

    return reply


def as_events(*events: object, then: Callable[[], object] = lambda: None) -> Reply:
    """Objects become data, strings go out as they are; `then` runs before the connection ends."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for event in events:
            text = event if isinstance(event, str) else f"data: {json.dumps(event)}"
            handler.wfile.write(f"{text}\n\n".encode())
        handler.wfile.flush()
        then()

    return reply


@contextmanager
def serve_stub() -> Generator[Stub]:
    """A stub on a port of its own, closed with its last reply."""
    served = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._serve()

        def do_DELETE(self) -> None:
            served.deleted.append(self.path)
            self._serve()

        def do_POST(self) -> None:
            served.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._serve()

        def _serve(self) -> None:
            served.keys.append(self.headers["Authorization"])
            served.replies.get(self.path, as_json(b"no", 404))(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def environment(**extra: str) -> dict[str, str]:
    """This environment without any setting of a node but `extra` and an empty data folder."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("EXO_")}
    return {**own, "EXO_DATA_DIR": "/no/such/exo-node", **extra}


def in_process(*arguments: str, stdin: str = "", **extra: str) -> Result:
    """Runs a command in this process, in the same environment as `exo_node`."""
    variables = environment(**extra)
    removed = dict.fromkeys(os.environ.keys() - variables.keys())
    return CliRunner().invoke(app, arguments, input=stdin, env={**variables, **removed})


def exo_node(*arguments: str, stdin: str = "", **extra: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(**extra),
        timeout=150,
        check=False,
    )
