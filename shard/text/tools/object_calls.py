"""Scans calls whose arguments are the members of an object: JSON, or what is spelled like it."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from .call_scanners import Declared, Scan, Scanner, ValueEnd, ValuePart, ValueStart, compiled
from .object_formats import FUNCTION_GEMMA, GEMMA, PLAIN, PYTHON, Objects

_HEX: Final = "[0-9a-fA-F]"
_PAIR: Final = rf"u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_REPLACEMENT: Final = "\ufffd"


_GLUE: Final = r"[\s,;\[]*+"
"""Text before a call, or between two."""
_MAX_DEPTH: Final = 200
_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_CODES: Final = (rf"\\{_PAIR}", rf"\\u{_HEX}{{4}}", rf"\\U{_HEX}{{8}}", rf"\\x{_HEX}{{2}}")
_WORDS: Final = {"None": "null", "True": "true", "False": "false"}
_OBJECT_KEY: Final = r"""\{\s*+"(?:name|arguments|parameters|function|type|id)"\s*+:"""
_EXTRA: Final = r'\s*+,\s*+"(?:[^"\\]|\\.)*+"\s*+:\s*+(?=\S)'


class ObjectScanner(Scanner):
    """Scans members of objects."""

    def __init__(self, objects: Objects, declared: Declared) -> None:
        super().__init__(declared)
        self._objects = objects
        self._syntax = objects.syntax
        self._names: frozenset[str] = frozenset()
        self._has_outer = False
        self._quote = ""
        self._before = ""
        """The last character of the string so far."""
        self._inner = 0
        """Strings that have begun within the string."""
        self._is_nested = False
        """Whether the string is part of a value that is collected."""
        self._after_value = self._begin
        """The step after the value that is collected."""
        self._json: list[str] = []
        """The collected value, as JSON."""
        self._word = ""
        self._depth = 0

    @property
    def _end(self) -> str:
        return self._objects.resumes or self._objects.end

    @property
    def _is_plain(self) -> bool:
        return self._objects is PLAIN

    def _has_end(self) -> Any:
        if self._is_plain and self._has_ended:
            return self._match(r"[\s\]}]*+(?:```)?+\s*+\Z")
        return self._match(r"[\s}]*+(?:\]\s*+)??" + self._objects.end)

    def _break(self) -> None:
        super()._break()
        self.is_over = self.is_over or self._is_plain

    def _begin(self) -> Iterator[Scan]:
        """Before the first call, or between two."""
        start = self._objects.start
        before = rf"(?:[\s,;]*+{start})*+{_GLUE}" if start else ""
        head = self._match(before + self._objects.head)
        if head:
            yield from self._call(head)
        elif head is None and self._objects.has_objects:
            key = _OBJECT_KEY if self._is_plain else r'\{\s*+"'
            match = self._match(rf"{before}(?={key})\{{")
            if self._takes(match):
                self._collect(self._object, "{")
            elif match is None:
                self._after()
        elif head is None:
            self._after()

    def _after(self) -> None:
        if self._calls == 0:
            self._break()
        elif self._takes(end := self._has_end()) or end is None:
            self.is_over = True

    def _call(self, head: Any) -> Iterator[Scan]:
        tool = head["tool"]
        if self._is_plain and tool not in self._declared:
            self._break()
            return
        self._has_outer = head.groupdict().get("outer") is not None
        self._names = frozenset(self._declared.get(tool, ()))
        self._step = self._members
        yield from self._start(tool, len(head[0]))

    def _members(self) -> Iterator[Scan]:
        names = sorted(self._names, key=lambda name: (-len(name), name))
        key = self._syntax.key.replace("NAME", "|".join(map(re.escape, names)) or "(?!)")
        match = self._match(rf"[\s,]*+{key}\s*+(?=\S)")
        if match:
            groups = match.groupdict()
            quoted = groups.get("quoted")
            name = groups["name"].strip() if quoted is None else _unescaped(quoted)
            yield from self._open(name, len(match[0]))
        elif match is None:
            self._close()

    def _close(self) -> None:
        shut = self._match(rf"[\s,]*+{self._syntax.shut}")
        if self._takes(shut):
            self._step = self._outer if self._has_outer else self._tail
        elif shut is None:
            end = self._has_end()
            if end:
                self._step = self._begin
            elif end is None:
                self._break()

    def _open(self, name: str, length: int) -> Iterator[Scan]:
        quote = compiled(self._syntax.quotes).match(self.rest, length, partial=True)
        if quote and quote.partial:
            return
        if quote is None:
            self._collect(self._value, "")
            yield ValueStart(name, self._take(length), "json")
            return
        self._enter_string(quote[0], is_nested=False)
        yield ValueStart(name, self._take(length + len(quote[0])), "string")

    def _enter_string(self, quote: str, *, is_nested: bool) -> None:
        self._quote, self._is_nested, self._step = quote, is_nested, self._string
        self._inner, self._before = 0, ""

    def _string(self) -> Iterator[Scan]:
        if not self.rest:
            return
        if plain := compiled(self._syntax.plain).match(self.rest):
            yield from self._emit(plain[0], len(plain[0]))
        elif self._syntax.escapes and self.rest[0] == "\\":
            yield from self._escape()
        else:
            yield from self._quoted()

    def _escape(self) -> Iterator[Scan]:
        for pattern in _CODES if self._syntax is PYTHON else _CODES[:2]:
            if code := self._match(pattern):
                yield from self._emit(_character(code[0]), len(code[0]))
                return
            if code is False:
                return
        if len(self.rest) > 1:
            yield from self._emit(_simple(self.rest[1]), 2)

    def _quoted(self) -> Iterator[Scan]:
        """A quote ends a string only before what may follow one. Where a string cannot escape it,
        strings within it have quotes, too: each that begins one there has another that ends it."""
        after_it = r"[,}\])]" if not self._is_nested else r"[,}\]):]"
        ends = rf"|{self._objects.end}" + (r"|\Z" if self._has_ended else "")
        close = self._match(rf"{re.escape(self._quote)}(?=\s*+(?:{after_it}{ends}))")
        is_quote = close is None and self.rest.startswith(self._quote)
        if is_quote and not self._syntax.escapes and self._before in tuple(":[,{"):
            self._inner += 1
        if close is None or (close and self._inner):
            self._inner -= close is not None
            yield from self._emit(self.rest[0], 1)
        elif close and self._is_nested:
            self._json.append('"')
            _ = self._take(len(close[0]))
            self._step = self._nested
        elif close:
            self._step = self._members
            yield ValueEnd(self._take(len(close[0])))

    def _emit(self, text: str, length: int) -> Iterator[Scan]:
        end, self._before = self._take(length), text[-1:]
        if self._is_nested:
            self._json.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            yield ValuePart(text, end)

    def _collect(self, after: Any, begin: str) -> None:
        """Collects a value that is no string, and the text of an object that has begun."""
        self._json, self._word, self._depth = [begin], "", len(begin)
        self._after_value, self._step = after, self._nested

    def _nested(self) -> Iterator[Scan]:
        if not self.rest:
            if self._has_ended and self._depth == 0:
                self._flush()
                yield from self._after_value()
            return
        first = self.rest[0]
        quote = self._match(self._syntax.quotes)
        more = "" if self._has_ended else "(?=.)"
        if word := self._match(rf"{self._syntax.word}++{more}"):
            self._word += word[0]
            _ = self._take(len(word[0]))
        elif quote:
            self._flush()
            self._json.append('"')
            _ = self._take(len(quote[0]))
            self._enter_string(quote[0], is_nested=True)
        elif word is None and quote is None:
            yield from self._punctuation(first)

    def _punctuation(self, first: str) -> Iterator[Scan]:
        if first not in "[]{}(),:" or (first in "[{(" and self._depth >= _MAX_DEPTH):
            self._break()
        elif self._depth == 0 and first in "]}),":
            self._flush()
            yield from self._after_value()
        else:
            self._flush(is_key=first == ":")
            self._depth += (first in "[{(") - (first in "]})")
            if first in "]})" and "".join(self._json[-1:]).strip() == ",":
                _ = self._json.pop()
            self._json.append({"(": "[", ")": "]"}.get(first, first))
            _ = self._take(1)
            if self._after_value == self._object and self._depth == 0:
                yield from self._object()

    def _flush(self, *, is_key: bool = False) -> None:
        word, self._word = self._word.strip(), ""
        if not word:
            return
        if is_key or (self._syntax in (GEMMA, FUNCTION_GEMMA) and _load(word) is _NOTHING):
            word = json.dumps(word, ensure_ascii=False)
        self._json.append(_WORDS.get(word, word))

    def _value(self) -> Iterator[Scan]:
        text = "".join(self._json)
        if _load(text) is _NOTHING:
            self._break()
            return
        self._step = self._members
        yield ValuePart(text, self.at)
        yield ValueEnd(self.at)

    def _extra(self) -> Iterator[Scan]:
        self._step = self._outer
        yield from ()

    def _outer(self) -> Iterator[Scan]:
        """In the object that has the arguments, after them."""
        extra = self._match(_EXTRA)
        shut = self._match(r"\s*+\}")
        if self._takes(extra):
            self._collect(self._extra, "")
        elif self._takes(shut) or extra is shut is None:
            self._step = self._tail
        yield from ()

    def _tail(self) -> Iterator[Scan]:
        tail = self._match(r"\s*+" + self._objects.tail) if self._objects.tail else None
        if self._takes(tail) or tail is None:
            self._step = self._begin
            self.is_over = self._objects.is_single
        yield from ()

    def _object(self) -> Iterator[Scan]:
        """A whole JSON object, whose members are a call's in any order."""
        call = _call_of(_load("".join(self._json)), needs_arguments=self._is_plain)
        if call is None or (self._is_plain and call[0] not in self._declared):
            self._break()
            return
        yield from self._start(call[0], 0)
        for name, value in call[1].items():
            is_string = isinstance(value, str)
            yield ValueStart(name, self.at, "string" if is_string else "json")
            text = value if is_string else json.dumps(value, ensure_ascii=False)
            yield ValuePart(text, self.at)
            yield ValueEnd(self.at)
        self._step = self._tail


_NOTHING: Final = object()


def _load(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return _NOTHING


def _call_of(value: object, *, needs_arguments: bool) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments in an object that is a call."""
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, Any]", value)
    if isinstance(fields.get("function"), dict):
        fields = cast("dict[str, Any]", fields["function"])
    name = fields.get("name")
    values = [fields[key] for key in ("arguments", "parameters") if key in fields]
    arguments: object = values[0] if values else None
    if isinstance(arguments, str):
        arguments = _load(arguments) if arguments.strip() else None
    if needs_arguments and not values:
        return None
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, cast("dict[str, Any]", arguments)


def _unescaped(text: str) -> str:
    value = _load(f'"{text}"')
    return text if value is _NOTHING else re.sub("[\ud800-\udfff]", _REPLACEMENT, value)


def _character(code: str) -> str:
    """The character of an escape; half of one is replaced."""
    if code[1] in "xU":
        point = int(code[2:], 16)
        return chr(point) if point < 0x110000 and not 0xD800 <= point < 0xE000 else _REPLACEMENT
    return _unescaped(code)


def _simple(character: str) -> str:
    if character in "\"\\/'":
        return character
    return _ESCAPES.get(character, "\\" + character)
