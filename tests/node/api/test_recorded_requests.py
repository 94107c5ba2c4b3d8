"""Bodies in the shapes that agents and libraries send, which are no dependencies here: all served.

The shapes are those that a server heard: of the AI SDK 6.0.326 with its provider 2.0.91 for servers
that are compatible with OpenAI's, asked as opencode's sources ask it, and of litellm 1.106.2 with
its `openai/` provider. The texts are our own.
"""

from typing import Any

import pytest
from fakes import ANSWER, says
from http_node import Node

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
OPENCODE_TURN: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32000,
    "top_p": 1,
    "promptCacheKey": "ses_1",
    "reasoning_effort": "medium",
    "verbosity": "low",
    "messages": [
        {"role": "system", "content": "You are opencode, an agent."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is in a.py?"},
                {"type": "text", "text": "Called the read tool with a.py"},
            ],
        },
        {
            "role": "assistant",
            "content": None,
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
OPENCODE_PLUGIN: dict[str, Any] = {
    **OPENCODE_TURN,
    "messages": [
        OPENCODE_TURN["messages"][0],
        {"role": "system", "content": "What a plugin adds."},
        OPENCODE_TURN["messages"][1],
        # Earlier providers wrote no null.
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        OPENCODE_TURN["messages"][3],
    ],
}
LITELLM_TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Read a.py"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc123de0", "name": "read", "content": "x = 1"},
    ],
    "model": "demo",
    "stream": True,
    "tool_choice": "auto",
    "tools": [READ],
}
LITELLM_SCHEMA: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "model": "demo",
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "schema": {
                "properties": {"x": {"title": "X", "type": "integer"}},
                "required": ["x"],
                "title": "Point",
                "type": "object",
                "additionalProperties": False,
            },
            "name": "Point",
            "strict": True,
        },
    },
}
BODIES = {
    "opencode's turn": OPENCODE_TURN,
    "opencode's turn with a plugin": OPENCODE_PLUGIN,
    "litellm's tools": LITELLM_TOOLS,
    "litellm's schema": LITELLM_SCHEMA,
}
HEADERS = {
    "authorization": "Bearer sk-anything",
    "user-agent": "opencode/1.4 ai-sdk/provider-utils/4.0.64 runtime/node.js/v20.20.2",
    "x-session-affinity": "ses_1",
    "accept-language": "*",
    "sec-fetch-mode": "cors",
    "x-stainless-lang": "python",
    "x-stainless-raw-response": "true",
}


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
    (request,) = node.chat.requests
    assert len(request.messages) == len(body["messages"])
    assert [m["role"] for m in request.messages] == [m["role"] for m in body["messages"]]
    assert request.limits.max_tokens == body.get("max_tokens", 0)
    assert request.output.HasField("grammar") == ("response_format" in body)
    if body.get("stream"):
        assert reply.body.endswith(b"data: [DONE]\n\n")
        apart = "stream_options" in body
        assert (b'"choices":[]' in reply.body) == apart, "usage in a chunk of its own, if asked"
