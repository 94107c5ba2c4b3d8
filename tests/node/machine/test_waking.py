"""Sleep is noticed by a clock, and a machine that is only busy does not wake."""

import asyncio
import sys
import time

import pytest
from loops import until

from exo_node.node.machine import awake
from exo_node.node.machine.awake import WakeWatch, seconds


class Clock:
    """A second further at each look, and by what `happens` before it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.looks = 0
        self.happens: dict[int, float] = {}

    def __call__(self) -> float:
        self.looks += 1
        self.now_s += 1 + self.happens.get(self.looks, 0.0)
        return self.now_s


@pytest.mark.parametrize(
    ("pauses", "slept"),
    [
        ({5: 3600.0}, [3601.0]),
        ({5: 5.0}, []),  # busy
        ({5: 60.0, 6: 90.0}, [61.0, 91.0]),  # it went to sleep again while others were told
    ],
)
async def test_a_long_pause_is_a_sleep(
    monkeypatch: pytest.MonkeyPatch, pauses: dict[int, float], slept: list[float]
) -> None:
    monkeypatch.setattr(awake, "_LOOK_EVERY_S", 0)
    clock, wakings = Clock(), list[float]()

    async def woke(seconds: float) -> None:
        wakings.append(seconds)

    clock.happens.update(pauses)
    task = asyncio.create_task(WakeWatch(woke, clock).run())
    await until(lambda: clock.looks > 12)
    _ = task.cancel()
    assert wakings == slept


def test_a_clock_that_somebody_sets_is_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    questions = list[int]()

    def clock_gettime(clock: int) -> float:
        questions.append(clock)
        return 7.0

    monkeypatch.setattr(time, "clock_gettime", clock_gettime)
    assert seconds() == 7.0
    assert questions == [time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC]
