"""Parses tool calls in a model's text.

Others may control what a model writes: the result is a list of calls of declared tools with objects
as arguments, or None. Then the text is content. Runs in the helper process, which has limits on
time and memory.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from .argument_values import RawText, coerce
from .call_formats import scanner_for
from .call_scanners import (
    CallStart,
    Scanner,
    ValueEnd,
    ValueKind,
    ValuePart,
    ValueStart,
    declared_names,
)
from .schemas import MAX_CALL_CHARS, SchemaDocument, SchemaFault, member

MAX_CALLS: Final = 128
_JSON: Final = "json_tools"
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
"""Matches a surrogate, which JSON's escapes can spell and UTF-8 cannot."""
Tools = Sequence[Mapping[str, Any]]
"""Declarations of tools: `{"type": "function", "function": …}`."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class _Reading:
    """The calls that a scanner finds in a text, with values as they are spelled."""

    def __init__(self, scanner: Scanner, text: str) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.has_repeats = False
        """Whether an argument came twice."""
        self._name, self._parts = "", list[str]()
        self._kind: ValueKind = "raw"
        for scan in chain(scanner.feed(text), scanner.finish()):
            match scan:
                case CallStart(tool):
                    self.calls.append((tool, {}))
                case ValueStart(name, _, kind):
                    self.has_repeats = self.has_repeats or name in self.calls[-1][1]
                    self._name, self._kind, self._parts = name, kind, []
                case ValuePart(part):
                    self._parts.append(part)
                case ValueEnd():
                    self._add()
                case _:
                    pass
        self.is_whole = scanner.is_whole

    def _add(self) -> None:
        value, arguments = spelled_value(self._kind, "".join(self._parts)), self.calls[-1][1]
        if self._kind != "all":
            arguments[self._name] = value
        else:
            arguments.update(value if isinstance(value, dict) else {"": value})


def spelled_value(kind: ValueKind, text: str) -> Any:
    """A value as its text spells it, before its schema is asked."""
    match kind:
        case "string":
            return text
        case "raw":
            return RawText(text)
        case "json" | "all":
            return _load(text)


def parse_calls(
    call_format: str, text: str, tools: Sequence[Mapping[str, Any]]
) -> list[Call] | None:
    """The calls in the text of one section, all or None."""
    if len(text) > MAX_CALL_CHARS:
        return None
    declared = declared_names(tools)
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    # Where a declared argument's tag stands in a value, the tag before it is missing, unless that
    # argument comes again. A call without marks is plain JSON, and so are some between others'.
    others = [("", False), (_JSON, False)] if call_format else []
    for name, splits in ((call_format, True), (call_format, False), *others):
        scanner = scanner_for(name, declared, splits=splits)
        reading = _Reading(scanner, text)
        if splits and reading.has_repeats:
            continue
        if not reading.is_whole or not 0 < len(reading.calls) <= MAX_CALLS:
            continue
        calls = [_check_call(*call, functions) for call in reading.calls]
        whole = [call for call in calls if call is not None]
        if len(whole) == len(calls):
            return whole
    return None


def _check_call(
    name: str,
    fields: dict[str, Any],
    functions: Mapping[str, Mapping[str, Any]],
) -> Call | None:
    if name not in functions:
        return None
    schema: dict[str, Any] = functions[name].get("parameters") or {}
    arguments = _coerce_arguments(fields, SchemaDocument(schema))
    required = schema.get("required")
    if isinstance(required, list) and not all(n in arguments for n in required):
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
    """The value of JSON; text that is none stays as it is."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return RawText(text)
