"""The command line: real processes against a stub of the node's HTTP API."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from exo_node.node import cli, cli_output
from exo_node.node.cli_client import Comment, Message, parse_sse
from exo_node.node.presence import Presence, find_running
from exo_node.node.settings import Settings

_COMMAND = [sys.executable, "-c", "from exo_node.node.cli import main; main()"]
_CHAT = "/v1/chat/completions"
_DEMO = {"id": "demo", "loaded": False, "context_length": 4096, "native_mtp": None}
_QWEN = {
    "id": "Qwen/Qwen3.6-27B",
    "loaded": True,
    "context_length": 262144,
    "native_mtp": {"default_k": 3, "max_k": 5, "weights": "found", "enabled": True, "reason": ""},
}
_STATS = {
    "drafter_kind": "native_mtp",
    "num_draft_tokens": 3,
    "drafting_reason": "",
    "proposed_draft_tokens": 60,
    "accepted_draft_tokens": 40,
    "generation_tps": 23.44,
    "time_to_first_token_s": 0.412,
}
_STATS_LINE = "drafter native_mtp, K 3, accepted 40/60, 23.4 tok/s, TTFT 0.41 s"
_CLUSTER: dict[str, Any] = {
    "self": "n1",
    "head": "n2",
    "term": 7,
    "cluster": "ab12",
    "version": "0.1.0",
    "nodes": [
        {
            "id": "n1", "name": "alpha", "version": "0.1.0", "host": "10.0.0.1", "port": 52416,
            "chip": "Apple M3 Max", "backend": "metal", "memory_bytes": 48 * 2**30,
            "status": "alive", "self": True, "head": False, "http_host": "127.0.0.1",
            "http_port": 52415, "stages": [],
        },
        {
            "id": "n2", "name": "be\x1b[2Jta", "version": "0.1.0", "host": "10.0.0.2",
            "port": 52416, "chip": "Apple M1", "backend": "metal", "memory_bytes": 12 * 2**30,
            "status": "suspect", "self": False, "head": True, "http_host": "127.0.0.1",
            "http_port": 52415, "stages": [],
        },
    ],
}  # fmt: skip
_PLACEMENT = {
    "id": "p1",
    "model": "Qwen/Qwen3.6-27B",
    "status": "ready",
    "reason": "two nodes hold it",
    "error": None,
    "stages": [
        {"node": "n1", "layers": [0, 40], "status": "ready"},
        {"node": "n2", "layers": [40, 64], "status": "ready"},
    ],
    "drafting": {"drafter_kind": "none", "num_draft_tokens": 0, "reason": "2 stages"},
}

Reply = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Stub:
    """A node's HTTP API, one canned reply a path."""

    port: int = 0
    replies: dict[str, Reply] = field(default_factory=dict[str, Reply])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: list[str | None] = field(default_factory=list[str | None])


def as_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        handler.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            handler.send_header(name, text)
        handler.end_headers()
        handler.wfile.write(content)

    return reply


def as_events(*events: object, then: Callable[[], object] = lambda: None) -> Reply:
    """Objects become data, strings go out as they are; `then` runs before the connection ends."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for event in events:
            text = event if isinstance(event, str) else f"data: {json.dumps(event)}"
            handler.wfile.write(f"{text}\n\n".encode())
        handler.wfile.flush()
        then()

    return reply


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def final(stats: Mapping[str, Any] = _STATS) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": 3}, "generation_stats": stats}


def failure(code: str) -> dict[str, Any]:
    return {"error": {"message": f"it is {code}", "type": "x", "param": None, "code": code}}


@pytest.fixture
def stub() -> Generator[Stub]:
    served = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            served.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._serve()

        def _serve(self) -> None:
            served.keys.append(self.headers["Authorization"])
            served.replies.get(self.path, as_json(b"no", 404))(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


def environment(**extra: str) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("EXO_")}
    return {**kept, "EXO_DATA_DIR": "/no/such/exo-node", **extra}


def exo_node(*arguments: str, stdin: str = "", **extra: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*_COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(**extra),
        timeout=60,
        check=False,
    )


def chat(stub: Stub, *arguments: str, **options: str) -> "subprocess.CompletedProcess[str]":
    return exo_node("chat", *arguments, "--port", str(stub.port), **options)


# ---- without a node


def test_help_imports_nothing_slow_and_names_every_command() -> None:
    code = (
        "import sys; from exo_node.node.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "slow = {'rich', 'pydantic', 'http.client', 'asyncio', 'mlx', 'grpc', 'uvicorn'}\n"
        "sys.exit(f'imported: {slow & set(sys.modules)}' if slow & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("start", "chat", "status", "models", "stop"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE)
    assert "--install-completion" in done.stdout


def test_start_help_names_the_variable_of_every_setting() -> None:
    text = exo_node("start", "--help", COLUMNS="200").stdout
    plural = {"peers": "EXO_PEER"}
    for name in Settings.model_fields:
        variable = plural.get(name, f"EXO_{name.upper()}")
        assert re.search(rf"\b{variable}\b", text), variable


def test_version_is_printed() -> None:
    done = exo_node("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"exo-node \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("command", [["status"], ["models"], ["stop"], ["chat", "hi"]])
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_without_a_node_a_command_says_how_to_start_one(
    command: list[str], json_flag: list[str]
) -> None:
    done = exo_node(*command, *json_flag)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith("exo-node: no node runs")
    assert done.stderr.endswith("`exo-node start`\n")


def test_nobody_at_the_given_port_is_no_node() -> None:
    done = exo_node("status", EXO_PORT="1")
    assert done.returncode == 69
    assert "no node answers at 127.0.0.1:1" in done.stderr


def test_a_node_that_is_still_starting_is_a_temporary_state(tmp_path: Path) -> None:
    with Presence.acquire(tmp_path):
        done = exo_node("status", "--data-dir", str(tmp_path))
    assert done.returncode == 75
    assert f"pid {os.getpid()}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nonsense"], "nonsense"),
        (["chat"], "PROMPT"),
        (["chat", "-"], "empty"),
        (["chat", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["chat", "hi", "--num-draft-tokens", "-1"], "--num-draft-tokens"),
        (["status", "--port", "70000"], "--port: '70000'"),
        (["start", "--memory-limit", "lots"], "--memory-limit: 'lots'"),
        (["start", "--host", "0.0.0.0"], "EXO_API_KEY"),
        (["start", "--port", "52416"], "--port"),
        (["start", "--api-key", "x"], "--api-key"),
    ],
)
def test_wrong_use_exits_with_2_and_names_the_fault(arguments: list[str], problem: str) -> None:
    done = exo_node(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


# ---- start


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, Sequence[str]]]:
    """Stands in for the node itself: what `start` hands over; it exits with 7."""
    calls: list[tuple[Settings, Sequence[str]]] = []

    def run_node(settings: Settings, warnings: Sequence[str]) -> int:
        calls.append((settings, warnings))
        return 7

    for name in [name for name in os.environ if name.startswith("EXO_")]:
        monkeypatch.delenv(name)
    module = types.ModuleType("exo_node.node.run")
    monkeypatch.setattr(module, "run_node", run_node, raising=False)
    monkeypatch.setitem(sys.modules, "exo_node.node.run", module)
    return calls


def test_start_hands_every_flag_over_and_exits_with_the_nodes_code(
    started: list[tuple[Settings, Sequence[str]]], tmp_path: Path
) -> None:
    flags = {
        "--name": "alpha", "--host": "::1", "--port": "7000", "--grpc-port": "7001",
        "--interface": "10.0.0.1", "--data-dir": str(tmp_path / "d"), "--models-dir": str(tmp_path),
        "--peer": "10.0.0.2:1", "--cluster-key-file": __file__, "--memory-limit": "2GB",
        "--dtype": "float16", "--log-format": "json",
    }  # fmt: skip
    words = [word for pair in flags.items() for word in pair]
    words += ["--peer", "10.0.0.3:1", "--no-mdns", "--offline"]
    assert CliRunner().invoke(cli.app, ["start", *words]).exit_code == 7
    ((settings, warnings),) = started
    assert warnings == ()
    assert settings == Settings(
        name="alpha", host="::1", port=7000, grpc_port=7001, interface="10.0.0.1",
        data_dir=tmp_path / "d", models_dir=tmp_path, peers=("10.0.0.2:1", "10.0.0.3:1"),
        cluster_key_file=Path(__file__), memory_limit=2 * 10**9, dtype="float16",
        log_format="json", mdns=False, offline=True,
    )  # fmt: skip


def test_start_without_flags_reads_variables_and_warns_of_unknown_ones(
    started: list[tuple[Settings, Sequence[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_PEER", "10.0.0.2:1")
    monkeypatch.setenv("EXO_MDNS", "1")
    monkeypatch.setenv("EXO_OFFLINE", "1")
    monkeypatch.setenv("EXO_NMAE", "x")
    assert CliRunner().invoke(cli.app, ["start"]).exit_code == 7
    ((settings, warnings),) = started
    assert (settings.peers, settings.mdns, settings.offline) == (("10.0.0.2:1",), True, True)
    assert len(warnings) == 1 and "EXO_NAME" in warnings[0]


# ---- chat


def test_chat_streams_the_answer_to_stdout_and_its_numbers_to_stderr(stub: Stub) -> None:
    stub.replies = {
        "/v1/models": as_json({"object": "list", "data": [_DEMO, _QWEN]}),
        _CHAT: as_events(": prefill 1/2", delta("Hel"), delta("lo\x1b["), final(), "data: [DONE]"),
    }
    done = chat(stub, "hi")
    assert (done.returncode, done.stdout) == (0, "Hello\x1b[\n")
    assert done.stderr == _STATS_LINE + "\n"
    assert stub.bodies == [
        {
            "model": "Qwen/Qwen3.6-27B",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_chat_passes_its_options_on_and_reads_stdin(stub: Stub) -> None:
    stub.replies = {_CHAT: as_events(delta("ok\n"), "data: [DONE]")}
    options = ["--model", "m", "--max-tokens", "5", "--temperature", "0", "--num-draft-tokens", "0"]
    done = chat(stub, "-", *options, stdin="from a pipe\n", EXO_API_KEY="k-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    body = stub.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "from a pipe\n"}]
    asked = [body[key] for key in ("model", "max_tokens", "temperature", "num_draft_tokens")]
    assert asked == ["m", 5, 0, 0]
    assert stub.keys == ["Bearer k-1"]


def test_chat_falls_back_to_the_demo_and_says_how_to_get_a_real_model(stub: Stub) -> None:
    stub.replies = {
        "/v1/models": as_json({"object": "list", "data": [_DEMO]}),
        _CHAT: as_events(delta("ok"), "data: [DONE]"),
    }
    done = chat(stub, "hi")
    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert "--model Qwen/Qwen3.6-27B" in done.stderr
    assert stub.bodies[0]["model"] == "demo"


def test_chat_json_prints_the_final_body_alone(stub: Stub) -> None:
    body = {"choices": [{"message": {"content": "ok"}}], "generation_stats": _STATS}
    stub.replies = {_CHAT: as_json(body)}
    done = chat(stub, "hi", "--model", "m", "--json")
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, body, "")
    assert "stream" not in stub.bodies[0]


@pytest.mark.parametrize(
    ("reply", "code", "said"),
    [
        (as_json(failure("model_loading"), 503, {"Retry-After": "9"}), 75, "try again in 9 s"),
        (as_json(failure("queue_full"), 429), 75, "it is queue_full"),
        (as_json(failure("model_not_found"), 404), 1, "it is model_not_found"),
        (as_json(failure("invalid_api_key"), 401), 1, "EXO_API_KEY"),
        (as_json(b"<html>", 502), 1, "answered 502"),
        (as_json([1]), 1, "ended the connection before"),
        (as_events(delta("par"), failure("peer_lost")), 75, "it is peer_lost"),
        (as_events(delta("par"), failure("internal_error")), 1, "it is internal_error"),
        (as_events(delta("par")), 1, "before the answer was complete"),
        (as_events(delta("par"), "data: {not json"), 1, "does not answer like an exo-node"),
        (as_events({"error": {"message": "a\nb\x1b[2J"}}), 1, r"a b\x1b[2J"),
    ],
)
def test_a_failed_chat_is_one_line_and_an_exit_code(
    stub: Stub, reply: Reply, code: int, said: str
) -> None:
    stub.replies = {_CHAT: reply}
    done = chat(stub, "hi", "--model", "m")
    assert (done.returncode, done.stdout) in [(code, ""), (code, "par\n")]
    (line,) = done.stderr.splitlines()
    assert line.startswith("exo-node: ") and said in line


def test_text_that_stdout_cannot_show_does_not_end_the_answer(stub: Stub) -> None:
    stub.replies = {_CHAT: as_events(delta("a\ud83d→b"), "data: [DONE]")}
    done = chat(stub, "hi", "--model", "m", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout) == (0, "a??b\n")


def test_ctrl_c_ends_a_chat_with_130(stub: Stub) -> None:
    release = threading.Event()
    stub.replies = {_CHAT: as_events(delta("Hel"), then=lambda: release.wait(30))}
    process = subprocess.Popen(
        [*_COMMAND, "chat", "hi", "--model", "m"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(EXO_PORT=str(stub.port)),
    )
    assert process.stdout is not None
    assert process.stdout.read(3) == b"Hel"
    process.send_signal(signal.SIGINT)
    rest, notes = process.communicate(timeout=30)
    release.set()
    assert (process.returncode, rest, notes) == (130, b"\n", b"")


# ---- status, models


def test_status_shows_nodes_and_placements(stub: Stub, tmp_path: Path) -> None:
    stub.replies = {
        "/v1/cluster": as_json(_CLUSTER),
        "/v1/placements": as_json({"object": "list", "data": [_PLACEMENT]}),
    }
    with Presence.acquire(tmp_path) as presence:
        presence.announce("0.0.0.0", stub.port, version="0.1.0")
        done = exo_node("status", "--data-dir", str(tmp_path), EXO_PORT="1")
        raw = exo_node("status", "--data-dir", str(tmp_path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == r"""node     alpha (n1), http://127.0.0.1:52415, exo-node 0.1.0
head     be\x1b[2Jta, term 7
cluster  ab12, 2 nodes

NODE                STATUS   CHIP          BACKEND  MEMORY    ADDRESS
alpha (self)        alive    Apple M3 Max  metal    48.0 GiB  10.0.0.1:52416
be\x1b[2Jta (head)  suspect  Apple M1      metal    12.0 GiB  10.0.0.2:52416

MODEL             STATUS  STAGES                                MTP
Qwen/Qwen3.6-27B  ready   alpha [0, 40) → be\x1b[2Jta [40, 64)  off: 2 stages
"""
    )
    assert json.loads(raw.stdout) == {"cluster": _CLUSTER, "placements": [_PLACEMENT]}


def test_models_are_a_table(stub: Stub) -> None:
    missing = {**_QWEN, "id": "b", "native_mtp": {"weights": "missing", "reason": "no mtp.*"}}
    listed = {"object": "list", "data": [_DEMO, _QWEN, missing]}
    stub.replies = {"/v1/models": as_json(listed)}
    done = exo_node("models", "--port", str(stub.port))
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == """MODEL             LOADED  CONTEXT  NATIVE MTP
demo              no      4096     none
Qwen/Qwen3.6-27B  yes     262144   K 3 (at most 5)
b                 yes     262144   off: no mtp.*
"""
    )
    assert json.loads(exo_node("models", "--json", EXO_PORT=str(stub.port)).stdout) == listed


def test_fields_of_another_version_may_be_missing() -> None:
    text = cli_output.status({"nodes": [{"id": "n"}]}, [{"model": "m", "stages": [{}]}])
    assert "m      -       - [?, ?)  -" in text
    assert "no model is loaded" in cli_output.status({}, [])


# ---- stop


@contextmanager
def holder(data_dir: Path, before: str) -> "Generator[subprocess.Popen[str]]":
    code = (
        "import signal, sys; from pathlib import Path\n"
        "from exo_node.node.presence import Presence\n"
        f"{before}\nheld = Presence.acquire(Path(sys.argv[1]))\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_stop_ends_the_node_that_holds_the_folder(tmp_path: Path, json_flag: list[str]) -> None:
    with holder(tmp_path, "") as process:
        done = exo_node("stop", "--data-dir", str(tmp_path), *json_flag)
        assert done.returncode == 0
        assert find_running(tmp_path) is None
        assert process.wait(10) == -signal.SIGTERM
    if json_flag:
        assert json.loads(done.stdout) == {"stopped": True, "pid": process.pid}
    else:
        assert (done.stdout, done.stderr) == ("", f"stopped the node with pid {process.pid}\n")


def test_stop_gives_up_on_a_node_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo_node.node.cli._STOP_TIMEOUT_S", 0.2)
    with holder(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)") as process:
        result = CliRunner().invoke(cli.app, ["stop", "--data-dir", str(tmp_path)])
        assert result.exit_code == 1
        assert f"kill -9 {process.pid}" in result.stderr
        assert process.poll() is None


# ---- pure parts


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"data: a\n\ndata:b\n\n", [Message("a"), Message("b")]),
        (b"data: a\r\ndata: b\r\n\r\n", [Message("a\nb")]),
        (b": ping\n\n:\n\n", [Comment("ping"), Comment("")]),
        (b"event: x\nid: 1\nretry: 5\n\n", []),
        (b"data: cut off", []),
        ("data:  ü\n\n".encode(), [Message(" ü")]),
    ],
)
def test_sse_lines_become_events(raw: bytes, events: list[Comment | Message]) -> None:
    assert list(parse_sse(raw.splitlines(keepends=True))) == events


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (_STATS, _STATS_LINE),
        (
            {"drafter_kind": "none", "drafting_reason": "2 stages", "generation_tps": 9},
            "drafter none (2 stages), 9.0 tok/s, TTFT 0.00 s",
        ),
        ({}, "drafter -, K -, accepted -/-, 0.0 tok/s, TTFT 0.00 s"),
    ],
)
def test_the_stats_line_says_how_it_was_drafted(stats: Mapping[str, Any], line: str) -> None:
    assert cli_output.stats_line(stats) == line


def test_a_terminal_gets_no_escape_sequences_and_sees_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    events = [Comment("prefill 1/2"), delta("a\n\x1b[2J"), final()]
    assert cli_output.print_answer(events) == _STATS
    written = capsys.readouterr()
    assert written.out == "a\n\\x1b[2J\n"
    assert written.err == "prefill 1/2\n"
