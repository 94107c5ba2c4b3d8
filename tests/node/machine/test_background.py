"""Loops that end by an error: they begin again, the user hears of it once, and it passes."""

import asyncio
import logging
from dataclasses import replace

import pytest
from loops import until

from exo_node.node.machine.events import EventLog
from exo_node.node.machine.log import HumanFormatter, request_scope
from exo_node.node.machine.tasks import Loops
from exo_node.node.machine.timing import LOCAL

TIMING = replace(LOCAL, keep_alive_s=0.04)


class Work:
    """Ends by an error while it is broken."""

    def __init__(self) -> None:
        self.broken = True
        self.turns = 0
        self.begun = 0

    async def run(self) -> None:
        self.begun += 1
        while True:
            self.turns += 1
            if self.broken:
                raise RuntimeError(f"turn {self.turns}")
            await asyncio.sleep(0.01)


def kinds(events: EventLog) -> list[str]:
    return [event.kind for event in events.entries()]


async def ended(task: "asyncio.Task[None]") -> None:
    _ = task.cancel()
    _ = await asyncio.gather(task, return_exceptions=True)


async def test_a_loop_begins_again_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    events, work = EventLog(), Work()
    loops = Loops(events, TIMING)
    with caplog.at_level(logging.ERROR):
        task = loops.keep(work.run, "the work")
        await until(lambda: work.begun >= 3)
    assert "the work ended by an error" in loops.trouble()
    assert kinds(events) == ["loop_ended"]
    assert len([r for r in caplog.records if r.exc_info]) == 1  # though each text differs
    assert "Traceback" not in events.entries()[0].text
    work.broken = False
    await until(lambda: not loops.trouble())
    assert kinds(events) == ["loop_ended", "loop_recovered"]
    assert work.turns > 3
    await ended(task)


async def test_work_that_returns_is_done() -> None:
    loops = Loops(EventLog(), LOCAL)
    await asyncio.wait_for(loops.keep(lambda: asyncio.sleep(0), "it"), 60)
    assert loops.trouble() == ""


async def test_cancelling_ends_the_work_and_the_trouble() -> None:
    closed: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    broken = Work()
    loops = Loops(EventLog(), TIMING)
    tasks = [loops.keep(work, "one"), loops.keep(broken.run, "other")]
    await until(loops.trouble)
    for task in tasks:
        await ended(task)
    assert closed == [True]
    assert loops.trouble() == ""
    assert all(task.cancelled() for task in tasks)


async def test_a_loop_carries_no_request_of_whoever_began_it() -> None:
    lines: list[str] = []

    async def work() -> None:
        line = logging.LogRecord("", logging.INFO, "", 0, "", None, None)
        lines.append(HumanFormatter().format(line))

    with request_scope("req_1"):
        await Loops(EventLog(), LOCAL).keep(work, "it")
        await work()
    assert ["request=req_1" in line for line in lines] == [False, True]
