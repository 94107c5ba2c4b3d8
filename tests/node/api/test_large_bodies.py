"""Bodies of 8 MB made of the smallest items: each is refused or read cheaply, off the loop."""

import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from exo_node.node.api.http.bodies import (
    MAX_HISTORY,
    StrictBody,
    ignored_header,
    parse_body,
    read_with,
    unknown_fields,
)
from exo_node.node.api.http.strict_json import MAX_CONTAINERS, MAX_ELEMENTS, decode
from exo_node.node.api.messages.messages_schema import MessagesBody
from exo_node.node.api.ollama.ollama_schema import OllamaChatBody, OllamaGenerateBody
from exo_node.node.api.openai.completions_schema import CompletionBody, DetokenizeBody, TokenizeBody
from exo_node.node.api.openai.openai_schema import ChatBody
from exo_node.node.api.responses.responses_schema import ResponsesBody
from exo_node.placement.errors import InvalidRequest

SIZE = 8_380_000
CPU_S = 3.0
"""Far above what each takes (0.1 to 1 s) and below what they took (5 s and more)."""
ASKED = '"model":"m","messages":[{"role":"user","content":"hi"}]'


def filled(before: str, item: str, after: str) -> bytes:
    """A body of SIZE bytes with as many of `item` as fit between the two."""
    count = (SIZE - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


def in_message(item: str) -> tuple[str, str, str]:
    return '{"model":"m","messages":[{"role":"user","content":[', item, "]}]}"


BODIES: dict[str, tuple[type[StrictBody], tuple[str, str, str]]] = {
    "blocks of a message": (MessagesBody, in_message('{"type":"z"}')),
    "blocks that are text": (MessagesBody, in_message('{"type":"text","text":""}')),
    "blocks of an answer": (
        MessagesBody,
        (
            '{"model":"m","messages":[{"role":"user","content":[{"type":"tool_result",'
            '"tool_use_id":"x","content":[',
            '{"type":"z"}',
            "]}]}]}",
        ),
    ),
    "blocks of the system": (MessagesBody, (f'{{{ASKED},"system":[', '{"type":"z"}', "]}")),
    "messages": (MessagesBody, ('{"model":"m","messages":[', '{"role":"user","content":""}', "]}")),
    "lists in metadata": (MessagesBody, (f'{{{ASKED},"metadata":{{"a":[', "[]", "]}}")),
    "nested lists": (MessagesBody, (f'{{{ASKED},"metadata":{{"a":[', "[[[[]]],[[[]]]]", "]}}")),
    "stop sequences": (MessagesBody, (f'{{{ASKED},"stop_sequences":[', '"a"', "]}")),
    "tools": (MessagesBody, (f'{{{ASKED},"tools":[', '{"name":"a"}', "]}")),
    "unknown fields": (MessagesBody, (f'{{{ASKED},"x":[', "null", "]}")),
    "objects of a schema": (
        MessagesBody,
        (f'{{{ASKED},"tools":[{{"name":"a","input_schema":{{"x":[', "{}", "]}}]}"),
    ),
    "parts of a chat": (ChatBody, in_message('{"type":"text","text":""}')),
    "messages of a chat": (
        ChatBody,
        ('{"model":"m","messages":[', '{"role":"user","content":""}', "]}"),
    ),
    "calls of a chat": (
        ChatBody,
        (
            '{"model":"m","messages":[{"role":"assistant","tool_calls":[',
            '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}',
            "]}]}",
        ),
    ),
    "values of a schema": (
        ChatBody,
        (
            f'{{{ASKED},"response_format":{{"type":"json_schema","json_schema":'
            '{"schema":{"enum":[',
            '""',
            "]}}}}",
        ),
    ),
    "fields of a chat": (ChatBody, (f"{{{ASKED},", '"a":0', "}")),
    "items": (ResponsesBody, ('{"model":"m","input":[', '{"type":"z"}', "]}")),
    "parts of an item": (
        ResponsesBody,
        ('{"model":"m","input":[{"role":"user","content":[', '{"type":"z"}', "]}]}"),
    ),
    "includes": (ResponsesBody, ('{"model":"m","input":"a","include":[', '""', "]}")),
    "ids": (CompletionBody, ('{"model":"m","prompt":[', "0", "]}")),
    "prompts": (CompletionBody, ('{"model":"m","prompt":[', '""', "]}")),
    "messages to count": (
        TokenizeBody,
        ('{"model":"m","messages":[', '{"role":"user","content":""}', "]}"),
    ),
    "ids to decode": (DetokenizeBody, ('{"model":"m","tokens":[', "0", "]}")),
    "messages of Ollama": (OllamaChatBody, ('{"model":"m","messages":[', '{"role":"user"}', "]}")),
    "objects of a format": (OllamaGenerateBody, ('{"model":"m","format":{"x":[', "{}", "]}}")),
}


def read(raw: bytes, schema: type[StrictBody]) -> list[str]:
    return unknown_fields(parse_body(raw, schema))


@pytest.mark.parametrize("name", BODIES)
def test_the_most_of_the_smallest_items_costs_little_and_is_refused_by_its_field(name: str) -> None:
    schema, parts = BODIES[name]
    raw = filled(*parts)
    began = time.thread_time()
    with pytest.raises(InvalidRequest) as caught:
        _ = read(raw, schema)
    assert time.thread_time() - began < CPU_S
    assert caught.value.param and len(caught.value.message) < 1000


@pytest.mark.parametrize("item", ["[]", "{}", "[[]]", '""', "null"])
def test_what_has_too_many_elements_is_refused_before_it_is_parsed(item: str) -> None:
    """The parser would hold the interpreter's lock for all of it."""
    raw = filled('{"a":[', item, "]}")
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="elements") as caught:
        _ = decode(raw)
    assert caught.value.param == "body"
    assert time.thread_time() - began < 2.5


ODD: dict[str, bytes] = {
    "quotes": b'"' * SIZE,
    "empty strings": b'["' + b'","' * (SIZE // 3),
    "escapes": b'{"a":"' + b"\\\\" * (SIZE // 2 - 5) + b'"}' + b"[" * 200_000,
    "escaped quotes": b'["' + b'\\",' * (SIZE // 3) + b'"' + b"[" * 200_000 + b"]",
    "a string that does not end": b'["' + b"[,{" * (SIZE // 3),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_json_is_counted_cheaply(name: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest) as caught:
        _ = decode(ODD[name])
    assert caught.value.param == "body"
    assert time.thread_time() - began < 5.0


@pytest.mark.parametrize("text", ["[{," * 2_000_000, '\\"[,' * 2_000_000, "\\\\[," * 1_000_000])
def test_a_text_may_have_any_characters(text: str) -> None:
    assert decode(f'{{"a":"{text}","b":[1,2]}}'.encode()) == {
        "a": json.loads(f'"{text}"'),
        "b": [1, 2],
    }


def test_as_many_elements_as_a_body_may_have_are_read() -> None:
    lists: list[list[int]] = [[]] * (MAX_CONTAINERS - 2)
    assert decode(json.dumps({"a": lists}).encode()) == {"a": lists}
    numbers = [0] * MAX_ELEMENTS
    assert decode(json.dumps({"a": numbers}).encode()) == {"a": numbers}


Make = Callable[[int], dict[str, Any]]


def anthropic(parts: int) -> dict[str, Any]:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}] * parts}
    return {"model": "m", "messages": [message]}


def responses(parts: int) -> dict[str, Any]:
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}] * parts}
    return {"model": "m", "input": [item]}


@pytest.mark.parametrize(
    ("schema", "make"),
    [(MessagesBody, anthropic), (ChatBody, anthropic), (ResponsesBody, responses)],
)
def test_the_messages_and_parts_of_one_body_are_bounded(
    schema: type[StrictBody], make: Make
) -> None:
    list_name = "input" if schema is ResponsesBody else "messages"
    _ = parse_body(json.dumps(make(MAX_HISTORY - 1)).encode(), schema)
    with pytest.raises(InvalidRequest, match=f"{MAX_HISTORY} messages, parts") as caught:
        _ = parse_body(json.dumps(make(MAX_HISTORY)).encode(), schema)
    assert caught.value.param == f"{list_name}[0].content[{MAX_HISTORY - 1}]"
    body = make(1)
    many = {**body, list_name: body[list_name] * 4097}
    if schema is ResponsesBody:
        many[list_name] *= 4
    with pytest.raises(InvalidRequest, match=r"at most|messages, parts") as caught:
        _ = parse_body(json.dumps(many).encode(), schema)
    assert str(caught.value.param).startswith(list_name)


def test_a_long_body_is_walked_beside_the_event_loop() -> None:
    """Its thread uses next to no CPU time meanwhile."""
    block = {"type": "text", "text": "a", **{f"field{i}": 0 for i in range(200)}}
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": [block] * 1024}]})

    async def body() -> bytes:
        return raw.encode()

    async def story() -> None:
        request = cast(Request, SimpleNamespace(body=body))
        began = time.thread_time()
        ignored = await read_with(request, lambda raw: read(raw, MessagesBody))
        assert time.thread_time() - began < 0.1
        assert len(ignored) == 64

    asyncio.run(story())


def test_names_are_collected_up_to_a_number_and_a_length() -> None:
    fields = {f"{i}{'x' * 10_000}": 0 for i in range(1000)}
    message = {"role": "user", "content": "a", "y": 0}
    body = MessagesBody.model_validate({"model": "m", "messages": [message] * 9, **fields})
    names = unknown_fields(body)
    assert len(names) == 64 and max(map(len, names)) <= 100
    header = ignored_header(
        [f"a block of type {'z' * 10**6}{i}" for i in range(1000)], "/v1/messages"
    )
    assert sum(map(len, header.values())) <= 1024


def test_the_path_of_a_fault_deep_down_takes_no_memory_for_each_element() -> None:
    depth, name = 400, "n" * 60
    inside = ",".join(["0"] * 100_000)
    raw = f'{{"{name}":' * depth + f'[{inside},"\\ud800"]' + "}" * depth
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        _ = decode(raw.encode())
    assert str(caught.value.param).endswith("[100000]")
    assert time.thread_time() - began < 3.0
