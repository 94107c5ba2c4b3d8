"""Calls that come in parts, as each dialect's official client sees them, over a real server."""

import json
from typing import Any

import pytest
from fakes import FINISHED, says
from http_node import ASK, BODIES, Node
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from exo_node.node.chat.requests import (
    CallPart,
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
)

PIECES = ('{"path": "a.py", "content": "', "print(\\n", "é", '"', "}")
WHOLE = {"path": "a.py", "content": "print(\né"}
PARTS: tuple[Event, ...] = (
    CallPart(name="write", arguments=PIECES[0]),
    TextDelta("", (11,)),
    *(CallPart(name="", arguments=piece) for piece in PIECES[1:-1]),
    CallPart(name="", arguments=PIECES[-1], ends=True),
)
ANSWER: tuple[Event, ...] = (
    Started((7, 8, 9)),
    ReasoningDelta("hm"),
    TextDelta("I write.", (10,)),
    *PARTS,
    CallPart(name="look", arguments="{}", ends=True),
    *PARTS,
    TextDelta("Done.", (12,)),
    FINISHED,
)
CUT: tuple[Event, ...] = (
    Started((7,)),
    CallPart(name="write", arguments=PIECES[0]),
    CallPart(name="", arguments="rm -rf /"),
    CallPart(name="", arguments="", ends=True, is_cut=True),
)
LENGTH = Finished("length", 3, 3, 2, 1, FINISHED.stats)
PATCH: tuple[Event, ...] = (
    Started((7,)),
    CallPart(name="apply_patch", arguments='{"inp'),
    CallPart(name="", arguments='ut": "*** Beg'),
    CallPart(name="", arguments="in\\n+\\"),
    CallPart(name="", arguments='"é'),
    CallPart(name="", arguments='"'),
    CallPart(name="", arguments="}", ends=True),
    FINISHED,
)


@pytest.fixture
def node(running: Node) -> Node:
    running.chat.reset()
    running.chat.scripts["writes"] = says(*ANSWER)
    running.chat.scripts["cut"] = says(*CUT, LENGTH)
    running.chat.scripts["patches"] = says(*PATCH)
    return running


def test_openais_chat_client_gathers_calls_from_their_parts(openai: Any) -> None:
    with openai.chat.completions.stream(model="writes", messages=ASK) as stream:
        deltas = [e.arguments_delta for e in stream if e.type.endswith("arguments.delta")]
        choice = stream.get_final_completion().choices[0]
    assert [piece for piece in deltas if piece][: len(PIECES)] == list(PIECES)
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["write", "look", "write"]
    assert [json.loads(call.function.arguments) for call in calls] == [WHOLE, {}, WHOLE]
    assert len({call.id for call in calls}) == 3
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I write.Done.")


def test_anthropics_client_gathers_calls_from_their_parts(anthropic: Any) -> None:
    with anthropic.messages.stream(model="writes", max_tokens=9, messages=ASK) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert deltas[: len(PIECES)] == list(PIECES)
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use", "tool_use", "text"]
    assert [block.input for block in message.content if block.type == "tool_use"] == [
        *(WHOLE, {}, WHOLE)
    ]
    assert message.stop_reason == "tool_use"


def test_openais_responses_client_gathers_calls_from_their_parts(node: Node, openai: Any) -> None:
    with openai.responses.stream(model="writes", input="hi") as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        output = stream.get_final_response().output
    assert deltas[: len(PIECES)] == list(PIECES)
    calls = [item for item in output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [WHOLE, {}, WHOLE]
    assert [item.type for item in output] == [
        *("reasoning", "message", *["function_call"] * 3, "message")
    ]
    events = responses(node, "writes")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    adapter = TypeAdapter[Any](ResponseStreamEvent)
    for event in events[:-1]:
        _ = adapter.validate_python(event)


def responses(node: Node, model: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": model, "input": "hi", "stream": True, **fields}
    lines = node.ask("POST", "/v1/responses", body).body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def test_a_custom_tools_input_flows_as_text(node: Node) -> None:
    tool = {"type": "custom", "name": "apply_patch"}
    events = responses(node, "patches", tools=[tool])
    deltas = [e["delta"] for e in events if e["type"].endswith("custom_tool_call_input.delta")]
    assert deltas[0] == "*** Beg"
    assert "".join(deltas) == '*** Begin\n+"é'
    [item] = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert (item["type"], item["input"], item["status"]) == (
        *("custom_tool_call", '*** Begin\n+"é', "completed"),
    )


def test_no_dialect_offers_a_call_that_was_cut_as_a_whole_one(
    node: Node, openai: Any, anthropic: Any
) -> None:
    chunks = list(openai.chat.completions.create(model="cut", messages=ASK, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [call.function.arguments for delta in deltas for call in delta.tool_calls or ()]
    with pytest.raises(json.JSONDecodeError):
        json.loads("".join(pieces))
    with anthropic.messages.stream(model="cut", max_tokens=9, messages=ASK) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"
    events = responses(node, "cut")
    assert events[-1]["type"] == "response.incomplete"
    assert "response.output_item.done" not in [event["type"] for event in events]
    [item] = events[-1]["response"]["output"]
    assert item["status"] == "incomplete"


def test_parts_are_asked_for_by_streams_of_dialects_that_have_them(node: Node) -> None:
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
    for stream in (True, False):
        for path in paths:
            _ = node.ask("POST", path, {"model": "demo", "stream": stream, **BODIES[path]})
    flags = [request.output.call_parts for request in node.chat.requests]
    assert flags == [True, True, True, False, False, False, False, False]
