"""The fields of a chat request: each is honoured, a no-op, or refused by name."""

import json
import re
from typing import Any, get_type_hints

import pytest
from http_node import chat_body

from exo_node.node.api.http.bodies import parse_body
from exo_node.node.api.http.strict_json import decode, encode, encode_in_parts
from exo_node.node.api.openai.openai_schema import ChatBody
from exo_node.node.api.responses.responses_api import parsed_response
from exo_node.node.api.responses.responses_schema import ResponsesBody
from exo_node.node.api.shared.chat_message import messages_for_template
from exo_node.node.api.shared.history import MAX_MESSAGES, History
from exo_node.placement.errors import InvalidRequest, UnsupportedParameter
from exo_node.placement.ids import RequestId


def parsed(**fields: object) -> ChatBody:
    return parse_body(json.dumps(chat_body(**fields)).encode(), ChatBody)


def parsed_messages(*messages: object) -> list[dict[str, Any]]:
    return messages_for_template(parsed(messages=messages).messages, History([]))


def turn(content: object, role: str = "user", **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


def test_every_field_of_openais_own_client_is_known_by_name() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

    offered = get_type_hints(CompletionCreateParamsStreaming)
    assert len(offered) > 30
    assert set(offered) <= set(ChatBody.known_fields())


@pytest.mark.parametrize(
    ("fields", "is_background"),
    [
        ({}, False),
        ({"priority": "interactive"}, False),
        ({"priority": "batch"}, True),
        ({"service_tier": "auto"}, False),
        ({"service_tier": "flex"}, True),
        ({"service_tier": "flex", "priority": "interactive"}, False),
        ({"priority": None, "service_tier": None}, False),
    ],
)
def test_a_request_may_go_behind_the_others(fields: dict[str, Any], is_background: bool) -> None:
    assert parsed(**fields).is_background is is_background


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel_tool_calls": False},
        {"logprobs": False, "top_logprobs": 0, "n": 1},
        {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "none"},
        {"tool_choice": "none", "modalities": ["text"]},
        {"response_format": {"type": "text"}},
        {"stream_options": {"include_obfuscation": False}},
        {"reasoning_effort": "none", "chat_template_kwargs": {}},
        {"seed": 42.0, "max_tokens": 5.0, "temperature": 1.0, "top_k": -1},
        {"max_tokens": -1.0},
        {"seed": -1, "max_tokens": -1, "max_completion_tokens": -1, "top_p": 0},
        {"keep_alive": "5m"},
        {"keep_alive": -1},
        {"best_of": 1, "echo": False, "mirostat": 0, "typical_p": 1, "tfs_z": 1.0},
        {"min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True, "n_probs": 0},
        {"messages": [turn("x", id="msg_1")]},
        {"messages": [turn([{"type": "text", "text": "a", "cache_control": {"type": "x"}}])]},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_a_field_that_asks_for_nothing_is_accepted(fields: dict[str, object]) -> None:
    assert parsed(**fields).model == "demo"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_context_size": 0}, "repetition_context_size"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2**32}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 10, "max_completion_tokens": 8}, "min_tokens"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _ = parsed(**fields)
    assert str(caught.value.param).startswith(param)


@pytest.mark.parametrize("name", sorted(set(ChatBody.known_fields()) - {"model", "messages"}))
def test_null_counts_as_not_given(name: str) -> None:
    assert parsed(**{name: None}) == parsed()


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"b": 1}}}},
            "json_schema",
            '{"b":1}',
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"b": 1}}},
            "json_schema",
            '{"b":1}',
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"b": 1}}},
            "json_schema",
            '{"b":1}',
        ),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "start: x"}, "lark", "start: x"),
    ],
    ids=str,
)
def test_the_form_of_an_answer_is_a_grammar(
    fields: dict[str, object], kind: str, text: str
) -> None:
    form = parsed(**fields).form
    assert form is not None
    assert (form.kind, form.text.replace("\n", "")) == (kind, text)
    assert form.field == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"grammar": "start: x", "regex": "a"}, "regex"),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * (1 << 19)}, "regex"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_form_that_is_none_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _ = parsed(**fields)
    assert str(caught.value.param).startswith(param)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": "required"}, {"names": None, "parallel": True}),
        ({"tool_choice": NAMED}, {"names": ["f"], "parallel": True}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"names": None, "parallel": False},
        ),
    ],
    ids=str,
)
def test_a_call_that_must_be_made_is_a_grammar(
    fields: dict[str, object], expected: dict[str, object]
) -> None:
    forced = parsed(tools=[TOOL], **fields).required_call
    assert forced is not None
    assert (forced.kind, json.loads(forced.text)) == ("calls", expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
        {"tool_choice": "must", "tools": [TOOL]},
        {"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]},
        {"tool_choice": {"type": "web_search"}, "tools": [TOOL]},
        {"tool_choice": {"type": "function"}, "tools": [TOOL]},
        {"tool_choice": {"type": "function", "function": {"name": 5}}, "tools": [TOOL]},
        {"tool_choice": 5, "tools": [TOOL]},
        {"tool_choice": {"type": "allowed_tools", "mode": "must", "tools": []}, "tools": [TOOL]},
        {"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}, "tools": [TOOL]},
    ],
    ids=str,
)
def test_a_call_that_cannot_be_made_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _ = parsed(**fields).required_call
    assert str(caught.value.param).startswith("tool_choice")
    assert not re.search(r"Literal|NamedTool|literal\[|\.str", caught.value.message)


ALLOWED = {"mode": "required", "tools": [NAMED]}
CHOICES: list[tuple[Any, tuple[str, ...], bool]] = [
    ("auto", ("f", "g"), False),
    ("none", (), False),
    ("any", ("f", "g"), True),
    ({"type": "auto"}, ("f", "g"), False),
    ({"type": "none"}, (), False),
    ({"type": "any"}, ("f", "g"), True),
    ({"type": "tool", "name": "f"}, ("f", "g"), True),
    ({"type": "function", "name": "f"}, ("f", "g"), True),
    ({"type": "allowed_tools", "allowed_tools": ALLOWED}, ("f",), True),
    ({"type": "allowed_tools", **ALLOWED}, ("f",), True),
    ({"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}, ("g",), False),
]


@pytest.mark.parametrize(("choice", "names", "insists"), CHOICES, ids=str)
def test_a_choice_of_tools_is_read_in_each_of_its_forms(
    choice: Any, names: tuple[str, ...], insists: bool
) -> None:
    other = {"type": "function", "function": {"name": "g"}}
    body = parsed(tools=[TOOL, other], tool_choice=choice)
    assert tuple(tool["function"]["name"] for tool in body.callable_tools) == names
    assert (body.required_call is not None) is insists
    flat = [{"type": "function", "name": name} for name in ("f", "g")]
    raw = json.dumps({"model": "m", "input": "x", "tools": flat, "tool_choice": choice}).encode()
    exchange = parsed_response(parse_body(raw, ResponsesBody), RequestId("req_0")).exchange
    assert tuple(tool["function"]["name"] for tool in exchange.request.tools) == names
    assert exchange.request.output.HasField("grammar") is insists


def test_a_choice_of_a_dropped_tool_is_dropped_with_it() -> None:
    hosted = {"type": "web_search"}
    body = {"model": "m", "input": "x", "tools": [hosted], "tool_choice": hosted}
    raw = json.dumps(body).encode()
    exchange = parsed_response(parse_body(raw, ResponsesBody), RequestId("req_0")).exchange
    assert not exchange.request.output.HasField("grammar")
    assert set(exchange.ignored) == {"tool_choice of type web_search", "tools[] of type web_search"}


UNSUPPORTED: list[tuple[dict[str, object], str]] = [
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream_options": {"include_usag": True}}, "stream_options.include_usag"),
    ({"chat_template": "x"}, "chat_template"),
    ({"guided_regex": "(a+)+$"}, "guided_regex"),
    ({"best_of": 10**6}, "best_of"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED, ids=[case[1] for case in UNSUPPORTED])
def test_what_the_node_cannot_do_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parsed(**fields)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


def test_an_unknown_field_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(UnsupportedParameter, match="the nearest that it knows is 'temperature'"):
        parsed(temprature=1)


INVALID: list[tuple[dict[str, object], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": 1}}}]},
        "tools[0].function.parameters",
    ),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
    ({"model": ""}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [turn("x")] * (MAX_MESSAGES + 1)}, "messages"),
    ({"stream": "true"}, "stream"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": 10**500}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"xtc_probability": -0.1}, "xtc_probability"),
    ({"xtc_threshold": 0.6}, "xtc_threshold"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 1000}, "stop"),
    ({"stop": "a" * 257}, "stop[0]"),
    ({"logprobs": 0}, "logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"draft_policy": "none"}, "draft_policy"),
    ({"num_draft_tokens": -1}, "num_draft_tokens"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"user": "\ud800"}, "user"),
    ({"messages": [turn([{"type": "text", "text": "\udfff"}])]}, "messages[0].content[0].text"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=[str(c)[:60] for c in INVALID])
def test_a_wrong_value_is_refused_with_its_path(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    assert (type(caught.value), caught.value.param) == (InvalidRequest, param)
    assert not re.search(r"pydantic|Input|String |after validation, None", caught.value.message)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "invalid UTF-8": (b'{"model": "\xff"}', "body"),
    "empty": (b"", "model"),
    "array": (b"[]", "body"),
    "null": (b"null", "body"),
    "string": (b'"x"', "body"),
    "cut off": (b'{"model": "m"', "body"),
    "deep arrays": (b"[" * 100_000, "body"),
    "deep objects": (b'{"a":' * 100_000, "body"),
    "duplicate name": (b'{"model": "a", "model": "b"}', "model"),
    "NaN": (b'{"temperature": NaN}', "temperature"),
    "1e400": (b'{"messages": [{"a": [1, 1e400]}]}', "messages[0].a[1]"),
    "5000 digits": (b'{"max_tokens": ' + b"1" * 5000 + b"}", "max_tokens"),
    "surrogate in a name": (b'{"\\ud800": 1}', "body"),
    "2000 fields": (encode({f"k{i}": i for i in range(2000)}), "k0"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_body_is_an_invalid_request(name: str) -> None:
    raw, param = DAMAGED[name]
    with pytest.raises(InvalidRequest) as caught:
        parse_body(raw, ChatBody)
    assert (type(caught.value), caught.value.param) == (InvalidRequest, param)


def test_a_field_name_of_a_mebibyte_is_refused_briefly() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parsed(**{"k" * 2**20: 1})
    assert len(caught.value.message) < 250


def test_surrogate_pairs_and_escapes_are_text_like_any_other() -> None:
    assert decode(b'{"a": "\\ud83d\\ude00 \\u00e9"}') == {"a": "😀 é"}
    assert encode({"a": "😀", "b": "\ud800"}) == '{"a":"😀","b":"\\ud800"}'.encode()


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parsed_messages(turn(parts, role="developer"), turn("c", name="ann")) == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c", "name": "ann"},
    ]


def test_an_earlier_tool_call_reaches_the_template_with_its_arguments_as_an_object() -> None:
    function = {"name": "f", "arguments": '{"x": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    # As OpenAI's client repeats an answer, unset fields included.
    unset: dict[str, object] = {"refusal": None, "audio": None, "function_call": None}
    spoken = {**turn(None, "assistant", tool_calls=[call], annotations=list[object]()), **unset}
    assert parsed_messages(spoken, turn("2", "tool", tool_call_id="c1")) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


def test_an_object_in_parts_is_encoded_as_a_whole() -> None:
    rows = [{"index": 0, "embedding": [0.5, -1e-9]}, ["é"], 3]
    whole: dict[str, Any] = {"object": "list", "data": rows, "none": [], "usage": {"n": 1}}
    parts, again = ({**whole, "data": iter(rows), "none": iter([])} for _ in range(2))
    assert b"".join(encode_in_parts(parts)) == encode(whole) == encode(again)
    with pytest.raises(ValueError, match="JSON compliant"):
        _ = [*encode_in_parts({"data": iter([float("nan")])})]


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_strict_schema_refuses_what_cannot_be_enforced(*, strict: bool | None) -> None:
    named = {"name": "r", "schema": {"type": "object"}, "strict": strict}
    form = parsed(response_format={"type": "json_schema", "json_schema": named}).form
    assert form is not None and form.strict is (strict is True)
