"""The past of a conversation is read as far as it can be, in every dialect."""

import copy
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from fakes import FINISHED, says
from http_node import Node, Reply
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_node.node.api.http.bodies import parse_body
from exo_node.node.api.http.dialects import Dialect, Exchange
from exo_node.node.api.messages.messages_api import MESSAGES
from exo_node.node.api.ollama.ollama_api import OLLAMA_CHAT
from exo_node.node.api.openai.openai_api import CHAT
from exo_node.node.api.responses.responses_api import parsed_response
from exo_node.node.api.responses.responses_schema import ResponsesBody
from exo_node.node.chat.requests import CallPart, Event, ReasoningDelta, Started, TextDelta
from exo_node.placement.errors import InvalidRequest
from exo_node.placement.ids import RequestId

Path = tuple[str | int, ...]
REQUEST = RequestId("req_0123456789abcdef")
PIXEL = "iVBORw0KGgo="
ASK: list[Any] = [{"role": "user", "content": "hi"}]
MARK = "MARK!"
"""A text that is no base64."""


def of(dialect: Dialect[Any]) -> Callable[[bytes], Exchange]:
    return lambda raw: dialect.parse(parse_body(raw, dialect.body), REQUEST)


READ: dict[str, Callable[[bytes], Exchange]] = {
    "chat": of(CHAT),
    "messages": of(MESSAGES),
    "ollama": of(OLLAMA_CHAT),
    "responses": lambda raw: parsed_response(parse_body(raw, ResponsesBody), REQUEST).exchange,
}
CALL = {"name": "edit", "arguments": '{"path": "apple"}'}
PICTURE = {"type": "base64", "media_type": "image/png", "data": PIXEL}
HISTORY: dict[str, list[Any]] = {
    "chat": [
        {"role": "system", "content": "banana"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "cherry", "cache_control": {"type": "ephemeral"}},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
            ],
            "name": "date",
        },
        {
            "role": "assistant",
            "content": "elder",
            "reasoning_content": "fig",
            "refusal": None,
            "tool_calls": [{"id": "call1", "type": "function", "index": 0, "function": CALL}],
        },
        {"role": "tool", "tool_call_id": "call1", "content": [{"type": "text", "text": "grape"}]},
        {"role": "assistant", "function_call": {"name": "look", "arguments": '{"at": "hazel"}'}},
        {"role": "function", "name": "look", "content": "kiwi"},
        {"role": "assistant", "content": None, "refusal": "lemon"},
        {"role": "user", "content": "mango"},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "cherry", "cache_control": {"type": "ephemeral"}},
                {"type": "image", "source": PICTURE},
                {"type": "document", "title": "date", "source": {"type": "text", "data": "elder"}},
                {"type": "document", "source": PICTURE},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "fig", "signature": "exo-node"},
                {"type": "text", "text": "grape", "citations": None},
                {"type": "tool_use", "id": "call1", "name": "edit", "input": {"path": "apple"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call1",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "hazel"},
                        {
                            "type": "search_result",
                            "source": "https://kiwi",
                            "title": "lemon",
                            "content": [{"type": "text", "text": "nut"}],
                        },
                    ],
                },
                {"type": "text", "text": "olive"},
            ],
        },
        {"role": "user", "content": "mango"},
    ],
    "ollama": [
        {"role": "system", "content": "banana"},
        {"role": "user", "content": "cherry", "images": [PIXEL]},
        {
            "role": "assistant",
            "content": "elder",
            "thinking": "fig",
            "tool_calls": [{"function": {"name": "edit", "arguments": {"path": "apple"}}}],
        },
        {"role": "tool", "tool_name": "edit", "content": "grape"},
        {"role": "user", "content": "mango"},
    ],
    "responses": [
        {"role": "developer", "content": "banana"},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "cherry"},
                {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
            ],
        },
        {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "fig"}]},
        {
            "type": "message",
            "id": "m1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "elder", "annotations": [], "logprobs": []}
            ],
        },
        {"type": "function_call", "call_id": "call1", "status": "incomplete", **CALL},
        {"type": "custom_tool_call", "call_id": "call2", "name": "patch", "input": "grape"},
        {"type": "function_call_output", "call_id": "call1", "output": "hazel"},
        {
            "type": "custom_tool_call_output",
            "call_id": "call2",
            "output": [{"type": "input_text", "text": "kiwi"}],
        },
        {"type": "tool_search_call", "call_id": "call3", "arguments": {"query": "lemon"}},
        {
            "type": "tool_search_output",
            "call_id": "call3",
            "tools": [{"type": "function", "name": "look", "description": "nut"}],
        },
        {
            "type": "function_call",
            "call_id": "call4",
            "namespace": "n",
            "name": "olive",
            "arguments": "{}",
        },
        {"role": "user", "content": "mango"},
    ],
}
WORDS = (
    *("apple", "banana", "cherry", "date", "elder", "fig", "grape", "hazel", "kiwi", "lemon"),
    *("mango", "nut", "olive", "look", "patch"),
)
SILENT = frozenset(
    (
        *("id", "type", "index", "status", "cache_control", "signature", "annotations"),
        *("logprobs", "media_type", "citations", "refusal", "is_error"),
    )
)
"""Fields that no prompt has, and which are dropped without a word."""


def read(dialect: str, history: object) -> tuple[str, list[str]]:
    """The messages for the template as JSON, and the names of what was dropped."""
    key = "input" if dialect == "responses" else "messages"
    exchange = READ[dialect](json.dumps({"model": "m", key: history}).encode())
    addresses = [image.url for image in exchange.request.images]
    messages = json.dumps([*exchange.request.messages, *addresses])
    assert all(isinstance(each["role"], str) for each in exchange.request.messages)
    return messages, list(exchange.ignored)


def places(value: object, at: Path = ()) -> Iterator[Path]:
    """Every place in the value, but the value itself."""
    inner: dict[Any, object] = {}
    if isinstance(value, dict):
        inner = cast("dict[Any, object]", value)
    elif isinstance(value, list):
        inner = dict(enumerate(cast("list[object]", value)))
    for step, each in inner.items():
        yield (*at, step)
        yield from places(each, (*at, step))


def parent(value: Any, at: Path) -> Any:
    for step in at[:-1]:
        value = value[step]
    return value


def words(value: object) -> set[str]:
    text = json.dumps(value)
    return {word for word in WORDS if word in text}


ODD: list[Any] = [
    *(None, True, 0, -1.5, 2**63, "", MARK, [], {}, [None], [[]], [{}], [MARK], {MARK: 1}),
    *({"type": MARK}, {"text": MARK}, {"type": "text", "text": MARK}, [{"type": MARK}]),
    *({"type": "image"}, {"type": "text"}, [{"type": "input_file"}], {"a": [{"b": [MARK]}]}),
    *("[1]", '{"a": ', "null", " ", "user", "assistant", "tool", "text", "image_url"),
    *("data:image/png;base64,@", "https://127.0.0.1/" + MARK, "x" * 5000),
]
VALUES: st.SearchStrategy[Any] = st.sampled_from(ODD)
DIALECTS = sorted(READ)


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, Path, str, Any]:
    dialect = draw(st.sampled_from(DIALECTS))
    at = draw(st.sampled_from(list(places(HISTORY[dialect]))))
    return dialect, at, draw(st.sampled_from(["drop", "replace", "add"])), draw(VALUES)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_whole_history_is_read_and_nothing_of_it_is_named(dialect: str) -> None:
    text, ignored = read(dialect, HISTORY[dialect])
    assert words(text) == words(HISTORY[dialect])
    assert ignored == (["a part of type document"] if dialect == "messages" else [])


@settings(max_examples=800, deadline=None)
@given(damages())
def test_any_damage_is_survived_and_what_it_costs_is_named(
    damage: tuple[str, Path, str, Any],
) -> None:
    dialect, at, action, value = damage
    history = copy.deepcopy(HISTORY[dialect])
    inside, last = parent(history, at), at[-1]
    lost, is_lost = words(inside[last]), True
    if action == "drop":
        del inside[last]
    elif action == "replace":
        inside[last] = value
    elif isinstance(last, int):
        inside.insert(last, value)
        is_lost = False
    else:
        inside[f"new_{last}"] = value
        is_lost = False
    try:
        text, ignored = read(dialect, history)
    except InvalidRequest as fault:
        assert at[0] == len(HISTORY[dialect]) - 1, "only the latest turn asks the model to read"
        assert re.search("read files|data URL|begins with data:image|no valid base64", str(fault))
        return
    expected = words(history) if not is_lost else words(history) | (words(HISTORY[dialect]) - lost)
    assert expected <= words(text) or ignored, (expected - words(text), text)
    names = {each for each in at if isinstance(each, str)}
    if MARK in json.dumps(value) and action != "drop" and not names & SILENT:
        assert MARK in text or ignored, (text, history)


def call_of(arguments: object, **fields: object) -> list[Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call], **fields}, ASK[0]]


def arguments_of(history: object) -> tuple[Any, list[str]]:
    messages, ignored = read("chat", history)
    return json.loads(messages)[0]["tool_calls"][0]["function"]["arguments"], ignored


@pytest.mark.parametrize("arguments", ["", " \n", "null", None, {}, "{}"])
def test_arguments_that_are_nothing_are_an_empty_object(arguments: object) -> None:
    assert arguments_of(call_of(arguments)) == ({}, [])


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": NaN}', "\x00", '{"a": 1, "a": 2}', "5"])
def test_arguments_that_are_no_json_object_reach_the_model_as_text(arguments: str) -> None:
    named = "messages[].tool_calls[].function.arguments (no JSON object; the model reads the text)"
    assert arguments_of(call_of(arguments)) == ({"arguments": arguments}, [named])


OF_OTHERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"reasoning": "because"}, []),
    ({"reasoning": "because", "reasoning_content": "because"}, []),
    ({"reasoning_content": "because", "reasoning": "not"}, ["messages[].reasoning"]),
    ({"reasoning": "because", "reasoning_details": [{"a": 1}]}, ["messages[].reasoning_details"]),
    (
        {"thinking": "because", "provider_specific_fields": {"a": 1}},
        ["messages[].provider_specific_fields"],
    ),
    ({"reasoning": "because", "thinking_blocks": [], "audio": None, "function_call": None}, []),
    ({"content": [{"type": "thinking", "thinking": "because"}]}, []),
]


@pytest.mark.parametrize(("fields", "names"), OF_OTHERS, ids=lambda value: str(value)[:60])
def test_reasoning_is_read_by_each_of_its_names(fields: dict[str, Any], names: list[str]) -> None:
    messages, ignored = read("chat", [{"role": "assistant", "content": None, **fields}, ASK[0]])
    assert (json.loads(messages)[0]["reasoning_content"], ignored) == ("because", names)


def test_a_result_that_names_no_call_answers_the_first_that_has_none() -> None:
    calls = [*call_of("{}"), *call_of("{}")]
    calls[0]["tool_calls"][0]["id"], calls[2]["tool_calls"][0]["id"] = "a", "b"
    results: list[Any] = [{"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}]
    messages, ignored = read("chat", [calls[0], calls[2], *results])
    ids = [each["tool_call_id"] for each in json.loads(messages)[2:]]
    assert (ids, ignored) == (["a", "b"], [])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_history_of_which_nothing_is_left_is_refused(dialect: str) -> None:
    with pytest.raises(InvalidRequest, match="that this node can read"):
        _ = read(dialect, [5, None, {"x": 1}])


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


def nested_results(depth: int) -> Any:
    block: Any = {"type": "text", "text": "x", "title": 5}
    for _ in range(depth):
        block = {"type": "tool_result", "tool_use_id": "c", "is_error": 5, "content": [block, 5]}
    return [{"role": "user", "content": [block]}, ASK[0]]


HOSTILE: dict[str, tuple[str, Any]] = {
    "results in results": ("messages", nested_results(150)),
    "texts of many lists": ("chat", call_of("[" + "[]," * 90_000 + "[]]") * 80),
    "objects of many lists": ("chat", call_of(json.dumps({"a": [[]] * 90_000})) * 80),
    "odd parts": ("chat", [{"role": "user", "content": [{"a": 1}] * 1000}] * 16),
    "odd messages": ("responses", [{"a": 1}] * 8000 + [ASK[0]]),
    "odd calls": ("ollama", [{"role": "assistant", "tool_calls": [5] * 500}] * 100),
    "results without calls": ("chat", [{"role": "tool", "content": "x"}] * 4000),
    "calls without results": ("chat", call_of("{}")[:1] * 2000 + [{"role": "tool"}] * 2000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_histories_cost_little(name: str) -> None:
    dialect, history = HOSTILE[name]
    began = time.thread_time()
    try:
        _, ignored = read(dialect, history)
        assert len(ignored) < 5000
    except InvalidRequest as fault:
        assert fault.param
    assert time.thread_time() - began < 3.0, "they took 0.5 s at most"


CUT: tuple[Event, ...] = (
    Started((7, 8, 9)),
    ReasoningDelta("fig"),
    TextDelta("grape", (10,)),
    CallPart(name="edit", arguments='{"path": "apple"}', ends=True),
    CallPart(name="look", arguments='{"at": "haz', ends=True, is_cut=True),
    replace(FINISHED, reason="length"),
)
ANSWERS: dict[str, tuple[Event, ...]] = {
    "whole": (*CUT[:4], FINISHED),
    "cut": CUT,
    "thoughts alone": (*CUT[:2], FINISHED),
    "nothing": (Started((7,)), FINISHED),
    "text": (Started((7,)), TextDelta("grape", (10,)), FINISHED),
}


def events_of(reply: Reply) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.body.decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def chat_message(events: list[dict[str, Any]]) -> list[Any]:
    """The message that a client adds up, with all fields that it got."""
    message: dict[str, Any] = {"content": None, "refusal": None}
    calls: list[Any] = []
    for event in events:
        for choice in event["choices"]:
            delta: dict[str, Any] = choice["delta"]
            for name in ("content", "reasoning_content"):
                if name in delta:
                    message[name] = (message.get(name) or "") + delta[name]
            message |= {"role": delta["role"]} if "role" in delta else {}
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    calls.append(part)
                else:
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return [message | ({"tool_calls": calls} if calls else {})]


def messages_message(events: list[dict[str, Any]]) -> list[Any]:
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = message["content"][-1], event["delta"]
                block["json"] += delta.pop("partial_json", "")
                kind = delta.pop("type")
                for name, text in delta.items():
                    block[name] = block.get(name, "") + text
                assert kind.endswith("_delta")
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
            case _:
                pass
    for block in message["content"]:
        text = block.pop("json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text)
            except ValueError:
                block["input"] = text
    return [message]


def ollama_message(events: list[dict[str, Any]]) -> list[Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for event in events:
        part = event["message"]
        message["content"] += part["content"]
        message["thinking"] = message.get("thinking", "") + part.get("thinking", "")
        message["tool_calls"] += part.get("tool_calls", [])
    return [message]


def items(events: list[dict[str, Any]]) -> list[Any]:
    return events[-1]["response"]["output"]


ADDED_UP: dict[str, tuple[str, Callable[[list[dict[str, Any]]], list[Any]]]] = {
    "chat": ("/v1/chat/completions", chat_message),
    "messages": ("/v1/messages", messages_message),
    "ollama": ("/api/chat", ollama_message),
    "responses": ("/v1/responses", items),
}
BACK: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "chat": lambda body: [body["choices"][0]["message"]],
    "messages": lambda body: [body],
    "ollama": lambda body: [body["message"]],
    "responses": lambda body: body["output"],
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_the_node_sent_comes_back_without_complaint(
    running: Node, dialect: str, answer: str, stream: bool
) -> None:
    cut = answer == "cut"
    if cut and (not stream or dialect == "ollama"):
        pytest.skip("only a stream with parts of calls has begun a call that is cut")
    running.chat.reset()
    running.chat.scripts["demo"] = says(*ANSWERS[answer])
    path, added_up = ADDED_UP[dialect]
    key = "input" if dialect == "responses" else "messages"
    body: dict[str, Any] = {"model": "demo", key: ASK, "stream": stream}
    reply = running.ask("POST", path, body)
    assert reply.status == 200, reply.body
    sent = added_up(events_of(reply)) if stream else BACK[dialect](reply.json)
    running.chat.scripts["demo"] = says(*ANSWERS["text"])
    back = running.ask("POST", path, {**body, key: [*ASK, *sent, *ASK], "stream": False})
    assert back.status == 200, back.body
    named = back.headers.get("x-exo-node-ignored", "")
    assert ("no JSON object" in named) if cut else named == ""
    text = json.dumps(running.chat.requests[-1].messages)
    said = {word for word in words([repr(each) for each in ANSWERS[answer]]) if word != "hazel"}
    assert said <= words(text)
    assert not cut or "haz" in text


def test_the_size_of_a_response_is_counted(running: Node) -> None:
    running.chat.reset()
    reply = running.ask("POST", "/v1/responses/input_tokens", {"model": "demo", "input": "hi"})
    assert (reply.status, reply.json["object"]) == (200, "response.input_tokens")
    assert reply.json["input_tokens"] > 0
