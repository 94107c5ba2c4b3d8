"""Bodies in the shapes that agents and libraries send, which are no dependencies here: all served.

The shapes are those of their public sources: opencode by the AI SDK's provider for servers that are
compatible with OpenAI's; litellm by its `openai/` provider, in chat, streaming and with tools.
"""

from collections.abc import Generator
from typing import Any

import pytest
from fakes import ANSWER, FINISHED, says
from http_node import Node, serving_fakes

from exo_node.node.chat.requests import Called, Started, TextDelta

READ: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file.",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"filePath": {"type": "string", "description": "The path."}},
            "required": ["filePath"],
            "additionalProperties": False,
        },
    },
}
CALL: dict[str, Any] = {
    "id": "abc123de0",
    "type": "function",
    "function": {"name": "read", "arguments": '{"filePath":"a.py"}'},
}
OPENCODE_TITLE: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32000,
    "temperature": 0.5,
    "messages": [
        {"role": "system", "content": "You are a title generator."},
        {"role": "user", "content": "Generate a title for this conversation:\n"},
        {"role": "user", "content": "hello"},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
}
OPENCODE_TURN: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32000,
    "top_p": 1,
    "reasoning_effort": "medium",
    "messages": [
        {"role": "system", "content": "You are opencode, an agent."},
        {"role": "system", "content": "Here is useful information about the environment."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is in a.py?"},
                {"type": "text", "text": "Called the read tool with a.py"},
            ],
        },
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I read it.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "abc123de0", "content": "<file>\n00001| x = 1\n</file>"},
    ],
    "tools": [READ],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
LITELLM_CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0.2,
    "max_tokens": 16,
}
LITELLM_TOOLS: dict[str, Any] = {
    "model": "demo",
    "messages": [
        {"role": "user", "content": "Read a.py"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL],
            "function_call": None,
        },
        {"role": "tool", "tool_call_id": "abc123de0", "name": "read", "content": "x = 1"},
    ],
    "tools": [READ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
LITELLM_SCHEMA: dict[str, Any] = {
    **LITELLM_CHAT,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "Point",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    },
}
BODIES = {
    "opencode's title": OPENCODE_TITLE,
    "opencode's turn": OPENCODE_TURN,
    "litellm's chat": LITELLM_CHAT,
    "litellm's tools": LITELLM_TOOLS,
    "litellm's schema": LITELLM_SCHEMA,
}
HEADERS = {
    "authorization": "Bearer sk-anything",
    "user-agent": "ai-sdk/openai-compatible",
    "x-stainless-lang": "python",
}


@pytest.fixture(scope="module")
def running() -> Generator[Node]:
    with serving_fakes() as node:
        yield node


@pytest.fixture
def node(running: Node) -> Node:
    running.chat.reset()
    running.chat.scripts["demo"] = says(*ANSWER)
    return running


@pytest.mark.parametrize("name", BODIES)
def test_a_body_in_that_shape_is_served(node: Node, name: str) -> None:
    body = BODIES[name]
    reply = node.ask("POST", "/v1/chat/completions", body, HEADERS)
    assert reply.status == 200, reply.body
    (asked,) = node.chat.requests
    assert len(asked.messages) == len(body["messages"])
    assert [m["role"] for m in asked.messages] == [m["role"] for m in body["messages"]]
    assert asked.max_tokens == body.get("max_tokens")
    assert (asked.grammar is not None) == ("response_format" in body)
    if body.get("stream"):
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert b'"choices":[]' in reply.body, "usage in a chunk of its own"


@pytest.mark.parametrize("body", [OPENCODE_TURN, LITELLM_TOOLS], ids=["opencode", "litellm"])
def test_the_result_of_a_call_comes_back_to_the_model(node: Node, body: dict[str, Any]) -> None:
    node.chat.scripts["demo"] = says(
        Started((1,)), TextDelta("", (2,)), Called("read", '{"filePath":"b.py"}'), FINISHED
    )
    reply = node.ask("POST", "/v1/chat/completions", {**body, "stream": False}, HEADERS)
    assert reply.status == 200, reply.body
    (asked,) = node.chat.requests
    call, result = asked.messages[-2], asked.messages[-1]
    assert call["tool_calls"][0]["function"] == {
        "name": "read",
        "arguments": {"filePath": "a.py"},
    }
    assert result["tool_call_id"] == "abc123de0"
    assert [tool["function"]["name"] for tool in asked.tools] == ["read"]
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"filePath":"b.py"}'
