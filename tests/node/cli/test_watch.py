"""`exo-node status --watch` against a stub of the node."""

import os
import pty
import select
import signal
import subprocess
import time
from typing import Any

import pytest
from api_stub import COMMAND, Stub, as_json, environment, exo_node
from interrupts import ending_on_interrupt

_CLUSTER: dict[str, Any] = {
    "self": "n1",
    "head": "n1",
    "nodes": [{"id": "n1", "name": "alpha", "status": "alive", "self": True, "head": True}],
}
_PLACEMENT = {
    "model": "some/model",
    "status": "ready",
    "stages": [{"node": "n1", "layers": [0, 40]}],
}


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.replies = {
        "/v1/cluster": as_json(_CLUSTER),
        "/v1/placements": as_json({"data": [_PLACEMENT]}),
        "/v1/mtp/stats": as_json({"models": {}}),
        "/v1/join/requests": as_json({"data": []}),
    }
    return stub


def test_without_a_terminal_it_is_one_look(stub: Stub) -> None:
    result = exo_node("status", "--watch", "--port", str(stub.port))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("some/model") == 1 and "\x1b" not in result.stdout


def _read_until(screen: int, text: bytes) -> bytes:
    output, until = b"", time.monotonic() + 60
    while text not in output and time.monotonic() < until:
        if select.select([screen], [], [], 1)[0]:
            output += os.read(screen, 65536)
    assert text in output, output
    return output


def test_on_a_terminal_it_continues_without_its_node_and_ends_with_ctrl_c(stub: Stub) -> None:
    screen, terminal = pty.openpty()
    size = {"COLUMNS": "120", "LINES": "30", "TERM": "xterm"}
    with ending_on_interrupt():
        process = subprocess.Popen(
            [*COMMAND, "status", "--watch", "--port", str(stub.port)],
            stdin=terminal,
            stdout=terminal,
            stderr=subprocess.PIPE,
            env=environment(**size),
        )
    os.close(terminal)
    try:
        _ = _read_until(screen, b"some/model")
        replies, stub.replies = stub.replies, {}
        _ = _read_until(screen, b"TROUBLE")
        other = {**_PLACEMENT, "model": "another/model"}
        stub.replies = {**replies, "/v1/placements": as_json({"data": [other]})}
        _ = _read_until(screen, b"another/model")
        process.send_signal(signal.SIGINT)
        assert _read_until(screen, b"\x1b[?1049l")  # the screen is as it was before
        _, notes = process.communicate(timeout=60)
    finally:
        process.kill()
        _ = process.wait()
        os.close(screen)
    assert (process.returncode, notes) == (0, b"")
