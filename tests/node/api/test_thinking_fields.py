"""How much a model should think, in the fields of other servers too, and what is only named."""

from typing import Any

import pytest
from fakes import FINISHED, says
from http_node import BODIES, Node, chat_body

from exo_node.node.api.http.bodies import unknown_fields, validated
from exo_node.node.api.messages.messages_schema import MessagesBody
from exo_node.node.api.openai.openai_schema import ChatBody
from exo_node.node.chat.requests import AnswerProgress, Started, TextDelta

SWITCHES: list[tuple[dict[str, object], dict[str, Any]]] = [
    ({"think": True}, {"thinking": True}),
    ({"think": False}, {"thinking": False}),
    ({"think": "low"}, {"effort": "low"}),
    ({"enable_thinking": False}, {"thinking": False}),
    ({"thinking": True}, {"thinking": True}),
    ({"thinking": {"type": "disabled"}}, {"thinking": False}),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking": True, "budget": 9}),
    ({"reasoning": {"effort": "high"}}, {"effort": "high"}),
    ({"reasoning": {"enabled": False}}, {"thinking": False}),
    ({"reasoning": {"max_tokens": 7}}, {"budget": 7}),
    ({"thinking_budget": 7}, {"budget": 7}),
    ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": False}),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, {"effort": "low"}),
    ({"reasoning_effort": "high", "reasoning": {"effort": "low"}}, {"effort": "high"}),
    ({"think": True, "enable_thinking": False}, {"thinking": False}),
    ({"think": None, "reasoning": None, "thinking": None}, {}),
    (
        {"chat_template_kwargs": {"clear_thinking": True, "thinking": True}},
        {"thinking": True, "kwargs": {"clear_thinking": True}},
    ),
]


@pytest.mark.parametrize(("fields", "options"), SWITCHES, ids=str)
def test_the_switches_of_other_servers_are_the_nodes_own(
    fields: dict[str, object], options: dict[str, Any]
) -> None:
    body = validated(chat_body(**fields), ChatBody)
    assert (body.template_options, unknown_fields(body)) == (options, [])


def test_fields_of_other_servers_are_dropped_and_named_and_reach_no_template(node: Node) -> None:
    node.chat.reset()
    reply = node.chat_reply(
        num_ctx=8192,
        usage={"include": True},
        provider={"order": ["x"]},
        reasoning={"effort": "low", "exclude": True},
        chat_template_kwargs={"tools": [], "messages": [], "enable_thinking": True},
    )
    assert reply.status == 200
    assert set(reply.headers["x-exo-node-ignored"].split(", ")) == {
        *("num_ctx", "usage", "provider", "reasoning.exclude"),
        *("chat_template_kwargs.tools", "chat_template_kwargs.messages"),
    }
    (request,) = node.chat.requests
    assert request.options == {"effort": "low", "thinking": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"thinking": 5}, "thinking"),
    ],
    ids=str,
)
def test_a_bad_switch_is_refused_by_its_field(
    node: Node, fields: dict[str, object], param: str
) -> None:
    reply = node.chat_reply(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)


NEW_WORDS: list[tuple[str, dict[str, object], str]] = [
    ("/v1/chat/completions", {"thinking": {"type": "maybe"}}, "thinking.type (maybe)"),
    ("/v1/messages", {"thinking": {"type": "maybe"}}, "thinking.type (maybe)"),
    ("/v1/messages", {"output_config": {"effort": "ultra"}}, "output_config.effort (ultra)"),
    ("/v1/responses", {"reasoning": {"effort": "ultra"}}, "reasoning.effort (ultra)"),
    ("/v1/responses", {"truncation": "smart"}, "truncation (smart)"),
]


@pytest.mark.parametrize(("path", "fields", "name"), NEW_WORDS, ids=str)
def test_a_new_word_of_a_known_field_is_dropped_and_named(
    node: Node, path: str, fields: dict[str, object], name: str
) -> None:
    reply = node.ask("POST", path, {"model": "demo", **BODIES[path], **fields})
    assert (reply.status, reply.headers["x-exo-node-ignored"]) == (200, name)
    assert node.chat.requests[-1].options == {}


NOTE = "reasoning effort high (xhigh is the nearest it has)"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_what_the_model_cannot_follow_is_named_in_every_dialect(
    node: Node, path: str, stream: bool
) -> None:
    node.chat.reset()
    started = Started((1, 2), (NOTE,))
    node.chat.scripts["demo"] = says(
        started, AnswerProgress("prefill 0/2"), TextDelta("a", (3,)), FINISHED
    )
    reply = node.ask("POST", path, {"model": "demo", "stream": stream, **BODIES[path]})
    assert reply.status == 200
    assert reply.headers["x-exo-node-ignored"] == NOTE


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"thinking": {"type": "adaptive", "effort": "low"}}, {"thinking": True, "effort": "low"}),
        ({"thinking": {"type": "enabled", "max_tokens": 7}}, {"thinking": True, "budget": 7}),
        ({"thinking": {"effort": "low"}, "output_config": {"effort": "high"}}, {"effort": "high"}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        ({}, {}),
    ],
)
def test_no_field_of_anthropics_thinking_is_ignored_in_silence(
    fields: dict[str, object], options: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    assert validated(body, MessagesBody).template_options == options
