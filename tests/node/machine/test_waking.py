"""Sleep is noticed by the clocks, and a machine that is only busy does not wake."""

import asyncio
from collections.abc import Callable

import pytest

from exo_node.node.machine import waking
from exo_node.node.machine.waking import WakeWatch


class Clocks:
    """Both clocks, a second further at each look, and what the next look finds."""

    def __init__(self) -> None:
        self.monotonic_s = self.wall_s = 1000.0
        self.looks = 0
        self.happens: dict[int, tuple[float, float]] = {}
        """Seconds that pass before a look besides, on each clock."""

    def monotonic(self) -> float:
        self.looks += 1
        asleep, wall = self.happens.get(self.looks, (0.0, 0.0))
        self.monotonic_s += 1 + asleep
        self.wall_s += 1 + wall
        return self.monotonic_s

    def wall(self) -> float:
        return self.wall_s


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("monotonic", "wall", "slept"),
    [
        (0.0, 3600.0, [3601.0]),  # asleep: the monotonic clock stands still
        (60.0, 60.0, [61.0]),  # stopped: both go on
        (5.0, 5.0, []),  # busy
        (0.0, -3600.0, []),  # the clock was set back
        (60.0, -3600.0, [61.0]),
    ],
)
async def test_a_long_pause_is_a_sleep(
    monkeypatch: pytest.MonkeyPatch, monotonic: float, wall: float, slept: list[float]
) -> None:
    monkeypatch.setattr(waking, "_LOOK_EVERY_S", 0)
    clocks, found = Clocks(), list[float]()

    async def woke(seconds: float) -> None:
        found.append(seconds)

    clocks.happens[5] = (monotonic, wall)
    task = asyncio.create_task(WakeWatch(woke, clocks.monotonic, clocks.wall).run())
    await until(lambda: clocks.looks > 12)
    _ = task.cancel()
    assert found == slept
