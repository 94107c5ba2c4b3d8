"""Each field of each dialect reaches the setting that it names, over a real server."""

import json
from typing import Any

import pytest
from fakes import FINISHED, says
from http_node import ASK, BODIES, Node

from exo_node.mtp.types import Sampling
from exo_node.node.chat.requests import GenerationRequest, Started, TextDelta
from exo_node.proto.fields import set_fields

OLLAMA: dict[str, Any] = {"messages": ASK, "stream": False}
MESSAGES: dict[str, Any] = {"messages": ASK, "max_tokens": 9}
RESPONSES: dict[str, Any] = {"input": "hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
TOOL: dict[str, Any] = {"name": "f", "input_schema": SCHEMA}


def request_of(node: Node, path: str, body: dict[str, Any]) -> GenerationRequest:
    """The internal request for a body."""
    node.chat.reset()
    node.chat.scripts["demo"] = says(Started((7, 8, 9)), TextDelta("a", (1,)), FINISHED)
    reply = node.ask("POST", path, {"model": "demo", **body})
    assert reply.status == 200, reply.body
    return node.chat.requests[-1]


FILTERS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 11, "min_p": 0.03}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.4, "frequency_penalty": 0.6}
OWN: dict[str, Any] = {"xtc_probability": 0.5, "xtc_threshold": 0.1, "repetition_penalty": 1.2}
SAMPLING: list[tuple[str, dict[str, Any], Sampling]] = [
    (
        "/v1/chat/completions",
        {"messages": ASK, **FILTERS, **PENALTIES, **OWN, "seed": 5, "logit_bias": {"7": -3}},
        Sampling(**FILTERS, **PENALTIES, **OWN, seed=5, logit_bias=((7, -3.0),)),
    ),
    ("/v1/chat/completions", {"messages": ASK, "min_tokens": 7}, Sampling(1.0, min_tokens=7)),
    (
        "/v1/chat/completions",
        {"messages": ASK, "min_tokens": 7, "ignore_eos": True, "max_tokens": 9},
        Sampling(1.0, min_tokens=2**32 - 1),
    ),
    ("/v1/completions", {"prompt": "a", "ignore_eos": True}, Sampling(1.0, min_tokens=2**32 - 1)),
    (
        "/v1/completions",
        {"prompt": "a", "min_tokens": 16, "ignore_eos": False},
        Sampling(1.0, min_tokens=16),
    ),
    (
        "/v1/completions",
        {"prompt": "hi", "temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.4},
        Sampling(temperature=0.7, top_p=0.9, presence_penalty=0.4),
    ),
    (
        "/api/chat",
        {
            **OLLAMA,
            "options": {
                **FILTERS,
                **PENALTIES,
                "seed": 5,
                "repeat_penalty": 1.2,
                "repeat_last_n": 33,
            },
        },
        Sampling(
            **FILTERS, **PENALTIES, seed=5, repetition_penalty=1.2, repetition_context_size=33
        ),
    ),
    (
        "/v1/messages",
        {**MESSAGES, "temperature": 0.7, "top_p": 0.9, "top_k": 11},
        Sampling(temperature=0.7, top_p=0.9, top_k=11),
    ),
    (
        "/v1/responses",
        {**RESPONSES, "temperature": 0.7, "top_p": 0.9},
        Sampling(temperature=0.7, top_p=0.9),
    ),
]


@pytest.mark.parametrize(("path", "body", "sampling"), SAMPLING, ids=[row[0] for row in SAMPLING])
def test_each_sampling_field_is_the_setting_that_it_names(
    running: Node, path: str, body: dict[str, Any], sampling: Sampling
) -> None:
    assert request_of(running, path, body).sampling == sampling


LIMITS: list[tuple[str, dict[str, Any], int, tuple[str, ...]]] = [
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 7, "stop": "x"}, 7, ("x",)),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 7, "stop": ["x", "y"]}, 7, ("x", "y")),
    ("/api/chat", {**OLLAMA, "options": {"num_predict": 7, "stop": ["x"]}}, 7, ("x",)),
    ("/api/chat", {**OLLAMA, "options": {"num_ctx": 7}}, 7, ()),
    ("/api/chat", {**OLLAMA, "options": {"num_predict": -1, "num_ctx": 7}}, 7, ()),
    ("/api/chat", {**OLLAMA, "options": {"num_predict": 9, "num_ctx": 7}}, 7, ()),
    ("/v1/messages", {"messages": ASK, "max_tokens": 7, "stop_sequences": ["x"]}, 7, ("x",)),
    ("/v1/responses", {**RESPONSES, "max_output_tokens": 7}, 7, ()),
]


@pytest.mark.parametrize(("path", "body", "tokens", "stop"), LIMITS, ids=[r[0] for r in LIMITS])
def test_each_dialects_limits_are_the_answers(
    running: Node, path: str, body: dict[str, Any], tokens: int, stop: tuple[str, ...]
) -> None:
    request = request_of(running, path, body)
    assert (request.limits.max_tokens, tuple(request.limits.stop)) == (tokens or 0, stop)


@pytest.mark.parametrize("only_one", [None, False, True])
def test_messages_may_forbid_parallel_calls(running: Node, only_one: bool | None) -> None:
    choice = {"type": "any"}
    if only_one is not None:
        choice["disable_parallel_tool_use"] = only_one  # pyright: ignore[reportArgumentType]
    request = request_of(
        running, "/v1/messages", {**MESSAGES, "tools": [TOOL], "tool_choice": choice}
    )
    assert json.loads(request.output.grammar.text)["parallel"] is (only_one is not True)


DIALECTS = [(path, {**body, "stream": False}) for path, body in BODIES.items()]


@pytest.mark.parametrize(("path", "body"), DIALECTS, ids=[row[0] for row in DIALECTS])
def test_each_dialect_may_keep_a_prompt_out_of_the_cache(
    running: Node, path: str, body: dict[str, Any]
) -> None:
    for value, uses_cache in ((False, False), (True, True), (None, True)):
        request = request_of(running, path, {**body, "cache": value})
        assert set_fields(request.sharing).get("cache", True) is uses_cache, value
    assert not request_of(running, path, body).sharing.HasField("cache")


@pytest.mark.parametrize(("path", "body"), DIALECTS, ids=[row[0] for row in DIALECTS])
@pytest.mark.parametrize("value", [True, "x", 1.5])
def test_a_field_of_the_runners_message_is_none_of_a_request(
    running: Node, path: str, body: dict[str, Any], value: object
) -> None:
    """Dialects whose unknown fields are dropped must not fill the message with them."""
    names = ("alone", "cache_salt", "continues", "initial_draft_tokens")
    reply = running.ask("POST", path, {"model": "demo", **body, **dict.fromkeys(names, value)})
    assert reply.status == (400 if path.endswith("completions") else 200), reply.body
    if reply.status == 200:
        message = set_fields(running.chat.requests[-1].sharing)
        assert "alone" not in message and message.get("cache_salt") != value


WITH_TOOLS = [row for row in DIALECTS if row[0] != "/v1/completions"]


@pytest.mark.parametrize(("path", "body"), WITH_TOOLS, ids=[row[0] for row in WITH_TOOLS])
def test_each_dialect_with_tools_may_let_an_answer_repeat_itself(
    running: Node, path: str, body: dict[str, Any]
) -> None:
    for value in (False, True, None):
        request = request_of(running, path, {**body, "loop_guard": value})
        assert set_fields(request.limits).get("loop_guard") is value
    assert not request_of(running, path, body).limits.HasField("loop_guard")
