"""Parses tool calls in a model's text, with mlx-lm's parsers and our own, all of them untrusted.

Others may control what a model writes. Whatever a parser raises or returns, the result is a list of
calls of declared tools with objects as arguments, or None: then the text is content. Runs in the
helper process, which has limits on time and memory.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from .answer_format import DEEPSEEK_CALL, call_format
from .argument_values import RawText, coerce
from .call_scanners import scanner_for
from .plain_calls import read_plain_call
from .schemas import MAX_CALL_CHARS, SchemaDocument, SchemaFault, member

MAX_CALLS: Final = 128
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
"""Matches a surrogate, which JSON's escapes can spell and UTF-8 cannot."""
Parser = Callable[[str, Any], Any]
Tools = Sequence[Mapping[str, Any]]
"""Declarations of tools: `{"type": "function", "function": …}`."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


def parser_of(tokenizer: Any) -> Parser:
    """The parser for a model's call format; `tokenizer` is mlx-lm's wrapper."""
    match call_format(tokenizer):
        case "":
            return read_plain_call
        case "Harmony":
            return _harmony
        case "DeepSeek":
            return _deepseek
        case "qwen3_coder" | "glm47" as name:
            return _read_first(partial(_tagged, name), tokenizer.tool_parser)
        case "json_tools":
            return tokenizer.tool_parser
        case _:
            return _read_first(read_plain_call, tokenizer.tool_parser)


def parse_calls(
    parser: Parser,
    text: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_beginning: bool = False,
) -> list[Call] | None:
    """The calls in `text`, all or None. `is_beginning`: required arguments may be missing."""
    if len(text) > MAX_CALL_CHARS:
        return None
    try:
        parsed: Any = parser(text, list(tools))
    # A parser may raise anything for nonsense; the text is content then.
    except (Exception, MemoryError):
        return None
    calls = cast(list[object], parsed) if isinstance(parsed, list) else [parsed]
    declared = {tool["function"]["name"]: tool["function"] for tool in tools}
    checked = [_check_call(call, declared, is_beginning) for call in calls[: MAX_CALLS + 1]]
    if not checked or len(checked) > MAX_CALLS:
        return None
    whole = [call for call in checked if call is not None]
    return whole if len(whole) == len(checked) else None


def _check_call(
    call: object, declared: Mapping[str, Mapping[str, Any]], is_beginning: bool
) -> Call | None:
    match call:
        case {"name": str(name), "arguments": arguments} if name in declared:
            pass
        case {"name": str(name), "parameters": arguments} if name in declared:
            pass
        case _:
            return None
    value = _load(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(value, dict):
        return None
    fields = cast(dict[object, Any], value)
    if not all(isinstance(name, str) for name in fields):
        return None
    schema: dict[str, Any] = declared[name].get("parameters") or {}
    arguments = _coerce_arguments(cast(dict[str, Any], fields), SchemaDocument(schema))
    required = None if is_beginning else schema.get("required")
    if isinstance(required, list) and not all(n in arguments for n in cast(list[object], required)):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return Call(name, _SURROGATE.sub("\ufffd", text))


def _coerce_arguments(fields: dict[str, Any], document: SchemaDocument) -> dict[str, Any]:
    """Converts each argument to its schema; one whose schema cannot be followed stays as it is."""
    arguments: dict[str, Any] = {}
    for name, value in fields.items():
        try:
            parts = list(document.members(document.root))
            arguments[name] = coerce(document, value, member(parts, name))
        except (SchemaFault, RecursionError):
            arguments[name] = value
    return arguments


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_first(reader: Parser, otherwise: Parser) -> Parser:
    """A parser that tries `reader`, which keeps the text of each argument, and then `otherwise`,
    mlx-lm's, which accepts more spellings of a call and guesses values."""

    def parse(text: str, tools: Any) -> Any:
        calls = reader(text, tools)
        return otherwise(text, tools) if calls is None else calls

    return parse


def _tagged(call_format: str, text: str, _: Any) -> object:
    scanner = scanner_for(call_format, "")
    values = scanner and scanner.values(text)
    if scanner is None or values is None:
        return None
    arguments = {name: RawText(value) for name, value in values.items()}
    return {"name": scanner.tool, "arguments": arguments}


_HARMONY_CALL: Final = re.compile(
    r"to=functions\.([\w.-]{1,256})[^{]*?<\|message\|>(.*)", re.DOTALL
)


def _harmony(text: str, _: Any) -> object:
    match = _HARMONY_CALL.search(text)
    return {"name": match[1], "arguments": match[2].strip() or "{}"} if match else None


_BEGIN, _SEP, _END = DEEPSEEK_CALL


def _deepseek(text: str, _: Any) -> object:
    """Parses V3's format (`function`, separator, name, JSON in a fence) and V3.1's (name, JSON)."""
    calls: list[object] = []
    rest = text.strip()
    while rest:
        body, end, rest = rest.removeprefix(_BEGIN).partition(_END)
        name, separator, arguments = body.partition(_SEP)
        if not separator or not end:
            return None
        if name == "function":
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        calls.append({"name": name.strip(), "arguments": arguments.strip()})
        rest = rest.strip()
    return calls
