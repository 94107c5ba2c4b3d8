"""Regular expressions, in llguidance's Lark, for the raw text of a schema's strings."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from ..tools.schemas import MAX_CALL_CHARS, SchemaDocument, SchemaFault, alternatives, constants
from .enforceable import FORMATS, leaves_pattern
from .lark import quoted
from .look_ahead import plain_patterns, regex_alternatives

_NEVER: Final = r"/[^\s\S]/"
_FREE: Final = "/(?s:.)*/"
_FLAGS: Final = re.compile(r"\(\?[a-zA-Z]+\)")


class RawStrings:
    """The terminals of one grammar; schemas that share one by reference write it once."""

    def __init__(self, document: SchemaDocument, prefix: str) -> None:
        """`prefix`: the upper-case start of the terminals' names."""
        self._document = document
        self._prefix = prefix
        self._names: dict[int, str] = {}
        self.terminals: list[str] = []
        self.longest = 0
        """The largest bound of a string's length."""

    def expression(self, schema: object) -> str:
        """A terminal's body for the strings that `schema` allows. Raises SchemaFault."""
        conditions = [part for part in self._conditions(schema) if part != _FREE]
        return f"({' & '.join(conditions)})" if conditions else _FREE

    def _conditions(self, schema: object) -> Iterator[str]:
        if "string" not in self._document.kinds(schema):
            yield _NEVER
        if not isinstance(schema, dict):
            return
        fields = cast("dict[str, Any]", schema)
        yield from self._own(fields)
        for part in self._document.parts(fields):
            yield self._named(part)
        for choices in alternatives(fields):
            strings = [part for part in choices if "string" in self._document.kinds(part)]
            either = [self.expression(part) for part in strings]
            yield _FREE if _FREE in either else f"({' | '.join(either) or _NEVER})"

    def _named(self, schema: object) -> str:
        """The terminal of a schema, written once: references can double its uses at each level."""
        name = self._names.get(id(schema))
        if name is None:
            body = self.expression(schema)
            name = _FREE if body == _FREE else f"{self._prefix}_{len(self._names)}"
            self._names[id(schema)] = name
            if name != _FREE:
                self.terminals.append(f"{name}: {body}")
        return name

    def _own(self, fields: Mapping[str, Any]) -> Iterator[str]:
        values = constants(fields)
        if values is not None:
            either = [quoted(value) for value in values if isinstance(value, str)]
            yield f"({' | '.join(either) or _NEVER})"
        low, high = _length(fields.get("minLength")) or 0, _length(fields.get("maxLength"))
        if high is not None and high > MAX_CALL_CHARS:
            high = None
        if high is not None and low > high:
            raise SchemaFault(f"minLength {low} is above maxLength {high}")
        if low or high is not None:
            if low > MAX_CALL_CHARS:
                raise SchemaFault(f"minLength {low} is more than a call may have")
            self.longest = max(self.longest, low, high or 0)
            yield f"/(?s:.){{{low},{'' if high is None else high}}}/"
        if isinstance(pattern := fields.get("pattern"), str) and not leaves_pattern(fields):
            yield from map(_search_regex, plain_patterns(pattern))
        if expression := FORMATS.get(str(fields.get("format"))):
            yield _lark_regex(expression)


def _length(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return int(min(value, MAX_CALL_CHARS + 1))


def _lark_regex(expression: str) -> str:
    """A regular expression in Lark, with ASCII digits and words, as in JSON Schema."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(expression, 'dw')}/"


def _search_regex(pattern: str) -> str:
    """The expression of texts in which `pattern` occurs.

    Terminals have no anchors, so text is allowed before and after an alternative without them.
    """
    flags = match[0] if (match := _FLAGS.match(pattern)) else ""
    either: list[str] = []
    for part in regex_alternatives(pattern[len(flags) :]):
        before, after = "(?s:.)*", "(?s:.)*"
        if part.startswith("^"):
            before, part = "", part[1:]
        if part.endswith("$") and (len(part) - len(part[:-1].rstrip("\\"))) % 2:
            after, part = "", part[:-1]
        either.append(f"{before}({part}){after}")
    return _lark_regex(f"{flags}({'|'.join(either)})")
