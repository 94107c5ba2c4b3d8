"""Arguments of calls: the reader of tagged ones, and the grammar of required ones."""

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
    spec = GrammarSpec("calls", lark, "tool_choice")
    codec.grammars.check(spec)
    return codec.grammars.compile(spec, Gate())


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
def test_a_value_is_read_as_its_schema_wants_it(
    family: str, schema: Schema, definitions: Schema, text: str, value: Any
) -> None:
    declared = with_argument(schema, definitions)
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


def test_whatever_is_let_through_is_one_of_pydantics_models() -> None:
    declared, codec = tool(Order.model_json_schema()), codec_of("qwen")
    for seed in seeds(4, 100):
        _ = Order.model_validate(arguments(codec, drawn(codec, declared, seed), declared))


@cache
def formats() -> FormatChecker:
    return FormatChecker()


def test_whatever_is_let_through_is_read_as_a_value_that_its_schema_allows() -> None:
    codec = codec_of("qwen")
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


@pytest.mark.parametrize(
    ("schema", "definitions"),
    [
        ({"$ref": "#/$defs/x"}, {"x": {"$ref": "#/$defs/x"}}),
        ({"$ref": "#/$defs/x"}, {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}),
        ({"$ref": "#/$defs/d0"}, CHAIN),
        (nested(300), {}),
        ({"$ref": "#/$defs/y"}, {}),
        ({"$ref": "http://example.invalid/x"}, {}),
        ({"type": "string", "minLength": 5, "maxLength": 2}, {}),
        ({"type": "string", "pattern": "(?!a)b"}, {}),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, {}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_be_followed_is_refused_and_its_argument_read(
    schema: Schema, definitions: Schema
) -> None:
    declared = with_argument(schema, definitions)
    with pytest.raises(InvalidRequest, match="'f'") as caught:
        _ = grammar(codec_of("qwen"), declared)
    assert caught.value.param == "tools"
    for family in FAMILIES:
        assert arguments(codec_of(family), spelled(family, "x"), declared) == {"a": "x"}


def test_references_that_double_each_time_cost_what_they_say_once() -> None:
    compiled = grammar(codec_of("qwen"), with_argument({"$ref": "#/$defs/d0"}, DOUBLED))
    compiled.take(codec_of("qwen").encode_text('{"name": "f", "arguments": {"a": "abc"}}'))
    assert not compiled.failed
