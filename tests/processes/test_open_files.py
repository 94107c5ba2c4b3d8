"""The limit of open files: how processes raise it, and how connections stay below it."""

import asyncio
import logging
import resource
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from fakes import hangs
from http_node import raw_chat, serving_fakes

from exo_node.node.api.http.connection_limits import ConnectionLimits
from exo_node.node.chat.requests import Started
from exo_node.node.machine.open_files import RESERVED, connections_within, quiet_accepts

_LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
{program}
"""


def run_limited(program: str, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    text = _LIMITED.format(soft=soft, hard=hard, program=program)
    command = (sys.executable, "-P", "-c", text)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


STARTS = {
    "runner": "import exo_node.shard.runner.main; print('up')",
    "convert": "import exo_node.shard.tools.convert.main; print('up')",
    "import": "import exo_node.shard.tools.convert.import_gguf; print('up')",
    "bench": """
from types import SimpleNamespace
from exo_node.placement.errors import InvalidCheckpoint
from exo_node.proto.peer_pb2 import StageSpec
from exo_node_bench.mtp.main import run_bench
try:
    run_bench(SimpleNamespace(prompts=None), StageSpec(path="/nowhere"))
except InvalidCheckpoint:
    print("up")
""",
    "verify": """
from exo_node.placement.errors import InvalidCheckpoint
from exo_node.proto.peer_pb2 import StageSpec
from exo_node.shard.tools.verify.main import run_verify
try:
    run_verify(None, StageSpec(path="/nowhere"), lambda _: None)
except InvalidCheckpoint:
    print("up")
""",
}
"""Programs that start each kind of child that loads models, up to its missing checkpoint."""


@pytest.mark.parametrize("child", STARTS)
def test_a_child_that_loads_a_model_starts_below_mlx_lms_limit(child: str) -> None:
    process = run_limited(STARTS[child], 256, 1024)
    assert (process.returncode, process.stdout) == (0, "up\n"), process.stderr


@pytest.mark.parametrize(
    "child", ["runner.main", "tools.convert.main", "tools.convert.import_gguf"]
)
def test_a_child_keeps_a_limit_that_is_higher_than_mlx_lms(child: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 5000:
        pytest.skip("the hard limit is too low here")
    program = f"import exo_node.shard.{child}\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert run_limited(program, 5000, 5000).stdout.split() == ["5000", "5000"]


@pytest.mark.parametrize(("soft", "hard", "expected"), [(256, 1024, 1024), (300, 15_000, 15_000)])
def test_the_soft_limit_is_raised_towards_the_hard_one(soft: int, hard: int, expected: int) -> None:
    ours = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if ours != resource.RLIM_INFINITY and ours < hard:
        pytest.skip("the hard limit is too low here")
    program = (
        "from exo_node.node.machine.open_files import raise_limit, soft_limit\n"
        "print(raise_limit(), soft_limit())"
    )
    assert run_limited(program, soft, hard).stdout.split() == [str(expected)] * 2


def test_a_limit_that_stays_too_low_is_reported_with_the_remedy() -> None:
    program = "import logging; logging.basicConfig()\n"
    program += "from exo_node.node.machine.open_files import raise_limit; raise_limit()"
    assert "ulimit -Hn" in run_limited(program, 128, 200).stderr
    assert run_limited(program, 128, 4096).stderr == ""


@pytest.mark.parametrize("limit", [64, 128, 256, 1024, 65536, resource.RLIM_INFINITY])
def test_http_never_takes_all_files(limit: int) -> None:
    allowed = connections_within(limit, 256)
    assert 1 <= allowed <= 256
    if limit != resource.RLIM_INFINITY:
        assert allowed <= max(limit - RESERVED, limit // 8)


def test_surplus_connections_are_closed_at_once_and_hold_no_files() -> None:
    limits = ConnectionLimits(connections=2, spare_s=60.0, refusals=3, refusal_s=60.0)
    with serving_fakes(limits=limits) as node, ExitStack() as stack:
        for _ in range(2):
            _ = stack.enter_context(node.raw(b"GET "))
        refusals = resets = 0
        for _ in range(20):
            surplus = stack.enter_context(node.raw(b""))
            surplus.settimeout(60)
            try:
                answer = surplus.recv(4096)
            except ConnectionResetError:
                answer = b""
            refusals += answer.startswith(b"HTTP/1.1 503 ")
            resets += answer == b""
        assert (refusals, resets) == (3, 17)


def test_a_connection_that_idles_gives_way_to_one_that_asks() -> None:
    for spare_s, status in ((60.0, 503), (0.2, 200)):
        limits = ConnectionLimits(connections=8, spare_s=spare_s, head_s=60.0)
        with serving_fakes(limits=limits) as node, ExitStack() as stack:
            for _ in range(8):
                _ = stack.enter_context(node.raw(b""))
            time.sleep(0.3)
            for _ in range(8):
                assert node.ask("GET", "/health/live").status == status


def test_an_answer_in_progress_is_never_closed_for_another_client() -> None:
    limits = ConnectionLimits(connections=1, spare_s=0.0)
    with serving_fakes(limits=limits, keep_alive_s=0.05) as node:
        node.chat.scripts["slow"] = hangs(Started((1,)))
        request = raw_chat(model="slow", stream=True).replace(b"{port}", str(node.port).encode())
        with node.raw(request) as connection:
            assert node.chat.began.wait(60)
            assert node.ask("GET", "/health/live").status == 503
            received = b""
            while received.count(b'"delta":{}') < 4:
                received += (piece := connection.recv(4096))
                assert piece


def test_a_closed_connections_place_is_free_again() -> None:
    with serving_fakes(limits=ConnectionLimits(connections=1, spare_s=60.0)) as node:
        with node.raw(b"GET "):
            assert node.ask("GET", "/health/live").status == 503
        statuses = [node.ask("GET", "/health/live").status for _ in range(20)]
        assert statuses[-1] == 200


def test_failed_accepts_are_logged_at_intervals_and_other_faults_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    handle = quiet_accepts(lambda: now[0])
    loop = asyncio.new_event_loop()
    context = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(24, "Too many open files"),
    }
    with caplog.at_level(logging.ERROR):
        for step in range(1000):
            now[0] = step / 100
            handle(loop, context)
        assert len(caplog.records) == 1
        now[0] = 11.0
        handle(loop, context)
        assert "999 such lines" in caplog.records[-1].getMessage()
        handle(loop, {"message": "something else"})
        assert caplog.records[-1].getMessage() == "something else"
        assert len(caplog.records) == 3
    loop.close()
