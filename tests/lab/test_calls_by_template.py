"""Calls with publishers' templates in each API: two in a turn, cut ones, interrupted ones.

The templates are those under `CHAT_TEMPLATES`, and the models write calls as each template spells
them (`tests/published_models.py`).
"""

import json
from collections.abc import Generator
from typing import Any

import pytest
from nodes import Node, node
from published_models import MODELS, make_published, published_texts

DONE = "The greeting is edited."
TEMPLATES = published_texts()
pytestmark = pytest.mark.skipif(
    not TEMPLATES, reason="CHAT_TEMPLATES names no folder with templates: see CONTRIBUTING.md"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
}
ASK = {"role": "user", "content": "Edit the greeting."}
FUNCTION = {"name": "edit", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
LIMITS = range(1, 1000, 3)
"""Limits at which answers are cut, up to one that none reaches."""


def arguments(name: str, number: int) -> dict[str, str]:
    return {"path": f"/f{number}", "text": f"{number}: {MODELS[name].sample('edit')}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Node]:
    """A node with a model for each template, which calls twice in a turn, and once more."""
    folder = tmp_path_factory.mktemp("published")
    for name, template in TEMPLATES.items():
        calls = [("edit", arguments(name, number)) for number in range(3)]
        answers = [calls[:2], calls[2:]]
        _ = make_published(folder / "models" / name, MODELS[name], template, answers, DONE)
    flags = ("--no-mdns", "--models-dir", str(folder / "models"))
    with node(folder / "a", *flags, sound=True) as running:
        yield running


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    if request.param not in TEMPLATES:
        pytest.skip(f"no template {MODELS[request.param].template} is in CHAT_TEMPLATES")
    return request.param


def chat(served: Node, model: str, messages: list[Any], **fields: Any) -> Any:
    body = {"model": model, "messages": messages, "tools": [TOOL], **fields}
    reply = served.call("POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply
    return reply.body


def called(message: Any) -> list[Any]:
    return [json.loads(each["function"]["arguments"]) for each in message.get("tool_calls") or ()]


def result(call: Any, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def test_rounds_of_calls_are_exact_and_cached(served: Node, model: str) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be kind. " * 20}, ASK]
    calls, previous = list[Any](), 0
    while True:
        answer = chat(served, model, messages)
        choice, usage = answer["choices"][0], answer["usage"]
        message = choice["message"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"{model}: {usage['prompt_tokens']} tokens, {cached} of them cached")
        # Mistral's first turns end with the prompt, after whose last row no request begins.
        assert cached >= (0.5 if model == "mistral" else 0.8) * previous
        previous = usage["prompt_tokens"]
        if not message.get("tool_calls"):
            break
        assert (choice["finish_reason"], message["content"] or "") == ("tool_calls", "")
        calls += called(message)
        messages.append(message)
        messages += [result(call, call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [arguments(model, number) for number in range(3)]
    assert message["content"] == DONE


def assert_continued(served: Node, model: str, message: Any) -> None:
    """Both ways in which clients go on after a call that was cut are taken."""
    results = [result(call, "It was cut.") for call in message.get("tool_calls") or ()]
    for further in ([{"role": "user", "content": "Go on."}], results):
        again = chat(served, model, [ASK, message, *further])
        assert again["choices"][0]["finish_reason"] in ("tool_calls", "stop")


def streamed(served: Node, model: str, limit: int) -> tuple[Any, str]:
    """A streamed answer's message, as clients put it together, and why it finished."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls, reason = dict[int, Any](), ""
    fields = {"model": model, "tools": [TOOL], "max_tokens": limit}
    with served.stream(ASK["content"], **fields) as events:
        for choice in (c for event in events if event != "[DONE]" for c in event["choices"]):
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                empty = {"id": part.get("id"), "type": "function", "function": {"arguments": ""}}
                function = calls.setdefault(part["index"], empty)["function"]
                function["name"] = part["function"].get("name") or function["name"]
                function["arguments"] += part["function"].get("arguments") or ""
    return message | ({"tool_calls": [*calls.values()]} if calls else {}), reason


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_cut_anywhere_is_continued(served: Node, model: str, streams: bool) -> None:
    cuts = 0
    for limit in LIMITS:
        if streams:
            message, reason = streamed(served, model, limit)
        else:
            choice = chat(served, model, [ASK], max_tokens=limit)["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
        assert_continued(served, model, message)
        if reason != "length":
            assert called(message) == [arguments(model, n) for n in range(len(called(message)))]
            break
        cuts += 1
    assert cuts > 1


def test_an_interrupted_call_is_no_error(served: Node, model: str) -> None:
    message = chat(served, model, [ASK])["choices"][0]["message"]
    first, *_ = message["tool_calls"]
    for later in ([], [result(first, "")]):
        messages = [ASK, message, *later, {"role": "user", "content": "Stop!"}]
        assert chat(served, model, messages)["choices"][0]["finish_reason"] in (
            "tool_calls",
            "stop",
        )


def messages_api(served: Node, model: str, messages: list[Any], limit: int) -> Any:
    tool = {"name": "edit", "input_schema": SCHEMA}
    body = {"model": model, "max_tokens": limit, "messages": messages, "tools": [tool]}
    reply = served.call("POST", "/v1/messages", body)
    assert reply.status == 200, reply
    return reply.body


def test_messages_of_cut_calls_come_back(served: Node, model: str) -> None:
    calls: list[Any] = []
    for limit in LIMITS:
        answer = messages_api(served, model, [ASK], limit)
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "cut"} for call in calls
        ]
        further = {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]}
        answer_turn = {"role": "assistant", "content": answer["content"]}
        messages = [ASK, answer_turn, further] if answer["content"] else [ASK, further]
        _ = messages_api(served, model, messages, 1000)
        if answer["stop_reason"] != "max_tokens":
            break
    assert [call["input"] for call in calls] == [
        arguments(model, number) for number in range(len(calls))
    ]
    assert calls


def responses(served: Node, model: str, items: list[Any], **fields: Any) -> Any:
    tool = {"type": "function", **FUNCTION}
    body = {"model": model, "input": items, "tools": [tool], **fields}
    reply = served.call("POST", "/v1/responses", body)
    assert reply.status == 200, reply
    return reply.body


def test_responses_of_cut_calls_come_back(served: Node, model: str) -> None:
    calls: list[Any] = []
    for limit in LIMITS:
        answer = responses(served, model, [ASK], max_output_tokens=limit)
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "cut"}
            for call in calls
        ]
        on = {"role": "user", "content": "Go on."}
        for items in ([ASK, *answer["output"], *results, on], [ASK, *answer["output"], on]):
            _ = responses(served, model, items)
        _ = responses(served, model, [on], previous_response_id=answer["id"])
        if answer["status"] != "incomplete":
            break
    assert [json.loads(call["arguments"]) for call in calls] == [
        arguments(model, number) for number in range(len(calls))
    ]
    assert calls
