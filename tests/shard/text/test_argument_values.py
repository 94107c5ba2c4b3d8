"""Arguments of tagged calls: their grammar, and the reader of what it lets through."""

import json
import random
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal

import pytest
from budget import seeds
from families_text import codec_of
from jsonschema import Draft202012Validator, FormatChecker
from pydantic import BaseModel, Field
from random_schemas import random_arguments

from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammars.grammar import Gate, TokenGrammar
from exo_node.shard.text.grammars.grammars import GrammarSpec
from exo_node.shard.text.tools.tool_calls import parse_calls

FAMILIES = ("qwen", "glm")
Schema = dict[str, Any]


def tool(parameters: Schema) -> Schema:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def with_argument(schema: object, definitions: Schema | None = None) -> Schema:
    members = {"properties": {"a": schema}, "required": ["a"]}
    return tool({"type": "object", **members, "$defs": definitions or {}})


def spelled(family: str, text: str) -> str:
    if family == "glm":
        return f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    value = f"<parameter=a>\n{text}\n</parameter>"
    return f"<tool_call>\n<function=f>\n{value}\n</function>\n</tool_call>"


def arguments(codec: TextCodec, text: str, declared: Schema) -> Schema:
    inner = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    [call] = codec.calls(inner, [declared]) or []
    return json.loads(call.arguments)


def grammar(codec: TextCodec, declared: Schema) -> TokenGrammar:
    lark = codec.call_grammar('{"names": null, "parallel": false}', [declared])
    codec.grammars.check(GrammarSpec("lark", lark, "tool_choice"))
    return codec.grammars.compile(GrammarSpec("lark", lark, "tool_choice"), Gate())


def is_let_through(family: str, text: str, declared: Schema) -> bool:
    codec = codec_of(family)
    compiled = grammar(codec, declared)
    compiled.take(codec.encode_text(spelled(family, text)))
    (mask,) = compiled.masks([])
    end = min(codec.end_tokens)
    return not compiled.failed and mask is not None and bool(mask[end // 8] >> end % 8 & 1)


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}], "default": None}


COLOUR: Schema = {"c": {"type": "string", "enum": ["red", "green"]}}
NODE: Schema = {
    "n": {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": optional({"$ref": "#/$defs/n"})},
        "required": ["v"],
    }
}
READ: list[tuple[Schema, Schema, str, Any]] = [
    (optional({"type": "string"}), {}, "hello", "hello"),
    (optional({"type": "string"}), {}, "5", "5"),
    (optional({"type": "string"}), {}, '"quoted"', '"quoted"'),
    (optional({"type": "string"}), {}, " kept \n", " kept \n"),
    (optional({"type": "string"}), {}, "null", None),
    (optional({"type": "integer"}), {}, "5", 5),
    (optional({"type": "integer"}), {}, "12345678901234567890", 12345678901234567890),
    (optional({"type": "boolean"}), {}, "true", True),
    (optional({"type": "number"}), {}, "2.5", 2.5),
    ({"$ref": "#/$defs/i"}, {"i": {"type": "integer"}}, "5", 5),
    ({"$ref": "#/$defs/c"}, COLOUR, "red", "red"),
    ({"allOf": [{"$ref": "#/$defs/c"}], "title": "Colour"}, COLOUR, "green", "green"),
    (optional({"$ref": "#/$defs/c"}), COLOUR, "green", "green"),
    ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, {}, "false", False),
    ({"const": "x"}, {}, "x", "x"),
    ({"const": 5}, {}, "5", 5),
    ({"enum": ["1", 2]}, {}, "1", "1"),
    ({"enum": ["1", 2]}, {}, "2", 2),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {}, "5", 5),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {}, "five", "five"),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]}, {}, "77", "77"),
    ({"type": ["string", "array"]}, {}, '["a"]', ["a"]),
    ({"type": "string", "nullable": True}, {}, "null", None),
    ({"type": "string"}, {}, "NULL", "NULL"),
    ({"$ref": "#/$defs/n"}, NODE, '{"v": 1, "next": {"v": 2}}', {"v": 1, "next": {"v": 2}}),
    ({"$ref": "#/properties/a/x-shared", "x-shared": {"type": "integer"}}, {}, "5", 5),
    ({}, {}, "5", 5),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("schema", "definitions", "text", "value"), READ, ids=str)
def test_a_value_that_is_let_through_is_read_as_its_schema_wants_it(
    family: str, schema: Schema, definitions: Schema, text: str, value: Any
) -> None:
    declared = with_argument(schema, definitions)
    assert is_let_through(family, text, declared)
    assert arguments(codec_of(family), spelled(family, text), declared) == {"a": value}


UNENFORCED: list[tuple[Schema, str, Any]] = [
    (optional({"type": "boolean"}), "True", True),
    (optional({"type": "string"}), "None", None),
    ({"type": "integer"}, " 5 ", 5),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "object"}, "{'a': 1}", {"a": 1}),
    ({"type": "object"}, "{[]: 1}", "{[]: 1}"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "array", "items": {"type": "string"}}, '["a\nb"]', ["a\nb"]),
    ({"type": "array", "items": optional({"type": "integer"})}, '["5", null]', [5, None]),
    ({"$ref": "http://x/y"}, "as it is", "as it is"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("schema", "text", "value"), UNENFORCED, ids=str)
def test_a_model_that_is_free_to_spell_a_value_is_understood(
    family: str, schema: Schema, text: str, value: Any
) -> None:
    declared = with_argument(schema)
    assert arguments(codec_of(family), spelled(family, text), declared) == {"a": value}


def test_json_keeps_its_kinds_where_the_schema_allows_them() -> None:
    kinds = {"type": "string"}, optional({"type": "integer"}), {"type": ["string", "integer"]}
    members = dict(zip("abc", kinds, strict=True))

    text = '{"name": "f", "arguments": {"a": 5, "b": "5", "c": "5"}}'
    [call] = parse_calls("json_tools", text, [tool({"properties": members})]) or []
    assert json.loads(call.arguments) == {"a": "5", "b": 5, "c": "5"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "maxLength": 3}, "日本語", "four"),
        ({"type": "string", "minLength": 2}, "ab", "a"),
        ({"type": "string", "maxLength": 2500}, "a" * 2500, "a" * 2501),
        ({"type": "string", "pattern": "^[a-z]+-\\d$"}, "ab-1", "ab-1\n"),
        ({"type": "string", "pattern": "a|b$"}, "xb", "bx"),
        ({"type": "string", "pattern": "^[0-9]+\\$"}, "5$", "5"),
        ({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
        ({"type": "string", "format": "email"}, "a.b@c.de", "a.b"),
        ({"type": "string", "format": "ipv6"}, "fe80::1", "fe80::1::2"),
        (
            optional({"type": "string", "format": "uuid"}),
            "0" * 8 + "-0000" * 3 + "-" + "0" * 12,
            "x",
        ),
        ({"type": "string", "const": "x"}, "x", "y"),
        ({"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]}, "abc", "abcd"),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"minLength": 4}]}, "abcd", "abc"),
    ],
    ids=str,
)
def test_bounds_of_strings_hold(family: str, schema: Schema, good: str, bad: str) -> None:
    declared = with_argument(schema)
    assert is_let_through(family, good, declared)
    assert not is_let_through(family, bad, declared)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_string_contains_neither_what_closes_it_nor_what_ends_its_call(family: str) -> None:
    closing = "</arg_value>" if family == "glm" else "</parameter>"
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 99}):
        declared = with_argument(schema)
        for word in (closing, "</tool_call>"):
            assert not is_let_through(family, f"a{word}b", declared)
            assert is_let_through(family, f"a{word[:-1]}b", declared)


def test_a_parameter_tag_within_a_text_does_not_cut_it() -> None:
    text = "write </parameter> here\n</parameter> and here"
    read = arguments(codec_of("qwen"), spelled("qwen", text), with_argument({"type": "string"}))
    assert read == {"a": text}


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class Cat(BaseModel, extra="forbid"):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel, extra="forbid"):
    kind: Literal["dog"]
    name: Annotated[str, Field(max_length=3)]


class Order(BaseModel):
    note: Annotated[str, Field(max_length=4)] | None = None
    colour: Colour
    other: Colour | None = None
    count: int | None = Field(ge=0, le=9, default=None)
    urgent: bool | None
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(max_length=1)
    level: Literal["low", "high", 3]


def drawn(codec: TextCodec, declared: Schema, seed: int) -> str:
    """An answer whose every token is drawn from all that may follow."""
    chance, compiled = random.Random(seed), grammar(codec, declared)
    ids: list[int] = []
    while not ids or ids[-1] not in codec.end_tokens:
        (mask,) = compiled.masks([])
        assert mask is not None and not compiled.failed and len(ids) < 2000
        ids.append(chance.choice([i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]))
        compiled.take(ids[-1:])
    return codec.decode(ids[:-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_let_through_is_one_of_pydantics_models(family: str) -> None:
    declared = tool(Order.model_json_schema())
    codec = codec_of(family)
    for seed in seeds(4, 100):
        _ = Order.model_validate(arguments(codec, drawn(codec, declared, seed), declared))


@cache
def formats() -> FormatChecker:
    return FormatChecker()


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_let_through_is_read_as_a_value_that_its_schema_allows(family: str) -> None:
    codec = codec_of(family)
    for seed in seeds(12, 500):
        parameters = random_arguments(seed)
        value = arguments(codec, drawn(codec, tool(parameters), seed), tool(parameters))
        validator: Any = Draft202012Validator(parameters, format_checker=formats())
        assert not list(validator.iter_errors(value)), (seed, value)


CHAIN = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(2000)} | {"d2000": {}}
DOUBLED = {
    f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
    for n in range(30)
} | {"d30": {"type": "string", "maxLength": 3}}


def nested(depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("schema", "definitions", "why"),
    [
        ({"$ref": "#/$defs/x"}, {"x": {"$ref": "#/$defs/x"}}, "back to themselves"),
        ({"$ref": "#/$defs/x"}, {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}, "back to themselves"),
        ({"$ref": "#/$defs/d0"}, CHAIN, "deeper than"),
        (nested(300), {}, "deeper than"),
        ({"$ref": "#/$defs/y"}, {}, "names nothing"),
        ({"$ref": "http://example.invalid/x"}, {}, "leaves the schema"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, {}, "above maxLength"),
        ({"type": "string", "pattern": "(?!a)b"}, {}, "looks around"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, {}, "no value"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_the_arguments_name(
    family: str, schema: Schema, definitions: Schema, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        _ = codec_of(family).call_grammar(
            '{"names": null, "parallel": true}', [with_argument(schema, definitions)]
        )
    assert caught.value.param == "tools"
    assert "'f'" in caught.value.message and "'a'" in caught.value.message
    text = spelled(family, "x")
    assert arguments(codec_of(family), text, with_argument(schema, definitions)) == {"a": "x"}


@pytest.mark.parametrize("family", FAMILIES)
def test_references_that_double_each_time_cost_what_they_say_once(family: str) -> None:
    declared = with_argument({"$ref": "#/$defs/d0"}, DOUBLED)
    assert is_let_through(family, "abc", declared)
    assert not is_let_through(family, "abcd", declared)


def test_arguments_by_reference_and_in_alternatives_are_those_of_the_call() -> None:
    either = [{"required": ["a"]}, {"required": ["b"]}]
    members = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    declared = tool(
        {"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": members, "anyOf": either}}}
    )
    codec = codec_of("qwen")
    head, tail = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"
    for names, good in (("", False), ("a", True), ("b", True), ("ab", True), ("c", False)):
        values = [f"<parameter={name}>\n5\n</parameter>\n" for name in names]
        compiled = grammar(codec, declared)
        compiled.take(codec.encode_text("".join([head, *values, tail])))
        assert (not compiled.failed) == good, names
    many = {"allOf": [{"anyOf": either}] * 12, "properties": members}
    with pytest.raises(InvalidRequest, match="alternatives") as caught:
        _ = codec.call_grammar('{"names": null, "parallel": true}', [tool(many)])
    assert caught.value.param == "tools"


def test_tools_whose_grammar_would_grow_without_end_are_refused_by_name() -> None:
    """Each argument would carry all that it refers to."""
    shared = {"type": "object", "properties": {f"p{n}": {"title": "x" * 90} for n in range(900)}}
    many = {f"a{n}": {"$ref": "#/$defs/s"} for n in range(2000)}
    long = {f"{'a' * 500}{n}": {"type": "string"} for n in range(1000)}
    for parameters in (
        {"properties": many, "$defs": {"s": shared}},
        {"properties": long},
        {"anyOf": [{"required": [f"a{n}"]} for n in range(9000)]},
    ):
        with pytest.raises(InvalidRequest, match="'f' cannot be enforced") as caught:
            _ = codec_of("qwen").call_grammar(
                '{"names": null, "parallel": true}', [tool(parameters)]
            )
        assert caught.value.param == "tools"


def test_arguments_that_share_a_schema_share_its_rules() -> None:
    free_or_short = {"anyOf": [{"$ref": "#/$defs/s"}, {"type": "string"}]}
    members = {name: free_or_short for name in "abc"} | {"d": {"$ref": "#/$defs/s"}}
    definitions = {"s": {"type": "string", "maxLength": 3}}
    declared = tool({"properties": members, "$defs": definitions})
    lark = codec_of("qwen").call_grammar('{"names": null, "parallel": true}', [declared])
    assert not grammar(codec_of("qwen"), declared).failed
    assert lark.count("TEXT_0:") == 1 and lark.count("text_1 ") + lark.count("text_1)") == 3
