"""Hostile arguments for every reader of calls: each arrives as the model meant it, in one piece or
in many."""

import json
from typing import Any

import pytest
from call_spellings import MARKS, RAW, SPELLINGS, deliver, raw, tool

from exo_node.shard.text.tools.call_formats import FORMATS

STRING = {"type": "string"}
EITHER = {"anyOf": [STRING, {"type": "integer"}]}
OPTIONAL = {"anyOf": [STRING, {"type": "null"}]}
NESTED = {"a": ["x, y", {"b": "}]\n", "c": None}], "d": -1.5, "e": True}
MEAN = (
    *("    if x:\n        return 1\n", "\n", "\n\n", " ", "", "  two  \n\n", "\ta\r\nb"),
    *("NULL", "null", "None", "true", "007", "5", "1e3", "[1, 2]", '{"a": 1}', "{", "}", "[", "]"),
    *('"', '""', "'", 'it\'s "so"', "\\", "\\n", "\\\\", "\\u00e9", "\\d+\\", '\\"'),
    *("é 😀 日本語", "\u2028", "a\u0000b", "\x1b[0m", "\ufeff", ",", ":", "=", "a: b, c=d", "- x"),
    *(
        "<",
        "</",
        "<>",
        "< /a >",
        "<b>&amp;</b>",
        "&quot;",
        "]]>",
        "<![CDATA[x]]>",
        "```json\n{}\n```",
    ),
    *(
        "</parameter>",
        "a </parameter> b",
        "</tool_call>",
        "BEFORE </tool_call> AFTER",
        "</function>",
    ),
    *(
        "<tool_call>",
        "<function=f>",
        "</arg_value>",
        "<arg_key>k</arg_key>",
        "</invoke>",
        "<invoke",
    ),
    *("</minimax:tool_call>", '<parameter name="old">', "</param>", "<|call|>", "<|end|>"),
    *(
        "<|close|>argument",
        "<|tool_call_end|>",
        "<tool_call|>",
        "[ARGS]",
        "[TOOL_CALLS]",
        ")]",
        "'}",
    ),
    *("<｜tool▁call▁end｜>", "</｜DSML｜parameter>", "<think>", "</think>", "<|message|>"),  # noqa: RUF001
)
EDIT = tool("edit", {"path": STRING, "old": STRING, "new": STRING}, ["path", "old"])


def divisions(text: str) -> list[list[str]]:
    return [
        [text],
        *([text[at : at + size] for at in range(0, len(text), size)] for size in (1, 5)),
    ]


def assert_delivered(
    call_format: str, text: str, declared: dict[str, Any], *calls: dict[str, Any]
) -> None:
    name = declared["function"]["name"]
    for texts in divisions(text):
        for in_parts in (False, True):
            answer = deliver(call_format, texts, [declared], in_parts=in_parts)
            assert (answer.values, answer.open) == ([(name, each) for each in calls], []), text


@pytest.mark.smoke
def test_the_table_has_every_format() -> None:
    assert SPELLINGS.keys() == FORMATS.keys()


@pytest.mark.parametrize("call_format", SPELLINGS)
@pytest.mark.parametrize("value", MEAN)
def test_a_string_arrives_as_it_was_written(call_format: str, value: str) -> None:
    arguments = {"path": "/a", "old": value, "new": "x"}
    assert_delivered(call_format, SPELLINGS[call_format]("edit", arguments), EDIT, arguments)
    last = {"path": "/a", "old": value}
    assert_delivered(call_format, SPELLINGS[call_format]("edit", last), EDIT, last)


@pytest.mark.smoke
@pytest.mark.parametrize("call_format", SPELLINGS)
def test_a_whole_call_within_an_argument_is_text(call_format: str) -> None:
    """As in an edit of a document about the format itself."""
    sample = SPELLINGS[call_format]("edit", {"path": "/b", "old": "1"})
    for value in (sample, f"Write:\n{sample}\nand so on\n", f"{sample}\n{sample}"):
        arguments = {"path": "/a", "old": value, "new": "x"}
        assert_delivered(call_format, SPELLINGS[call_format]("edit", arguments), EDIT, arguments)
        last = {"path": "/a", "old": value}
        assert_delivered(call_format, SPELLINGS[call_format]("edit", last), EDIT, last)


ODD = ("a-b", "a.b", "$x", "a b", "@", "é", "a/b", "x[0]", "name", "arguments", "type", "0")
QUOTED = ("a>b", '"q"', "a:b", "a=b", "{x}", "<y>", "", "a\nb")


@pytest.mark.parametrize("call_format", SPELLINGS)
@pytest.mark.parametrize("name", [*ODD, *QUOTED])
def test_an_argument_may_have_any_name_that_is_declared(call_format: str, name: str) -> None:
    if name in ("a=b", "") and call_format == "pythonic":
        pytest.skip("not a name that the format can spell")
    declared = tool("f", {name: STRING, "z": STRING})
    arguments = {name: "v", "z": "w"}
    assert_delivered(call_format, SPELLINGS[call_format]("f", arguments), declared, arguments)


@pytest.mark.parametrize("call_format", SPELLINGS)
@pytest.mark.parametrize(
    "name", ["f", "a.b", "a:b", "a/b", "a-b_c", "functions.f", "mcp__x__y", "0"]
)
def test_a_tool_may_have_any_name_that_the_node_accepts(call_format: str, name: str) -> None:
    for arguments in ({"z": "w"}, {}):
        text = SPELLINGS[call_format](name, arguments)
        assert_delivered(call_format, text, tool(name, {"z": STRING}), arguments)


@pytest.mark.parametrize("call_format", SPELLINGS)
@pytest.mark.parametrize(
    "value", [NESTED, [], {}, ["a", "b"], 5, -0.5, True, None, [[1], [2, [3]]]]
)
def test_other_values_arrive_as_they_are(call_format: str, value: Any) -> None:
    declared = tool("f", {"v": {"type": ["object", "array", "number", "boolean", "null"]}})
    assert_delivered(call_format, SPELLINGS[call_format]("f", {"v": value}), declared, {"v": value})


UNIONS: list[tuple[dict[str, Any], str, Any]] = [
    (EITHER, "007", "007"),
    (EITHER, "7", 7),
    (EITHER, "+7", "+7"),
    (OPTIONAL, "NULL", "NULL"),
    (OPTIONAL, "null", None),
    (OPTIONAL, "nil", "nil"),
    (OPTIONAL, "", ""),
    ({"type": "integer"}, "7", 7),
    ({"type": "number"}, "7.5", 7.5),
    ({"type": "boolean"}, "true", True),
    ({"type": "array"}, '["a"]', ["a"]),
]


@pytest.mark.parametrize("call_format", RAW)
@pytest.mark.parametrize(("schema", "text", "value"), UNIONS, ids=str)
def test_a_value_without_quotes_is_read_by_its_schema(
    call_format: str, schema: dict[str, Any], text: str, value: Any
) -> None:
    spelled = SPELLINGS[call_format]("f", {"v": text})
    assert_delivered(call_format, spelled, tool("f", {"v": schema}), {"v": value})


@pytest.mark.parametrize("call_format", MARKS)
def test_calls_one_after_another_are_all_read(call_format: str) -> None:
    texts = [SPELLINGS[call_format]("edit", {"path": n, "old": n}) for n in ("/a", "/b")]
    calls = [{"path": n, "old": n} for n in ("/a", "/b")]
    for between in ("", "\n"):
        assert_delivered(call_format, between.join(texts), EDIT, *calls)


def test_the_table_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_delivered("json_tools", SPELLINGS["json_tools"]("edit", {"path": "a"}), EDIT, {})
    assert raw(5) == json.dumps(5)
