"""Real nodes under a flood of connections, at the few files that macOS gives a process."""

import resource
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from nodes import COMMAND, eventually, node
from test_cluster import grpc_address, join, sees

_LIMITED = (
    "import os, resource, sys; "
    "resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard})); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def _limited(hard: int) -> tuple[str, ...]:
    return (sys.executable, "-c", _LIMITED.format(hard=hard), COMMAND)


@pytest.mark.parametrize("hard", [256, 4096])
def test_idle_connections_stop_neither_the_api_nor_heartbeats(tmp_path: Path, hard: int) -> None:
    ours = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if ours != resource.RLIM_INFINITY and ours < hard:
        pytest.skip("the hard limit is too low here")
    flags = ("--no-mdns",)
    with (
        node(tmp_path / "a", *flags, command=_limited(hard)) as one,
        node(join(one, tmp_path / "b"), *flags, "--peer", grpc_address(one)) as two,
        ExitStack() as stack,
    ):
        eventually(lambda: sees(one, 2) and sees(two, 2), 15)
        until = time.monotonic() + 6.0
        while time.monotonic() < until:
            for _ in range(100):
                idle = stack.enter_context(socket.socket())
                idle.setblocking(False)
                _ = idle.connect_ex(("127.0.0.1", one.port))
            time.sleep(1.2)
            reply = one.call("GET", "/v1/cluster")
            assert reply.status == 200, reply
            assert {each["status"] for each in reply.body["nodes"]} == {"alive"}
        for each in (one, two):
            log = each.log.read_text()
            assert "Traceback" not in log and "suspect" not in log
            assert len(log) < 20_000
