"""One call of a tool while a model writes it: the beginning of its arguments that is certain.

That beginning is one of the arguments that `tool_calls.py` finds in the whole call, character by
character: strings come as they are written, other values when they are complete.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .argument_values import is_string_so_far
from .call_scanners import Closed, Opened, Part, Scan, Scanner
from .schemas import Kind, SchemaDocument, SchemaFault, kind_of, member
from .tool_calls import Call

ParseBeginning = Callable[[str], Awaitable[Sequence[Call] | None]]
"""The calls in a text, of which required arguments may be missing."""

_MOST_PARSES: Final = 16
"""Each reads the call from its beginning on."""
_CANONICAL: Final = re.compile(r"0|-?[1-9][0-9]{0,17}|true|false")
"""Values whose JSON is the same however they are read."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The rest of a call. `text` is what the model wrote besides, or what was not understood."""

    arguments: str
    text: str
    calls: Sequence[Call] = ()
    """Further ones in the same text."""
    is_cut: bool = False


class _GivenUp(Exception):
    """Nothing more is certain before the call is whole."""


class CallStream:
    """One call."""

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
        self._has_given_up = False
        self._texts: list[str] = []
        self._sent: list[str] = []
        self._sent_to = 0
        """Where in the text that ends which `_sent` stands for."""
        self._names: list[str] = []
        self._kinds: frozenset[Kind] | None = None
        """Of the value that is read; None where its schema cannot be followed."""
        self._value: list[str] = []
        self._is_quoted = False
        self._may_be_string = False
        """Whether more of the value may show that it is one."""
        self._in_string = False
        """Whether `_sent` ends within a string."""
        self._parses = 0

    @property
    def has_begun(self) -> bool:
        """Whether any arguments were returned: then there is a `name`."""
        return bool(self._sent)

    async def feed(self, text: str) -> str:
        """The arguments that became certain with `text`, in JSON; empty for none."""
        self._texts.append(text)
        return await self._read(lambda: self._scanner.feed(text))

    async def finish(self, calls: Sequence[Call] | None, *, ended: bool) -> Ending:
        """The rest of a call that has begun.

        `calls` are those of the whole text, None where it holds none. Then the call ends as it was
        written if the model `ended` it. It is left open where the answer was cut within it: no
        whole object may be taken for one that lacks what was to come.
        """
        found = list(calls or ())
        if found and found[0].name == self.name:
            return Ending(self._rest_of(found[0].arguments), "", found[1:])
        if not ended:
            return Ending("", self._unread, is_cut=True)
        last = await self._read(self._scanner.finish)
        is_whole = self._scanner.is_complete and not self._has_given_up
        return Ending(last + self._closing, "" if is_whole else self._unread)

    async def _read(self, scans: Callable[[], Iterator[Scan]]) -> str:
        length = len(self._sent)
        try:
            for scan in () if self._has_given_up else scans():
                if text := await self._arguments(scan):
                    self._sent.append(text)
                    self._sent_to = scan.end
        except _GivenUp:
            self._has_given_up = True
        return "".join(self._sent[length:])

    @property
    def _unread(self) -> str:
        text = "".join(self._texts)[self._sent_to :]
        return text if text.strip() else ""

    @property
    def _closing(self) -> str:
        return '"}' if self._in_string else "}"

    def _rest_of(self, arguments: str) -> str:
        sent = "".join(self._sent)
        if arguments.startswith(sent):
            return arguments[len(sent) :]
        # A name that came twice, say: its last value is the one that counts in JSON, too.
        known: dict[str, Any] = json.loads(sent + self._closing)
        whole: dict[str, Any] = json.loads(arguments)
        changed = {n: v for n, v in whole.items() if n not in known or not _same(known[n], v)}
        more = json.dumps(changed, ensure_ascii=False)[1:-1]
        return self._closing[:-1] + (f", {more}" if more else "") + "}"

    async def _arguments(self, scan: Scan) -> str:
        match scan:
            case Opened():
                self._open(scan)
                return self._string_so_far()
            case Part(text) if self._in_string:
                return _escaped(text)
            case Part(text):
                self._value.append(text)
                return self._string_so_far()
            case Closed() if self._in_string:
                self._in_string = False
                return '"'
            case Closed():
                return await self._whole_value(scan.end)

    def _open(self, value: Opened) -> None:
        if not self._names:
            self.name = self._scanner.tool
            if self.name not in self._parameters:
                raise _GivenUp
            self._document = SchemaDocument(self._parameters[self.name])
        if value.name in self._names:
            raise _GivenUp
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
        """The beginning of the value, once it is certain to be a string."""
        kinds = self._kinds
        if kinds is None or not self._may_be_string:
            return ""
        value = "".join(self._value)
        if self._is_quoted or not self._scanner.has_raw_strings:
            verdict = self._is_quoted and "string" in kinds
        else:
            verdict = is_string_so_far(kinds, value)
        self._may_be_string, self._in_string = verdict is None, verdict is True
        return f'{self._key}"{_escaped(value)}' if self._in_string else ""

    async def _whole_value(self, end: int) -> str:
        """A value that is no string, or may be none: as the whole call's parser reads it."""
        value = "".join(self._value).strip()
        if self._is_canonical(value):
            return self._key + value
        self._parses += 1
        if self._parses > _MOST_PARSES:
            raise _GivenUp
        text = "".join(self._texts)[:end] + self._scanner.closing
        calls = await self._parse_beginning(text)
        if calls is None or [call.name for call in calls] != [self.name]:
            raise _GivenUp
        sent, arguments = "".join(self._sent), calls[0].arguments.removesuffix("}")
        if not arguments.startswith(sent):
            raise _GivenUp
        return arguments[len(sent) :]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _same(one: object, other: object) -> bool:
    return json.dumps(one) == json.dumps(other)
