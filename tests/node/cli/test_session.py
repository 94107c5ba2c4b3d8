"""`exo-node chat` as a conversation: its commands, and a person at a real terminal."""

import json
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from api_stub import COMMAND, DEMO, Stub, as_events, as_json, environment, exo_node

from exo_node.node.cli import flags
from exo_node.node.cli.chat import HELP, ChatSession, EndSession, Json, run
from exo_node.node.cli.client import Comment
from exo_node.node.cli.failures import CommandFailed
from exo_node.node.cli.main import COMMANDS, FIRST

_CHAT = "/v1/chat/completions"
WITHIN_S = 30.0
EDITING = b"\x1b[?2004h"
"""The sequence that switches on bracketed paste."""


def delta(text: str) -> Json:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


class Typed:
    """Lines of a person; an exception among them is raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = list(lines)

    def read(self, prompt: str) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def bodies_of(
    session: ChatSession, *lines: str | BaseException, fault: BaseException | None = None
) -> Any:
    """The bodies of the requests; each answer is the number of its question."""
    bodies: list[Json] = []

    def ask(body: Mapping[str, Any]) -> Iterable[Json | Comment]:
        bodies.append(json.loads(json.dumps(body)))
        yield delta(f"answer {len(bodies)}")
        if fault is not None:
            raise fault
        yield {"choices": [], "generation_stats": {"drafter_kind": "none", "generation_tps": 3}}

    run(session, Typed(*lines), ask)
    return bodies


def test_each_question_comes_with_what_was_said_before() -> None:
    bodies = bodies_of(ChatSession("demo"), "/system Be short.", "one", "two", "/clear", "three")
    system = {"role": "system", "content": "Be short."}
    first = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "answer 1"}]
    assert bodies[1]["messages"] == [system, *first, {"role": "user", "content": "two"}]
    assert bodies[2]["messages"] == [system, {"role": "user", "content": "three"}]


def test_settings_reach_the_request_and_are_taken_back() -> None:
    session = ChatSession("demo", ("demo", "big"))
    name = "num_draft_tokens"
    lines = ("/set temperature 0.5", f"/set {name} 2", "/model big", "one")
    one, two = bodies_of(session, *lines, "/set temperature -", f"/set {name} -", "two")
    assert (one["temperature"], one["num_draft_tokens"], one["model"]) == (0.5, 2, "big")
    assert not {"temperature", "num_draft_tokens"} & two.keys()


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("/nonsense", "there is no /nonsense"),
        ("/set", "everything is the model's own"),
        ("/set color 3", "/set NAME VALUE"),
        ("/set top_k three", "three is no number"),
        ("/set temperature nan", "nan is no number"),
        ("/model nope", "nope is not on this cluster; demo, big are"),
        ("/stats", "nothing was answered yet"),
        ("/help", HELP),
    ],
)
def test_a_command_says_what_it_did_or_what_is_wrong(line: str, reply: str) -> None:
    session = ChatSession("demo", ("demo", "big"))
    assert reply in session.command(line)
    assert session.options == {}


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said_of_it() -> None:
    session = ChatSession("demo")
    bodies = bodies_of(session, "one", KeyboardInterrupt(), "two", fault=KeyboardInterrupt())
    assert [message["content"] for message in bodies[1]["messages"]] == ["one", "answer 1", "two"]


def test_a_failed_answer_ends_neither_the_session_nor_stays_as_a_lone_question(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts: list[int] = []

    def ask(body: Mapping[str, Any]) -> Iterable[Json | Comment]:
        counts.append(len(body["messages"]))
        raise CommandFailed("the node is gone")
        yield {}

    run(ChatSession("demo"), Typed("one", "two"), ask)
    assert counts == [1, 1]
    assert capsys.readouterr().err.count("exo-node: the node is gone") == 2


def test_quit_ends_it() -> None:
    with pytest.raises(EndSession):
        _ = ChatSession("demo").command("/quit")
    assert len(bodies_of(ChatSession("demo"), "one", "/quit", "two")) == 1


# --------------------------------------------------------------------------- the command


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.replies = {
        "/v1/models": as_json({"object": "list", "data": [{**DEMO, "loaded": True}]}),
        _CHAT: as_events(delta("Hello"), "data: [DONE]"),
    }
    return stub


def test_a_pipe_without_a_prompt_is_the_prompt(stub: Stub) -> None:
    result = exo_node("chat", "--port", str(stub.port), stdin="from a pipe")
    assert (result.returncode, result.stdout) == (0, "Hello\n"), result.stderr
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": "from a pipe"}]


def test_on_a_terminal_nothing_begins_a_conversation(stub: Stub, tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    command = [*COMMAND, "chat", "--port", str(stub.port), "--data-dir", str(tmp_path)]
    child = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment(), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    screen = bytearray()

    def see(text: bytes) -> None:
        """Then that the editor has the terminal, which would take Ctrl-D for its own."""
        until = time.monotonic() + WITHIN_S
        while EDITING not in screen.partition(text)[2]:
            assert time.monotonic() < until, bytes(screen)
            if select.select([mine], [], [], 1)[0]:
                screen.extend(os.read(mine, 4096))

    try:
        see(b"/help lists the commands")
        _ = os.write(mine, b"hi\r")
        see(b"Hello")
        _ = os.write(mine, b"/set top_k 3\r")
        see(b"top_k is 3")
        _ = os.write(mine, b"\x04")
        assert child.wait(WITHIN_S) == 0
    finally:
        child.kill()
        _ = child.wait()
        os.close(mine)
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    history = tmp_path / "chat_history"
    assert "hi" in history.read_text() and history.stat().st_mode & 0o777 == 0o600


def test_the_shell_completes_models_of_the_running_node(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_PORT", str(stub.port))
    assert flags.models_on_disk("d") == ["demo"]
    assert flags.models_on_disk("x") == []
    monkeypatch.setenv("EXO_PORT", "1")
    assert flags.models_on_disk("d") == []


def test_help_lists_first_what_people_do_first() -> None:
    text = exo_node().stderr
    _, *groups, last = text.split("\n\n")
    lines = [line for group in groups for line in group.split("\n") if line.startswith("  ")]
    names = [line.split()[0] for line in lines if line[2] not in " -"]
    assert names[:4] == ["Run", "start", "chat", "dashboard"]
    assert set(COMMANDS) <= set(names)
    assert "..." not in text.partition("Every day:")[2], "each help is one line, whole"
    assert last.split() == FIRST.split()
