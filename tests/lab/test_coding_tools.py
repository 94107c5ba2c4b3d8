"""The real coding tools, started by `exo-node launch`, each with a scripted task.

Runs those that are in PATH, each in an empty repository and with a home of its own. The model's
answers are scripted (`tests/scripted.py`), and everything else is as it is for a user. `-s` prints
the versions and the tokens of both requests, in the demo's vocabulary.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from nodes import COMMAND, Node, node
from scripted import Script, make_scripted
from stubborn_templates import TURNS

from exo_node.node.cli.coding_tools import TOOLS

ASK = "Write a greeting into greeting.txt"
DONE = "The greeting is written."
GREETING = "hello from the script"
_COUNTERS = ("prompt_tokens", "prefix_cache_hits")
_AIDER = (
    "--yes-always --no-check-update --no-show-release-notes --no-auto-commits --no-analytics "
    "--no-pretty --no-gitignore greeting.txt"
)


@dataclass(frozen=True, slots=True)
class Task:
    """The function that the model calls, the words that start the tool without a terminal, what it
    reads from stdin, and the least share of its second request that is cached."""

    function: str
    arguments: tuple[str, ...]
    fields: tuple[str, ...]
    stdin: str = ""
    cached: float = 0.9

    def script(self, file: Path) -> Script:
        if not self.function:  # aider reads edits from the text
            return Script(f"greeting.txt\n```\n{GREETING}\n```\n")
        values = (str(file), GREETING) if len(self.fields) > 1 else (f"echo {GREETING} > {file}",)
        return Script(DONE, (self.function, dict(zip(self.fields, values, strict=True))))


CHECKS = {"-turns": TURNS, "": ""}
"""What the models' templates refuse, by the end of the models' names: Mistral's, Gemma's and Llama
2's want turns of a user and of the assistant."""
TASKS = {
    "claude": Task(
        "Write", ("-p", ASK, "--permission-mode", "acceptEdits"), ("file_path", "content")
    ),
    "codex": Task(
        "exec_command",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK),
        ("cmd",),
    ),
    "opencode": Task("write", ("run", ASK), ("filePath", "content")),
    "qwen": Task("write_file", ("--yolo", ASK), ("file_path", "content")),
    "copilot": Task("create", ("-p", ASK, "--allow-all-tools"), ("path", "file_text")),
    "aider": Task("", tuple(_AIDER.split()), (), f"{ASK}\nOnce more\n", 0.3),
}


MODELS = {f"{name}{end}": (name, check) for end, check in CHECKS.items() for name in TASKS}


def test_every_tool_of_launch_has_a_task() -> None:
    assert TASKS.keys() == TOOLS.keys()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository for each tool, and their home."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "home").mkdir()
    for model in MODELS:
        _ = subprocess.run(["git", "init", "-q", str(folder / model)], check=True)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, work: Path) -> Generator[Node]:
    """A node with two models for each tool."""
    folder = tmp_path_factory.mktemp("served")
    for model, (name, check) in MODELS.items():
        script = TASKS[name].script(work / model / "greeting.txt")
        _ = make_scripted(folder / "models" / model, script, check=check)
    flags = ("--no-mdns", "--models-dir", str(folder / "models"))
    with node(folder / "a", *flags, sound=True) as running:
        yield running


@pytest.mark.parametrize("model", MODELS)
def test_a_tool_completes_its_task_and_its_second_turn_is_cached(
    served: Node, work: Path, model: str
) -> None:
    name, _ = MODELS[model]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: {TOOLS[name].install}")
    task = TASKS[name]
    home = {"HOME": str(work / "home"), "PWD": str(work / model)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EXO_", "XDG_", "CLAUDE"))}
    ended = subprocess.run(
        [COMMAND, "launch", name, model, "--data-dir", str(served.data_dir), "--", *task.arguments],
        cwd=work / model,
        env=kept | home,
        input=task.stdin,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (work / model / "greeting.txt").read_text().strip() == GREETING, ended.stdout
    assert not task.function or DONE in ended.stdout
    read, cached = (_counter(served, model, counter) for counter in _COUNTERS)
    # At most what the first request had is cached, so the second one has at most the rest.
    print(f"{model}: {read} tokens, {cached} of them cached; {_version(name)}")
    assert cached > task.cached * (read - cached)


def _counter(served: Node, model: str, name: str) -> int:
    """A counter of the node's metrics."""
    with urlopen(f"http://127.0.0.1:{served.port}/metrics") as reply:
        page = reply.read().decode()
    line = re.search(rf'^vllm:{name}_total{{.*model_name="{model}".*}} (\S+)$', page, re.MULTILINE)
    assert line is not None
    return int(float(line[1]))


def _version(name: str) -> str:
    ended = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
    return ended.stdout.strip()
