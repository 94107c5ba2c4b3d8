"""A server on loopback with the part of the Hugging Face hub's API that its client uses."""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from exo_node.node.store.identifiers import Commit, RepositoryName

REPOSITORY = RepositoryName("owner/tiny")
COMMIT = Commit("c0ffee" + "0" * 34)
MODEL = "model.safetensors"
_PIECE = 64 << 10

Request = tuple[str, str, str | None]
"""Method, file and Range of one request for a file."""


def git_hash(data: bytes) -> str:
    """The SHA-1 of what Git stores for a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class FakeHub:
    """One repository, and the faults of its server."""

    files: dict[str, bytes]
    requests: list[Request] = field(default_factory=list[Request])
    cut_after: list[int] = field(default_factory=list[int])
    """How many bytes each of the next answers for weights brings before its connection breaks."""
    silent_after: list[int] = field(default_factory=list[int])
    """How many bytes each of the next answers for weights brings before it is silent."""
    fell_silent: threading.Event = field(default_factory=threading.Event)
    unanswered: str = ""
    """The start of the path whose next request is answered only once the server ends."""
    hung_up: threading.Event = field(default_factory=threading.Event)
    """Set when the server ends: a silent answer ends then, and one that has not begun begins."""
    down: list[int] = field(default_factory=list[int])
    """The statuses of the next answers for weights."""
    refuse: tuple[int, str] | None = None
    token: str = ""
    """If set, requests without it are refused as for a gated repository."""
    slow_s: float = 0.0
    """Before each piece of weights, so that a client can be ended half-way."""
    lie: bool = False
    """Weights arrive with one byte changed."""
    ignore_ranges: bool = False
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    """False sizes in the listing, by file."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """False SHA-256 hashes in the listing, by file."""
    searched: list[str] = field(default_factory=list[str])
    """The texts that were searched for."""
    others: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    """Files of further repositories, which a search finds too."""
    lies: dict[str, Callable[[Any], object]] = field(
        default_factory=dict[str, Callable[[Any], object]]
    )
    """By the end of an API path: what is sent, in bytes or as JSON, for an honest answer."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """False headers of answers for files."""
    status: int = 200
    """Of answers for files: 302 leads to the file, with honest headers; 404 does not."""
    more: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Bytes after the end of a file, which the answer's length includes."""
    url: str = ""

    def fetched(self) -> set[str]:
        """The files whose content was requested."""
        return {path for method, path, _ in self.requests if method == "GET" and "/" not in path}

    def ranges(self, file: str) -> list[str | None]:
        return [r for method, path, r in self.requests if (method, path) == ("GET", file)]

    def files_of(self, repository: str) -> dict[str, bytes]:
        return self.others.get(repository, self.files)

    def listing(self, repository: str = REPOSITORY) -> list[dict[str, object]]:
        return [self._entry(name, data) for name, data in self.files_of(repository).items()]

    def found(self, text: str) -> list[dict[str, object]]:
        """The repositories with `text` in their names."""
        self.searched.append(text)
        facts: dict[str, object] = {"sha": COMMIT, "downloads": 1234, "likes": 5, "gated": False}
        facts["lastModified"] = "2026-11-01T10:00:00.000Z"
        names = [REPOSITORY, *self.others]
        return [{"id": name, **facts} for name in names if text.lower() in name.lower()]

    def _entry(self, name: str, data: bytes) -> dict[str, object]:
        size = self.sizes.get(name, len(data))
        entry: dict[str, object] = {"type": "file", "path": name, "size": size}
        entry["oid"] = git_hash(data)
        if name.endswith((".safetensors", ".bin")):
            digest = self.digests.get(name, hashlib.sha256(data).hexdigest())
            entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 130}
            entry["xetHash"] = digest  # the client would go to Xet storage for it
        return entry


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._delay()
        if not self._gated():
            self._resolve(send_body=False)

    def _delay(self) -> None:
        """Waits where the request is the one that is not answered."""
        if self.hub.unanswered and self.path.startswith(self.hub.unanswered):
            self.hub.unanswered = ""
            self.hub.fell_silent.set()
            _ = self.hub.hung_up.wait()

    def _gated(self) -> bool:
        """Whether the request was refused because it lacks the token."""
        if not self.hub.token or self.headers.get("Authorization") == f"Bearer {self.hub.token}":
            return False
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self._delay()
        if self._gated():
            return
        if not path.startswith("/api/"):
            self._resolve(send_body=True)
        elif path == "/api/models":
            texts = parse_qs(urlsplit(self.path).query)["search"]
            self._json(self.hub.found(texts[0]))
        elif "/tree/" in path:
            self._json(self.hub.listing("/".join(path.split("/")[3:5])))
        elif self.hub.refuse and self.hub.refuse[1] in ("RepoNotFound", "RevisionNotFound", ""):
            self._refuse()
        elif path.partition("/revision/")[2] not in ("", "main", COMMIT):
            self.send_response(404)
            self.send_header("X-Error-Code", "RevisionNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._json({"id": "/".join(path.split("/")[3:5]), "sha": COMMIT, "siblings": []})

    def _json(self, value: object) -> None:
        path = unquote(urlsplit(self.path).path)
        for end, lie in self.hub.lies.items():
            value = lie(value) if path.endswith(end) else value
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self) -> None:
        assert self.hub.refuse
        status, code = self.hub.refuse
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _lead_away(self) -> None:
        self.send_response(self.hub.status)
        for name, value in self.hub.headers.items():
            self.send_header(name, value)
        if self.hub.status == 302:
            self.send_header("Location", f"{self.path}?away")
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _resolve(self, *, send_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        repository, _, rest = path.removeprefix("/").partition("/resolve/")
        commit = COMMIT if rest.startswith(COMMIT) else rest.rpartition("/")[0]
        name = rest.removeprefix(f"{commit}/")
        self.hub.requests.append((self.command, name, self.headers.get("Range")))
        if self.hub.refuse:
            self._refuse()
            return
        if self.hub.down and name == MODEL and send_body:
            self.send_response(self.hub.down.pop(0))
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"down")
            return
        data = self.hub.files_of(repository).get(name)
        if data is None:
            self.hub.refuse = (404, "EntryNotFound")
            self._refuse()
            return
        if self.hub.status != 200 and "away" not in self.path:
            self._lead_away()
            return
        data += self.hub.more.get(name, b"")
        start = int((self.headers.get("Range") or "bytes=0-").split("=")[1].rstrip("-"))
        start = 0 if self.hub.ignore_ranges else start
        is_blob = name.endswith(".safetensors")
        etag = hashlib.sha256(data).hexdigest() if is_blob else git_hash(data)
        self.send_response(206 if start else 200)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit.encode("ascii", "replace").decode()}
        if "away" not in self.path:
            headers |= self.hub.headers
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if not send_body:
            return
        end = len(data)
        if is_blob and self.hub.cut_after:
            end = start + self.hub.cut_after.pop(0)
            self.close_connection = True
        if is_blob and self.hub.lie:
            data = data[:-1] + bytes([data[-1] ^ 1])
        silent = is_blob and bool(self.hub.silent_after)
        end = start + self.hub.silent_after.pop(0) if silent else end
        for at in range(start, end, _PIECE):
            if is_blob and self.hub.slow_s:
                time.sleep(self.hub.slow_s)
            self.wfile.write(data[at : min(at + _PIECE, end)])
        if silent:
            self.hub.fell_silent.set()
            _ = self.hub.hung_up.wait()
            self.close_connection = True


class Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that hang up, as some tests do."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


@contextmanager
def serve(hub: FakeHub) -> Generator[str, None, None]:
    """Serves `hub` until the block ends; yields the endpoint."""
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub.url
    finally:
        hub.hung_up.set()
        server.shutdown()
        server.server_close()
        thread.join()
