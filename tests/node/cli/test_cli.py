"""The command line but for `chat`: real processes against a stub of the node's HTTP API."""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api_stub import DEMO, QWEN, Stub, as_json, exo_node
from models import make_checkpoint
from typer.testing import CliRunner

from exo_node.node.cli.main import COMMANDS, app, load_command
from exo_node.node.machine import setting_sources
from exo_node.node.machine.data_dir_lock import DataDirLock, find_running
from exo_node.node.machine.settings import Settings

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


# ---- without a node


def test_help_imports_nothing_slow_and_names_every_command() -> None:
    code = (
        "import sys; from exo_node.node.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "slow = {'rich', 'pydantic', 'httpx2', 'http.client', 'asyncio', 'mlx', 'grpc'}\n"
        "slow |= {'uvicorn', 'importlib.metadata', 'plistlib', 'socket', 'hmac'}\n"
        "sys.exit(f'imported: {slow & set(sys.modules)}' if slow & set(sys.modules) else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    for command in ("start", "chat", "status", "models", "stop"):
        assert re.search(rf"^  {command} ", result.stdout, re.MULTILINE)
    assert "--install-completion" in result.stdout


@pytest.mark.parametrize("group", ["models", "token", "service", "bench"])
def test_the_sentences_of_a_groups_commands_are_whole(group: str) -> None:
    listed = exo_node(group, "--help").stdout.split("Commands:")[1]
    assert len(listed.splitlines()) > 2 and "..." not in listed, listed


def test_start_help_names_the_variable_of_every_setting() -> None:
    text = exo_node("start", "--help", COLUMNS="200").stdout
    plural = {"peers": "EXO_PEER", "models_dirs": "EXO_MODELS_DIR"}
    for name in Settings.model_fields:
        variable = plural.get(name, f"EXO_{name.upper()}")
        assert re.search(rf"\b{variable}\b", text), variable


def test_version_is_printed() -> None:
    result = exo_node("--version")
    assert result.returncode == 0
    assert re.fullmatch(r"exo-node \d+\.\d+\.\d+\n", result.stdout)


def test_nobody_at_the_given_port_is_no_node() -> None:
    result = exo_node("status", EXO_PORT="1")
    assert result.returncode == 69
    assert "no node answers at 127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nonsense"], "nonsense"),
        (["chat"], "PROMPT"),
        (["chat", "hi", "--num-draft-tokens", "-1"], "--num-draft-tokens"),
        (["start", "--memory-limit", "lots"], "--memory-limit: 'lots'"),
        (["start", "--host", "0.0.0.0"], "EXO_API_KEY"),
        (["start", "--port", "52416"], "--port"),
        (["start", "--api-key", "x"], "--api-key"),
    ],
)
def test_wrong_use_exits_with_2_and_names_the_fault(arguments: list[str], problem: str) -> None:
    result = exo_node(*arguments)
    assert result.returncode == 2
    assert problem in result.stderr
    assert "Traceback" not in result.stderr


# ---- start


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, Sequence[str]]]:
    """Stands in for the node itself: what `start` hands over; it exits with 7."""
    calls: list[tuple[Settings, Sequence[str]]] = []

    def run_node(settings: Settings, warnings: Sequence[str]) -> int:
        calls.append((settings, warnings))
        return 7

    for name in [name for name in os.environ if name.startswith(("EXO_", "GRPC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(setting_sources, "_FORGOTTEN", [])  # by tests before, of this process
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
    words += ["--peer", "10.0.0.3:1", "--no-mdns", "--offline", "--auto-download"]
    assert CliRunner().invoke(app, ["start", *words]).exit_code == 7
    ((settings, warnings),) = started
    assert warnings == ()
    assert settings == Settings(
        name="alpha", host="::1", port=7000, grpc_port=7001, interface="10.0.0.1",
        data_dir=tmp_path / "d", models_dirs=(tmp_path,), peers=("10.0.0.2:1", "10.0.0.3:1"),
        cluster_key_file=Path(__file__), memory_limit=2 * 10**9, dtype="float16",
        log_format="json", mdns=False, offline=True, auto_download=True,
    )  # fmt: skip


def test_start_without_flags_reads_variables_and_warns_of_unknown_ones(
    started: list[tuple[Settings, Sequence[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_PEER", "10.0.0.2:1")
    monkeypatch.setenv("EXO_MDNS", "0")
    monkeypatch.setenv("EXO_OFFLINE", "1")
    monkeypatch.setenv("EXO_NMAE", "x")
    assert CliRunner().invoke(app, ["start"]).exit_code == 7
    ((settings, warnings),) = started
    assert (settings.peers, settings.mdns, settings.offline) == (("10.0.0.2:1",), False, True)
    assert len(warnings) == 1 and "EXO_NAME" in warnings[0]


# ---- status, models


def test_status_shows_nodes_and_placements(stub: Stub, tmp_path: Path) -> None:
    stub.replies = {
        "/v1/cluster": as_json(_CLUSTER),
        "/v1/placements": as_json({"object": "list", "data": [_PLACEMENT]}),
        "/v1/mtp/stats": as_json({"models": {}}),
        "/v1/join/requests": as_json({"data": [{"name": "studio\x1b[2J"}]}),
    }
    with DataDirLock.acquire(tmp_path) as presence:
        presence.announce("0.0.0.0", stub.port)
        result = exo_node("status", "--data-dir", str(tmp_path), EXO_PORT="1")
        raw = exo_node("status", "--data-dir", str(tmp_path), "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert (
        result.stdout.replace(f"EXO_DATA_DIR={tmp_path} ", "")
        == r"""node     alpha (n1), http://127.0.0.1:52415, exo-node 0.1.0
head     be\x1b[2Jta, term 7
cluster  ab12, 2 nodes
asking   studio\x1b[2J; `exo-node nodes` shows who asks to join, and how to answer

NODE                STATUS   CHIP          BACKEND  MEMORY   ADDRESS
alpha (self)        alive    Apple M3 Max  metal    51.5 GB  10.0.0.1:52416
be\x1b[2Jta (head)  suspect  Apple M1      metal    12.9 GB  10.0.0.2:52416

MODEL             STATUS  STAGES                                        MTP
Qwen/Qwen3.6-27B  ready   alpha layers 0-39 → be\x1b[2Jta layers 40-63  off: 2 stages
"""
    )
    expected = {"cluster": _CLUSTER, "placements": [_PLACEMENT], "answered": {}}
    assert json.loads(raw.stdout) == expected


def test_models_are_a_table(stub: Stub) -> None:
    fit = {"nodes": 1, "needed_bytes": 1, "tokens_per_second": 9.0, "reason": None}
    demo = {
        **DEMO,
        "size_bytes": 33_044_512,
        "format": "bfloat16",
        "fits": fit,
        "mtp": "head found",
    }
    short = {**fit, "nodes": 3, "context_length": 8192, "shortened": True}
    large = {**QWEN, "size_bytes": 27 * 10**9, "format": "4-bit", "fits": short}
    off = {"weights": "missing", "enabled": False, "reason": "no mtp.*"}
    missing = {**large, "id": "b", "native_mtp": off, "loaded": False}
    missing["fits"] = {**fit, "nodes": 0, "needed_bytes": 68 * 10**9}
    broken = {"id": "c\x1b[2J", "error": "model.safetensors is truncated"}
    listed = {"object": "list", "data": [demo, large, missing, broken]}
    stub.replies = {"/v1/models": as_json(listed)}
    result = exo_node("models", "--port", str(stub.port))
    assert (result.returncode, result.stderr.count("\n")) == (0, 1)
    assert (
        result.stdout
        == """MODEL             SIZE     FORMAT    FITS                      LOADED  NATIVE MTP
demo              33 MB    bfloat16  yes                       no      head found
Qwen/Qwen3.6-27B  27.0 GB  4-bit     on 3 nodes, 8,192 tokens  yes     -
b                 27.0 GB  4-bit     no: needs 68.0 GB         no      off: no mtp.*
c\\x1b[2J          -        -         -                         no      cannot be used: model.safetensors is truncated
"""  # noqa: E501
    )
    assert json.loads(exo_node("models", "--json", EXO_PORT=str(stub.port)).stdout) == listed


def test_show_asks_the_running_node_how_fast_the_model_is(stub: Stub, tmp_path: Path) -> None:
    port = ("--port", str(stub.port), "--data-dir", str(tmp_path))
    fit = {"nodes": 1, "needed_bytes": 1, "tokens_per_second": 81.5, "estimated": False}
    demo = {**DEMO, "fits": fit, "loaded": True}
    for listed, words in (([demo], "as measured 81.5 tokens a second"), ([], "estimated ")):
        stub.replies = {"/v1/models": as_json({"object": "list", "data": listed})}
        output = exo_node("models", "show", "demo", *port)
        assert words in output.stdout, output
    offline = exo_node("models", "show", "demo", "--data-dir", str(tmp_path))
    assert "estimated " in offline.stdout, offline


def test_models_need_no_running_node(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "me" / "tiny", "llama")
    variables = {"EXO_DATA_DIR": str(tmp_path / "data"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    result = exo_node("models", "--json", "--models-dir", str(tmp_path), **variables)
    assert result.returncode == 0, result.stderr
    listed = {entry["id"]: entry for entry in json.loads(result.stdout)["data"]}
    assert listed.keys() == {"demo", "me/tiny"}
    assert (listed["demo"]["fits"]["nodes"], listed["demo"]["format"]) == (1, "bfloat16")
    assert "no MTP head" in listed["me/tiny"]["mtp"]
    best = json.loads(exo_node("models", "recommend", "--json", **variables).stdout)["data"]
    ids = {entry["id"] for entry in best}
    assert ids and all(entry["fits"]["nodes"] for entry in best) and not ids & {"demo", "me/tiny"}


# ---- stop


@contextmanager
def holder(data_dir: Path, before: str, *, then: str = "") -> "Generator[subprocess.Popen[str]]":
    code = (
        "import signal, sys; from pathlib import Path\n"
        "from exo_node.node.machine.data_dir_lock import DataDirLock\n"
        f"{before}\nheld = DataDirLock.acquire(Path(sys.argv[1])){then}\n"
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
        result = exo_node("stop", "--data-dir", str(tmp_path), *json_flag)
        assert result.returncode == 0
        assert find_running(tmp_path) is None
        assert process.wait(60) == -signal.SIGTERM
    if json_flag:
        assert json.loads(result.stdout) == {"stopped": True, "pid": process.pid}
    else:
        assert (result.stdout, result.stderr) == ("", f"stopped the node with pid {process.pid}\n")


def test_stop_waits_for_a_node_as_long_as_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers may take longer than anybody would wait for a node that hangs."""
    monkeypatch.setattr("exo_node.node.cli.start.TIMES.stop_silence_s", 0.5)
    monkeypatch.setattr("exo_node.node.cli.start.TIMES.health_s", 0.1)
    paths: list[str] = []

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            _ = self.wfile.write(b"{}")
            if len(paths) == 10:
                process.kill()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        answers = threading.Thread(target=server.serve_forever)
        answers.start()
        lives = f"; held.announce('127.0.0.1', {server.server_port})"
        ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        with holder(tmp_path, ignores, then=lives) as process:
            result = CliRunner().invoke(app, ["stop", "--data-dir", str(tmp_path)])
        server.shutdown()
        answers.join()
    assert result.exit_code == 0 and set(paths) == {"/health/live"} and len(paths) >= 10
    assert result.stderr.count("stop again to cut them short") == 1


def test_stop_gives_up_on_a_node_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo_node.node.cli.start.TIMES.stop_silence_s", 0.2)
    with holder(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)") as process:
        result = CliRunner().invoke(app, ["stop", "--data-dir", str(tmp_path)])
        assert result.exit_code == 1
        assert f"kill -9 {process.pid}" in result.stderr
        assert process.poll() is None


def test_the_list_of_commands_has_the_beginning_of_the_help_of_each() -> None:
    """The list is made without the modules of the commands."""
    for name, sentence in COMMANDS.items():
        assert " ".join(load_command(name).help.split()).startswith(sentence), name


def test_each_command_is_explained_in_one_short_line() -> None:
    assert {name for name, sentence in COMMANDS.items() if len(sentence) > 60} == set()


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["serve", "--port", "no"], ["start", "--port", "no"]),
        (["run", "tiny", "--max-tokens", "0"], ["chat", "--model", "tiny", "--max-tokens", "0"]),
        (["ls", "--port", "no"], ["models", "--port", "no"]),
        (["ps", "--port", "no"], ["status", "--port", "no"]),
        (["top", "--json"], ["status", "--json"]),
        (["pull", "nobody/nothing", "--no"], ["models", "pull", "nobody/nothing", "--no"]),
        (["rm"], ["models", "rm"]),
        (["delete", "demo"], ["models", "rm", "demo"]),
        (["import", "no.gguf"], ["models", "import", "no.gguf"]),
        (["search", "qwen"], ["models", "search", "qwen"]),
        (["version"], ["--version"]),
    ],
)
def test_the_words_of_other_programs_are_understood(words: list[str], own: list[str]) -> None:
    result, expected = exo_node(*words), exo_node(*own)
    assert (result.returncode, result.stdout) == (expected.returncode, expected.stdout)
    assert result.stderr == expected.stderr and "No such command" not in result.stderr


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (("plan",), "MODEL"),
        (("chat",), "[PROMPT]"),
        (("approve",), "DIGITS [NAME]"),
        (("deny",), "[NAME]"),
        (("models", "rm"), "ID"),
    ],
)
def test_usage_lines_have_no_marks_of_the_parser(command: tuple[str, ...], usage: str) -> None:
    first = exo_node(*command, "--help").stdout.splitlines()[0]
    assert first == f"Usage: exo-node {' '.join(command)} [OPTIONS] {usage}"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        *(("statsu", " Did you mean 'status'"), ("pul", " Did you mean 'pull'?")),
        *(("versoin", " Did you mean 'version'"), ("qqq", "")),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest(word: str, hint: str) -> None:
    refused = CliRunner().invoke(app, [word])
    assert refused.exit_code == 2
    assert refused.stderr.splitlines()[-1].startswith(f"Error: No such command '{word}'.{hint}")


def test_a_search_lists_the_hubs_models_with_their_fit(stub: Stub) -> None:
    hits = [
        {"id": "a/one", "size_bytes": 2 * 10**9, "fits": {"nodes": 1}},
        {"id": "a/two", "size_bytes": 10**9, "error": "it has no config.json\x1b[2J"},
        {"id": "a/three", "size_bytes": 9 * 10**10, "fits": {"nodes": 0, "needed_bytes": 10**11}},
    ]
    stub.replies["/v1/models/search?q=qwen%203%2Fx"] = as_json({"data": hits})
    result = exo_node("models", "search", "qwen", "3/x", "--port", str(stub.port))
    assert result.returncode == 0, result.stderr
    rows = result.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["MODEL", "a/one", "a/two", "a/three"]
    assert "yes" in rows[1] and "no config.json\\x1b" in rows[2] and "needs 100.0 GB" in rows[3]
    assert "models pull a/one" in result.stderr


def test_a_search_of_nothing_and_one_without_the_hub_say_so(stub: Stub) -> None:
    stub.replies["/v1/models/search?q=x"] = as_json({"data": []})
    empty = exo_node("models", "search", "x", "--port", str(stub.port))
    assert (empty.returncode, empty.stdout) == (0, "") and "no safetensors" in empty.stderr
    fault = {"error": {"message": "the hub could not be searched", "code": "download_failed"}}
    stub.replies["/v1/models/search?q=x"] = as_json(fault, 503)
    failed = exo_node("models", "search", "x", "--port", str(stub.port))
    assert failed.returncode != 0 and "could not be searched" in failed.stderr
