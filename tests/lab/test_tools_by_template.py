"""The real coding tools with publishers' templates: each edits a file with the format's own marks.

The templates are those under `CHAT_TEMPLATES`, and the models write calls as each template spells
them (`tests/published_models.py`). `-s` prints the tokens that were read and cached.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from nodes import COMMAND, Node, node
from published_models import MODELS, Call, PublishedModel, make_published, published_texts
from tool_runs import counter, run_tool, skip_without, version

from exo_node.node.cli.coding_tools import TOOLS

ASK = "Edit the greeting in greeting.txt"
DONE = "The greeting is edited."
Answers = Sequence[Sequence[Call]]
TEMPLATES = published_texts()
pytestmark = pytest.mark.skipif(
    not TEMPLATES, reason="CHAT_TEMPLATES names no folder with templates: see CONTRIBUTING.md"
)
_SERVER = str(Path(__file__).parent.parent / "mcp_notes.py")
_CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK)
_CODEX_SERVER = (
    *("-c", f"mcp_servers.notes.command={json.dumps(sys.executable)}"),
    *("-c", f"mcp_servers.notes.args={json.dumps([_SERVER])}"),
)


@dataclass(frozen=True, slots=True)
class Edit:
    """A file, and its text before and after the edit."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Task:
    """The words that start a tool without a terminal, the function that edits, and the model's
    calls; those of one answer are made in one turn."""

    tool: str
    arguments: tuple[str, ...]
    function: str
    answers: Callable[[Edit], Answers]


def _calls(read: str, path: str, edit: str, *texts: str) -> Callable[[Edit], Answers]:
    """Two calls in one turn that read the file, and one that edits it; the names of arguments."""

    def answers(one: Edit) -> Answers:
        arguments = dict(zip((path, *texts), (one.file, one.old, one.new), strict=True))
        return [[(read, {path: one.file})] * 2, [(edit, arguments)]]

    return answers


def _codex(edit: Edit) -> Answers:
    removed = "".join(f"-{line}\n" for line in edit.old.splitlines())
    added = "".join(f"+{line}\n" for line in edit.new.splitlines())
    patch = f"*** Begin Patch\n*** Update File: greeting.txt\n@@\n{removed}{added}*** End Patch"
    return [
        [("exec_command", {"cmd": "cat greeting.txt"}), ("exec_command", {"cmd": "pwd"})],
        [("exec_command", {"cmd": f"apply_patch <<'EOF'\n{patch}\nEOF\n"})],
    ]


def _codex_server(edit: Edit) -> Answers:
    return [
        [("exec_command", {"cmd": "cat greeting.txt"})],
        [("mcp__notes__write_note", {"path": edit.file, "text": edit.new})],
    ]


def _cline(edit: Edit) -> Answers:
    arguments = {"path": edit.file, "old_text": edit.old, "new_text": edit.new}
    return [
        [("run_commands", {"commands": ["cat greeting.txt"]})],
        [("editor", arguments)],
        [("submit_and_exit", {"summary": DONE, "verified": True})],
    ]


TASKS: Mapping[str, Task] = {
    "claude": Task(
        "claude",
        ("-p", ASK, "--permission-mode", "acceptEdits"),
        "Edit",
        _calls("Read", "file_path", "Edit", "old_string", "new_string"),
    ),
    "codex": Task("codex", _CODEX, "exec_command", _codex),
    "codex-server": Task(
        "codex", (*_CODEX, *_CODEX_SERVER), "mcp__notes__write_note", _codex_server
    ),
    "opencode": Task(
        "opencode",
        ("run", ASK),
        "edit",
        _calls("read", "filePath", "edit", "oldString", "newString"),
    ),
    "qwen": Task(
        "qwen",
        ("--yolo", ASK),
        "edit",
        _calls("read_file", "file_path", "edit", "old_string", "new_string"),
    ),
    "cline": Task("cline", ("--yolo", ASK), "editor", _cline),
}


def _edit(model: PublishedModel, task: Task, file: Path) -> Edit:
    sample = model.sample(task.function)
    return Edit(str(file), f"first {sample}", f"hello {sample}, twice: {sample}")


@pytest.fixture(scope="module", params=MODELS)
def publisher(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in TEMPLATES:
        pytest.skip(f"no template {MODELS[name].template} is in CHAT_TEMPLATES")
    return name


@dataclass(frozen=True, slots=True)
class Workplace:
    """A node with one model for each task, of the task's name, and a repository for each."""

    node: Node
    folder: Path
    edits: Mapping[str, Edit]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, publisher: str) -> Generator[Workplace]:
    folder, model = tmp_path_factory.mktemp(publisher), MODELS[publisher]
    edits: dict[str, Edit] = {}
    for name, task in TASKS.items():
        _ = subprocess.run(["git", "init", "-q", str(folder / name)], check=True)
        edits[name] = _edit(model, task, folder / name / "greeting.txt")
        _ = Path(edits[name].file).write_text(edits[name].old + "\n")
        answers = task.answers(edits[name])
        _ = make_published(folder / "models" / name, model, TEMPLATES[publisher], answers, DONE)
    (folder / "home").mkdir()
    flags = ("--no-mdns", "--models-dir", str(folder / "models"))
    with node(folder / "a", *flags, sound=True) as running:
        yield Workplace(running, folder, edits)


@pytest.mark.parametrize("name", TASKS)
def test_a_tool_edits_a_file_with_the_formats_own_marks(work: Workplace, name: str) -> None:
    task = TASKS[name]
    install = TOOLS[task.tool].install if task.tool in TOOLS else "npm install -g cline"
    skip_without(task.tool, install)
    ended = run_tool(work.folder, name, _words(work, name))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    edit = work.edits[name]
    assert Path(edit.file).read_text().rstrip("\n") == edit.new, ended.stdout + ended.stderr
    assert DONE in ended.stdout
    read, cached = (
        counter(work.node, name, each) for each in ("prompt_tokens", "prefix_cache_hits")
    )
    print(f"{name}: {read} tokens, {cached} of them cached; {version(task.tool)}")
    # Cline's last call ends its work. Two calls of a turn may be two answers.
    later = len(task.answers(edit)) - (task.tool == "cline")
    assert cached > 0.7 * later * (read - cached)


def _words(work: Workplace, name: str) -> tuple[str, ...]:
    """The words that start the tool; Cline is told of the node first."""
    task = TASKS[name]
    if task.tool in TOOLS:
        launch = (COMMAND, "launch", task.tool, name, "--data-dir", str(work.node.data_dir), "--")
        return (*launch, *task.arguments)
    url = f"http://127.0.0.1:{work.node.port}/v1"
    words = ("cline", "auth", "-p", "openai", "-b", url, "-k", "any", "-m", name)
    ended = run_tool(work.folder, name, words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ("cline", *task.arguments)
