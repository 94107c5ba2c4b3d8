"""Errors of commands with `--json`: one JSON object on stderr, the exit status as without it."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from api_stub import Stub, as_json, exo_node, in_process
from models import make_checkpoint
from typer.testing import CliRunner

from exo_node.node.cli.main import app
from exo_node.node.machine.data_dir_lock import DataDirLock


def failed(*arguments: str, stdin: str = "", **extra: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the error; a command in words, in this process, ends with the same
    status."""
    result = exo_node(*arguments, "--json", stdin=stdin, **extra)
    assert result.stdout == "", "an error is no data"
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    body = json.loads(lines[0])
    assert list(body) == ["error"]
    in_words = in_process(*arguments, stdin=stdin, **extra)
    assert in_words.exit_code == result.returncode
    assert not in_words.stderr.startswith("{")
    return result.returncode, body["error"]


@pytest.mark.parametrize("command", [["status"], ["stop"], ["chat", "hi"], ["nodes"]])
def test_without_a_node_the_remedy_is_apart(command: list[str]) -> None:
    status, error = failed(*command)
    assert (status, error["code"]) == (69, "no_node")
    assert error["remedy"] == "start one with `exo-node start`"
    assert error["message"].startswith("no node runs") and "start one" not in error["message"]


def test_a_node_that_is_still_starting_has_a_code_of_its_own(tmp_path: Path) -> None:
    with DataDirLock.acquire(tmp_path):
        status, error = failed("status", "--data-dir", str(tmp_path))
    assert (status, error["code"], error["remedy"]) == (
        75,
        "node_starting",
        "try again in a moment",
    )
    assert f"pid {os.getpid()}" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["chat", "-"], "wrong_use", "empty"),
        (["chat", "hi", "--max-tokens", "0"], "wrong_use", "--max-tokens"),
        (["plan"], "wrong_use", "MODEL"),
        (["models", "show"], "wrong_use", "ID"),
        (["status", "--port", "70000"], "invalid_settings", "--port: '70000'"),
    ],
)
def test_wrong_use_is_json_too(arguments: list[str], code: str, problem: str) -> None:
    status, error = failed(*arguments)
    assert (status, error["code"]) == (2, code)
    assert problem in error["message"]


def test_a_question_without_a_terminal_names_its_flag_and_comes_after_the_check(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "models" / "mine"
    make_checkpoint(folder, "llama")
    status, error = failed("models", "rm", "mine", "--data-dir", str(tmp_path))
    assert (status, error["code"]) == (2, "invalid_settings") and "--yes" in error["message"]
    assert folder.exists()
    status, error = failed("models", "rm", "yours", "--data-dir", str(tmp_path))
    assert status == 1 and "'yours' is on this machine" in error["message"]


@pytest.mark.parametrize(
    ("code", "http", "headers", "status", "remedy"),
    [
        ("queue_full", 429, {"Retry-After": "9"}, 75, "try again in 9 s"),
        ("insufficient_memory", 503, {"Retry-After": "9"}, 1, None),
        ("invalid_api_key", 401, {}, 1, "set EXO_API_KEY to the node's key, or to a token of it"),
    ],
)
def test_the_apis_code_and_words_are_passed_on(
    stub: Stub, code: str, http: int, headers: dict[str, str], status: int, remedy: str | None
) -> None:
    body = {"error": {"message": "it says \x1b[2Jso", "code": code, "type": "server_error"}}
    stub.replies["/v1/cluster"] = as_json(body, http, headers)
    ended, error = failed("status", "--port", str(stub.port))
    assert ended == status
    assert error == {
        "message": "it says \\x1b[2Jso",
        "code": code,
        **({} if remedy is None else {"remedy": remedy}),
    }


def test_a_prompt_that_says_json_asks_for_none() -> None:
    assert exo_node("chat", "--", "--json").stderr.startswith("exo-node: no node runs")


def test_a_question_that_is_answered_with_no_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise typer.Abort

    monkeypatch.setattr("exo_node.node.cli.client.client_settings", refuse)
    result = CliRunner().invoke(app, ["status", "--json"])
    assert (result.exit_code, json.loads(result.stderr)["error"]["code"]) == (1, "aborted")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_full_disk_is_one_line_that_names_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: bool
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/local.token")

    monkeypatch.setattr("exo_node.node.run.run_node", full)
    arguments = ["models", "--json"] if as_json else ["start", "--data-dir", str(tmp_path)]
    if as_json:
        monkeypatch.setattr("exo_node.node.cli.models.client_settings", full)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
    assert "/data/local.token" in result.stderr and "make room on that disk" in result.stderr
    assert result.stderr.startswith("{") == as_json


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))

    monkeypatch.setattr("exo_node.node.cli.models.client_settings", broken)
    result = CliRunner().invoke(app, ["models"])
    assert isinstance(result.exception, OSError)
