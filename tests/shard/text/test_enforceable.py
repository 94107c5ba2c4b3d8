"""Schemas as zod and pydantic write them."""

import itertools
import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from exo_node.placement.errors import InvalidRequest
from exo_node.shard.text.grammars.enforceable import enforceable, unenforced
from exo_node.shard.text.grammars.grammars import GrammarSpec, left_out
from exo_node.shard.text.tools.schemas import SchemaFault

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?)$"
"""zod's, which looks ahead in its middle."""


@pytest.mark.parametrize("pattern", [DECIMAL, EMAIL])
def test_a_known_look_ahead_is_the_same_texts_written_otherwise(pattern: str) -> None:
    written: str = enforceable({"pattern": pattern})["pattern"]
    assert "(?" not in written
    for length in range(7):
        for chars in itertools.product("a.+-1@'" if pattern == EMAIL else "a.+-1", repeat=length):
            text = "".join(chars)
            assert bool(re.search(pattern, text)) is bool(re.search(written, text)), text
    for text in ("a@b.co", "a.b'c@d-e.fg", ".a@b.co", "a..b@c.de", "a'@b.co", "a@b.c", "a@.co"):
        assert bool(re.search(pattern, text)) is bool(re.search(written, text)), text


@pytest.mark.parametrize("pattern", [r"^(?!a)b", r"^a(?!b)", r"^(?<!a)x", r"(?<=x)", DURATION])
def test_other_look_around_is_refused(pattern: str) -> None:
    with pytest.raises(SchemaFault, match="looks around"):
        _ = enforceable({"type": "string", "pattern": pattern})


def takes(schema: Any, value: Any) -> bool:
    """Whether the grammar of a schema allows a document."""
    text = json.dumps(enforceable(schema))
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(json.dumps(value).encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def record(names: Any, **more: Any) -> dict[str, Any]:
    whole = {"type": "integer"}
    return {"type": "object", "propertyNames": names, "additionalProperties": whole, **more}


CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string", "pattern": DECIMAL}, ["1.5", "+1.", "7"], ["", ".", "-", "x"]),
    (
        {"type": "string", "format": "email", "pattern": EMAIL},
        ["a@b.co"],
        [".a@b.co", "a..b@c.de", "x"],
    ),
    (record({"type": "string"}), [{"a": 1}, {}], [{"a": "x"}]),
    (record({}), [{"a": 1}], [{"a": "x"}]),
    (record({"format": "uuid"}), [{"a": 1}], [{"a": "x"}]),
    (record({"enum": ["a", "b"]}), [{"a": 1}, {"a": 1, "b": 2}, {"b": 2}], [{"c": 1}, {"a": "x"}]),
    (record({"enum": ["a", "b"]}, required=["a"]), [{"a": 1}], [{"b": 1}, {}]),
    (
        record({"$ref": "#/$defs/C"}, **{"$defs": {"C": {"enum": ["a"], "title": "C"}}}),
        [{"a": 1}],
        [{"b": 1}],
    ),
    (record({"pattern": "^a"}), [{"ab": 1}], [{"b": 1}]),
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, [[1, 2]], [["a"]]),
    (
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}},
        [["a", "b"], []],
        [["a", "b", "a"]],
    ),
    ({"type": "string", "format": "date", "pattern": DURATION}, ["2026-01-31"], ["P1D"]),
    (record({"minLength": 2, "maxLength": 3}), [{"ab": 1}], [{"b": 1}, {"abcd": 1}]),
    (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [0, -5, 10**18 - 1],
        [2**63, 0.5],
    ),
    ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**64}, [7], [-1]),
    ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, [0.25, -7], ["x"]),
    *(
        ({"type": "string", "format": name}, ["any thing"], [7])
        for name in ("base64", "base64url", "jwt", "cuid", "cuid2", "nanoid", "ulid", "emoji")
    ),
    *(
        ({"type": "string", "format": name}, ["any thing"], [7])
        for name in ("ends_with", "binary", "password", "e164", "json-string", "path")
    ),
    (
        # Arguments may have the names of keywords.
        {
            "type": "object",
            "properties": {
                "format": {"type": "integer"},
                "uniqueItems": {"type": "boolean"},
                "pattern": {"const": {"format": "x", "uniqueItems": True}},
            },
            "required": ["format", "uniqueItems", "pattern"],
            "additionalProperties": False,
        },
        [{"format": 1, "uniqueItems": True, "pattern": {"format": "x", "uniqueItems": True}}],
        [{"format": 1}],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=lambda v: json.dumps(v)[:60])
def test_what_programs_write_is_enforced(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    inner = {k: v for k, v in schema.items() if k != "$defs"}
    nested = {
        "type": "object",
        "properties": {"a": inner},
        "required": ["a"],
        "$defs": schema.get("$defs", {}),
    }
    for value in right:
        assert takes(schema, value), value
        assert takes(nested, {"a": value}), value
    for value in wrong:
        assert not takes(schema, value), value
        assert not takes(nested, {"a": value}), value


def test_a_schema_is_left_as_it_came() -> None:
    for schema, _, _ in CASES:
        before = json.dumps(schema)
        _ = enforceable(schema)
        assert json.dumps(schema) == before


def test_what_is_left_out_is_named_and_refused_where_strict() -> None:
    schema = {"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "null"}]}
    spec = GrammarSpec("json_schema", json.dumps(schema), "response_format")
    assert left_out(spec, (), strict=False) == ["uniqueItems (response_format)"]
    with pytest.raises(InvalidRequest, match="uniqueItems") as caught:
        _ = left_out(spec, (), strict=True)
    assert caught.value.param == "response_format"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    calls = GrammarSpec("calls", "", "tool_choice")
    assert left_out(calls, [tool], strict=False) == ["uniqueItems (tool_choice)"]
    assert unenforced({"format": "duration", "pattern": DURATION}) == ["pattern"]
    assert not unenforced({"properties": {"uniqueItems": True}, "default": {"uniqueItems": True}})
    assert not unenforced({"uniqueItems": False, "pattern": DECIMAL, "format": "jwt"})


def test_faults_name_their_place() -> None:
    with pytest.raises(SchemaFault, match=r"^properties\.a\.items: the pattern"):
        _ = enforceable({"properties": {"a": {"items": {"pattern": "x(?=y)"}}}})
    deep: Any = {}
    for _ in range(500):
        deep = {"items": deep}
    with pytest.raises(SchemaFault, match="deeper"):
        _ = enforceable(deep)


def props(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **more}


CLOSED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (props("a"), [{"a": 1}, {}], [{"a": 1, "b": 1}]),
    ({"type": "array", "items": props("a")}, [[{"a": 1}]], [[{"b": 1}]]),
    ({"anyOf": [props("a"), {"type": "null"}]}, [{"a": 1}, None], [{"b": 1}]),
    ({"$ref": "#/$defs/x", "$defs": {"x": props("a")}}, [{"a": 1}], [{"b": 1}]),
    ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": props("a")}}, [{"a": 1}], [{"b": 1}]),
]
OPEN: list[tuple[dict[str, Any], Any]] = [
    ({"type": "object"}, {"b": 1}),
    (props("a", additionalProperties=True), {"b": 1}),
    (props("a", additionalProperties={"type": "integer"}), {"a": 1, "b": 1}),
    (props("a", required=["a", "b"]), {"a": 1, "b": 1}),
    (props("a", required=["a"], minProperties=2), {"a": 1, "b": 1}),
    ({"allOf": [props("a", required=["a"]), props("b", required=["b"])]}, {"a": 1, "b": 1}),
    (
        {"$ref": "#/$defs/x", "properties": {"b": {"type": "integer"}}}
        | {"required": ["b"], "$defs": {"x": props("a", required=["a"])}},
        {"a": 1, "b": 1},
    ),
    (props("a", anyOf=[props("b", required=["b"]), {"required": ["a"]}]), {"a": 1, "b": 1}),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CLOSED, ids=lambda v: json.dumps(v)[:60])
def test_an_object_that_is_silent_about_other_properties_has_none(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    assert all(takes(schema, value) for value in right)
    assert not any(takes(schema, value) for value in wrong)


@pytest.mark.parametrize(("schema", "value"), OPEN, ids=lambda v: json.dumps(v)[:60])
def test_an_object_that_others_extend_or_that_allows_more_stays_open(
    schema: dict[str, Any], value: Any
) -> None:
    assert takes(schema, value) or takes(schema, dict(reversed(value.items())))
