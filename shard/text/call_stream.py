"""Streams the arguments of a tool call while a model writes it.

The streamed text is always a prefix of the arguments that `tool_calls.py` parses in the whole call.
Strings are streamed character by character, other values when they are complete.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .argument_values import is_string_so_far
from .call_scanners import Scan, Scanner, ValueEnd, ValuePart, ValueStart
from .schemas import Kind, SchemaDocument, SchemaFault, kind_of, member
from .tool_calls import Call

ParseBeginning = Callable[[str], Awaitable[Sequence[Call] | None]]
"""Parses the calls in a text; required arguments may be missing."""

_MAX_PARSES: Final = 16
"""Each of them parses the call from its beginning."""
_CANONICAL: Final = re.compile(r"0|-?[1-9][0-9]{0,17}|true|false")
"""Values with only one JSON text."""


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

    def __init__(
        self,
        scanner: Scanner,
        tools: Sequence[Mapping[str, Any]],
        parse_beginning: ParseBeginning,
    ) -> None:
        self.name = ""
        self._scanner = scanner
        self._parameters = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self._parse_beginning = parse_beginning
        self._document = SchemaDocument({})
        self._waits_for_end = False
        self._texts: list[str] = []
        self._streamed: list[str] = []
        self._streamed_end = 0
        """The end of the call's text that `_streamed` covers."""
        self._names: list[str] = []
        self._kinds: frozenset[Kind] | None = None
        """Kinds of the current value; None if its schema cannot be followed."""
        self._value: list[str] = []
        self._is_quoted = False
        self._may_be_string = False
        """Whether more text may show that the value is a string."""
        self._in_string = False
        """Whether `_streamed` ends within a string."""
        self._parses = 0

    @property
    def has_begun(self) -> bool:
        """Whether any arguments were returned; then `name` is set."""
        return bool(self._streamed)

    async def feed(self, text: str) -> str:
        """The arguments that became certain with `text`, in JSON; empty for none."""
        self._texts.append(text)
        return await self._read(lambda: self._scanner.feed(text))

    async def finish(self, calls: Sequence[Call] | None, *, ended: bool) -> Ending:
        """The rest of a call that has begun.

        `calls` are those of the whole text, None if it contains none. Then the call is closed with
        its arguments so far if the model `ended` it. If the answer was cut, the call stays open: a
        client must not take it for a complete one.
        """
        parsed = list(calls or ())
        if parsed and parsed[0].name == self.name:
            return Ending(self._rest_of(parsed[0].arguments), "", parsed[1:])
        if not ended:
            return Ending("", self._unread, is_cut=True)
        last = await self._read(self._scanner.finish)
        is_whole = self._scanner.is_complete and not self._waits_for_end
        return Ending(last + self._closing, "" if is_whole else self._unread)

    async def _read(self, scans: Callable[[], Iterator[Scan]]) -> str:
        length = len(self._streamed)
        try:
            for scan in () if self._waits_for_end else scans():
                if text := await self._arguments(scan):
                    self._streamed.append(text)
                    self._streamed_end = scan.end
        except _Unpredictable:
            self._waits_for_end = True
        return "".join(self._streamed[length:])

    @property
    def _unread(self) -> str:
        text = "".join(self._texts)[self._streamed_end :]
        return text if text.strip() else ""

    @property
    def _closing(self) -> str:
        return '"}' if self._in_string else "}"

    def _rest_of(self, arguments: str) -> str:
        streamed = "".join(self._streamed)
        if arguments.startswith(streamed):
            return arguments[len(streamed) :]
        # For example a repeated name: in JSON, too, its last value counts.
        streamed_fields: dict[str, Any] = json.loads(streamed + self._closing)
        fields: dict[str, Any] = json.loads(arguments)
        changed = {
            n: v
            for n, v in fields.items()
            if n not in streamed_fields or not _is_same_json(streamed_fields[n], v)
        }
        more = json.dumps(changed, ensure_ascii=False)[1:-1]
        return self._closing[:-1] + (f", {more}" if more else "") + "}"

    async def _arguments(self, scan: Scan) -> str:
        match scan:
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
                return await self._whole_value(scan.end)

    def _open(self, value: ValueStart) -> None:
        if not self._names:
            self.name = self._scanner.tool
            if self.name not in self._parameters:
                raise _Unpredictable
            self._document = SchemaDocument(self._parameters[self.name])
        if value.name in self._names:
            raise _Unpredictable
        self._names.append(value.name)
        self._value, self._is_quoted = [], value.is_quoted
        try:
            parts = list(self._document.members(self._document.root))
            self._kinds = self._document.kinds(member(parts, value.name))
        except (SchemaFault, RecursionError):
            self._kinds = None
        self._may_be_string = self._kinds is not None

    def _is_canonical(self, value: str) -> bool:
        kinds = self._kinds or frozenset[Kind]()
        may_be_text = self._is_quoted or (self._scanner.has_raw_strings and "string" in kinds)
        if may_be_text or not _CANONICAL.fullmatch(value):
            return False
        return kind_of(json.loads(value)) in kinds

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
        if self._is_quoted or not self._scanner.has_raw_strings:
            verdict = self._is_quoted and "string" in kinds
        else:
            verdict = is_string_so_far(kinds, value)
        self._may_be_string, self._in_string = verdict is None, verdict is True
        return f'{self._key}"{_escape(value)}' if self._in_string else ""

    async def _whole_value(self, end: int) -> str:
        """A complete value, which may not be a string, as the parser of whole calls reads it."""
        value = "".join(self._value).strip()
        if self._is_canonical(value):
            return self._key + value
        self._parses += 1
        if self._parses > _MAX_PARSES:
            raise _Unpredictable
        text = "".join(self._texts)[:end] + self._scanner.closing
        calls = await self._parse_beginning(text)
        if calls is None or [call.name for call in calls] != [self.name]:
            raise _Unpredictable
        streamed, arguments = "".join(self._streamed), calls[0].arguments.removesuffix("}")
        if not arguments.startswith(streamed):
            raise _Unpredictable
        return arguments[len(streamed) :]


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_same_json(one: object, other: object) -> bool:
    return json.dumps(one) == json.dumps(other)
