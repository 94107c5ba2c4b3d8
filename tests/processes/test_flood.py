"""Real nodes under a flood of connections, at the few files that macOS gives a process."""

import resource
import socket
import sys
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Literal

import pytest
from nodes import COMMAND, copy_key, eventually, grpc_address, node, sees, struck

WITHIN_S = 180.0
"""Long, so that a loaded machine fails no test."""
_LIMITED = (
    "import os, resource, sys; "
    "resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard})); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)

pytestmark = pytest.mark.timeout(600)


def _limited(hard: int) -> tuple[str, ...]:
    return (sys.executable, "-c", _LIMITED.format(hard=hard), COMMAND)


def test_idle_connections_stop_neither_the_api_nor_heartbeats(tmp_path: Path) -> None:
    """One node cannot raise its soft limit of open files, the other one can."""
    ours = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if ours != resource.RLIM_INFINITY and ours < 4096:
        pytest.skip("the hard limit is too low here")
    numbers = count()
    # A machine that stalls for a second causes suspicions without a flood too.
    assert struck(lambda: flooded(tmp_path / str(next(numbers))))


def flooded(root: Path) -> Literal[True] | None:
    """None if one of the nodes was suspected."""
    flags = ("--no-mdns",)
    with (
        node(root / "a", *flags, command=_limited(256)) as one,
        node(
            copy_key(one, root / "b"),
            *flags,
            "--peer",
            grpc_address(one),
            command=_limited(4096),
        ) as two,
        ExitStack() as stack,
    ):
        nodes = (one, two)
        eventually(lambda: all(sees(each, 2) for each in nodes), WITHIN_S)
        until = time.monotonic() + 6.0
        while time.monotonic() < until:
            for _ in range(70):
                for each in nodes:
                    idle = stack.enter_context(socket.socket())
                    idle.setblocking(False)
                    _ = idle.connect_ex(("127.0.0.1", each.port))
            time.sleep(1.2)
            replies = [each.call("GET", "/v1/cluster") for each in nodes]
            assert [reply.status for reply in replies] == [200, 200]
        logs = [each.log.read_text() for each in nodes]
        assert all("Traceback" not in log and len(log) < 20_000 for log in logs)
        return None if any("suspect" in log for log in logs) else True
