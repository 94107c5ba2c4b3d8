"""CPU time that a request may take in a helper process once its client has left."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text import helper_process
from exo_node.shard.text.helper import Packet
from exo_node.shard.text.helper_process import HelperLimits, HelperProcess

CPU_S_PER_LOOK = 0.125


class BusyUsage:
    """The system's figures of a process that computes without end."""

    def __init__(self, pid: int) -> None:
        self.cpu_s = 0.0

    def cpu_times(self) -> SimpleNamespace:
        assert self.cpu_s < 100, "the process is never ended"
        self.cpu_s += CPU_S_PER_LOOK
        return SimpleNamespace(user=self.cpu_s, system=0.0)

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=0)


class SilentProcess:
    """A process that never answers."""

    pid = 1
    returncode: int | None = None

    def __init__(self) -> None:
        self.stdin = SimpleNamespace(write=len)
        self.stdout = SimpleNamespace(readexactly=self._nothing)
        self.stderr = SimpleNamespace(read=self._end)

    async def _nothing(self, _: int) -> bytes:
        return await asyncio.Future()

    async def _end(self) -> bytes:
        return b""

    def kill(self) -> None:
        self.returncode = -9

    async def wait(self) -> int | None:
        return self.returncode


@pytest.mark.parametrize(
    ("has_left", "grace_s", "taken_s"), [(True, 0.5, 0.5), (True, 60.0, 2.0), (False, 0.5, 2.0)]
)
def test_a_request_whose_client_has_left_may_take_a_little_more_and_never_over_the_limit(
    has_left: bool, grace_s: float, taken_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_process.psutil, "Process", BusyUsage)
    limits = HelperLimits(cpu_s=2.0, wall_s=600.0, grace_s=grace_s, look_s=0.0)

    async def run() -> tuple[Any, float]:
        process: Any = SilentProcess()
        disconnected = asyncio.Event()
        if has_left:
            disconnected.set()
        helper = HelperProcess(process, limits)
        usage: Any = helper._usage  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(InvalidRequest):
            _ = await helper.ask(Packet("encode", {}), disconnected)
        return process.returncode, usage.cpu_s

    returncode, cpu_s = asyncio.run(run())
    assert returncode == -9
    assert taken_s < cpu_s <= taken_s + 4 * CPU_S_PER_LOOK
