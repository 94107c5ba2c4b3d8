"""Grammars in the formats of published families: after reasoning and headers, and around calls."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from families_text import codec_of

from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammars.grammar import Gate, TokenGrammar, gate_of
from exo_node.shard.text.grammars.grammars import GrammarSpec
from exo_node.shard.text.template import TemplateOptions, options_of
from exo_node.shard.text.tools.channels import AnswerChannels, AnswerFormat, ReasoningCount

ASK = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
YES = GrammarSpec("regex", "yes", "regex")
BEFORE = {
    "qwen": "I think.\n</think>",
    "glm": "I think.</think>",
    "gpt_oss": "<|channel|>analysis<|message|>hm<|end|>"
    "<|start|>assistant<|channel|>final<|message|>",
}
HEADER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
BY_ROLE = " to=functions.weather<|channel|>commentary json<|message|>"
BEFORE_A_CALL = {
    **BEFORE,
    "deepseek": "",
    "gpt_oss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
}
CALLS = {
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"  # noqa: RUF001
    '{"city": "Ulm", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
    "gpt_oss": HEADER + '{"city": "Ulm", "days": 3}',
    "qwen": "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather<arg_key>city</arg_key><arg_value>Ulm</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
}


_JSON = '{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}'
REQUIRED = {**CALLS, "qwen": _JSON, "glm": _JSON}
"""A call that the grammar of a required one allows."""


def state(codec: TextCodec, grammar: TokenGrammar, ids: Sequence[int]) -> str:
    grammar.take(ids)
    (mask,) = grammar.masks([])
    if grammar.failed or mask is None:
        return "never"
    ends = [
        mask[token // 8] >> token % 8 & 1 for token in codec.end_tokens if token < 8 * len(mask)
    ]
    return "ends" if any(ends) else "goes on"


def gated(
    codec: TextCodec, options: TemplateOptions, *, calls: bool = False, insists: bool = False
) -> Gate:
    prompt = codec.encode_chat(ASK, tools=[TOOL] if calls else [], options=options)
    gate = gate_of(codec.answer_format, prompt, calls=calls, insists=insists)
    assert gate is not None
    return gate


@pytest.mark.parametrize("family", BEFORE)
def test_what_comes_before_the_content_is_free(family: str) -> None:
    codec = codec_of(family)
    before = codec.encode_text(BEFORE[family])
    gate = gated(codec, TemplateOptions())

    def after(text: str) -> str:
        ids = [*before, *codec.encode_text(text)]
        return state(codec, codec.grammars.compile(YES, gate), ids)

    assert state(codec, codec.grammars.compile(YES, gate), before[:-1]) == "goes on"
    assert (after(""), after("ye"), after("yes"), after("no")) == (
        "goes on",
        "goes on",
        "ends",
        "never",
    )


@pytest.mark.parametrize("family", ["qwen", "glm"])
def test_without_thinking_the_grammar_begins_at_once(family: str) -> None:
    codec = codec_of(family)
    gate = gated(codec, options_of({"kwargs": {"enable_thinking": False}}))
    assert gate.opens == ()
    grammar = codec.grammars.compile(YES, gate)
    assert state(codec, grammar, codec.encode_text("yes")) == "ends"


@pytest.mark.parametrize("family", REQUIRED)
def test_a_call_that_is_insisted_on_goes_by_the_families_own_tokens(family: str) -> None:
    codec = codec_of(family)
    lark = codec.call_grammar('{"names": ["weather"], "parallel": false}', [TOOL])
    spec = GrammarSpec("lark", lark, "tool_choice")
    gate = gated(codec, TemplateOptions(), insists=True)

    def after(text: str) -> str:
        return state(codec, codec.grammars.compile(spec, gate), codec.encode_text(text))

    before, call = BEFORE_A_CALL[family], REQUIRED[family]
    assert after(before + call) == "ends"
    assert after(before) == "goes on"
    assert after(before + call.replace("weather", "wether")) == "never"
    assert after(before + call.replace("3", '"3"')) == "never"
    assert after(before + "It is") == "never"
    assert read(codec, before + call, TOOL) == ("weather", {"city": "Ulm", "days": 3})


def read(codec: TextCodec, text: str, tool: dict[str, Any]) -> tuple[str, Any]:
    """The one call of an answer, as a runner reads it."""
    form = codec.answer_format.with_tools([tool])
    form = form if codec.has_call_grammar else form.unmarked_call()
    channels = AnswerChannels(form, form.begins_in(codec.encode_chat(ASK)))
    segments = [*channels.feed(text), *channels.finish()]
    [call] = codec.calls("".join(s.text for s in segments if s.state == "call"), [tool]) or []
    return call.name, json.loads(call.arguments)


@pytest.mark.parametrize("family", REQUIRED)
def test_whatever_a_model_prefers_what_it_must_call_is_read(family: str) -> None:
    """Each token is drawn from all that may follow."""
    members = {
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    }
    schema = {"type": "object", "properties": members, "required": ["unit", "days"]}
    function = {"name": "weather", "parameters": {**schema, "additionalProperties": False}}
    tool: dict[str, Any] = {"type": "function", "function": function}
    codec, chance = codec_of(family), random.Random(0)
    lark = codec.call_grammar('{"names": null, "parallel": false}', [tool])
    gate = gated(codec, TemplateOptions(), insists=True)
    start = BEFORE_A_CALL[family] + ("<|channel|>commentary to" if family == "gpt_oss" else "")
    for _ in range(12):
        grammar = codec.grammars.compile(GrammarSpec("lark", lark, "tool_choice"), gate)
        ids_so_far = codec.encode_text(start)
        grammar.take(ids_so_far)
        while not ids_so_far or ids_so_far[-1] not in codec.end_tokens:
            (mask,) = grammar.masks([])
            assert mask is not None and len(ids_so_far) < 500
            ids_so_far.append(
                chance.choice([i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1])
            )
            grammar.take(ids_so_far[-1:])
        answer = codec.decode(ids_so_far[:-1])
        assert re.search(r"\s{43}", answer) is None, "spaces without an end"
        name, arguments = read(codec, answer, tool)
        assert name == "weather"
        assert arguments["unit"] in ("C", "F") and arguments["days"] in range(10)


def test_a_call_of_harmony_may_be_written_in_each_of_its_forms_and_never_as_an_answer() -> None:
    codec = codec_of("gpt_oss")
    lark = codec.call_grammar('{"names": null, "parallel": true}', [TOOL])
    codec.grammars.check(GrammarSpec("lark", lark, "tool_choice"))
    gate = gated(codec, TemplateOptions(), insists=True)

    def after(text: str) -> str:
        spec = GrammarSpec("lark", lark, "tool_choice")
        return state(codec, codec.grammars.compile(spec, gate), codec.encode_text(text))

    arguments = '{"city": "Ulm"}'
    message_before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    thought = BEFORE_A_CALL["gpt_oss"]
    for before in ("", thought, thought + message_before, thought + thought):
        for header in (HEADER, HEADER.replace(" <|constrain|>json", ""), BY_ROLE):
            assert after(before + header + arguments) == "ends", before + header
            assert after(before + header + arguments[:-1]) == "goes on"
            assert after(before + header + arguments + "<|start|>") == "never"
    assert after(thought[:-9]) == "goes on"
    for answer in ("<|channel|>final", "<|channel|>analysis<|message|>hm<|return|>", "yes"):
        assert after(answer) == "never"
    within = codec.encode_chat([*ASK, {"role": "assistant", "content": "so"}])
    assert gate_of(codec.answer_format, within, calls=False, insists=True) is None


@pytest.mark.parametrize("family", ["qwen", "glm"])
def test_a_model_with_tools_may_call_one_in_the_documents_place(family: str) -> None:
    codec = codec_of(family)
    gate = gated(codec, TemplateOptions(), calls=True)
    grammar = codec.grammars.compile(YES, gate)
    ids = codec.encode_text(BEFORE[family] + CALLS[family])
    grammar.take(ids)
    assert grammar.masks([]) == [None] and not grammar.failed


@pytest.mark.parametrize(
    ("family", "text", "tokens"),
    [
        ("qwen", "I think.\n</think>\n\nyes", "I think.\n</think>"),
        ("qwen", "a</think>b<think>c</think>d", "a</think><think>c</think>"),
        ("gpt_oss", BEFORE["gpt_oss"] + "yes", "<|channel|>analysis<|message|>hm<|end|>"),
        ("gpt_oss", "<|channel|>final<|message|>yes", ""),
    ],
)
def test_tokens_of_reasoning_are_counted(family: str, text: str, tokens: str) -> None:
    codec = codec_of(family)
    prompt = codec.encode_chat(ASK, options=TemplateOptions())
    count = ReasoningCount(codec.answer_format, prompt)
    for token in codec.encode_text(text):
        count.take([token])
    assert count.tokens == len(codec.encode_text(tokens))
    plain = ReasoningCount(AnswerFormat(), prompt)
    plain.take(codec.encode_text(text))
    assert plain.tokens == 0
