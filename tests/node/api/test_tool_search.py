"""Tools that a client's own search finds: left out of the list, shown in the search's result."""

import json
from dataclasses import replace
from typing import Any

import pytest
from fakes import FINISHED, says
from http_node import ASK, Node

from exo_node.node.chat.requests import CallPart, Started

SEARCH: dict[str, Any] = {"name": "ToolSearch", "input_schema": {"type": "object"}}
PLACEHOLDER = {"name": "Placeholder", "input_schema": {"type": "object"}, "defer_loading": True}
FETCH_SCHEMA = {"type": "object", "properties": {"url": {"type": "string"}}}
FETCH = {"name": "Fetch", "description": "Fetches.", "input_schema": FETCH_SCHEMA}
LATE_FETCH = {**FETCH, "defer_loading": True}
LISTED = {"name": "Read", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {"query": "select:Fetch"}}


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "tool_name": name}


def searched(*results: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation after a search with this result."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": list(results)}
    return [*ASK, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]


@pytest.fixture
def node(running: Node) -> Node:
    running.chat.reset()
    return running


def ask(node: Node, tools: list[dict[str, Any]], messages: Any = ASK, **fields: Any) -> Any:
    """The reply to a request, which reached the chat."""
    body = {"model": "demo", "max_tokens": 9, "tools": tools, "messages": messages, **fields}
    reply = node.ask("POST", "/v1/messages", body)
    assert reply.status == 200, reply.body
    return reply


def listed(node: Node) -> list[str]:
    """The names of the tools in the last request's list."""
    tools = node.chat.requests[-1].tools
    return [tool["function"]["name"] for tool in tools if not tool.get("defer_loading")]


def test_a_deferred_tool_is_callable_and_not_listed(node: Node) -> None:
    _ = ask(node, [LISTED, SEARCH, PLACEHOLDER, LATE_FETCH])
    assert listed(node) == ["Read", "ToolSearch"]
    names = [tool["function"]["name"] for tool in node.chat.requests[-1].tools]
    assert names == ["Read", "ToolSearch", "Placeholder", "Fetch"]


def test_a_search_shows_the_schema_in_the_form_that_the_client_announces(node: Node) -> None:
    reply = ask(node, [SEARCH, LATE_FETCH], searched(reference("Fetch")))
    content = node.chat.requests[-1].messages[-1]["content"]
    first, line, last = content.split("\n")
    assert (first, last) == ("<functions>", "</functions>")
    function = json.loads(line.removeprefix("<function>").removesuffix("</function>"))
    assert function == {"description": "Fetches.", "name": "Fetch", "parameters": FETCH_SCHEMA}
    assert "x-exo-node-ignored" not in reply.headers


def test_what_precedes_a_search_stays_when_it_has_found_a_tool(node: Node) -> None:
    """Claude Code adds the tool to the request's list, in the order of names."""
    _ = ask(node, [SEARCH, PLACEHOLDER])
    before = node.chat.requests[-1]
    _ = ask(node, [LATE_FETCH, SEARCH, PLACEHOLDER], searched(reference("Fetch")))
    after = node.chat.requests[-1]
    assert [t for t in after.tools if not t.get("defer_loading")] == [
        t for t in before.tools if not t.get("defer_loading")
    ]
    assert after.messages[: len(before.messages)] == before.messages


def test_other_text_of_a_searchs_result_stays_and_lost_tools_are_named(node: Node) -> None:
    text = {"type": "text", "text": "Two were found."}
    found = searched(text, reference("Gone"), reference("Fetch"), reference("Fetch"))
    reply = ask(node, [SEARCH, LATE_FETCH], found)
    content = node.chat.requests[-1].messages[-1]["content"]
    assert content.startswith("Two were found.\n<functions>") and content.count("<function>") == 1
    assert content.endswith("There is no tool Gone now.")
    assert "tool_reference to Gone" in reply.headers["x-exo-node-ignored"]


def test_without_a_client_that_searches_deferred_tools_are_listed(node: Node) -> None:
    hosted = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    reply = ask(node, [hosted, LATE_FETCH])
    assert listed(node) == ["Fetch"]
    assert "tool_search_tool_regex_20251119" in reply.headers["x-exo-node-ignored"]


@pytest.mark.parametrize(
    ("choice", "messages", "names"),
    [
        ({"type": "any"}, ASK, ["ToolSearch"]),
        ({"type": "any"}, searched(reference("Fetch")), ["ToolSearch", "Fetch"]),
        ({"type": "tool", "name": "Fetch"}, ASK, ["Fetch"]),
    ],
)
def test_a_required_call_may_be_of_a_tool_that_was_found(
    node: Node, choice: Any, messages: Any, names: list[str]
) -> None:
    _ = ask(node, [SEARCH, PLACEHOLDER, LATE_FETCH], messages, tool_choice=choice)
    grammar = node.chat.requests[-1].output.grammar
    assert grammar is not None and json.loads(grammar.text)["names"] == names


def test_a_call_is_not_required_of_tools_that_the_model_does_not_know(node: Node) -> None:
    body = {"model": "demo", "messages": ASK, "tools": [PLACEHOLDER]}
    reply = node.ask("POST", "/v1/messages", body | {"tool_choice": {"type": "any"}})
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")


WRITE_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
WRITE: dict[str, Any] = {"type": "function", "name": "write", "parameters": WRITE_SCHEMA}
NOTES: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__notes",
    "description": "Notes.",
    "tools": [WRITE, {**WRITE, "name": "read"}],
}
CLIENT_SEARCH: dict[str, Any] = {
    "type": "tool_search",
    "execution": "client",
    "description": "Searches.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
FOUND: list[dict[str, Any]] = [
    {
        "type": "tool_search_call",
        "execution": "client",
        "call_id": "c",
        "arguments": {"query": "q"},
    },
    {
        "type": "tool_search_output",
        "execution": "client",
        "call_id": "c",
        "status": "completed",
        "tools": [{**NOTES, "tools": [{**WRITE, "defer_loading": True}]}],
    },
]


def respond(node: Node, tools: list[dict[str, Any]], input: Any = "hi", **fields: Any) -> Any:
    body = {"model": "demo", "tools": tools, "input": input, **fields}
    reply = node.ask("POST", "/v1/responses", body)
    assert reply.status == 200, reply.body
    return reply


def calls(node: Node, name: str, arguments: str = '{"path": "a"}') -> None:
    """Lets the next answer be a call of that function."""
    node.chat.scripts["demo"] = says(
        Started((1,)),
        CallPart(name=name, arguments=arguments, ends=True),
        replace(FINISHED, reason="stop"),
    )


def test_tools_of_a_namespace_are_functions_and_their_calls_come_back_apart(node: Node) -> None:
    calls(node, "mcp__notes__write")
    reply = respond(node, [NOTES, LATE_FUNCTION])
    assert "x-exo-node-ignored" not in reply.headers
    assert listed(node) == ["mcp__notes__write", "mcp__notes__read", "late"]
    (item,) = reply.json["output"]
    assert (item["type"], item["name"], item["namespace"]) == (
        "function_call",
        "write",
        "mcp__notes",
    )
    assert reply.json["tools"][0] == NOTES
    _ = respond(node, [NOTES], [*ASK, item, {**RESULT, "call_id": item["call_id"]}])
    (call,) = node.chat.requests[-1].messages[1]["tool_calls"]
    assert call["function"]["name"] == "mcp__notes__write"


LATE_FUNCTION = {**WRITE, "name": "late", "defer_loading": True}
RESULT = {"type": "function_call_output", "output": "done"}


def test_a_stream_has_the_namespace_of_a_call_from_its_beginning(node: Node, openai: Any) -> None:
    calls(node, "mcp__notes__write")
    events = list(openai.responses.create(model="demo", input="hi", tools=[NOTES], stream=True))
    items = [event.item for event in events if event.type.startswith("response.output_item")]
    assert [(item.name, item.namespace) for item in items] == [("write", "mcp__notes")] * 2
    assert events[-1].response.output[0].namespace == "mcp__notes"


def test_names_that_meet_stay_apart(node: Node) -> None:
    """A function has its own name, wherever it stands."""
    plain = {**WRITE, "name": "mcp__notes__write"}
    other = {**NOTES, "name": "mcp__notes_"}
    tools = [NOTES, other, plain, {"type": "custom", "name": "write"}, WRITE]
    _ = respond(node, tools)
    names = listed(node)
    assert len(names) == len(set(names)) == 7
    for name, (form, space) in {
        "mcp__notes__write": ("mcp__notes__write", None),
        "mcp__notes__write_": ("write", "mcp__notes"),
        "mcp__notes__write__": ("write", "mcp__notes_"),
        "write": ("write", None),
    }.items():
        calls(node, name)
        (item,) = respond(node, tools).json["output"]
        assert (item["type"], item["name"], item.get("namespace")) == ("function_call", form, space)
    calls(node, "write_", '{"input": "text"}')
    (item,) = respond(node, tools).json["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "write", "text")


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_that_the_client_runs_is_a_call_of_its_own_kind(
    node: Node, openai: Any, stream: bool
) -> None:
    calls(node, "tool_search", '{"query": "notes"}')
    created: Any = openai.responses.create(
        model="demo", input="hi", tools=[CLIENT_SEARCH], stream=stream
    )
    events = list(created) if stream else []
    response = events[-1].response if stream else created
    (item,) = response.to_dict()["output"]
    assert {name: item[name] for name in ("type", "execution", "arguments", "status")} == {
        "type": "tool_search_call",
        "execution": "client",
        "arguments": {"query": "notes"},
        "status": "completed",
    }
    assert item["call_id"] and not [e for e in events if "arguments" in e.type]


def test_what_a_search_found_stands_in_its_result_and_can_be_called(node: Node) -> None:
    _ = respond(node, [WRITE, CLIENT_SEARCH])
    before = node.chat.requests[-1]
    calls(node, "mcp__notes__write")
    reply = respond(node, [WRITE, CLIENT_SEARCH], [*ASK, *FOUND], tool_choice="required")
    after = node.chat.requests[-1]
    assert listed(node) == ["write", "tool_search"]
    assert after.messages[: len(before.messages)] == before.messages
    (call,) = after.messages[1]["tool_calls"]
    assert call["function"] == {"name": "tool_search", "arguments": {"query": "q"}}
    assert '"name": "mcp__notes__write"' in after.messages[2]["content"]
    assert json.loads(after.output.grammar.text)["names"] is None
    assert reply.json["output"][0]["namespace"] == "mcp__notes"
    assert "x-exo-node-ignored" not in reply.headers


def test_deferred_functions_are_listed_where_no_client_searches(node: Node) -> None:
    _ = respond(node, [LATE_FUNCTION, CLIENT_SEARCH])
    assert listed(node) == ["tool_search"]
    reply = respond(node, [LATE_FUNCTION, {"type": "tool_search"}])
    assert listed(node) == ["late"]
    assert "tools[] of type tool_search" in reply.headers["x-exo-node-ignored"]


def test_a_call_is_required_by_a_tools_own_name(node: Node) -> None:
    choice = {"type": "function", "name": "write", "namespace": "mcp__notes"}
    _ = respond(node, [NOTES], tool_choice=choice)
    grammar = node.chat.requests[-1].output.grammar
    assert grammar is not None and json.loads(grammar.text)["names"] == ["mcp__notes__write"]
    reply = node.ask(
        "POST",
        "/v1/responses",
        {"model": "demo", "input": "hi", "tools": [NOTES], "tool_choice": {**choice, "name": "x"}},
    )
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
