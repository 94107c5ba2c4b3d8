"""Reads the arguments of a call: the values of a model's text under a tool's schema."""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from ...checkpoint.python_source import literal
from .schemas import (
    Kind,
    SchemaDocument,
    alternatives,
    any_of,
    constants,
    declared_kinds,
    is_among,
    kind_of,
    member,
)

_INFINITE: Final = (math.inf, -math.inf)
_WORDS: Final[dict[str, Any]] = {"None": None, "True": True, "False": False}
"""Python's spelling, in which some chat templates write earlier calls."""


class RawText(str):
    """An argument as it stands in a tagged call: strings without quotes, other values as JSON."""

    __slots__ = ()


def read_text(document: SchemaDocument, text: str, schema: object) -> Any:
    """The value that `text` spells as an argument of a tagged call.

    Text that is JSON of a kind that `schema` allows besides strings is that value: `5` is a
    number for `str | int`, and `null` is not a string for `str | None`. Any other text is a
    string. Raises SchemaFault.
    """
    kinds = document.kinds(schema)
    if kinds <= {"string"}:
        return str(text)
    value = _load(text, "string" in kinds)
    if isinstance(value, float) and value.is_integer() and "number" not in kinds:
        value = int(value)
    if isinstance(value, str) or not _is_kind(value, kinds) or value in _INFINITE:
        return str(text)
    if "string" in kinds and not _fits(document, value, schema, {}):
        return str(text)
    return coerce(document, value, schema)


_STARTS: Final[dict[Kind, str]] = {
    "array": "[",
    "object": "{",
    "number": "-0123456789",
    "integer": "-0123456789",
    "null": "nN",
    "boolean": "tfTF",
}
_WORDS_OF_JSON: Final = ("null", "true", "false")
_NUMBER: Final = re.compile(r"[-+.eE0-9]+\s*")
_MAX_SCALAR_CHARS: Final = 64
"""Characters after which a text that may be a number is only read when it is complete."""


def is_string_so_far(kinds: frozenset[Kind], beginning: str) -> bool | None:
    """Whether `read_text` returns a string for every text with this beginning.

    None if a few more characters may decide it, False if only the whole text will.
    """
    if kinds <= {"string"}:
        return True
    if "string" not in kinds:
        return False
    if not beginning:
        return None
    first = beginning[0]
    if not any(first in _STARTS.get(kind, "") for kind in kinds):
        return True
    if first in "[{":
        return False
    # Only the first characters count, so that the division of the text into deltas does not.
    text = beginning[:_MAX_SCALAR_CHARS]
    if first in "nNtfTF":
        words = (*_WORDS, *_WORDS_OF_JSON)
        may_be_scalar = any(w.startswith(text) or w == text.rstrip() for w in words)
    else:
        may_be_scalar = _NUMBER.fullmatch(text) is not None
    if not may_be_scalar:
        return True
    return None if len(beginning) <= _MAX_SCALAR_CHARS else False


def coerce(document: SchemaDocument, value: Any, schema: object) -> Any:
    """Converts `value` to a kind that `schema` allows, if that keeps its meaning.

    Models write strings for numbers, and numbers for strings of digits. Raises SchemaFault.
    """
    kinds = document.kinds(schema)
    match value:
        case RawText():
            return read_text(document, value, schema)
        case str():
            return value if "string" in kinds else read_text(document, value, schema)
        case dict() if "object" in kinds:
            fields, parts = cast("dict[str, Any]", value), list(document.members(schema))
            return {name: coerce(document, fields[name], member(parts, name)) for name in fields}
        case list() if "array" in kinds:
            items = _items(list(document.members(schema)))
            return [coerce(document, item, items) for item in cast("list[Any]", value)]
        case _ if "string" in kinds and not _is_kind(value, kinds):
            return json.dumps(value, ensure_ascii=False)
        case _:
            return value


def _fits(
    document: SchemaDocument, value: object, schema: object, results: dict[int, bool]
) -> bool:
    """Whether `schema` allows a value that is not a string. Does not check members of arrays and
    objects."""
    if not isinstance(schema, dict):
        return schema is not False
    fields = cast("dict[str, Any]", schema)
    if id(fields) not in results:
        results[id(fields)] = (value is None and fields.get("nullable") is True) or (
            _is_kind(value, declared_kinds(fields))
            and _is_within_bounds(value, fields)
            and all(_fits(document, value, part, results) for part in document.parts(fields))
            and all(
                any(_fits(document, value, choice, results) for choice in choices)
                for choices in alternatives(fields)
            )
        )
    return results[id(fields)]


def _is_kind(value: object, kinds: frozenset[Kind]) -> bool:
    kind = kind_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _items(parts: Sequence[Mapping[str, Any]]) -> object:
    if any("prefixItems" in fields for fields in parts):
        return True
    return any_of([fields["items"] for fields in parts if "items" in fields])


def _is_within_bounds(value: object, fields: Mapping[str, Any]) -> bool:
    allowed = constants(fields)
    if allowed is not None and not is_among(value, allowed):
        return False
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return all(
        holds(value, fields[name])
        for name, holds in _BOUNDS.items()
        if isinstance(fields.get(name), int | float) and not isinstance(fields[name], bool)
    )


def _is_multiple(value: float, step: float) -> bool:
    try:
        return step > 0 and (value % step == 0 or (value / step).is_integer())
    except OverflowError:
        return False


_BOUNDS: Final[dict[str, Callable[[float, float], bool]]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": _is_multiple,
}


def _load(text: str, or_string: bool) -> Any:
    """The value that `text` spells, or `text` itself if it spells none.

    `or_string`: strings are allowed as well, so fewer texts count as a value.
    """
    if text in _WORDS:
        return _WORDS[text]
    if or_string and text[:1].isspace():
        return text
    try:
        return json.loads(text, parse_constant=_refuse, strict=False)
    except (ValueError, RecursionError):
        pass
    if or_string or text.strip()[:1] not in ("[", "{"):
        return text
    try:
        return literal(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
