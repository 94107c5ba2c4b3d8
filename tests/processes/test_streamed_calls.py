"""A real node with a random model streams calls in parts that add up to the whole answer's call."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from families_text import folder_of
from models import make_checkpoint
from nodes import Node, node
from openai import OpenAI

ASK: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 8},
        "lines": {"type": "integer", "minimum": 0, "maximum": 9},
        "content": {"type": "string", "minLength": 150, "maxLength": 200},
    },
    "required": ["path", "lines", "content"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "write", "parameters": PARAMETERS}
CHAT: dict[str, Any] = {
    "messages": ASK,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "reasoning_effort": "none",
}
MODEL = "writer"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("writer")
    models = folder / "models"
    model = make_checkpoint(
        models / MODEL, "qwen3_5", dtype="float32", vocab=4352, raw=False, mtp=False, seed=3
    )
    family: Path = folder_of("qwen")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        _ = shutil.copy(family / name, model / name)
    data = folder / "data"
    data.mkdir()
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(models))
    with node(data, *flags) as started:
        yield started


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def whole(running: Node) -> str:
    """The arguments of the answer that is not streamed."""
    reply = running.call("POST", "/v1/chat/completions", {"model": MODEL, **CHAT})
    assert reply.status == 200, reply
    [call] = reply.body["choices"][0]["message"]["tool_calls"]
    arguments: str = call["function"]["arguments"]
    assert len(json.loads(arguments)["content"]) >= 150
    return arguments


def assert_streamed(deltas: list[str], whole: str) -> None:
    """Asserts that the deltas add up to `whole`, in more than ten parts of less than half of it."""
    assert "".join(deltas) == whole
    assert max(map(len, deltas)) < len(whole) / 2
    assert len(deltas) > 10


def test_openais_client_receives_a_call_in_parts(
    running: Node, whole: str, closing: ExitStack
) -> None:
    url = f"http://127.0.0.1:{running.port}/v1"
    client: Any = closing.enter_context(OpenAI(base_url=url, api_key="any", max_retries=0))
    chunks = list(client.chat.completions.create(model=MODEL, stream=True, **CHAT))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert_streamed([call.function.arguments or "" for call in calls], whole)
    assert calls[0].function.name == "write"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    fields: dict[str, Any] = {"model": MODEL, "input": "hi", "temperature": 0}
    fields |= {"tools": [{"type": "function", "strict": False, **FUNCTION}]}
    fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**fields, reasoning={"effort": "none"}) as stream:
        kind = "response.function_call_arguments.delta"
        deltas = [event.delta for event in stream if event.type == kind]
        [item] = stream.get_final_response().output
    assert_streamed(deltas, whole)
    assert item.arguments == whole


def test_anthropics_client_receives_a_call_in_parts(
    running: Node, whole: str, closing: ExitStack
) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    url = f"http://127.0.0.1:{running.port}"
    client = closing.enter_context(anthropic.Anthropic(base_url=url, api_key="any", max_retries=0))
    with client.messages.stream(
        model=MODEL,
        max_tokens=2000,
        messages=ASK,
        tools=[{"name": "write", "input_schema": PARAMETERS}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        extra_body={"temperature": 0},
    ) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert_streamed(deltas, whole)
    assert [block.input for block in message.content] == [json.loads(whole)]
    assert message.stop_reason == "tool_use"
