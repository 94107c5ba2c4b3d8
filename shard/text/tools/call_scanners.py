"""Finds the calls in an answer's text as it grows, and where they end.

Pure: the scans depend on the text so far, not on its division into deltas. One scanner reads one
section of calls, from the marker that opens it to the one that closes it. `tool_calls.py` decides
whether the calls are ones of declared tools.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, cast

import regex

_PIECE_CHARS: Final = 1024
MAX_HELD_CHARS: Final = 4096
"""The longest text whose meaning may depend on what follows it."""

Declared = Mapping[str, Collection[str]]
"""The names of the arguments of each declared tool."""
ValueKind = Literal["string", "raw", "json", "all"]
"""`string`: a string, decoded. `json`: any other JSON. `raw`: one or the other, by the schema.
`all`: an object with all arguments."""


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call."""

    tool: str
    end: int
    """Characters of the section up to this event; so in the other events."""


@dataclass(frozen=True, slots=True)
class ValueStart:
    """The start of an argument's value."""

    name: str
    end: int
    kind: ValueKind


@dataclass(frozen=True, slots=True)
class ValuePart:
    """A part of the value's text."""

    text: str
    end: int


@dataclass(frozen=True, slots=True)
class ValueEnd:
    """The end of the value."""

    end: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """Text in a value that may be the next argument's: only the whole call shows whether it is."""

    end: int


Scan = CallStart | ValueStart | ValuePart | ValueEnd | Doubt


def declared_names(tools: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """The names of tools' arguments, by the tools'."""
    names: dict[str, frozenset[str]] = {}
    for tool in tools:
        function = tool["function"]
        properties: object = (function.get("parameters") or {}).get("properties")
        declared = cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
        names[function["name"]] = frozenset(declared)
    return names


@lru_cache(maxsize=512)
def compiled(pattern: str) -> Any:
    return regex.compile(pattern, regex.DOTALL)


class Scanner(ABC):
    """Scans one section of calls."""

    def __init__(self, declared: Declared) -> None:
        self.at = 0
        """Characters read so far; those after them are `rest`."""
        self.rest = ""
        self.is_over = False
        """Whether the section has ended; `rest` is the text after it."""
        self.is_broken = False
        """Whether the section's text is no call."""
        self._declared = declared
        self._has_ended = False
        """Whether no more text follows."""
        self._calls = 0
        self._step: Callable[[], Iterator[Scan]] = self._begin

    @property
    def is_whole(self) -> bool:
        """Whether all of the section is calls, and it has ended."""
        return self.is_over and not self.is_broken and self._calls > 0

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._calls > 0

    def feed(self, text: str) -> Iterator[Scan]:
        """The scans that became certain with `text`."""
        # In pieces, as each scan copies the text after it.
        at = 0
        while at < len(text):
            # No division of the text changes where the bound is reached.
            room = max(1, MAX_HELD_CHARS + 1 - len(self.rest))
            piece = text[at : at + (len(text) if self.is_over else min(_PIECE_CHARS, room))]
            self.rest += piece
            at += len(piece)
            yield from self._run()
            if len(self.rest) > MAX_HELD_CHARS and not (self.is_over or self._may_hold):
                self._break()

    def finish(self) -> Iterator[Scan]:
        """The scans that the end of the text makes certain."""
        self._has_ended = True
        yield from self._run()

    def _run(self) -> Iterator[Scan]:
        before = None
        while not self.is_over and before != (self.at, self._step):
            before = self.at, self._step
            yield from self._step()

    @abstractmethod
    def _begin(self) -> Iterator[Scan]:
        """Reads the text before the first call. Each step replaces `_step` by the next one."""

    @property
    def _may_hold(self) -> bool:
        """Whether the unread text may have any length: no search in it restarts."""
        return False

    @property
    @abstractmethod
    def _end(self) -> str:
        """The pattern of the text that ends a section."""

    def _match(self, pattern: str) -> Any:
        """The match of `pattern` where the rest begins; False if more text is needed."""
        match = compiled(pattern).match(self.rest, partial=not self._has_ended)
        return False if match and match.partial else match

    def _takes(self, match: Any) -> bool:
        """Whether there is a match, which is then read."""
        if match:
            _ = self._take(len(match[0]))
        return bool(match)

    def _start(self, tool: str, length: int) -> Iterator[Scan]:
        self._calls += 1
        yield CallStart(tool, self._take(length))

    def _take(self, length: int) -> int:
        self.rest = self.rest[length:]
        self.at += length
        return self.at

    def _part(self, length: int) -> Iterator[Scan]:
        if length > 0:
            text = self.rest[:length]
            yield ValuePart(text, self._take(length))

    def _break(self) -> None:
        """Makes the section one without whole calls, up to the text that ends sections; it ends
        at once if no call has begun in it."""
        self.is_broken = True
        self.is_over = not self._calls
        self._step = self._skip

    def _skip(self) -> Iterator[Scan]:
        end = compiled(self._end).search(self.rest, partial=not self._has_ended)
        _ = self._take(len(self.rest) if end is None else end.start())
        self.is_over = bool(end) and not end.partial and self._takes(end)
        yield from ()
