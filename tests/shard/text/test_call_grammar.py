"""Grammars of required calls: the parsers read all that they allow."""

import importlib
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from models import DEMO

from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammars.call_grammar import call_grammar
from exo_node.shard.text.grammars.grammar import Gate, TokenGrammar
from exo_node.shard.text.grammars.grammars import GrammarSpec
from exo_node.shard.text.tools.answer_format import HARMONY
from exo_node.shard.text.tools.object_formats import DEEPSEEK_MARKS as DEEPSEEK
from exo_node.shard.text.tools.tool_calls import parse_calls

CODEC = TextCodec.load(DEMO)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "opts": {"$ref": "#/$defs/opts"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "opts": {
            "type": "object",
            "properties": {"dry": {"type": "boolean"}},
            "required": ["dry"],
            "additionalProperties": False,
        }
    },
}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}}}


TOOLS = [tool("weather", PARAMETERS), tool("now")]
HERMES = """<tool_call>
{"name": "weather", "arguments": {"city": "Ulm", "days": 3, "opts": {"dry": true}}}
</tool_call>"""
KINDS = ("json_tools", "qwen3_coder", "glm47")


def tokenizer(kind: str, *vocabulary: str) -> Any:
    """The attributes of mlx-lm's wrapper that the grammar uses."""
    return SimpleNamespace(
        get_vocab=lambda: dict.fromkeys(vocabulary, 0),
        added_tokens_decoder={},
        has_tool_calling=bool(kind),
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
        tool_parser=parser(kind) if kind else None,
    )


V3 = """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Ulm", "days": 3}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""  # noqa: RUF001


def parser(kind: str) -> Any:
    return importlib.import_module(f"mlx_lm.tool_parsers.{kind}").parse_tool_call


def after(kind: str, text: str, names: list[str] | None = None, parallel: bool = True) -> str:
    return behind(tokenizer(kind), text, names, parallel)


def behind(
    wrapper: Any,
    text: str,
    names: list[str] | None = None,
    parallel: bool = True,
    tools: Sequence[dict[str, Any]] = TOOLS,
) -> str:
    """Whether an answer may end after `text`, must continue, or can never contain it."""
    call_request = json.dumps({"names": names, "parallel": parallel})
    spec = GrammarSpec("lark", call_grammar(wrapper, call_request, tools), "tool_choice")
    CODEC.grammars.check(spec)
    grammar: TokenGrammar = CODEC.grammars.compile(spec, Gate())
    grammar.take(CODEC.encode_text(text))
    (mask,) = grammar.masks([])
    end = min(CODEC.end_tokens)
    if grammar.failed or mask is None:
        return "never"
    return "ends" if mask[end // 8] >> end % 8 & 1 else "goes on"


def test_a_call_in_the_models_own_format_is_let_through_and_read() -> None:
    kind, text = "json_tools", HERMES
    assert after(kind, text) == "ends"
    assert after(kind, f"{text}\n{text}") == "ends"
    assert after(kind, text[:-1]) == "goes on"
    inner = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    (call_read,) = parse_calls(kind, inner, TOOLS) or []
    assert call_read.name == "weather"
    assert json.loads(call_read.arguments) == {"city": "Ulm", "days": 3, "opts": {"dry": True}}


def test_anything_else_is_not() -> None:
    kind, text = "json_tools", HERMES
    assert after(kind, "") == "goes on"
    assert after(kind, "It is") == "never"
    assert after(kind, text.replace("weather", "wether")) == "never"
    assert after(kind, text.replace("days", "daze")) == "never"
    assert after(kind, text.replace("3", "x")) == "never"
    assert after(kind, text.replace("true", "2")) == "never"
    assert after(kind, text, names=["now"]) == "never"
    assert after(kind, text, names=["weather"]) == "ends"
    assert after(kind, f"{text}\n{text}", parallel=False) == "never"


def test_deepseeks_v3_writes_a_fence_and_its_calls_one_after_the_other() -> None:
    wrapper = tokenizer("", *DEEPSEEK)
    wrapper.chat_template = "… ```json …"
    assert behind(wrapper, V3) == "ends"
    first, last = DEEPSEEK
    call = V3.removeprefix(first).removesuffix(last)
    assert behind(wrapper, f"{first}{call}\n{call}{last}") == "ends"
    assert behind(wrapper, f"{first}{call}\n{call}{last}", parallel=False) == "never"
    assert behind(wrapper, V3.replace("```json", "")) == "never"
    assert behind(wrapper, V3, names=["now"]) == "never"
    (first_call, again) = parse_calls("DeepSeek", f"{call}\n{call}", TOOLS) or []
    assert first_call == again and json.loads(first_call.arguments) == {"city": "Ulm", "days": 3}


@pytest.mark.parametrize("kind", ["", "pythonic", "kimi_k2", "qwen3_coder", "glm47"])
def test_a_model_whose_own_calls_are_no_json_writes_one_as_json(kind: str) -> None:
    unknown = tokenizer(kind)
    call = '{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}'
    assert behind(unknown, call) == "ends"
    assert behind(unknown, call[:-1]) == "goes on"
    assert behind(unknown, call, names=["weather"]) == "ends"
    assert behind(unknown, '{"name": "now", "arguments": {}}') == "ends"
    for bad in (
        call.replace("weather", "wether"),
        call.replace("3", '"3"'),
        f"{call}\n{call}",
        '{"name": "now", "arguments": {"made up": 1}}',
        f"<tool_call>{call}",
    ):
        assert behind(unknown, bad) == "never", bad
    assert behind(unknown, call, names=["now"]) == "never"
    [call_read] = parse_calls(kind, call, TOOLS) or []
    assert json.loads(call_read.arguments) == {"city": "Ulm", "days": 3}


DAYS: dict[str, Any] = {"properties": {"days": {"type": "integer"}}, "required": ["days"]}
PARTS: list[dict[str, Any]] = [
    {"$ref": "#/$defs/days", "$defs": {"days": DAYS}},
    {"allOf": [DAYS]},
    {"anyOf": [DAYS]},
    {"oneOf": [DAYS]},
]


@pytest.mark.parametrize("parameters", PARTS, ids=max)
def test_a_call_in_json_has_the_arguments_that_parts_of_its_schema_declare(
    parameters: dict[str, Any],
) -> None:
    wrapper, declared = tokenizer(""), [tool("weather", parameters)]
    for arguments, after_it in (('{"days": 3}', "ends"), ('{"days": "x"}', "never")):
        call = f'{{"name": "weather", "arguments": {arguments}}}'
        assert behind(wrapper, call, tools=declared) == after_it


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": "now"}', '{"name": 5, "arguments": {}}'])
def test_text_that_is_no_call_in_json_is_none(text: str) -> None:
    assert parse_calls("", text, TOOLS) is None


def test_a_name_that_is_not_declared_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="declared"):
        _ = call_grammar(tokenizer("json_tools"), '{"names": ["x"], "parallel": true}', TOOLS)


def test_names_that_look_like_grammar_are_text() -> None:
    wild = {"properties": {'a"\\n|b': {"type": "string"}, "<x>": {"enum": ['"', "\\"]}}}
    for markers in [*((kind,) for kind in KINDS), ("", *HARMONY), ("", *DEEPSEEK)]:
        lark = call_grammar(
            tokenizer(*markers), '{"names": null, "parallel": true}', [tool('f"g', wild)]
        )
        CODEC.grammars.check(GrammarSpec("lark", lark, "tool_choice"))


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "string", "pattern": "^(?!(a+)+)b"}, "looks around with '(?!'"),
    ({"type": "array", "contains": {}}, 'Unimplemented keys: ["contains"]'),
    ({"type": "array", "items": {"type": "string", "pattern": "["}}, "unclosed character class"),
    ({"type": "object", "propertyNames": {"not": {}}}, "'propertyNames' with not"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum (5) is greater than maximum (1)"),
]


@pytest.mark.parametrize("kind", ["json_tools", "plain"])
@pytest.mark.parametrize(("schema", "reason"), FAULTS, ids=[case[1] for case in FAULTS])
@pytest.mark.parametrize("name", ["size", "odd\nname // %json {"])
def test_what_cannot_be_enforced_names_tool_and_argument_and_shows_no_grammar(
    kind: str, schema: dict[str, Any], reason: str, name: str
) -> None:
    parameters = {"type": "object", "properties": {"ok": {"type": "string"}, name: schema}}
    tools = [TOOLS[0], tool("resize", parameters | {"required": [name]})]
    model = tokenizer("" if kind == "plain" else kind)
    with pytest.raises(InvalidRequest) as caught:
        lark = call_grammar(model, json.dumps({"names": None, "parallel": True}), tools)
        CODEC.grammars.check(GrammarSpec("calls", lark, "tool_choice"))
    message = caught.value.message
    assert caught.value.param == "tools"
    assert reason in message
    assert "'resize'" in message
    assert name.split("\n", maxsplit=1)[0] in message
    assert not any(mark in message for mark in ("call_0", "start:", "<[", " | ", "at 2("))
