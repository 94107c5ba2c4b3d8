"""Calls that a client gets in parts: where a value ends, and what follows the first call."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from exo_node.shard.runner.answer_pieces import AnswerPieces
from exo_node.shard.text.tools.call_formats import scanner_for
from exo_node.shard.text.tools.call_scanners import ValuePart
from exo_node.shard.text.tools.channels import AnswerFormat
from exo_node.shard.text.tools.object_formats import DEEPSEEK_CALL
from exo_node.shard.text.tools.object_formats import DEEPSEEK_MARKS as DEEPSEEK
from exo_node.shard.text.tools.tool_calls import Call

CALLS = {
    "qwen3_coder": (
        "<function=write>\n<parameter=path>\n{}\n</parameter>\n"
        "<parameter=lines>\n3\n</parameter>\n</function>"
    ),
    "glm47": (
        "write\n<arg_key>path</arg_key>\n<arg_value>{}</arg_value>\n"
        "<arg_key>lines</arg_key>\n<arg_value>3</arg_value>\n"
    ),
}


@pytest.mark.parametrize("call_format", CALLS)
@pytest.mark.parametrize("value", ["a.py", "a\n", "\n\na", "a </", "a\n</para", ""])
def test_parts_of_a_value_hold_nothing_of_the_tags_around_it(call_format: str, value: str) -> None:
    scanner = scanner_for(call_format, {})
    text = f"<tool_call>{CALLS[call_format].format(value)}</tool_call>"
    scans = [scan for character in text for scan in scanner.feed(character)]
    scans += scanner.finish()
    assert "".join(scan.text for scan in scans if isinstance(scan, ValuePart)) == value + "3"
    assert scanner.is_whole


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "write", "parameters": {"properties": {"path": {"type": "string"}}}},
}


def test_further_calls_of_one_list_follow_the_call_that_came_in_parts() -> None:
    calls = [Call("write", json.dumps({"path": path})) for path in ("a", "b", "c")]
    opening, separator, end = DEEPSEEK_CALL
    call_texts = [f"{opening}{call.name}{separator}{call.arguments}{end}" for call in calls]
    edges: Any = {"content": [(DEEPSEEK[0], "call")], "call": [(DEEPSEEK[1], "content")]}
    form = AnswerFormat(edges, call_format="DeepSeek")

    async def parse(text: str) -> Sequence[Call]:
        assert text
        return calls

    async def run() -> tuple[str, list[Call]]:
        answer = AnswerPieces(form, (1,), parse, tools=[TOOL], in_parts=True)
        pieces = await answer.feed("".join([DEEPSEEK[0], *call_texts, DEEPSEEK[1]]))
        pieces += await answer.finish("", stopped=True)
        whole = [piece.call for piece in pieces if piece.HasField("call")]
        return (
            "".join(piece.call_part.arguments for piece in pieces),
            [Call(call.name, call.arguments) for call in whole],
        )

    assert asyncio.run(run()) == (calls[0].arguments, calls[1:])
