"""The real coding tools, each with a scripted task: to write a file with marks of calls in it.

Runs those that are in PATH, each in an empty repository and with a home of its own. The model's
answers are scripted (`tests/scripted.py`), and everything else is as it is for a user. `-s` prints
the versions and the tokens of the requests, in the demo's vocabulary.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from nodes import COMMAND, Node, node
from scripted import Call, Script, make_scripted
from stubborn_templates import TURNS
from tool_runs import counter, run_tool, skip_without, version

from exo_node.node.cli.coding_tools import TOOLS

ASK = "Write a greeting into greeting.txt"
DONE = "The greeting is written."
GREETING = "hello </tool_call> and </parameter> from </function> the script"
"""It has the marks of the format in which the scripted models call."""
_COUNTERS = ("prompt_tokens", "prefix_cache_hits")
_AIDER = (
    "--yes-always --no-check-update --no-show-release-notes --no-auto-commits --no-analytics "
    "--no-pretty --no-gitignore greeting.txt"
)
_SERVER = str(Path(__file__).parent.parent / "mcp_notes.py")
_CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK)
_CODEX_SERVER = (
    *("-c", f"mcp_servers.notes.command={json.dumps(sys.executable)}"),
    *("-c", f"mcp_servers.notes.args={json.dumps([_SERVER])}"),
)
_CLAUDE_SERVER = json.dumps(
    {"mcpServers": {"notes": {"command": sys.executable, "args": [_SERVER]}}}
)


@dataclass(frozen=True, slots=True)
class Task:
    """The function that writes the file, the words that start the tool without a terminal, what it
    reads from stdin, and the least share of its later requests that is cached.

    `first` and `last` are the model's calls before and after that one. `tool`: the tool, if the
    task has another name.
    """

    function: str
    arguments: tuple[str, ...]
    fields: tuple[str, ...]
    stdin: str = ""
    cached: float = 0.9
    first: Call | None = None
    last: Call | None = None
    tool: str | None = None

    def script(self, file: Path) -> Script:
        if not self.function:  # aider reads edits from the text
            return Script(f"greeting.txt\n```\n{GREETING}\n```\n")
        command = f"printf %s {shlex.quote(GREETING)} > {shlex.quote(str(file))}"
        values = (str(file), GREETING) if len(self.fields) > 1 else (command,)
        call: Call = (self.function, dict(zip(self.fields, values, strict=True)))
        first, *further = (each for each in (self.first, call, self.last) if each is not None)
        return Script(DONE, first, tuple(further))


CHECKS = {"-turns": TURNS, "": ""}
"""What the models' templates refuse, by the end of the models' names: Mistral's, Gemma's and Llama
2's want turns of a user and of the assistant."""
TASKS = {
    "claude": Task(
        "Write", ("-p", ASK, "--permission-mode", "acceptEdits"), ("file_path", "content")
    ),
    "codex": Task("exec_command", _CODEX, ("cmd",)),
    "opencode": Task("write", ("run", ASK), ("filePath", "content")),
    "qwen": Task("write_file", ("--yolo", ASK), ("file_path", "content")),
    "copilot": Task("create", ("-p", ASK, "--allow-all-tools"), ("path", "file_text")),
    "aider": Task("", tuple(_AIDER.split()), (), f"{ASK}\nOnce more\n", 0.3),
}
"""A task for each tool of `exo-node launch`, by its name."""
SERVER_TASKS = {
    "codex-server": Task(
        "mcp__notes__write_note", (*_CODEX, *_CODEX_SERVER), ("path", "text"), tool="codex"
    ),
    # Codex has facts about models of its own, by their names: to this one it offers a search.
    "gpt-5.5": Task(
        "mcp__notes__write_note",
        (*_CODEX, *_CODEX_SERVER),
        ("path", "text"),
        first=("tool_search", {"query": "write note"}),
        tool="codex",
    ),
    "claude-server": Task(
        "mcp__notes__write_note",
        ("-p", ASK, "--mcp-config", _CLAUDE_SERVER, "--allowedTools", "mcp__notes__write_note"),
        ("path", "text"),
        first=("ToolSearch", {"query": "select:mcp__notes__write_note"}),
        tool="claude",
    ),
}
"""Tasks that are done by a tool of an MCP server, some of them found by a search, by the model."""
CLINE = Task(
    "editor",
    ("--yolo", ASK),
    ("path", "new_text"),
    last=("submit_and_exit", {"summary": DONE, "verified": "true"}),
)
LAUNCHED = {f"{name}{end}": TASKS[name] for end in CHECKS for name in TASKS} | SERVER_TASKS
ALL_TASKS = {**LAUNCHED, "cline": CLINE}
"""The tasks by their models."""


def test_every_tool_of_launch_has_a_task() -> None:
    assert TASKS.keys() == TOOLS.keys()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository for each task, and the tools' home."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "home").mkdir()
    for name in ALL_TASKS:
        _ = subprocess.run(["git", "init", "-q", str(folder / name)], check=True)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, work: Path) -> Generator[Node]:
    """A node with one model for each task, of the task's name."""
    folder = tmp_path_factory.mktemp("served")
    for name, task in ALL_TASKS.items():
        script = task.script(work / name / "greeting.txt")
        check = next(check for end, check in CHECKS.items() if name.endswith(end))
        _ = make_scripted(folder / "models" / name, script, check=check)
    flags = ("--no-mdns", "--models-dir", str(folder / "models"))
    with node(folder / "a", *flags, sound=True) as running:
        yield running


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_tool_completes_its_task_and_its_last_turn_is_cached(
    served: Node, work: Path, name: str
) -> None:
    task = ALL_TASKS[name]
    tool = task.tool or name.removesuffix("-turns")
    skip_without(tool, TOOLS[tool].install)
    launch = (COMMAND, "launch", tool, name, "--data-dir", str(served.data_dir), "--")
    ended = run_tool(work, name, (*launch, *task.arguments), task.stdin)
    _check(served, work, name, ended)
    print(version(tool))


def test_cline_completes_its_task(served: Node, work: Path) -> None:
    skip_without("cline", "npm install -g cline")
    url = f"http://127.0.0.1:{served.port}/v1"
    words = ("cline", "auth", "-p", "openai", "-b", url, "-k", "any", "-m", "cline")
    ended = run_tool(work, "cline", words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ended = run_tool(work, "cline", ("cline", *CLINE.arguments))
    _check(served, work, "cline", ended)
    print(version("cline"))


def _check(served: Node, work: Path, name: str, ended: "subprocess.CompletedProcess[str]") -> None:
    task = ALL_TASKS[name]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (work / name / "greeting.txt").read_text().strip() == GREETING, ended.stdout
    assert not task.function or DONE in ended.stdout
    read, cached = (counter(served, name, each) for each in _COUNTERS)
    # The first request's tokens are read at least; those that came after it have at most the rest.
    print(f"{name}: {read} tokens, {cached} of them cached")
    later = 1 if task.first is None else 2
    assert cached > task.cached * later * (read - cached)
