"""Parses the arguments of a call from its text as it grows.

Pure: the events depend on the text so far, not on its division into deltas. A scanner assumes a
well-formed call. `tool_calls.py` decides whether the text is one when it is complete.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from .answer_format import DEEPSEEK_CALL
from .channels import overlap

_MAX_SEARCH_CHARS: Final = 4096
"""The longest text between two values in which the next one is searched."""
_PIECE_CHARS: Final = 1024


@dataclass(frozen=True, slots=True)
class ValueStart:
    """The start of a value. `is_quoted`: it is a JSON string, whose parts are decoded."""

    name: str
    end: int
    """Characters of the call's text up to this event; so in the other events."""
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class ValuePart:
    """A part of the value: its text, decoded if it is a JSON string."""

    text: str
    end: int


@dataclass(frozen=True, slots=True)
class ValueEnd:
    """The end of the value."""

    end: int


Scan = ValueStart | ValuePart | ValueEnd


class Scanner(ABC):
    """Parses one call."""

    closing = ""
    """The text that completes a call that is cut after a value."""
    has_raw_strings = False
    """Whether strings have no quotes, so that they may look like other values."""

    def __init__(self) -> None:
        self.tool = ""
        """Empty until the name is complete."""
        self.is_complete = False
        self._rest = ""
        self._at = 0
        self._step = self._begin

    def feed(self, text: str) -> Iterator[Scan]:
        """The events that became certain with `text`."""
        self._rest += text
        before = None
        while self._rest and before != (self._at, self._step):
            before = self._at, self._step
            yield from self._step()

    def values(self, text: str) -> dict[str, str] | None:
        """The values in the whole text of a call, by name; None if it is not one."""
        values, name = dict[str, str](), ""
        # In pieces, as each value copies the text behind it.
        pieces = (text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))
        for scan in chain(chain.from_iterable(map(self.feed, pieces)), self.finish()):
            match scan:
                case ValueStart():
                    values[name := scan.name] = ""
                case ValuePart():
                    values[name] += scan.text
                case ValueEnd():
                    pass
        return values if self.is_complete else None

    @abstractmethod
    def finish(self) -> Iterator[Scan]:
        """The events that the end of the call makes certain; sets `is_complete`."""

    @abstractmethod
    def _begin(self) -> Iterator[Scan]:
        """Parses the text before the values. Each step replaces `_step` by the next one."""

    def _idle(self) -> Iterator[Scan]:
        yield from ()

    def _take(self, length: int) -> int:
        self._rest = self._rest[length:]
        self._at += length
        return self._at

    def _part(self, length: int) -> Iterator[Scan]:
        if length > 0:
            text = self._rest[:length]
            yield ValuePart(text, self._take(length))


def scanner_for(call_format: str, header: str) -> Scanner | None:
    """The scanner for a call format; None if its calls are only parsed when they are complete.

    `header` is the text before the call in formats with headers.
    """
    match call_format:
        case "qwen3_coder":
            return _TaggedScanner(_QWEN)
        case "glm47":
            return _TaggedScanner(_GLM)
        case "json_tools":
            return _JsonScanner(_HERMES_HEAD, "}}", r"\s*\}\s*")
        case "DeepSeek":
            return _JsonScanner(_DEEPSEEK_HEAD, "}" + _CALL_END, _DEEPSEEK_TAIL)
        case "Harmony":
            address = _HARMONY_ADDRESS.search(header)
            return _JsonScanner(_OBJECT, "}", r"\s*", address[1]) if address else None
        case _:
            return None


class _Tags:
    """The tags of a call whose values stand between tags."""

    def __init__(
        self, head: str, opening: str, begins: str, closes: str, tail: str, line: str = ""
    ) -> None:
        """`head`, `opening`: patterns of the text before the first value and before each.

        `begins`: the first characters of an opening tag. `closes`: the closing tag, which `line`
        belongs to if it stands before it. `tail`: the text after the last value. None of these has
        a character with a meaning in patterns.
        """
        self.head, self.opening = re.compile(head, re.DOTALL), re.compile(opening, re.DOTALL)
        self.closes, self.tail, self.line = closes, tail, line
        closing = f"{line}?{closes}" if line else closes
        parts = "|".join(tag[:length] for tag in (begins, tail) for length in range(len(tag)))
        self.closing = re.compile(rf"{closing}(?=\s*(?:({begins})|(?:{parts}|{tail}\s*)\Z))")
        """A tag that ends a value. Its group is None if only more text shows whether it does."""
        self.last = re.compile(rf"{closing}\s*{tail}\s*\Z")
        """The end of the last value and of the call."""


_QWEN: Final = _Tags(
    r"\s*<function=([^\n]*?)>(?:\n|(?=[^>]))",
    r"\s*<parameter=([^\n]*?)>(?:\n|(?=[^>]))",
    "<parameter=",
    "</parameter>",
    "</function>",
    "\n",
)
_GLM: Final = _Tags(
    r"(.*?)(?=<arg_key>)",
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>",
    "<arg_key>",
    "</arg_value>",
    "",
)


class _TaggedScanner(Scanner):
    """Parses values between tags, as in newer Qwen models and GLM."""

    has_raw_strings = True

    def __init__(self, tags: _Tags) -> None:
        super().__init__()
        self.closing = tags.tail
        self._tags = tags

    def finish(self) -> Iterator[Scan]:
        if self._step == self._value:
            if last := self._tags.last.search(self._rest):
                yield from self._part(last.start())
                yield ValueEnd(self._take(len(self._rest)))
                self.is_complete = True
        elif self._step == self._next:
            self.is_complete = self._rest.strip() == self._tags.tail

    def _begin(self) -> Iterator[Scan]:
        if head := self._tags.head.match(self._rest):
            self.tool = head[1].strip()
            _ = self._take(head.end())
            self._step = self._next
        elif len(self._rest) > _MAX_SEARCH_CHARS:
            self._step = self._idle
        yield from ()

    def _next(self) -> Iterator[Scan]:
        if opening := self._tags.opening.match(self._rest):
            self._step = self._value
            yield ValueStart(opening[1], self._take(opening.end()))
        elif len(self._rest) > _MAX_SEARCH_CHARS:
            self._step = self._idle

    def _value(self) -> Iterator[Scan]:
        rest, tags = self._rest, self._tags
        closing = tags.closing.search(rest)
        if closing is None:
            cut = max(overlap(rest, tags.closes), overlap(rest, tags.line + tags.closes))
            yield from self._part(len(rest) - cut)
            return
        yield from self._part(closing.start())
        if closing[1] is not None:
            self._step = self._next
            yield ValueEnd(self._take(len(closing[0])))


_UNICODE: Final = r"u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
"""A JSON escape, without surrogates, which are no characters by themselves."""
_STRING: Final = rf'"((?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\{_UNICODE})*)"'
_OBJECT: Final = re.compile(r"\s*\{")
_HERMES_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_HARMONY_ADDRESS: Final = re.compile(r"to=functions\.([\w.-]{1,256})")
_CALL_BEGIN, _CALL_SEP, _CALL_END = DEEPSEEK_CALL
_DEEPSEEK_HEAD: Final = re.compile(
    rf"\s*(?:{_CALL_BEGIN})?(?:function{_CALL_SEP}\s*([^\n]*)\n\s*```json|(?!function{_CALL_SEP})"
    rf"([^{{]*?){_CALL_SEP})\s*{{"
)
_DEEPSEEK_TAIL: Final = rf"\s*(?:```)?\s*{_CALL_END}\s*"
_FIRST_KEY: Final = re.compile(rf"\s*{_STRING}\s*:\s*(?=\S)", re.DOTALL)
_NEXT_KEY: Final = re.compile(rf"\s*,\s*{_STRING}\s*:\s*(?=\S)", re.DOTALL)
_OBJECT_END: Final = re.compile(r"\s*\}")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE: Final = re.compile(
    rf'\\(?:["\\/bfnrt]|{_UNICODE}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_OUTSIDE: Final = re.compile(r'[^"\[\]{},]+')
_INSIDE: Final = re.compile(r'(?:[^"\\]|\\.)+', re.DOTALL)


class _JsonScanner(Scanner):
    """Parses members of a JSON object, as in Hermes, DeepSeek and Harmony."""

    def __init__(self, head: re.Pattern[str], closing: str, tail: str, tool: str = "") -> None:
        """`tail` is the pattern of the text that may follow the object."""
        super().__init__()
        self.closing = closing
        self._head = head
        self._tail = tail
        self._tool_of_header = tool
        self._key = _FIRST_KEY
        self._depth = 0
        self._in_string = False

    def finish(self) -> Iterator[Scan]:
        behind = self._step == self._idle and re.fullmatch(self._tail, self._rest)
        self.is_complete = bool(behind)
        yield from ()

    def _begin(self) -> Iterator[Scan]:
        head = self._head.match(self._rest)
        if head is None:
            if len(self._rest) > _MAX_SEARCH_CHARS:
                self._step = self._idle
            return
        self.tool = self._tool_of_header or next(filter(None, head.groups()), "").strip()
        _ = self._take(head.end())
        self._step = self._members
        yield from ()

    def _members(self) -> Iterator[Scan]:
        key = self._key.match(self._rest)
        if key is None:
            if end := _OBJECT_END.match(self._rest):
                _ = self._take(end.end())
                self._step = self._idle
            return
        self._key = _NEXT_KEY
        is_quoted = self._rest[key.end()] == '"'
        end = self._take(key.end() + is_quoted)
        self._step = self._quoted if is_quoted else self._bare
        yield ValueStart(json.loads(f'"{key[1]}"'), end, is_quoted)

    def _quoted(self) -> Iterator[Scan]:
        if part := _PLAIN.match(self._rest):
            yield ValuePart(part[0], self._take(part.end()))
        elif escape := _ESCAPE.match(self._rest):
            yield ValuePart(json.loads(f'"{escape[0]}"'), self._take(escape.end()))
        elif self._rest.startswith('"'):
            self._step = self._members
            yield ValueEnd(self._take(1))

    def _bare(self) -> Iterator[Scan]:
        """A value that is not a string; nested values are not separated."""
        first, pattern = self._rest[0], _INSIDE if self._in_string else _OUTSIDE
        if part := pattern.match(self._rest):
            yield ValuePart(part[0], self._take(part.end()))
        elif first == '"':
            self._in_string = not self._in_string
            yield ValuePart(first, self._take(1))
        elif self._depth == 0 and first in ",]}":
            self._step = self._members
            yield ValueEnd(self._at)
        elif not self._in_string:
            self._depth += 1 if first in "[{" else -1 if first in "]}" else 0
            yield ValuePart(first, self._take(1))
