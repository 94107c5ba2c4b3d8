"""A hub on loopback whose lists never end, or drip."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from hub import COMMIT, REPOSITORY, Server

FILE = {"type": "file", "path": "config.json", "size": 2, "oid": "0" * 40}


class Endless(BaseHTTPRequestHandler):
    """`way`: how a list is sent. The answer about the commit is honest."""

    protocol_version = "HTTP/1.1"
    way = ""
    began: threading.Event
    over: threading.Event

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        if "/tree/" not in self.path and "search=" not in self.path:
            self._send(json.dumps({"id": REPOSITORY, "sha": COMMIT}).encode())
            return
        self.began.set()
        if self.way == "dripping head":
            self._drip(b"HTTP/1.1 200 OK\r\nX-Long: ")
        elif self.way in ("empty pages", "full pages"):
            page = [] if self.way == "empty pages" else [{**FILE, "path": "x.py"}]
            self._send(json.dumps(page).encode(), Link=f'<{self.path}&cursor=x>; rel="next"')
        else:
            self.send_response(404 if "error" in self.way else 200)
            self.end_headers()
            self._drip(b"[") if "dripping" in self.way else self._flood()

    def _send(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {
            "Connection": "close",
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _flood(self) -> None:
        piece = b"[" + (json.dumps(FILE).encode() + b", ") * 1000
        while not self.over.is_set():
            self.wfile.write(piece)
            piece = piece.lstrip(b"[")

    def _drip(self, begin: bytes) -> None:
        self.wfile.write(begin)
        while not self.over.wait(0.02):
            self.wfile.write(b" ")


@contextmanager
def endless(way: str) -> Generator[tuple[str, threading.Event]]:
    """The address of the server, and an event once it sends without end."""
    began, over = threading.Event(), threading.Event()
    fields = {"way": way, "began": began, "over": over}
    server = Server(("127.0.0.1", 0), type("Bound", (Endless,), fields))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", began
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
