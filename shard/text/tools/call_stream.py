"""Streams the arguments of a tool call while a model writes it.

The streamed text is always a prefix of the arguments that `tool_calls.py` parses in the whole call.
Strings are streamed character by character, other values when they are complete. From the first
list or object on all waits for the whole call: only the helper process may read those.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .argument_values import coerce, is_string_so_far
from .call_scanners import CallStart, Doubt, Scan, ValueEnd, ValueKind, ValuePart, ValueStart
from .schemas import Kind, SchemaDocument, SchemaFault, member
from .tool_calls import Call, spelled_value

_MAX_SCALAR_CHARS: Final = 64
"""The most characters of a value that is no string so far and is read here."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The rest of a call. `text` is text beside the call, or text that could not be parsed."""

    arguments: str
    text: str
    calls: Sequence[Call] = ()
    """Further calls in the same text."""
    is_cut: bool = False


class _Unpredictable(Exception):
    """No more of the call is certain before it is complete."""


class CallStream:
    """The stream of one call."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.name = ""
        self._parameters = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self._document = SchemaDocument({})
        self._waits_for_end = False
        self._texts: list[str] = []
        self._streamed: list[str] = []
        self._streamed_end = 0
        """The end of the call's text that `_streamed` covers."""
        self._tool = ""
        self._names: list[str] = []
        self._has_repeated = False
        """Whether an argument came twice."""
        self._schema: object = True
        self._kinds: frozenset[Kind] | None = None
        """Kinds of the current value; None if its schema cannot be followed."""
        self._value: list[str] = []
        self._kind: ValueKind = "raw"
        self._may_be_string = False
        """Whether more text may show that the value is a string."""
        self._in_string = False
        """Whether `_streamed` ends within a string."""

    @property
    def has_begun(self) -> bool:
        """Whether any arguments were returned; then `name` is set."""
        return bool(self._streamed)

    def feed(self, text: str, scans: Iterable[Scan]) -> str:
        """The arguments that became certain with `text`, in JSON; empty for none."""
        self._texts.append(text)
        length = len(self._streamed)
        try:
            for scan in () if self._waits_for_end else scans:
                if arguments := self._arguments(scan):
                    self._streamed.append(arguments)
                    self._streamed_end = scan.end
        except _Unpredictable:
            self._waits_for_end = True
        return "".join(self._streamed[length:])

    def finish(self, calls: Sequence[Call] | None, *, is_whole: bool) -> Ending:
        """The rest of a call that has begun.

        `calls` are those of the whole text, None if it contains none or was cut. Then the call
        stays open: a client must not take it for a complete one. `is_whole`: all text was read.
        """
        parsed = list(calls or ())
        if parsed and parsed[0].name == self.name:
            rest = self._rest_of(parsed[0].arguments)
            if rest is not None:
                return Ending(rest, "", parsed[1:])
        is_read = is_whole and not self._waits_for_end
        return Ending("", "" if is_read else self._unread, is_cut=True)

    @property
    def _unread(self) -> str:
        text = "".join(self._texts)[self._streamed_end :]
        return text if text.strip() else ""

    @property
    def _closing(self) -> str:
        return '"}' if self._in_string else "}"

    def _rest_of(self, arguments: str) -> str | None:
        """The text that completes what was streamed to `arguments`, if any does."""
        streamed = "".join(self._streamed)
        if arguments.startswith(streamed):
            return arguments[len(streamed) :]
        if not self._has_repeated:
            return None
        # In JSON, too, the last value of a repeated name counts.
        streamed_fields: dict[str, Any] = json.loads(streamed + self._closing)
        fields: dict[str, Any] = json.loads(arguments)
        changed = {
            n: v
            for n, v in fields.items()
            if n not in streamed_fields or not _is_same_json(streamed_fields[n], v)
        }
        more = json.dumps(changed, ensure_ascii=False)[1:-1]
        return self._closing[:-1] + (f", {more}" if more else "") + "}"

    def _arguments(self, scan: Scan) -> str:
        match scan:
            case CallStart(tool):
                if self._tool or tool not in self._parameters:
                    raise _Unpredictable
                self._tool = tool
                self._document = SchemaDocument(self._parameters[tool])
                return ""
            case ValueStart():
                self._open(scan)
                return self._string_so_far()
            case ValuePart(text) if self._in_string:
                return _escape(text)
            case ValuePart(text):
                self._value.append(text)
                return self._string_so_far()
            case ValueEnd() if self._in_string:
                self._in_string = False
                return '"'
            case ValueEnd():
                return self._whole_value()
            case Doubt():
                raise _Unpredictable

    def _open(self, value: ValueStart) -> None:
        self._has_repeated = value.name in self._names
        if self._has_repeated or value.kind == "all":
            raise _Unpredictable
        self.name = self._tool
        self._names.append(value.name)
        self._value, self._kind = [], value.kind
        try:
            parts = list(self._document.members(self._document.root))
            self._schema = member(parts, value.name)
            self._kinds = self._document.kinds(self._schema)
        except (SchemaFault, RecursionError):
            self._kinds = None
        self._may_be_string = self._kinds is not None

    @property
    def _key(self) -> str:
        before = "{" if len(self._names) == 1 else ", "
        return f"{before}{json.dumps(self._names[-1], ensure_ascii=False)}: "

    def _string_so_far(self) -> str:
        """The value so far with its key, once it is certain to be a string."""
        kinds = self._kinds
        if kinds is None or not self._may_be_string:
            return ""
        value = "".join(self._value)
        if self._kind == "raw":
            verdict = is_string_so_far(kinds, value)
        else:
            verdict = self._kind == "string" and "string" in kinds
        self._may_be_string, self._in_string = verdict is None, verdict is True
        return f'{self._key}"{_escape(value)}' if self._in_string else ""

    def _whole_value(self) -> str:
        """A complete value, which may not be a string, as the parser of whole calls reads it."""
        text = "".join(self._value)
        is_nested = text.lstrip()[:1] in ("[", "{")
        if self._kinds is None or is_nested or len(text) > _MAX_SCALAR_CHARS:
            raise _Unpredictable
        try:
            value = coerce(self._document, spelled_value(self._kind, text), self._schema)
            return self._key + json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (SchemaFault, ValueError, RecursionError) as fault:
            raise _Unpredictable from fault


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_same_json(one: object, other: object) -> bool:
    return json.dumps(one) == json.dumps(other)
