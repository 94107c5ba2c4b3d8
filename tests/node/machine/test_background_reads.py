"""Reads of files beside the event loop: one that hangs keeps nobody waiting for long."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from exo_node.node.machine.background_reads import BackgroundRead, read_regular


async def test_a_read_that_hangs_leaves_what_was_known_until_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hangs, goes_on, reads = threading.Event(), threading.Event(), [0]

    def read(before: int | None) -> int:
        reads[0] += 1
        if hangs.is_set():
            assert goes_on.wait(60)
        return (before or 0) + 1

    content = BackgroundRead("the file", read)
    assert content.value == 1
    await content.refresh()
    assert content.value == 2
    hangs.set()
    await asyncio.gather(*(content.refresh() for _ in range(5)))
    assert (content.value, reads[0]) == (2, 3), "and one thread waits for it"
    began = time.monotonic()
    for _ in range(100):
        await content.refresh()
    assert time.monotonic() - began < 0.5 and content.value == 2
    assert caplog.text.count("the file cannot be read at the moment") == 1
    hangs.clear()
    goes_on.set()
    async with asyncio.timeout(60):
        while content.value < 4:
            await asyncio.sleep(0.01)
            await content.refresh()


async def test_a_read_that_begins_as_another_ends_is_neither_late_nor_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = [threading.Event(), threading.Event()]

    def read(before: int | None) -> int:
        assert before is None or ends[before - 1].wait(60)
        return (before or 0) + 1

    content = BackgroundRead("the file", read)
    first = asyncio.create_task(content.refresh())
    await asyncio.sleep(0)
    ends[0].set()
    while content.value < 2:
        await asyncio.sleep(0)
    second = asyncio.create_task(content.refresh())  # before the first resumes
    await first
    third = asyncio.create_task(content.refresh())
    await asyncio.sleep(0.01)
    assert not third.done()
    ends[1].set()
    _ = await asyncio.gather(second, third)
    assert content.value == 3 and not caplog.text


async def test_a_read_that_fails_leaves_what_was_known(caplog: pytest.LogCaptureFixture) -> None:
    def read(before: int | None) -> int:
        if before is not None:
            raise ValueError("broken")
        return 1

    content = BackgroundRead("the file", read)
    await content.refresh()
    assert content.value == 1 and "the file could not be read" in caplog.text


def test_only_a_file_is_read_and_only_its_beginning(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    _ = file.write_bytes(b"12345")
    os.mkfifo(pipe)
    assert read_regular(file, 3)[0] == b"123"
    for path in (pipe, tmp_path, tmp_path / "nothing"):
        with pytest.raises(OSError):
            _ = read_regular(path, 3)
