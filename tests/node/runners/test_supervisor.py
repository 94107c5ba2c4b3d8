"""A runner process ends with its load."""

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from exo_node.node.machine.timing import LAN
from exo_node.node.runners.supervisor import RunnerHost, Supervisor
from exo_node.node.trust.certificates import Credentials
from exo_node.proto import peer_pb2 as pb

HANGS = "import signal; signal.pause()"
"""Python code that hangs, in place of the runner's start."""


async def test_a_cancelled_load_ends_its_runner(tmp_path: Path) -> None:
    _ = (tmp_path / "sitecustomize.py").write_text(HANGS)
    process_started = asyncio.Event()

    def credentials() -> Credentials:
        process_started.set()
        return Credentials(b"", b"", b"")

    host = RunnerHost(
        node="a" * 20,
        host="127.0.0.1",
        credentials=credentials,
        environment={"PYTHONPATH": str(tmp_path)},
        timing=replace(LAN, reply_s=0.0),
    )
    supervisor = Supervisor(host, lambda _, why: None)
    spec = pb.StageSpec(placement="p", path=str(tmp_path))
    load = asyncio.ensure_future(supervisor.load(spec, lambda _: None))
    try:
        async with asyncio.timeout(60):
            _ = await process_started.wait()
        [state] = supervisor.states()
        assert psutil.pid_exists(state.pid)
        _ = load.cancel()
        with pytest.raises(asyncio.CancelledError):
            _ = await load
        assert supervisor.states() == []
        assert not psutil.pid_exists(state.pid)
    finally:
        await supervisor.close()
