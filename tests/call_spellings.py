"""Calls as models of each format spell them, and a stand-in for the runner that reads them."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.runner.answer_pieces import AnswerPieces
from exo_node.shard.text.tools.call_formats import FORMATS, OWN_MARKS
from exo_node.shard.text.tools.channels import AnswerFormat
from exo_node.shard.text.tools.object_formats import DEEPSEEK_CALL, DEEPSEEK_MARKS
from exo_node.shard.text.tools.tool_calls import Call, parse_calls

Arguments = Mapping[str, Any]
_BEGIN, _SEP, _END = DEEPSEEK_CALL
_GEMMA_QUOTE = '<|"|>'
_BAR = "｜DSML｜"  # noqa: RUF001


def raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _joined(arguments: Arguments, part: Callable[[str, Any], str]) -> str:
    return "".join(part(name, value) for name, value in arguments.items())


def _json(name: str, arguments: Arguments) -> str:
    return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)


def _qwen(name: str, arguments: Arguments, prefix: str = "") -> str:
    parts = _joined(arguments, lambda n, v: f"<parameter={n}>\n{raw(v)}\n</parameter>\n")
    return f"<{prefix}tool_call>\n<function={name}>\n{parts}</function>\n</{prefix}tool_call>"


def _glm(name: str, arguments: Arguments, prefix: str = "") -> str:
    def part(key: str, value: Any) -> str:
        return (
            f"<{prefix}arg_key>{key}</{prefix}arg_key>\n"
            f"<{prefix}arg_value>{raw(value)}</{prefix}arg_value>\n"
        )

    return f"<{prefix}tool_call>{name}\n{_joined(arguments, part)}</{prefix}tool_call>"


def _invoked(
    name: str, arguments: Arguments, section: str, prefix: str = "", kind: bool = False
) -> str:
    def part(key: str, value: Any) -> str:
        is_string = f' string="{str(isinstance(value, str)).lower()}"' if kind else ""
        tag = f"{prefix}parameter"
        return f'<{tag} name="{key}"{is_string}>{raw(value)}</{tag}>\n'

    call = f'<{prefix}invoke name="{name}">\n{_joined(arguments, part)}</{prefix}invoke>'
    return f"<{section}>\n{call}\n</{section}>"


def _minicpm(name: str, arguments: Arguments) -> str:
    def part(key: str, value: Any) -> str:
        text = raw(value)
        hides = set("<&\n") & set(text)
        return f'<param name="{key}">' + (f"<![CDATA[{text}]]>" if hides else text) + "</param>"

    return f'<function name="{name}">{_joined(arguments, part)}</function>'


def _kimi_k3(name: str, arguments: Arguments) -> str:
    def part(key: str, value: Any) -> str:
        kind = "string" if isinstance(value, str) else "object"
        key = key.replace("&", "&amp;").replace('"', "&quot;")
        return (
            f'<|open|>argument key="{key}" type="{kind}"<|sep|>{raw(value)}<|close|>argument<|sep|>'
        )

    call = (
        f'<|open|>call tool="{name}" index="1"<|sep|>{_joined(arguments, part)}<|close|>call<|sep|>'
    )
    return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"


def _gemma(value: object, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            fields = cast("dict[str, Any]", value)
            return "{" + ",".join(f"{n}:{_gemma(v, quote)}" for n, v in fields.items()) + "}"
        case list():
            return "[" + ",".join(_gemma(each, quote) for each in cast("list[Any]", value)) + "]"
        case _:
            return json.dumps(value)


def _harmony(name: str, arguments: Arguments) -> str:
    header = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{header}<|message|>{json.dumps(dict(arguments), ensure_ascii=False)}<|call|>"


def _pythonic(name: str, arguments: Arguments) -> str:
    inner = ", ".join(f"{n}={v!r}" for n, v in arguments.items())
    return f"<|tool_call_start|>[{name}({inner})]<|tool_call_end|>"


SPELLINGS: dict[str, Callable[[str, Arguments], str]] = {
    "json_tools": lambda n, a: f"<tool_call>\n{_json(n, a)}\n</tool_call>",
    "qwen3_coder": _qwen,
    "Seed": lambda n, a: _qwen(n, a, "seed:"),
    "glm47": _glm,
    "laguna": _glm,
    "longcat": lambda n, a: _glm(n, a, "longcat_"),
    "minimax_m2": lambda n, a: _invoked(n, a, "minimax:tool_call"),
    "muse_spark": lambda n, a: _invoked(n, a, "atem:function_calls", "atem:"),
    "DSML": lambda n, a: _invoked(n, a, f"{_BAR}function_calls", _BAR, kind=True),
    "minicpm5": _minicpm,
    "kimi_k2": lambda n, a: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{n}:0"
        f"<|tool_call_argument_begin|>{json.dumps(dict(a))}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "kimi_k3": _kimi_k3,
    "mistral": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{json.dumps(dict(a))}",
    "gemma4": lambda n, a: f"<|tool_call>call:{n}{_gemma(dict(a), _GEMMA_QUOTE)}<tool_call|>",
    "function_gemma": lambda n, a: (
        f"<start_function_call>call:{n}{_gemma(dict(a), '<escape>')}<end_function_call>"
    ),
    "pythonic": _pythonic,
    "DeepSeek": lambda n, a: (
        f"{DEEPSEEK_MARKS[0]}{_BEGIN}{n}{_SEP}{json.dumps(dict(a))}{_END}{DEEPSEEK_MARKS[1]}"
    ),
    "Harmony": _harmony,
    "": _json,
}
RAW = ("qwen3_coder", "Seed", "glm47", "longcat", "minimax_m2", "muse_spark", "minicpm5")
"""The formats whose strings have no quotes."""
MARKS: dict[str, str] = {
    "json_tools": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "glm47": "<tool_call>",
    "laguna": "<tool_call>",
    "longcat": "<longcat_tool_call>",
    "minimax_m2": "<minimax:tool_call>",
    "muse_spark": "<atem:function_calls>",
    "minicpm5": "<function name=",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "kimi_k3": "<|open|>tools<|sep|>",
    "mistral": "[TOOL_CALLS]",
    "gemma4": "<|tool_call>",
    "function_gemma": "<start_function_call>",
    "pythonic": "<|tool_call_start|>",
    **{name: marks[0] for name, marks in OWN_MARKS.items()},
}


def format_named(call_format: str) -> AnswerFormat:
    """The format of answers with such calls."""
    assert call_format in FORMATS
    if call_format == "Harmony":
        from families_text import codec_of

        return codec_of("gpt_oss").answer_format
    marks = OWN_MARKS.get(call_format) or tuple(filter(None, [MARKS.get(call_format)]))
    edges: Any = {"content": [(mark, "call") for mark in marks]}
    return AnswerFormat(edges, call_format=call_format)


class Delivered:
    """What a client gets of one answer."""

    def __init__(self) -> None:
        self.content = ""
        self.calls: list[tuple[str, str]] = []
        self.open: list[str] = []
        """The arguments of calls that stay open."""

    def take(self, piece: pb.Piece) -> None:
        match piece.WhichOneof("piece"):
            case "call":
                self.calls.append((piece.call.name, piece.call.arguments))
            case "call_part":
                part = piece.call_part
                if part.name:
                    self.calls.append((part.name, ""))
                name, arguments = self.calls.pop()
                self.calls.append((name, arguments + part.arguments))
                if part.ends and part.is_cut:
                    self.open.append(self.calls.pop()[1])
            case "text":
                self.content += piece.text
            case _:
                pass

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def deliver(
    call_format: str,
    texts: Sequence[str],
    tools: Sequence[dict[str, Any]],
    *,
    in_parts: bool = True,
    stopped: bool = True,
) -> Delivered:
    """The answer of a model whose text comes divided into `texts`."""

    async def parse(text: str) -> list[Call] | None:
        return parse_calls(call_format, text, tools)

    async def run() -> Delivered:
        form = format_named(call_format)
        pieces = AnswerPieces(form, (1,), parse, tools=tools, in_parts=in_parts)
        answer = Delivered()
        for text in texts:
            for piece in await pieces.feed(text):
                answer.take(piece)
        for piece in await pieces.finish("", stopped=stopped):
            answer.take(piece)
        return answer

    return asyncio.run(run())


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
