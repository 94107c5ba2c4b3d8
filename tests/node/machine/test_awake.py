"""A machine stays awake while it works, by the system's own command.

The fake commands do what caffeinate(8) and systemd-inhibit(1) document: they hold the assertion as
long as they live, and end with an error where the system refuses.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from loops import until

from exo_node.node.machine import awake
from exo_node.node.machine.awake import Awake, KeepAwake, inhibitor

HOLDS = "echo $$ >>{held}; exec sleep 60"
ENDS_AT_ONCE = "echo $$ >>{held}"
LEAVES_A_CHILD = "sleep 60 & echo $! $$ >>{held}; exit 1"
STAYS = "trap '' TERM; echo $$ >>{held}; while :; do sleep 0.05; done"
REFUSES = "echo 'Failed to inhibit: Access denied' >&2; exit 1"


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """The file with the processes that hold an assertion, one a line."""
    return tmp_path / "held"


@pytest.fixture
def install(tmp_path: Path, held: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a command of that text in place of the system's."""
    monkeypatch.setattr(awake, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(awake, "_LINGER_S", 0.05)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def install(text: str) -> None:
        command = tmp_path / inhibitor(sys.platform, 1)[0]
        _ = command.write_text(f"#!/bin/sh\n{text.format(held=held)}\n")
        command.chmod(0o755)

    return install


def living(held: Path) -> list[int]:
    pids = [int(line) for line in held.read_text().split()] if held.exists() else []
    return [pid for pid in pids if psutil.pid_exists(pid)]


def nothing(name: str) -> None:
    del name


@contextlib.asynccontextmanager
async def running(
    when: KeepAwake | list[KeepAwake],
    works: list[bool],
    on_refusal: Callable[[str], None] = nothing,
) -> AsyncGenerator["asyncio.Task[None]"]:
    """`works[0]`: whether the machine works now; `when[0]`, of a list: what is chosen now."""
    chosen: list[KeepAwake] = when if isinstance(when, list) else [when]
    task = asyncio.create_task(Awake(lambda: chosen[0], lambda: works[0], on_refusal).run())
    try:
        yield task
    finally:
        _ = task.cancel()
        _ = await asyncio.gather(task, return_exceptions=True)


async def test_it_holds_while_there_is_work_and_lets_go_afterwards(
    install: Callable[[str], None], held: Path
) -> None:
    install(HOLDS)
    works = [False]
    async with running("answers", works):
        await asyncio.sleep(0.1)
        assert not held.exists()
        works[0] = True
        await until(lambda: len(living(held)) == 1)
        await asyncio.sleep(0.1)
        assert len(held.read_text().split()) == 1, "one command holds for as long as it takes"
        works[0] = False
        await until(lambda: not living(held))
        works[0] = True
        await until(lambda: len(living(held)) == 1)
    assert not living(held), "it ends with the node"


async def test_a_choice_on_the_page_holds_and_lets_go_at_once(
    install: Callable[[str], None], held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(HOLDS)
    monkeypatch.setattr(awake, "_LINGER_S", 3600.0)
    when: list[KeepAwake] = ["never"]
    async with running(when, [True]):
        await asyncio.sleep(0.1)
        assert not held.exists()
        when[0] = "always"
        await until(lambda: len(living(held)) == 1)
        when[0] = "never"
        await until(lambda: not living(held))


async def test_a_command_that_somebody_killed_is_started_again(
    install: Callable[[str], None], held: Path
) -> None:
    install(HOLDS)
    async with running("always", [False]):
        await until(lambda: len(living(held)) == 1)
        os.kill(living(held)[0], 9)
        await until(lambda: len(held.read_text().split()) == 2 and len(living(held)) == 1)


async def test_it_holds_on_for_a_while_after_the_work(
    install: Callable[[str], None], held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(HOLDS)
    monkeypatch.setattr(awake, "_LINGER_S", 3600.0)
    idle = list[bool]()

    def works() -> bool:
        if held.exists():
            idle.append(True)
        return not held.exists()

    task = asyncio.create_task(Awake(lambda: "answers", works, nothing).run())
    await until(lambda: len(idle) > 5)
    assert len(living(held)) == 1
    _ = task.cancel()
    _ = await asyncio.gather(task, return_exceptions=True)


async def test_commands_that_end_late_are_begun_as_often_as_they_end(
    install: Callable[[str], None], held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(ENDS_AT_ONCE)
    monkeypatch.setattr(awake, "_SOON_S", 0.0)
    async with running("always", [False]):
        await until(lambda: held.exists() and len(held.read_text().split()) > 8)


async def test_a_lack_that_passes_is_no_refusal(
    install: Callable[[str], None], held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(HOLDS)
    create, faults = asyncio.create_subprocess_exec, [errno.EMFILE, errno.EAGAIN]

    async def create_subprocess_exec(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if faults:
            raise OSError(faults.pop(), "a lack")
        return await create(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_subprocess_exec)
    async with running("always", [False]):
        await until(lambda: len(living(held)) == 1)
    assert not faults


async def test_a_refusal_is_said_once_and_ends_the_attempts(
    install: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    install(REFUSES)
    refusals = list[str]()
    async with running("always", [False], refusals.append) as task:
        await asyncio.wait_for(task, 20)
    (record,) = caplog.records
    assert refusals == [record.getMessage()]
    assert "this machine may sleep while it answers: " in record.getMessage()
    assert record.getMessage().endswith("Failed to inhibit: Access denied")


async def test_a_command_that_ends_at_once_is_not_begun_for_ever(
    install: Callable[[str], None], held: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    install(ENDS_AT_ONCE)
    async with running("always", [False]) as task:
        await asyncio.wait_for(task, 20)
    assert len(held.read_text().split()) == 5
    (record,) = caplog.records
    assert record.getMessage().endswith("it ended with 0")


async def test_a_command_that_the_system_cannot_run_is_a_refusal(
    install: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    install("")
    monkeypatch.setenv("PATH", str(tmp_path))
    _ = (tmp_path / inhibitor(sys.platform, 1)[0]).write_text("nonsense")
    async with running("always", [False]) as task:
        await asyncio.wait_for(task, 20)
    (record,) = caplog.records
    assert "this machine may sleep while it answers: " in record.getMessage()


@pytest.mark.parametrize("text", [LEAVES_A_CHILD, STAYS])
async def test_neither_a_child_nor_deaf_ears_keep_a_node_from_its_end(
    install: Callable[[str], None], held: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(awake, "_END_S", 0.1, raising=False)
    install(text)
    async with asyncio.timeout(10):
        async with running("always", [False]):
            await until(lambda: bool(living(held)))
            await asyncio.sleep(0.3)
    if text == LEAVES_A_CHILD:
        os.kill(living(held)[0], 9)
    await until(lambda: not living(held))


async def test_where_the_command_is_missing_nothing_runs_and_a_choice_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(shutil, "which", nothing)
    refusals = list[str]()
    for when in get_args(KeepAwake):
        async with running(when, [True], refusals.append) as task:
            await asyncio.wait_for(task, 20)
    assert len(refusals) == 3 and all(each.endswith(" is missing") for each in refusals)
    assert [each.getMessage() for each in caplog.records] == refusals[:2], "not of never"


def test_the_assertion_ends_with_the_process_even_if_that_is_killed() -> None:
    assert inhibitor("darwin", 42) == ("caffeinate", "-i", "-w", "42")
    assert "--pid=42" in inhibitor("linux", 42)
