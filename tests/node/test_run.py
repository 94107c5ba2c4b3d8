"""The signals that end a node: the first lets answers end, the second does not."""

import asyncio
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from exo_node.node import run
from exo_node.node.machine.data_dir_lock import DataDirLock
from exo_node.node.machine.hardware import Hardware
from exo_node.node.machine.settings import load_settings

ABSENT: Any = None
STEPS = 20
"""Turns of the event loop that the running answers take, if they may end."""


class Node:
    """A node that gets a signal as soon as it serves, and `signals` in all."""

    local = SimpleNamespace(version="1", http_port=1, grpc_port=2)

    def __init__(self, signals: int) -> None:
        self._more = signals - 1
        self.outcome = asyncio.get_running_loop().create_future()
        self.story: list[str] = []

    async def start(self) -> None:
        signal.raise_signal(signal.SIGTERM)

    async def drain(self) -> None:
        self.story.append("drains")
        for _ in range(self._more):
            signal.raise_signal(signal.SIGTERM)
        try:
            for _ in range(STEPS):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.story.append("cut short")
            raise
        self.story.append("drained")

    async def close(self) -> None:
        self.story.append("closed")


class Presence:
    """A data folder that nobody looks into."""

    def announce(self, *_: object, **__: object) -> None: ...


@pytest.mark.parametrize(("signals", "end"), [(1, "drained"), (2, "cut short")])
def test_one_signal_waits_for_running_answers_and_a_second_one_does_not(
    signals: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Node] = []

    def make_node(_: object, __: Hardware, ___: Sequence[str]) -> Node:
        started.append(Node(signals))
        return started[-1]

    monkeypatch.setattr(run, "Node", make_node)
    presence: DataDirLock = Presence()  # pyright: ignore[reportAssignmentType]
    assert asyncio.run(run._serve(load_settings({}, {}), ABSENT, presence)) == 0  # pyright: ignore[reportPrivateUsage]
    [node] = started
    assert node.story == ["drains", end, "closed"]
