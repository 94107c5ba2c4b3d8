"""Calls of tools out of a model's text: mlx-lm's parsers, and two of our own, trusted with nothing.

A parser sees what a model wrote, which may be what somebody made it write. Whatever it raises or
invents, the result is a list of calls of declared tools with an object as arguments, or None: then
the text is content. Runs in the helper process, which has limits on time and memory.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from .answer_format import DEEPSEEK_CALL, is_deepseek, is_harmony

MAX_CALL_CHARS: Final = 1 << 20
MAX_CALLS: Final = 128
Parser = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


def parser_of(tokenizer: Any) -> Parser | None:
    """`tokenizer` is mlx-lm's wrapper."""
    if is_harmony(tokenizer):
        return _harmony
    if tokenizer.has_tool_calling:
        return tokenizer.tool_parser
    return _deepseek if is_deepseek(tokenizer) else None


def parse_calls(
    parser: Parser | None, text: str, tools: Sequence[Mapping[str, Any]]
) -> list[Call] | None:
    """The calls in `text`, all of them or None."""
    if parser is None or len(text) > MAX_CALL_CHARS:
        return None
    try:
        found: Any = parser(text, list(tools))
    # A parser that is handed nonsense may raise anything; its text is content then.
    except (Exception, MemoryError):
        return None
    calls = cast(list[object], found) if isinstance(found, list) else [found]
    declared = {tool["function"]["name"]: tool["function"] for tool in tools}
    checked = [_checked(call, declared) for call in calls[: MAX_CALLS + 1]]
    if not checked or len(checked) > MAX_CALLS:
        return None
    whole = [call for call in checked if call is not None]
    return whole if len(whole) == len(checked) else None


def _checked(call: object, declared: Mapping[str, Mapping[str, Any]]) -> Call | None:
    match call:
        case {"name": str(name), "arguments": arguments} if name in declared:
            pass
        case {"name": str(name), "parameters": arguments} if name in declared:
            pass
        case _:
            return None
    value = _loaded(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(value, dict):
        return None
    fields = cast(dict[object, Any], value)
    if not all(isinstance(name, str) for name in fields):
        return None
    schema = declared[name].get("parameters") or {}
    coerced = coerced_object(cast(dict[str, Any], fields), schema)
    required = schema.get("required")
    if isinstance(required, list) and not all(n in coerced for n in cast(list[object], required)):
        return None
    try:
        return Call(name, json.dumps(coerced, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


def coerced_object(value: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """`value` with each member as its schema wants it, where that changes no meaning."""
    members = schema.get("properties")
    known: Mapping[str, Any] = cast(dict[str, Any], members) if isinstance(members, dict) else {}
    return {name: _coerced(member, known.get(name)) for name, member in value.items()}


def _coerced(value: Any, schema: object) -> Any:
    """Parsers of tagged formats give text for numbers, and numbers for text of digits."""
    kinds = _kinds(schema)
    if isinstance(value, str) and kinds and "string" not in kinds:
        loaded = _loaded(value)
        return loaded if _is_kind(loaded, kinds) else value
    if kinds == {"string"} and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict) and isinstance(schema, dict):
        return coerced_object(cast(dict[str, Any], value), cast(dict[str, Any], schema))
    return value


def _kinds(schema: object) -> set[str]:
    match schema:
        case {"type": str(kind)}:
            return {kind}
        case {"type": list() as kinds}:
            return {str(kind) for kind in cast(list[object], kinds)}
        case _:
            return set()


def _is_kind(value: object, kinds: set[str]) -> bool:
    match value:
        case bool():
            return "boolean" in kinds
        case int():
            return bool(kinds & {"integer", "number"})
        case float():
            return "number" in kinds
        case list():
            return "array" in kinds
        case dict():
            return "object" in kinds
        case None:
            return "null" in kinds
        case _:
            return False


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


_HARMONY_CALL: Final = re.compile(
    r"to=functions\.([\w.-]{1,256})[^{]*?<\|message\|>(.*)", re.DOTALL
)


def _harmony(text: str, _: Any) -> object:
    found = _HARMONY_CALL.search(text)
    return {"name": found[1], "arguments": found[2].strip() or "{}"} if found else None


_BEGIN, _SEP, _END = DEEPSEEK_CALL


def _deepseek(text: str, _: Any) -> object:
    """V3 writes `function`, a separator, the name, and JSON in a fence; V3.1 the name and JSON."""
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
