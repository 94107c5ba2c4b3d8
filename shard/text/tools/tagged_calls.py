"""Scans calls whose arguments stand between tags, without quotes."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from .call_scanners import (
    MAX_HELD_CHARS,
    Declared,
    Doubt,
    Scan,
    Scanner,
    ValueEnd,
    ValueKind,
    ValueStart,
    compiled,
)

_KINDS: Final[tuple[ValueKind, ...]] = ("string", "json", "all", "raw")
_GAP: Final = r"\s*+"
_TOOL: Final = r"""(?P<quote>["']?)(?P<tool>[\w.:/-]{1,256})(?P=quote)"""


@dataclass(frozen=True)
class Tags:
    """Patterns of one format's tags.

    `start`, `end`: of a section. `opening`: how a call begins; `head` is all the text before its
    first argument, `tail` the tag that ends it. `key`: the text before a value, in which NAME
    stands for the argument's name; its groups `string` and `json` say what the value is. `close`
    ends a value, and has the line break before it that is none of the value's.

    No pattern may end with something optional or look at what must not follow: where the text so
    far ends could then change the result.
    """

    start: str
    end: str
    opening: str
    head: str
    tail: str
    key: str
    close: str
    escapes: bool = False
    """Whether names are escaped as in HTML."""


QWEN: Final = Tags(
    start="<tool_call>",
    end="</tool_call>",
    opening="<function=",
    head=rf"<function={_TOOL}\s*>",
    tail="</function>",
    key=r"<parameter=NAME>(?:\n|(?=[^>\n]))",
    close=r"\n?+</parameter>",
)
SEED: Final = replace(QWEN, start="<seed:tool_call>", end="</seed:tool_call>")


def _keyed(prefix: str) -> Tags:
    return Tags(
        start=f"<{prefix}tool_call>",
        end=f"</{prefix}tool_call>",
        opening=rf"[\w.:/-]{{1,256}}\s*+<{prefix}arg_key>",
        head=rf"{_TOOL}(?=\s*+(?:<{prefix}arg_key>|</{prefix}tool_call>))",
        tail="",
        key=rf"<{prefix}arg_key>\s*+NAME\s*+</{prefix}arg_key>\s*+<{prefix}arg_value>",
        close=f"</{prefix}arg_value>",
    )


GLM: Final = _keyed("")
LONGCAT: Final = _keyed("longcat_")


def _invoked(prefix: str, section: str, kind: str = "") -> Tags:
    return Tags(
        start=f"<{prefix}{section}>",
        end=f"</{prefix}{section}>",
        opening=rf"<{prefix}invoke\s",
        head=rf"<{prefix}invoke\s[^>\n]*?\bname={_TOOL}\s*>",
        tail=f"</{prefix}invoke>",
        key=rf"<{prefix}parameter\s[^>\n]*?\bname=NAME{kind}\s*>",
        close=f"</{prefix}parameter>",
    )


MINIMAX: Final = replace(_invoked("", ""), start="<minimax:tool_call>", end="</minimax:tool_call>")
MUSE: Final = _invoked("atem:", "function_calls", r"(?:\s+[^>\n]*?)?")
DSML_MARK: Final = "｜DSML｜"  # noqa: RUF001
DSML: Final = _invoked(
    DSML_MARK, "(?:function|tool)_calls", r'(?:\s+string="(?:(?P<string>true)|(?P<json>false))")?'
)
MINICPM: Final = Tags(
    start="",
    end="</function>",
    opening=r"<function\s",
    head=rf"<function\s+name\s*=\s*{_TOOL}\s*>",
    tail="",
    key=r"<param\s+name\s*=\s*NAME\s*>(?:(?P<cdata>\s*+<!\[CDATA\[)|(?=\s*+(?:[^\s<]|<[^!])))",
    close="</param>",
)
_ATTRIBUTE: Final = r'\s+\w+="[^"]*"'
KIMI_K3: Final = Tags(
    start=r"<\|open\|>tools<\|sep\|>",
    end=r"<\|close\|>tools<\|sep\|>",
    opening=r"<\|open\|>call\s",
    head=rf'<\|open\|>call(?:\s+tool="(?P<tool>[\w.:/-]{{1,256}})"|{_ATTRIBUTE})*<\|sep\|>',
    tail=r"<\|close\|>call<\|sep\|>",
    key=r'<\|open\|>(?:argument(?:\s+type="(?:(?P<string>string)|(?P<json>\w+))"|\s+key=NAME'
    rf"|{_ATTRIBUTE})*|(?P<all>json)[^<]*?)<\|sep\|>",
    close=r"<\|close\|>(?:argument|json)<\|sep\|>",
    escapes=True,
)


class TaggedScanner(Scanner):
    """Scans values between tags."""

    def __init__(self, tags: Tags, declared: Declared, *, splits: bool = False) -> None:
        """`splits`: a declared argument's tag ends the value before it, whose own is missing."""
        super().__init__(declared)
        self._tags = tags
        self._splits = splits
        self._has_start = True
        self._names: frozenset[str] = frozenset()
        """Declared names of arguments that have not come."""
        self._depth = 0
        """Calls that have begun within the value."""
        self._from = 0
        """Characters of the rest in which nothing ends the value, or only if no other text does."""
        self._held = 0
        """The length of the closing tag at the start of the rest that then ends it."""
        self._has_values = False
        self._closes = tags.close

    @property
    def _may_hold(self) -> bool:
        return self._step == self._value

    @property
    def _end(self) -> str:
        return self._tags.end

    def _begin(self) -> Iterator[Scan]:
        start = rf"\s*+{self._tags.start}|(?=\s*+{self._tags.opening})"
        if (match := self._match(start)) is None:
            self._break()
        elif match:
            self._has_start = bool(match[0]) or not self._tags.start
            _ = self._take(len(match[0]))
            self._step = self._head
        yield from ()

    def _head(self) -> Iterator[Scan]:
        again = rf"(?:{_GAP}{self._tags.start})*+" if self._tags.start else ""
        match = self._match(again + _GAP + self._tags.head)
        if match is None:
            self._break()
        elif match:
            yield from self._call(match)

    def _call(self, match: Any) -> Iterator[Scan]:
        tool = match["tool"] or ""
        if not (self._has_start or tool in self._declared):
            self._break()
            return
        self._names = frozenset(self._declared.get(tool, ()))
        self._has_values = False
        self._step = self._next
        yield from self._start(tool, len(match[0]))

    def _next(self) -> Iterator[Scan]:
        """Between two values, or after the last one."""
        tags = self._tags
        declared, other = self._name_patterns()
        key = self._match(_GAP + tags.key.replace("NAME", declared)) if declared else None
        if key is None:
            key = self._match(_GAP + tags.key.replace("NAME", other))
        if key:
            yield from self._open(key)
            return
        tail = self._match(_GAP + tags.tail) if tags.tail else None
        end = self._match(_GAP + tags.end)
        if self._takes(tail):
            self._step = self._between
        elif self._takes(end) or (self._has_ended and self._has_values and not self.rest.strip()):
            self.is_over = True
        elif key is tail is end is None:
            self._break()

    def _open(self, key: Any) -> Iterator[Scan]:
        groups = key.groupdict()
        name: str = groups["name"] or ""
        name = name if name in self._names else name.strip()
        if self._tags.escapes:
            name = html.unescape(name)
        kind: ValueKind = next(each for each in _KINDS if groups.get(each) or each == "raw")
        self._names -= {name}
        self._depth = self._from = self._held = 0
        self._closes = self._tags.close
        if groups.get("cdata"):
            self._closes = r"\]\]>\s*+" + self._closes
        self._has_values = True
        self._step = self._value
        yield ValueStart(name, self._take(len(key[0])), kind)

    def _between(self) -> Iterator[Scan]:
        """After a call."""
        head = self._match(_GAP + self._tags.head)
        end = self._match(_GAP + self._tags.end)
        if head:
            yield from self._call(head)
        elif self._takes(end) or head is end is None:
            self.is_over = True

    def _value(self) -> Iterator[Scan]:
        while True:
            mark = self._marks().search(self.rest, self._from, partial=not self._has_ended)
            if mark is None or mark.partial:
                self._from = len(self.rest) if mark is None else mark.start()
                if len(self.rest) - self._from > MAX_HELD_CHARS:
                    self._from = len(self.rest)
                break
            start, length = mark.start(), len(mark[0])
            match mark.lastgroup:
                case "opens":
                    self._depth += 1
                    self._from = start + length
                case "inner" if self._depth:
                    self._from = start + length
                case "inner" if not self._splits:
                    yield from self._part_to(start)
                    yield Doubt(self.at)
                    self._from = length
                case "last" if self._depth:
                    self._depth -= 1
                    yield from self._part_to(start)
                    self._from = self._held = length
                case "lost" if self._depth or self._held:
                    self._depth = max(0, self._depth - 1)
                    self._from = start + length + 2
                case "next" if self._depth:
                    self._from = start + length
                case kind:
                    yield from self._close(start, 0 if kind == "inner" else length)
                    return
        if self._held and self._has_ended:
            yield from self._close(0, self._held)
        elif not self._held:
            yield from self._part_to(self._from)

    def _part_to(self, length: int) -> Iterator[Scan]:
        yield from self._part(length)
        self._from = self._held = 0

    def _close(self, start: int, length: int) -> Iterator[Scan]:
        yield from self._part_to(start)
        self._step = self._next
        yield ValueEnd(self._take(length))

    def _name_patterns(self) -> tuple[str, str]:
        """The patterns of names that are declared, whatever characters they have, and of others."""
        names = sorted(self._names, key=lambda name: (-len(name), name))
        if self._tags.escapes:
            names = [name.replace("&", "&amp;").replace('"', "&quot;") for name in names]
        escaped = "|".join(map(re.escape, names))
        either = rf"""(?:(?P<name>{escaped})|(?P<mark>["'])(?P<name>{escaped})(?P=mark))"""
        other = r"""(?P<mark>["']?)(?P<name>[^\n<>"']{1,256}+)(?P=mark)"""
        return either if names else "", other

    def _marks(self) -> Any:
        """The pattern of texts in a value that may end it.

        `next`: it ends before another argument. `last`: at the end of its call. `lost`: there, too,
        but its own tag is missing. `opens`: a whole call begins in it. `inner`: a declared argument
        begins, so perhaps the tag before it is missing.
        """
        tags = self._tags
        key = tags.key.partition("NAME")[0].partition("(")[0]
        again = rf"{tags.start}{_GAP}{tags.opening}"
        stops = [tags.end]
        if tags.tail:
            after = f"{_GAP}(?:{tags.end}|{tags.opening})" if self._has_start else ""
            stops.append(tags.tail + after)
        lost = f"{tags.end}{_GAP}"
        if tags.tail:
            lost = rf"(?:{tags.tail}{_GAP}(?:{lost})?+|{lost})"
        if self._has_ended:
            stops.append(rf"(?:{tags.tail}{_GAP})?\Z")
        ends = rf"{lost}(?:{again}|\Z)" if self._has_ended else lost + again
        ways = [
            rf"(?P<next>{self._closes}(?={_GAP}{key}))",
            rf"(?P<last>{self._closes}(?={_GAP}(?:{'|'.join(stops)})))",
        ]
        if self._closes == tags.close:  # else the value is in quotes of its own
            ways += [rf"(?P<lost>\n?+(?={ends}))", rf"(?P<opens>{again})"]
        if self._names and self._closes == tags.close:
            words = "|".join(map(re.escape, sorted(self._names)))
            inner = tags.key.replace("NAME", rf"""["']?(?:{words})["']?""")
            ways.append(rf"(?P<inner>\n(?={inner}))")
        return compiled("|".join(ways))
