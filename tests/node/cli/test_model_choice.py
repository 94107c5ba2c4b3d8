"""The model that `exo-node launch` chooses, over a stub of the node."""

from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from api_stub import DEMO, QWEN, Stub, as_json, in_process

LOADED = {**QWEN, "capabilities": ["tools"], "fits": {"context_length": 262144}}
OTHER = {
    "id": "other",
    "loaded": False,
    "capabilities": ["tools"],
    "fits": {"context_length": 40960},
}
SMALL = {**DEMO, "loaded": True, "capabilities": ["tools"], "fits": {"context_length": 4096}}
EMBEDDER = {"id": "e", "loaded": True, "context_length": 40960, "capabilities": ["embeddings"]}
PROFILE = {**LOADED, "id": "gpt-4o", "profile_of": QWEN["id"]}
SHORT = {**LOADED, "id": "short", "context_length": 8192}
ELSEWHERE = {"id": "elsewhere", "loaded": False, "context_length": 40960, "fits": None}
BROKEN = {"id": "broken", "loaded": False, "error": "its config.json is missing"}
PREVIEW = "/v1/placements/preview?model="


def serve(stub: Stub, *entries: Any) -> None:
    stub.replies["/v1/models"] = as_json({"object": "list", "data": entries})


def printed(stub: Stub, *arguments: str, **extra: str) -> Any:
    return in_process("launch", *arguments, "--print", "--port", str(stub.port), **extra)


def output(result: Any) -> str:
    return " ".join(result.output.split())


def test_the_loaded_model_is_taken_and_nothing_is_loaded(stub: Stub) -> None:
    serve(stub, EMBEDDER, OTHER, PROFILE, LOADED)
    result = printed(stub, "claude")
    assert result.exit_code == 0, result.output
    assert f"ANTHROPIC_MODEL={QWEN['id']} " in result.stdout
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=262144 " in result.stdout
    assert stub.bodies == []


def test_of_several_loaded_models_the_one_with_enough_context_is_taken(stub: Stub) -> None:
    serve(stub, SMALL, LOADED)
    assert f"ANTHROPIC_MODEL={QWEN['id']} " in printed(stub, "claude").stdout


@pytest.mark.parametrize(
    ("entries", "arguments", "words"),
    [
        (
            [SMALL | {"loaded": False}, OTHER, BROKEN],
            [],
            "no model is loaded; `exo-node launch claude MODEL` names one: other",
        ),
        ([SMALL | {"loaded": False}, ELSEWHERE], [], "MODEL` names one: elsewhere"),
        ([SMALL | {"loaded": False}], [], "no model here has the 32,768 tokens of context"),
        ([LOADED, {**LOADED, "id": "second"}], [], "several models are loaded; `exo-node launch"),
        ([SMALL, OTHER], [], "demo has 4,096 tokens of context, and Claude Code needs 32,768"),
        ([SMALL, OTHER], ["demo"], "`exo-node launch claude MODEL` names one: other"),
        ([SHORT], [], "`--context 32768` loads it again with so many"),
        ([BROKEN], ["broken"], "broken cannot be used: its config.json is missing"),
        ([LOADED], ["absent"], "no model 'absent' is on this machine"),
        ([EMBEDDER, OTHER], ["e"], "e embeds and does not answer; name another"),
    ],
)
def test_a_model_that_cannot_serve_the_tool_is_refused_with_those_that_can(
    stub: Stub, entries: list[Any], arguments: list[str], words: str
) -> None:
    serve(stub, *entries)
    absent = {"error": {"message": "no model 'absent' is on this machine", "code": "x"}}
    stub.replies[f"{PREVIEW}absent"] = as_json(absent, 404)
    result = printed(stub, "claude", *arguments)
    assert result.exit_code in (1, 2)
    assert words in output(result)
    assert stub.bodies == []


PICTURES = {**OTHER, "id": "pictures", "capabilities": ["vision"]}


@pytest.mark.parametrize(("tool", "words"), [("claude", "no model here"), ("aider", "pictures")])
def test_a_model_that_calls_no_tools_is_named_for_those_alone_that_need_none(
    stub: Stub, tool: str, words: str
) -> None:
    serve(stub, PICTURES)
    assert words in output(printed(stub, tool))


def test_a_model_without_a_format_for_calls_is_noted_for_tools_that_call(stub: Stub) -> None:
    serve(stub, {**LOADED, "capabilities": []})
    for tool, noted in (("codex", True), ("aider", False)):
        result = printed(stub, tool)
        assert result.exit_code == 0
        assert ("no format for calling tools" in result.stderr) is noted


def test_the_context_of_a_model_that_is_not_loaded_is_the_one_of_the_plan(stub: Stub) -> None:
    serve(stub, {**OTHER, "profile_of": "base"})
    stub.replies[f"{PREVIEW}base"] = as_json({"best": {"context_length": 49152}})
    result = printed(stub, "claude", "other")
    assert "ANTHROPIC_MODEL=other " in result.stdout
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=49152 " in result.stdout
    assert stub.bodies == []


def test_what_a_load_would_be_refused_for_is_the_error(stub: Stub) -> None:
    serve(stub, OTHER)
    plan = {"best": {"context_length": 49152}, "refusal": "no node has the files"}
    stub.replies[f"{PREVIEW}other"] = as_json(plan)
    result = printed(stub, "claude", "other")
    assert (result.exit_code, "no node has the files" in result.stderr) == (1, True)


def test_another_tool_is_refused_with_the_names(stub: Stub) -> None:
    result = printed(stub, "cursor")
    assert result.exit_code == 2
    assert "'cursor' is none of claude, codex, opencode, qwen, copilot, aider" in output(result)


def test_the_list_is_asked_for_as_the_tool_will_ask(stub: Stub, tmp_path: Path) -> None:
    messages: list[Message] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        messages.append(handler.headers)
        as_json({"object": "list", "data": [LOADED]})(handler)

    stub.replies["/v1/models"] = reply
    _ = (tmp_path / "local.token").write_text("0" * 64)
    result = printed(stub, "claude", EXO_DATA_DIR=str(tmp_path), EXO_API_KEY="k3y")
    assert result.exit_code == 0, result.output
    [headers] = messages
    assert (headers["Authorization"], headers["X-Exo-Token"]) == ("Bearer k3y", None)
