"""`exo-node launch` and a real node, whose model acts out a script."""

import os
import subprocess
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from nodes import COMMAND, Node, node
from scripted import CONTEXT, Script, make_scripted
from tool_stand_ins import StandIns

pytest.importorskip("anthropic")

CALL = ("Write", {"file_path": "greeting.txt", "content": "hello"})
FINISHED = "The greeting is written."
AGENT = """
from anthropic import Anthropic
client = Anthropic(base_url=os.environ["ANTHROPIC_BASE_URL"], api_key=None, max_retries=0)
ask = {"role": "user", "content": "Write a greeting. " * 200}
schema = {"type": "object", "properties": {n: {"type": "string"} for n in ("file_path", "content")}}
tools = [{"name": "Write", "description": "Writes a file.", "input_schema": schema}]
fields = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 100, "tools": tools}
first = client.messages.create(messages=[ask], **fields)
[call] = first.content
open(call.input["file_path"], "w").write(call.input["content"])
result = {"type": "tool_result", "tool_use_id": call.id, "content": "written"}
answer = {"role": "assistant", "content": first.content}
turns = [ask, answer, {"role": "user", "content": [result]}]
second = client.messages.create(messages=turns, **fields)
print(second.content[0].text, second.usage.cache_read_input_tokens)
"""
"""Does what a coding tool does, by Anthropic's client and the variables that it was given."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("writer", "second"):
        _ = make_scripted(folder / name, Script(FINISHED, CALL))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Generator[Node]:
    folder = tmp_path_factory.mktemp("launch")
    with node(folder / "a", "--no-mdns", "--models-dir", str(models), sound=True) as running:
        yield running


@pytest.fixture
def tools(tmp_path: Path) -> StandIns:
    folder = tmp_path / "bin"
    folder.mkdir()
    return StandIns(folder)


def launching(
    served: Node, tools: StandIns, *words: str, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """`exo-node launch` in an empty folder, with the stand-ins first in PATH."""
    own, dashes, rest = [*words], [], []
    if "--" in own:
        at = own.index("--")
        own, dashes, rest = own[:at], ["--"], own[at + 1 :]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("EXO_")}
    path = f"{tools.folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [COMMAND, "launch", *own, "--data-dir", str(served.data_dir), *dashes, *rest],
        cwd=tools.folder,
        env={**environment, "PATH": path, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(served: Node, tools: StandIns, *words: str, **options: Any) -> tuple[int, str, str]:
    """The exit status, stdout and stderr."""
    process = launching(served, tools, *words, **options)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err
    return process.returncode, out, err


def placements(served: Node) -> dict[str, int]:
    """The context of each placement by its model; two of a model fail the test."""
    data = served.call("GET", "/v1/placements").body["data"]
    contexts = {each["model"]: each["context_length"] for each in data}
    assert len(contexts) == len(data)
    return contexts


def test_the_model_is_loaded_once_and_two_tools_do_their_tasks_with_cached_second_turns(
    served: Node, tools: StandIns
) -> None:
    tools.add("claude", AGENT)
    both = [launching(served, tools, "claude", "writer", "--", "-p") for _ in range(2)]
    ends = [(*process.communicate(timeout=300), process.returncode) for process in both]
    for out, err, status in ends:
        assert status == 0, err
        assert "loading writer, with 131,072 tokens of context" in err
        text, _, cached = out.strip().rpartition(" ")
        assert text == FINISHED
        assert int(cached) > 900
    assert (tools.folder / "greeting.txt").read_text() == "hello"
    assert placements(served) == {"writer": CONTEXT}
    assert [record["arguments"][-1] for record in tools.records("claude")] == ["-p", "-p"]


def test_a_model_that_is_loaded_with_less_is_loaded_again_where_a_context_is_named(
    served: Node, tools: StandIns
) -> None:
    tools.add("codex")
    small = {"model": "second", "context": 8192}
    assert served.call("POST", "/v1/placements", small).status == 200
    status, _, err = launch(served, tools, "codex", "second")
    assert (status, "`--context 16384` loads it again" in err) == (2, True), err
    assert placements(served)["second"] == 8192
    status, _, err = launch(served, tools, "codex", "second", "--context", "20000")
    assert status == 0, err
    assert placements(served)["second"] == 20000
    assert "model_context_window=20000" in tools.only("codex")["arguments"]


def test_a_node_that_asks_for_a_key_gets_the_users(
    tmp_path: Path, models: Path, tools: StandIns
) -> None:
    tools.add("claude", AGENT)
    env, flags = {"EXO_API_KEY": "s3cret"}, ("--no-mdns", "--models-dir", str(models))
    with node(tmp_path / "keyed", *flags, env=env, sound=True) as keyed:
        for wrong in ({}, {"EXO_API_KEY": "other"}):
            status, _, err = launch(keyed, tools, "claude", "writer", env=wrong)
            assert (status, "set EXO_API_KEY to the node's key" in err) == (1, True), err
        assert tools.records("claude") == []
        status, out, err = launch(keyed, tools, "claude", "writer", env=env)
        assert (status, FINISHED in out) == (0, True), err
        assert 'ANTHROPIC_AUTH_TOKEN="$EXO_API_KEY"' in err
        assert "s3cret" not in err + keyed.log.read_text()
