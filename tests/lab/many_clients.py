"""Many concurrent clients of one node, some of which never read their answers."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 600.0
"""The limit of all requests together, on a slow machine."""
_SMALL_BUFFER = 4096
"""The receive buffer, in bytes, of a client that never reads."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one client. `fault`: the connection broke, or the answer is incomplete."""

    status: int = 0
    seconds: float = 0.0
    tokens: int = 0
    retry_after: str | None = None
    fault: str = ""


def ask(port: int, path: str, body: dict[str, Any], headers: dict[str, str]) -> Outcome:
    """Sends one request and reads its answer to the end."""
    started_at = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        took = time.monotonic() - started_at
        again = answer.getheader("Retry-After")
        if answer.status != 200:
            return Outcome(answer.status, took, retry_after=again)
        whole = not body.get("stream") or text.rstrip().endswith("data: [DONE]")
        return Outcome(200, took, text.count("\n"), again, "" if whole else "it broke off")
    except (OSError, http.client.HTTPException) as fault:
        return Outcome(
            seconds=time.monotonic() - started_at, fault=f"{type(fault).__name__}: {fault}"
        )
    finally:
        connection.close()


def at_once(clients: Sequence[Callable[[], Outcome]]) -> list[Outcome]:
    """Runs all clients concurrently, each in a thread."""
    outcomes: list[Outcome | None] = [None] * len(clients)
    ready = threading.Barrier(len(clients))

    def run(number: int) -> None:
        _ = ready.wait()
        outcomes[number] = clients[number]()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [each or Outcome(fault="no answer") for each in outcomes]


def never_reads(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection that requested a stream and reads nothing of it."""
    content = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", port))
    connection.sendall(head.encode() + content)
    return connection


def wrong(outcomes: Sequence[Outcome]) -> list[str]:
    """The outcomes other than a whole answer or a 429 with Retry-After."""
    problems = [each.fault for each in outcomes if each.fault]
    problems += [f"status {o.status}" for o in outcomes if o.status not in (0, 200, 429)]
    problems += [
        "429 without Retry-After" for o in outcomes if o.status == 429 and not o.retry_after
    ]
    return problems
