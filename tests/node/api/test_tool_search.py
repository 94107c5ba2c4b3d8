"""Tools that a client's own search finds: left out of the list, shown in the search's result."""

import json
from typing import Any

import pytest
from http_node import ASK, Node

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
    """A conversation behind a search with this result."""
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
    grammar = node.chat.requests[-1].grammar
    assert grammar is not None and json.loads(grammar.text)["names"] == names


def test_a_call_is_not_required_of_tools_that_the_model_does_not_know(node: Node) -> None:
    body = {"model": "demo", "messages": ASK, "tools": [PLACEHOLDER]}
    reply = node.ask("POST", "/v1/messages", body | {"tool_choice": {"type": "any"}})
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
