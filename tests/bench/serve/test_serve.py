"""`exo-node bench serve` against servers with fixed gaps and faults."""

import csv
import json
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from api_stub import COMMAND, environment, in_process
from http_node import serving
from interrupts import ending_on_interrupt
from nodes import eventually
from openai_server import TOKENS, OpenAiServer
from typer.testing import Result

Row = dict[str, str]


ONCE = ("--repeats", "1", "--limit", "0")


def bench(folder: Path, *arguments: str, **servers: OpenAiServer) -> tuple[Result, list[Row]]:
    """The command's result, and the rows of its CSV."""
    with ExitStack() as stack:
        named: list[str] = []
        for name, server in servers.items():
            port = stack.enter_context(serving(server.app()))
            named += ["--server", f"{name}=http://127.0.0.1:{port}/v1"]
        result = in_process("bench", "serve", *named, *arguments, "--output", str(folder))
    if not (folder / "serve.csv").exists():
        return result, []
    with (folder / "serve.csv").open() as file:
        return result, list(csv.DictReader(file))


def test_fixed_gaps_are_measured(tmp_path: Path) -> None:
    """Sleeps may be late, never early, and a slow machine is late for both servers."""
    fast, slow = OpenAiServer(gap_s=0.01), OpenAiServer(gap_s=0.15)
    result, rows = bench(
        tmp_path,
        *("--workloads", "32,agent", "--concurrency", "1,3", "--requests", "3", *ONCE),
        *("--turns", "2", "--system-tokens", "50", "--tool-tokens", "20"),
        fast=fast,
        slow=slow,
    )
    assert result.exit_code == 0, result.output
    assert len(rows) == 8
    for row in rows:
        gap_ms = 10 if row["server"] == "fast" else 150
        assert float(row["mean_e2el_ms"]) >= 0.95 * TOKENS * gap_ms
        assert float(row["mean_ttft_ms"]) >= 0.95 * gap_ms, "the role's event is no token"
        assert row["output_tokens_by"] == "usage"
        assert row["failed"] == "0"
        if row["server"] == "slow":
            assert float(row["p50_itl_ms"]) >= 0.8 * gap_ms
    tokens = [float(row["total_input_tokens"]) for row in rows if row["workload"] == "32 tokens"]
    assert tokens == [96.0] * 4, "three prompts of 32 tokens, at two a word and ten around them"
    assert (fast.most, slow.most) == (3, 3)
    bodies = [sorted(map(json.dumps, server.bodies)) for server in (fast, slow)]
    assert bodies[0] == bodies[1]
    report = json.loads((tmp_path / "serve.json").read_text())
    assert report["same_answers"] == [{"other": "slow", "both": 16, "same": 16}]
    assert len(report["runs"][0]["answers"]) == 3
    ratios = {(r["workload"], r["figure"]): r["median"] for r in report["ratios"]}
    assert ratios["32 tokens", "mean_e2el_ms"] < 0.9, "fast over slow"
    assert "<svg" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    ("fault", "refused", "output"),
    [
        ("500", "0", "2 failed: HTTP 500"),
        ("503", "2", "2 failed: HTTP 503"),
        ("cut", "0", "2 failed: the stream ended before the answer did"),
        ("garbage", "0", "2 failed: an event that is no chat chunk"),
        ("endless", "0", "2 failed: more text than max_tokens allows"),
        ("hang", "0", "2 failed: no byte within the time limit"),
    ],
)
def test_a_servers_faults_are_counted_not_hidden(
    tmp_path: Path, fault: str, refused: str, output: str
) -> None:
    result, [row] = bench(  # the first of its requests is the warm-up
        tmp_path,
        *("--workloads", "32", "--concurrency", "2", "--requests", "6", *ONCE),
        *("--silence", "3"),
        bad=OpenAiServer(fault=fault),
    )
    assert result.exit_code == 1
    assert (row["completed"], row["failed"], row["refused"]) == ("4", "2", refused)
    assert output in result.output
    assert "2 requests failed" in (tmp_path / "index.html").read_text()


def test_the_turns_after_a_lost_one_count_as_lost(tmp_path: Path) -> None:
    arguments = ("--workloads", "agent", "--concurrency", "1", "--requests", "3", "--turns", "3")
    # The warm-up takes the first three requests, so the second turn is spoiled.
    server = OpenAiServer(fault="cut", every=5)
    result, [row] = bench(tmp_path, *arguments, *ONCE, bad=server)
    assert result.exit_code == 1
    assert (row["completed"], row["failed"]) == ("1", "2")
    assert len(server.bodies) == 5


def test_after_the_limit_each_client_has_one_answer_and_no_repeat_begins(tmp_path: Path) -> None:
    arguments = ("--workloads", "32", "--concurrency", "1,2", "--limit", "0.001", "--repeats", "5")
    result, rows = bench(tmp_path, *arguments, slow=OpenAiServer())
    assert result.exit_code == 0
    assert [row["completed"] for row in rows] == ["1", "2"]
    assert json.loads((tmp_path / "serve.json").read_text())["state"] == "limit"
    assert "2 of 10 runs" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    ("models", "output"),
    [
        ({"data": []}, "lists no model; load one first"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, "2 models (a, b); say which is asked: --model ID"),
        ({"data": [{"id": "a", "loaded": False}]}, "no model loaded; name one with --model ID"),
        ({"data": 7}, "lists no model"),
        ([], "gives no JSON object; is this an OpenAI server?"),
    ],
)
def test_a_server_without_one_model_gets_the_remedy(
    tmp_path: Path, models: object, output: str
) -> None:
    result, _ = bench(tmp_path, x=OpenAiServer(models=models))
    assert result.exit_code == 1
    assert output in result.output
    assert len(result.output.splitlines()) == 1


def test_the_loaded_model_of_a_node_is_asked(tmp_path: Path) -> None:
    models = {"data": [{"id": "a", "loaded": False}, {"id": "b", "loaded": True}]}
    server = OpenAiServer(models=models)
    result, _ = bench(tmp_path, "--workloads", "32", "--limit", "0.001", x=server)
    assert result.exit_code == 0
    assert {body["model"] for body in server.bodies} == {"b"}


def test_a_key_comes_from_its_variable_and_goes_to_its_server(tmp_path: Path) -> None:
    server = OpenAiServer()
    with serving(server.app()) as port:
        flags = ("--server", f"x=http://127.0.0.1:{port}", "--key", "x=MY_KEY")
        out = ("--output", str(tmp_path), "--workloads", "32", "--limit", "0.001")
        result = in_process("bench", "serve", *flags, *out, MY_KEY="opensesame")
    assert result.exit_code == 0
    assert server.keys == ["Bearer opensesame"]
    assert not any("opensesame" in file.read_text() for file in tmp_path.iterdir())


def test_an_address_where_no_server_listens_is_one_line(tmp_path: Path) -> None:
    result = in_process("bench", "serve", "--server", "x=http://127.0.0.1:1")
    assert result.exit_code == 1
    [line] = result.output.splitlines()
    assert "server x: GET http://127.0.0.1:1/v1/models: ConnectError" in line
    assert "start the server, or correct its --server" in line


def test_without_a_node_here_the_command_says_how_to_start_one(tmp_path: Path) -> None:
    result = in_process("bench", "serve", "--data-dir", str(tmp_path))
    assert result.exit_code == 69
    assert "start one with `exo-node start`" in result.output


@pytest.mark.parametrize(
    ("folder", "output"),
    [
        ("a-file", "is not a folder; name a new folder"),
        ("full", "is not empty; name a new folder"),
        ("a-file/below", "cannot be written to (Not a directory)"),
        ("proc/below", "cannot be written to"),
    ],
)
def test_a_folder_that_cannot_take_results_is_refused_before_the_first_request(
    tmp_path: Path, folder: str, output: str
) -> None:
    _ = (tmp_path / "a-file").write_text("x")
    (tmp_path / "full" / "of").mkdir(parents=True)
    (tmp_path / "proc").symlink_to("/proc")
    server = OpenAiServer()
    result, _ = bench(tmp_path / folder, x=server)
    assert result.exit_code == 2
    assert output in result.output
    assert server.bodies == []


def test_a_disk_that_fills_up_loses_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("exo_node_bench.folder.write_atomic", full)
    result, _ = bench(tmp_path, "--workloads", "32", "--limit", "0.001", x=OpenAiServer())
    assert result.exit_code == 1
    assert "TOKENS/S" in result.output
    assert "cannot be written to any more (No space left on device)" in result.output


def test_ctrl_c_leaves_a_page_of_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(OpenAiServer().app()) as port:
        flags = ("--server", f"x=http://127.0.0.1:{port}", "--workloads", "32")
        command = [*COMMAND, "bench", "serve", *flags, "--repeats", "1000", "--output", str(out)]
        command += ["--requests", "2", "--concurrency", "1", "--limit", "0"]
        with ending_on_interrupt():
            started = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=environment()
            )
        with started as process:
            try:
                eventually(lambda: b'"figures"' in _read(out / "serve.json"), 60)
                process.send_signal(signal.SIGINT)
                printed, _ = process.communicate(timeout=240)
            finally:
                process.kill()
    assert process.returncode == 130
    assert "TOKENS/S" in printed
    report = json.loads((out / "serve.json").read_text())
    assert report["state"] == "interrupted"
    assert 1 <= len(report["runs"]) < 1000
    assert "The bench was interrupted" in (out / "index.html").read_text()


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def test_a_server_cannot_write_escape_sequences_to_the_terminal(tmp_path: Path) -> None:
    models = {"data": [{"id": "a\x1b[2J"}, {"id": "b\nc"}]}
    result, _ = bench(tmp_path, x=OpenAiServer(models=models))
    assert result.exit_code == 1
    assert r"(a\x1b[2J, b c)" in result.output
    assert "\x1b" not in result.output
