"""The dialects as their own official clients see them, over a real server and a scripted chat."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FINISHED, says
from http_node import ASK, BODIES, Node

from exo_node.node.chat.requests import (
    AnswerProgress,
    CallPart,
    Event,
    ReasoningDelta,
    Started,
    TextDelta,
)
from exo_node.placement.errors import InsufficientMemory, PeerLost, QueueFull

THOUGHT: tuple[Event, ...] = (
    Started((7, 8, 9)),
    TextDelta("", (10,)),
    ReasoningDelta("hm"),
    TextDelta("I ", (11,)),
    TextDelta("look.", ()),
    CallPart(name="weather", arguments='{"city": "Ulm"}', ends=True),
    CallPart(name="weather", arguments='{"city": "Bonn"}', ends=True),
    FINISHED,
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture
def node(running: Node) -> Node:
    running.chat.reset()
    running.chat.scripts["thinks"] = says(*THOUGHT)
    running.chat.scripts["breaks"] = says(*THOUGHT[:4], then=PeerLost("a node is gone"))
    running.chat.scripts["busy"] = says(then=QueueFull("too many wait"))
    return running


def module(name: str) -> Any:
    """A package of the extra `clients`."""
    return pytest.importorskip(name)


def test_openais_client_completes_a_text(node: Node, openai: Any) -> None:
    completion = openai.completions.create(model="demo", prompt="Once", max_tokens=5)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("héllo", "stop")
    stream = openai.completions.create(model="demo", prompt=[1, 2], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "héllo"
    first, second = node.chat.requests
    assert (first.text, first.ids, first.limits.max_tokens) == ("Once", None, 5)
    assert (second.text, second.ids, second.limits.max_tokens) == (None, (1, 2), 16)


def test_texts_and_ids_are_told_without_an_answer(node: Node) -> None:
    reply = node.ask("POST", "/v1/tokenize", {"model": "demo", "prompt": "ab"}).json
    assert reply == {"count": 2, "max_model_len": 4096, "tokens": [97, 98]}
    chat = node.ask("POST", "/v1/tokenize", {"model": "demo", "messages": ASK}).json
    assert chat["count"] == 2
    reply = node.ask("POST", "/v1/detokenize", {"model": "demo", "tokens": [97, 98]})
    assert reply.json == {"prompt": "ab"}
    refused = node.ask("POST", "/v1/tokenize", {"model": "demo"})
    assert (refused.status, refused.error["param"]) == (400, "prompt")


def test_anthropics_client_gets_blocks(node: Node, anthropic: Any) -> None:
    message = anthropic.messages.create(
        model="thinks",
        max_tokens=50,
        system="Be brief.",
        messages=ASK,
        tools=[{"name": "weather", "input_schema": PARAMETERS}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    blocks = [block.to_dict() for block in message.content]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("hm", "I look.")
    assert [block["input"] for block in blocks[2:]] == [{"city": "Ulm"}, {"city": "Bonn"}]
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (1, 2)
    (request,) = node.chat.requests
    assert request.messages[0] == {"role": "system", "content": "Be brief."}
    assert request.options == {"thinking": True, "budget": 1024}
    assert request.tools[0]["function"]["parameters"] == PARAMETERS


def test_anthropics_client_counts_tokens(anthropic: Any) -> None:
    count = anthropic.messages.count_tokens(model="demo", messages=ASK, system="s")
    assert count.input_tokens == 3


def test_anthropics_client_gets_errors_of_its_own_kinds(node: Node, anthropic: Any) -> None:
    with pytest.raises(module("anthropic").NotFoundError) as missing:
        _ = anthropic.messages.create(model="nope", max_tokens=5, messages=ASK)
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    with pytest.raises(module("anthropic").RateLimitError):
        _ = anthropic.messages.create(model="busy", max_tokens=5, messages=ASK)
    with pytest.raises(module("anthropic").APIStatusError, match="a node is gone"):
        for _ in anthropic.messages.create(model="breaks", max_tokens=5, messages=ASK, stream=True):
            pass


CLAUDE_CODE: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}
    ],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {"$schema": "x", "type": "object", "properties": {"path": {}}},
            "cache_control": {"type": "ephemeral"},
            "eager_input_streaming": True,
        },
        {"type": "web_search_20260101", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Read a.py"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read it.", "signature": "s"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "x = 1"}],
                },
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "The time is noon."},
    ],
}


def test_a_request_in_the_shape_of_claude_codes_is_served_and_what_is_unknown_is_named(
    node: Node,
) -> None:
    reply = node.ask("POST", "/v1/messages?beta=true", CLAUDE_CODE)
    assert reply.status == 200
    assert set(reply.headers["x-exo-node-ignored"].split(", ")) == {
        "tools[].eager_input_streaming",
        "tools[].max_uses",
        "context_management",
        "tools[] of type web_search_20260101",
    }
    (request,) = node.chat.requests
    assert [message["role"] for message in request.messages] == [
        *("system", "user", "assistant", "tool", "user", "system")
    ]
    assistant, tool = request.messages[2], request.messages[3]
    assert assistant["reasoning_content"] == "I read it."
    assert assistant["tool_calls"][0]["function"] == {"name": "Read", "arguments": {"path": "a.py"}}
    assert (tool["content"], tool["tool_call_id"]) == ("x = 1", "t1")
    assert [tool["function"]["name"] for tool in request.tools] == ["Read"]
    assert request.options == {"effort": "medium", "thinking": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"system": 5}, "system"),
    ],
    ids=str,
)
def test_a_bad_messages_request_is_refused_in_anthropics_words(
    node: Node, fields: dict[str, object], param: str
) -> None:
    body = {"model": "demo", "max_tokens": 5, "messages": ASK, **fields}
    reply = node.ask("POST", "/v1/messages", body)
    assert reply.status == 400
    assert reply.json["type"] == "error"
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param


def test_openais_client_gets_a_response(node: Node, openai: Any) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    response = openai.responses.create(
        model="thinks", input="hi", instructions="Be brief.", tools=[tool], max_output_tokens=9
    )
    assert response.output_text == "I look."
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert response.usage is not None and response.usage.output_tokens == 3
    (request,) = node.chat.requests
    assert [m["role"] for m in request.messages] == ["system", "user"]
    assert (request.limits.max_tokens, request.tools[0]["function"]["name"]) == (9, "weather")


def test_a_response_that_breaks_off_ends_as_failed(node: Node, openai: Any) -> None:
    """Codex retries by the code of `response.failed`, and takes any other end for a lost line."""
    events = list(openai.responses.create(model="breaks", input="hi", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert "a node is gone" in last.response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))


CODEX: dict[str, Any] = {
    "model": "demo",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "The sandbox is on."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command":["ls"]}',
            "call_id": "1",
        },
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "a.py"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
        {"type": "web_search_call", "id": "ws_1"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"},
}


def test_a_request_in_the_shape_of_codexs_is_served(node: Node) -> None:
    patch = CallPart(name="apply_patch", arguments='{"input": "*** Begin Patch"}', ends=True)
    node.chat.scripts["demo"] = says(Started((7,)), patch, FINISHED)
    reply = node.ask("POST", "/v1/responses", CODEX)
    assert reply.status == 200
    assert set(reply.headers["x-exo-node-ignored"].split(", ")) == {
        "client_metadata",
        "tools[].external_web_access",
        "tools[] of type web_search",
        "an item of type web_search_call",
    }
    (request,) = node.chat.requests
    roles = [message["role"] for message in request.messages]
    assert roles == ["system", "system", "user", "assistant", "tool", "tool"]
    calls = [call["function"] for call in request.messages[3]["tool_calls"]]
    assert calls == [
        {"name": "shell", "arguments": {"command": ["ls"]}},
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
    ]
    lines = [line for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    item = json.loads(lines[-1].removeprefix("data: "))["response"]["output"][0]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin Patch")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"background": True, "store": True}, "background"),
        ({"background": "yes"}, "background"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "of_tomorrow"}]}, "input"),
    ],
    ids=str,
)
def test_a_response_that_needs_more_is_refused(
    node: Node, fields: dict[str, object], param: str
) -> None:
    reply = node.ask("POST", "/v1/responses", {"model": "demo", "input": "hi", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_ollamas_client_chats(node: Node, ollama: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    answer = ollama.chat(model="thinks:latest", messages=ASK, tools=[tool], think=True)
    assert (answer.message.content, answer.message.thinking) == ("I look.", "hm")
    calls: list[Any] = answer.message.tool_calls or []
    assert [call.function.arguments for call in calls] == [{"city": "Ulm"}, {"city": "Bonn"}]
    assert (answer.prompt_eval_count, answer.eval_count, answer.done_reason) == (3, 3, "stop")
    parts = list(ollama.chat(model="demo", messages=ASK, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "héllo"
    assert [part.done for part in parts] == [False, False, True]
    request = node.chat.requests[0]
    assert request.tools[0]["function"]["name"] == "weather"
    assert request.options == {"thinking": True}


def test_ollamas_client_generates(node: Node, ollama: Any) -> None:
    options = {"temperature": 0, "num_predict": 7, "draft_num_predict": 2, "num_ctx": 4096}
    answer = ollama.generate(model="demo", prompt="hi", system="s", options=options)
    assert answer.response == "héllo"
    raw = ollama.generate(model="demo", prompt="hi", raw=True)
    assert raw.response == "héllo"
    assert ollama.generate(model="demo", prompt="").done_reason == "load"
    first, second, third = node.chat.requests
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert (first.limits.max_tokens, first.num_draft_tokens) == (7, 2)
    assert first.sampling.temperature == 0 and "temperature" in first.explicit_fields
    assert (second.text, third.text) == ("hi", ".")


LARGE: dict[str, Any] = {
    "id": "owner/large-model",
    "loaded": True,
    "downloaded": True,
    "size_bytes": 15_400_000_000,
    "parameters": 27_400_000_000,
    "model_type": "qwen3_5",
    "format": "4-bit",
    "digest": "0123456789abcdef",
    "context_length": 65_536,
    "capabilities": ["thinking", "thinking_toggle", "tools"],
    "fits": {"context_length": 8192},
}


def test_ollamas_client_discovers_tools_sizes_and_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch, ollama: Any
) -> None:
    stage = {"model": LARGE["id"], "weight_bytes": 10**10, "cache_bytes": 10**9}
    nodes = [
        {"backend": "metal", "stages": [stage, {**stage, "model": "demo"}]},
        {"backend": "cpu", "stages": [stage]},
    ]

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [LARGE, {"id": "broken", "error": "no config.json"}]}

    async def cluster() -> dict[str, Any]:
        return {"nodes": nodes}

    monkeypatch.setattr(node.operations, "models", models)
    monkeypatch.setattr(node.operations, "cluster", cluster)
    large, broken = ollama.list().models
    assert (large.digest, large.size) == ("0123456789abcdef", 15_400_000_000)
    details = large.details
    assert (details.family, details.parameter_size) == ("qwen3_5", "27.4B")
    assert details.quantization_level == "4-bit"
    assert len(broken.digest) >= 12 and broken.digest.isalnum()
    [running] = ollama.ps().models
    assert (running.size, running.size_vram) == (22 * 10**9, 11 * 10**9)
    assert (running.context_length, running.digest) == (65_536, large.digest)
    model = ollama.show("owner/large-model")
    assert model.capabilities == ["completion", "tools", "thinking"]
    assert model.modelinfo["general.architecture"] == "qwen3_5"
    assert model.modelinfo["qwen3_5.context_length"] == 65_536
    monkeypatch.setitem(LARGE, "loaded", False)
    assert ollama.show("owner/large-model").modelinfo["qwen3_5.context_length"] == 8192
    version = node.ask("GET", "/api/version").json["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_ollamas_client_gets_errors_as_text(node: Node, ollama: Any) -> None:
    with pytest.raises(module("ollama").ResponseError, match="there is no model 'nope'") as caught:
        _ = ollama.chat(model="nope", messages=ASK)
    assert caught.value.status_code == 404
    with pytest.raises(module("ollama").ResponseError, match="a node is gone"):
        _ = list(ollama.chat(model="breaks", messages=ASK, stream=True))


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b"]}


def test_usage_counts_reasoning_and_messages_name_the_stop_string(node: Node, openai: Any) -> None:
    end = replace(FINISHED, reasoning_tokens=2, stopped_by="###")
    node.chat.scripts["demo"] = says(Started((1,)), ReasoningDelta("hm"), TextDelta("a", (2,)), end)
    chat = openai.chat.completions.create(model="demo", messages=ASK)
    assert chat.usage is not None and chat.usage.completion_tokens_details is not None
    assert chat.usage.completion_tokens_details.reasoning_tokens == 2
    response = openai.responses.create(model="demo", input="hi")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    fields = {"model": "demo", "max_tokens": 5, "messages": ASK, "stop_sequences": ["###"]}
    message = node.ask("POST", "/v1/messages", fields).json
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "###")
    stream = node.ask("POST", "/v1/messages", {**fields, "stream": True}).body.decode()
    assert '"stop_reason":"stop_sequence","stop_sequence":"###"' in stream.replace(" ", "")


def test_every_dialect_says_what_an_answer_may_be(node: Node, openai: Any, ollama: Any) -> None:
    """In the field of its own clients; the order of the schema's members is kept."""
    chat = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    form: Any = chat
    _ = openai.chat.completions.create(model="demo", messages=ASK, response_format=form)
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    _ = openai.responses.create(model="demo", input="hi", text=text)
    _ = ollama.chat(model="demo", messages=ASK, format=SCHEMA)
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = {"model": "demo", "max_tokens": 5, "messages": ASK, "output_config": output}
    assert node.ask("POST", "/v1/messages", body).status == 200
    _ = ollama.generate(model="demo", prompt="hi", format="json")
    forms = [request.output.grammar for request in node.chat.requests]
    assert [form.field for form in forms if form] == [
        "response_format",
        "text.format",
        "format",
        "output_config.format",
        "format",
    ]
    assert [json.loads(form.text) for form in forms if form] == [SCHEMA] * 4 + [{"type": "object"}]
    assert all(list(json.loads(f.text)["properties"]) == ["b", "a"] for f in forms[:4] if f)


def test_every_dialect_can_insist_on_a_call(node: Node, openai: Any) -> None:
    function: Any = {"name": "weather", "parameters": PARAMETERS}
    tools: Any = [{"type": "function", "function": function}]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    for tool_choice in ("required", choice):
        _ = openai.chat.completions.create(
            model="demo", messages=ASK, tools=tools, tool_choice=tool_choice
        )
    own: Any = [{"type": "function", **function, "strict": False}]
    _ = openai.responses.create(model="demo", input="hi", tools=own, tool_choice="required")
    response = openai.responses.create(
        model="demo", input="hi", tools=own, tool_choice={"type": "function", "name": "weather"}
    )
    assert getattr(response.tool_choice, "name", None) == "weather"
    body = {"model": "demo", "max_tokens": 5, "messages": ASK}
    body |= {"tools": [{"name": "weather", "input_schema": PARAMETERS}]}
    for kind in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        assert node.ask("POST", "/v1/messages", body | {"tool_choice": kind}).status == 200
    names = [
        json.loads(r.output.grammar.text)["names"]
        for r in node.chat.requests
        if r.output.grammar.text
    ]
    assert names == [None, ["weather"]] * 3


@pytest.mark.parametrize("media_type", ["", "application/x-www-form-urlencoded"])
def test_ollamas_paths_take_what_curl_sends(node: Node, media_type: str) -> None:
    body = json.dumps({"model": "demo", "messages": ASK, "stream": False}).encode()
    headers = {"Content-Type": media_type}
    reply = node.ask("POST", "/api/chat", body, headers)
    assert (reply.status, reply.json["message"]["content"]) == (200, "héllo")
    assert node.ask("POST", "/v1/completions", body, headers).status == 415
    page = {**headers, "Origin": "http://evil.example"}
    assert node.ask("POST", "/api/chat", body, page).status == 403


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_who_is_refused_for_want_of_room_is_told_when_to_come_again_in_every_dialect(
    node: Node, path: str, stream: bool
) -> None:
    node.chat.scripts["full"] = says(then=InsufficientMemory("no room"))
    node.chat.scripts["lost"] = says(then=PeerLost("a node is gone"))
    replies = {
        model: node.ask("POST", path, {"model": model, "stream": stream, **BODIES[path]})
        for model in ("busy", "full", "lost")
    }
    assert {model: reply.status for model, reply in replies.items()} == {
        "busy": 429,
        "full": 503,
        "lost": 503,
    }
    assert replies["busy"].headers["retry-after"] == "1"
    assert replies["lost"].headers["retry-after"] == "2"
    assert replies["full"].headers["x-should-retry"] == "false", "waiting makes no room"
    kinds = {"/api/": str, "/v1/": dict}
    for reply in replies.values():
        assert isinstance(reply.json["error"], kinds[path[: path.index("/", 1) + 1]])


WAITS: tuple[Event, ...] = (
    AnswerProgress("loading 3/5"),
    AnswerProgress("resuming: stage 1 is gone"),
    AnswerProgress("prefill 2/3"),
    *THOUGHT,
)


@pytest.mark.parametrize("path", [path for path in BODIES if path.startswith("/v1/")])
def test_what_an_answer_waits_for_is_the_same_comment_in_every_dialect(
    node: Node, path: str
) -> None:
    node.chat.scripts["waits"] = says(*WAITS)
    reply = node.ask("POST", path, {"model": "waits", "stream": True, **BODIES[path]})
    comments = [line for line in reply.body.decode().splitlines() if line.startswith(":")]
    assert comments == [": loading 3/5", ": resuming: stage 1 is gone", ": prefill 2/3"]


@pytest.mark.parametrize(
    "name", ["x", " x", "x ", "\t", "é" * 150 + " y", "a " * 50, '"', "a\r\nset-cookie: b"]
)
def test_any_name_of_an_unknown_field_leaves_a_header_that_may_be_sent(
    node: Node, name: str
) -> None:
    more = {f"{name}{number}" if number else name: 1 for number in range(40)}
    body = {"model": "demo", "messages": ASK, "stream": False, **more}
    reply = node.ask("POST", "/api/chat", body)
    assert reply.status == 200
    assert len(reply.headers["x-exo-node-ignored"]) <= 1024
    assert "set-cookie" not in reply.headers


def test_llm_answers_streams_calls_and_keeps_a_conversation(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    kinds = pytest.importorskip("llm.default_plugins.openai_models")
    llm = module("llm")
    base = f"http://127.0.0.1:{node.port}/v1"
    options: dict[str, Any] = {"model_id": "exo", "api_base": base, "supports_tools": True}
    demo = kinds.Chat(model_name="demo", **options)
    demo.key = "any"
    conversation = demo.conversation()
    assert conversation.prompt("hi", stream=False).text() == "héllo"
    assert "".join(conversation.prompt("again", temperature=0.5, max_tokens=9)) == "héllo"
    request = node.chat.requests[-1]
    assert [message["content"] for message in request.messages] == ["hi", "héllo", "again"]
    assert (request.sampling.temperature, request.limits.max_tokens) == (0.5, 9)
    thinks = kinds.Chat(model_name="thinks", **options)
    thinks.key = "any"
    tool = llm.Tool(name="weather", description="", input_schema=PARAMETERS)
    for stream in (False, True):
        calls = thinks.prompt("hi", tools=[tool], stream=stream).tool_calls()
        assert [call.arguments for call in calls] == [{"city": "Ulm"}, {"city": "Bonn"}]
