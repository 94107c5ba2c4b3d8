"""`exo-node launch` over a stub of the node, with programs that stand for the tools."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from api_stub import COMMAND, QWEN, Stub, as_json, environment, exo_node
from interrupts import ending_on_interrupt
from nodes import eventually
from tool_stand_ins import StandIns

from exo_node.node.cli.coding_tools import TOOLS

LOADED = {**QWEN, "capabilities": ["tools"], "fits": {"context_length": 262144}}
OTHER = {"id": "other", "capabilities": ["tools"], "fits": {"context_length": 40960}}
SHORT = {**LOADED, "id": "short", "context_length": 8192}


@pytest.fixture
def tools(tmp_path: Path) -> StandIns:
    folder = tmp_path / "bin"
    folder.mkdir()
    return StandIns(folder)


def path_of(tools: StandIns) -> str:
    return f"{tools.folder}{os.pathsep}{os.environ['PATH']}"


def launch(
    stub: Stub, tools: StandIns, *words: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    return exo_node("launch", *words, "--port", str(stub.port), PATH=path_of(tools), **variables)


def serve(stub: Stub, *entries: Any) -> None:
    stub.replies["/v1/models"] = as_json({"object": "list", "data": entries})


@pytest.mark.parametrize(
    ("entry", "flags", "sent"),
    [
        (OTHER, [], {"model": "other"}),
        (OTHER, ["--context", "40000"], {"model": "other", "context": 40000}),
        (SHORT, ["--context", "40000"], {"model": "short", "context": 40000}),
        (LOADED, ["--context", "40000"], None),
    ],
)
def test_a_model_is_loaded_before_its_tool_starts(
    stub: Stub, tools: StandIns, entry: Any, flags: list[str], sent: Any
) -> None:
    serve(stub, entry)
    tools.add("claude")
    query = "&context=40000" if flags else ""
    preview = f"/v1/placements/preview?model={entry['id']}{query}"
    stub.replies[preview] = as_json({"best": {"context_length": 40960}})
    stub.replies["/v1/placements"] = as_json({"data": [], "context_length": 40000})
    result = launch(stub, tools, "claude", entry["id"], *flags)
    assert result.returncode == 0, result.stderr
    assert stub.bodies == ([] if sent is None else [sent])
    context = "262144" if sent is None else "40000"
    assert tools.only("claude")["environment"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == context


@pytest.mark.parametrize("tool", TOOLS)
def test_the_printed_lines_start_a_tool_as_launch_does(
    stub: Stub, tools: StandIns, tmp_path: Path, tool: str
) -> None:
    serve(stub, {**LOADED, "id": 'it\'s "one" $HOME/`x`'})
    tools.add(tool)
    own = ["exec", "--flag=a b", "it's", "--", "-x"]
    variables = {"PATH": path_of(tools), "EXO_API_KEY": "s3cret", "EXO_DATA_DIR": str(tmp_path)}
    arguments = (tool, "--port", str(stub.port), "--", *own)
    lines = exo_node("launch", "--print", *arguments, **variables)
    assert "s3cret" not in lines.stdout + lines.stderr
    shell = ["sh", "-euc", lines.stdout]
    _ = subprocess.run(shell, check=True, env=environment(**variables), timeout=60)
    launched = exo_node("launch", *arguments, **variables)
    assert launched.returncode == 0, launched.stderr
    assert "s3cret" not in launched.stderr
    first, second = tools.records(tool)
    for record in (first, second):
        del record["pid"]
        for shells in ("_", "PWD", "OLDPWD", "SHLVL"):
            _ = record["environment"].pop(shells, None)
    assert first == second
    assert first["arguments"][-len(own) :] == own
    assert "s3cret" in first["environment"].values()
    files = sorted((tmp_path / "launch").glob("*")) if (tmp_path / "launch").exists() else []
    named = [*first["arguments"], *first["environment"].values()]
    assert len(files) == (tool in ("qwen", "aider")) and all(str(file) in named for file in files)


def test_the_settings_are_shown_before_the_tool_starts(stub: Stub, tools: StandIns) -> None:
    serve(stub, LOADED)
    tools.add("codex", "print('started', flush=True)")
    result = launch(stub, tools, "codex")
    assert result.stdout == "started\n"
    assert (
        "Codex uses Qwen/Qwen3.6-27B, with 262,144 tokens of context:\ncodex -c " in result.stderr
    )


def test_the_tools_exit_status_is_that_of_launch(stub: Stub, tools: StandIns) -> None:
    serve(stub, LOADED)
    tools.add("aider", "sys.exit(3)")
    result = launch(stub, tools, "aider")
    assert result.returncode == 3


def test_ctrl_c_reaches_the_tool_which_has_the_process_of_launch(
    stub: Stub, tools: StandIns
) -> None:
    serve(stub, LOADED)
    tools.add(
        "claude",
        "import signal\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "print('ready', flush=True)\n"
        "try:\n    signal.pause()\nexcept KeyboardInterrupt:\n    sys.exit(42)",
    )
    with ending_on_interrupt():
        process = subprocess.Popen(
            [*COMMAND, "launch", "claude", "--port", str(stub.port)],
            env=environment(PATH=path_of(tools)),
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        eventually(lambda: bool(tools.records("claude")), 60)
        assert tools.only("claude")["pid"] == process.pid
        assert process.stdout is not None
        _ = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 42
    finally:
        process.kill()
        _ = process.communicate()


def test_a_program_of_the_tool_ends_at_a_broken_pipe(stub: Stub, tools: StandIns) -> None:
    serve(stub, LOADED)
    program = tools.folder / "claude"
    _ = program.write_text("#!/bin/sh\nyes | head -n 1\n")
    program.chmod(0o755)
    result = launch(stub, tools, "claude")
    assert (result.returncode, result.stdout) == (0, "y\n")
    assert "roken pipe" not in result.stderr


def test_a_tool_that_is_missing_is_named_with_how_to_install_it(
    stub: Stub, tools: StandIns
) -> None:
    for tool in TOOLS.values():
        result = exo_node("launch", tool.command, "--port", "1", PATH=str(tools.folder))
        assert result.returncode == 1
        assert f"{tool.title} is not installed" in result.stderr
        assert tool.install in result.stderr
    assert stub.keys == []


def test_a_tool_that_cannot_be_started_is_an_error(stub: Stub, tools: StandIns) -> None:
    serve(stub, LOADED)
    program = tools.folder / "claude"
    _ = program.write_text("no program\n")
    program.chmod(0o755)
    result = launch(stub, tools, "claude")
    assert result.returncode == 1
    assert f"{program} cannot be started: Exec format error" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_that_cannot_be_written_is_an_error_that_names_print(
    stub: Stub, tools: StandIns, tmp_path: Path
) -> None:
    serve(stub, LOADED)
    tools.add("qwen")
    _ = (tmp_path / "launch").write_text("in the way")
    result = launch(stub, tools, "qwen", EXO_DATA_DIR=str(tmp_path))
    assert result.returncode == 1
    assert "cannot be written" in result.stderr and "--print" in result.stderr
    assert tools.records("qwen") == []


@pytest.mark.parametrize(
    ("variables", "direct"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://127.0.0.1:9"}, "127.0.0.1,localhost"),
        (
            {"http_proxy": "http://127.0.0.1:9", "no_proxy": "lan", "NO_PROXY": "lan"},
            "lan,127.0.0.1,localhost",
        ),
    ],
)
def test_a_tool_asks_no_proxy_for_the_node(
    stub: Stub,
    tools: StandIns,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    direct: str | None,
) -> None:
    for name in ("no_proxy", "NO_PROXY", "https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    serve(stub, LOADED)
    tools.add("claude")
    result = launch(stub, tools, "claude", WEB_CONCURRENCY="4", **variables)
    assert result.returncode == 0, result.stderr
    started = tools.only("claude")["environment"]
    assert started.get("NO_PROXY") == started.get("no_proxy") == direct
    assert started["WEB_CONCURRENCY"] == "4"  # it is the tool's own
