"""Log lines: their two formats, the request they belong to, and text that cannot draw."""

import asyncio
import io
import json
import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import pytest

from exo_node.node.machine import log as log_module
from exo_node.node.machine.log import (
    JsonFormatter,
    LineLimit,
    apart,
    configure,
    escape_controls,
    request_scope,
)

_log = logging.getLogger("exo_node.node.cluster.membership")


@pytest.fixture(autouse=True)
def restored_logging() -> Generator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in list(root.manager.loggerDict)}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in list(root.manager.loggerDict):
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))


def carried() -> str | None:
    """The request that a line from here would name."""
    line = JsonFormatter(None).format(logging.LogRecord("", 0, "", 0, "", None, None))
    return json.loads(line).get("request")


def _lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_json_lines_carry_time_level_logger_message_node_and_request() -> None:
    stream = io.StringIO()
    configure("json", node="alpha", stream=stream)
    with request_scope("r1"):
        _log.warning("%s is suspect", "beta")
    _log.info("plain")
    first, second = map(json.loads, _lines(stream))
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "warning",
        "logger": "exo_node.node.cluster.membership",
        "message": "beta is suspect",
        "node": "alpha",
        "request": "r1",
    }
    assert "request" not in second


def test_human_lines_are_short() -> None:
    stream = io.StringIO()
    configure("human", stream=stream)
    with request_scope("r1"):
        _log.warning("beta is suspect")
    (line,) = _lines(stream)
    assert line[8:] == " warning membership: beta is suspect  request=r1"


def test_text_from_outside_cannot_forge_a_line_or_move_the_cursor() -> None:
    stream = io.StringIO()
    configure("human", stream=stream)
    _log.warning("name is %s", "x\n12:00:00 info forged\x1b[2J\x9b1m")
    (line,) = _lines(stream)
    assert line.endswith(r"x\x0a12:00:00 info forged\x1b[2J\x9b1m")


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_a_traceback_is_logged(log_format: str) -> None:
    stream = io.StringIO()
    configure("human" if log_format == "human" else "json", stream=stream)
    try:
        raise ValueError("lost \x1b[2J")
    except ValueError:
        _log.exception("failed")
    text = stream.getvalue()
    assert "Traceback" in text and "ValueError: lost" in text
    assert "\x1b" not in text
    assert len(_lines(stream)) > 3 if log_format == "human" else len(_lines(stream)) == 1


async def test_a_request_is_known_in_the_tasks_it_starts_and_nowhere_else() -> None:
    async def serve(request: str) -> str | None:
        with request_scope(request):
            return await asyncio.create_task(inner())

    async def inner() -> str | None:
        await asyncio.sleep(0)
        return carried()

    assert await asyncio.gather(serve("a"), serve("b")) == ["a", "b"]
    assert carried() is None


def test_the_libraries_below_are_quiet_and_their_warnings_are_not_lost() -> None:
    stream = io.StringIO()
    configure("human", "debug", stream=stream)
    for name in ("uvicorn.error", "grpc._cython", "zeroconf", "asyncio"):
        logging.getLogger(name).info("chatter")
    logging.getLogger("uvicorn.access").error("GET /")
    assert _lines(stream) == []
    logging.getLogger("zeroconf").warning("no route")
    _log.debug("ours")
    assert [line.split(": ")[1] for line in _lines(stream)] == ["no route", "ours"]


@pytest.mark.parametrize("form", ["human", "json"])
def test_a_line_that_says_it_has_no_error_is_a_line(form: Literal["human", "json"]) -> None:
    stream = io.StringIO()
    configure(form, stream=stream)
    logging.getLogger("asyncio").error("Task was destroyed", exc_info=False)
    assert "Task was destroyed" in stream.getvalue()


def test_configuring_twice_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("human", stream=first)
    configure("json", stream=second)
    _log.info("once")
    assert (len(_lines(first)), len(_lines(second))) == (0, 1)


def test_only_the_excepted_controls_pass() -> None:
    assert escape_controls("a\tb\n\x00\x7f é", keep="\n") == "a\\x09b\n\\x00\\x7f é"
    assert escape_controls("x\u202egpj.exe\u2066\u200f") == "x\\u202egpj.exe\\u2066\u200f"


async def test_a_task_that_outlives_its_request_does_not_carry_it() -> None:
    async def carried_by_task() -> str | None:
        return carried()

    with request_scope("r1"):
        own = asyncio.create_task(carried_by_task())
        other = asyncio.create_task(carried_by_task(), context=apart())
        assert [await own, await other, carried()] == ["r1", None, "r1"]


def test_lines_that_strangers_cause_are_few_and_counted() -> None:
    now = [0.0]
    limit = LineLimit(3, 60.0, lambda: now[0])
    logged = [limit.left_out() for _ in range(500) if limit.passes()]
    assert logged == ["", "", ""]
    now[0] = 60.0
    assert limit.passes()
    assert limit.left_out() == " (497 such lines were left out before)"
    assert limit.left_out() == ""


def test_a_file_of_the_log_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "FILE_BYTES", 2000)
    file = tmp_path / "logs" / "node.log"
    configure("json", node="desk", file=file)
    try:
        for number in range(100):
            logging.getLogger("exo_node.test").info("line %d", number)
    finally:
        configure("human")
    files = sorted(each.name for each in file.parent.iterdir())
    assert files == ["node.log", "node.log.1", "node.log.2", "node.log.3"]
    assert all(each.stat().st_size <= 2000 for each in file.parent.iterdir())
    assert json.loads(file.read_text().splitlines()[-1])["message"] == "line 99"


def test_a_file_that_cannot_be_renamed_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(log_module, "FILE_BYTES", 200)
    monkeypatch.setattr(os, "rename", rename)
    logging.getLogger().handlers.clear()  # pytest's own cannot pass half a surrogate on
    configure("human", file=tmp_path / "log")
    try:
        for number in range(20):
            logging.getLogger("exo_node.test").info("line %d \udcff", number)
    finally:
        configure("human")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split("line ")[1].split()[0] for line in lines] == [str(n) for n in range(20)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("human", file=Path("/dev/full"))
    try:
        for number in range(50):
            logging.getLogger("exo_node.test").info("line %d", number)
    finally:
        configure("human")
    assert capsys.readouterr().err == "/dev/full cannot be written: No space left on device\n"
