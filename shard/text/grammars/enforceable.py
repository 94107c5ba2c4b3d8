"""JSON schemas as the library of grammars takes them, with what it lacks written otherwise.

Programs write their schemas by zod or pydantic, which know more keywords and formats.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from ..tools.schemas import MAX_DEPTH, SchemaDocument, SchemaFault, constants

_MEMBERS: Final = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
_DATA: Final = frozenset(("enum", "const", "default", "examples", "example"))
_TITLES: Final = frozenset(("type", "title", "description", "$comment"))
_LIMIT: Final = 10**18 - 1
"""The library reads no larger bound of a number, such as those of 64 bits and of float32."""
_BOUNDS: Final = {
    "minimum": -_LIMIT,
    "exclusiveMinimum": -_LIMIT,
    "maximum": _LIMIT,
    "exclusiveMaximum": _LIMIT,
}
_OBJECTS: Final = frozenset(("properties", "required", "patternProperties", "minProperties"))
_COMBINING: Final = frozenset(("anyOf", "oneOf", "allOf", "not", "if", "then", "else"))
_OPEN: Final = _COMBINING.union(
    ("$ref", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    ("minProperties", "maxProperties", "propertyNames", "dependentSchemas"),
)
UNIQUE: Final = "uniqueItems"
_AROUND: Final = re.compile(r"\(\?<?[=!]")
_WITHOUT_LOOKING: Final = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$": r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$",
}
"""Patterns that look around, for which grammars have nothing, and others of the same texts: of
pydantic's Decimal and of zod's e-mail address."""

_DATE: Final = (
    "([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([1-9][0-9](0[48]|[2468][048]|[13579][26])|(1[26]|[2468][048]|[3579][26])00)-02-29)"
)
_TIME: Final = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    r"([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_DAYS: Final = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_HOURS: Final = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL: Final = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST: Final = rf"{_LABEL}(\.{_LABEL})*"
_HEX: Final = "[0-9a-fA-F]{1,4}"
_IPV6: Final = "|".join(
    [
        f"({_HEX}:){{7}}{_HEX}",
        *(f"({_HEX}:){{{n}}}(:{_HEX}){{1,{7 - n}}}" for n in range(1, 7)),
        f":((:{_HEX}){{1,7}}|:)",
        f"({_HEX}:){{1,7}}:",
    ]
)
_PATH: Final = "([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P([0-9]+W|{_DAYS}({_HOURS})?|{_HOURS})",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"({_IPV6})",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:(//({_HOST}|\[({_IPV6})\])(:[0-9]{{1,5}})?(/{_PATH}*)*"
    rf"|/?{_PATH}+(/{_PATH}*)*)(\?({_PATH}|[/?])*)?(#({_PATH}|[/?])*)?",
}
"""Expressions of the formats that are enforced, after RFC 3339, 5321, 1123, 4291, 4122 and 3986 as
programs use them. Others are remarks without effect, as in JSON Schema."""


def enforceable(root: Any) -> Any:
    """A copy of a schema without what has no effect, and with known look-aheads written otherwise.

    `uniqueItems`, and a pattern that cannot be enforced beside a format that is, are left out:
    `unenforced` names them. An object that declares properties and does not mention others has no
    others, or a model could add them without end. Bounds beyond 18 digits are narrowed to them.
    Raises SchemaFault, which names the place.
    """
    document = SchemaDocument(cast("dict[str, Any]", root) if isinstance(root, dict) else {})
    may_close = not any(_extends_others(fields) for fields in _schemas(root))
    return _converted(document, root, (), may_close=may_close)


def unenforced(root: Any) -> list[str]:
    """The keywords that `enforceable` leaves out although they ask for something."""
    names = set[str]()
    for fields in _schemas(root):
        if fields.get(UNIQUE) is True:
            names.add(UNIQUE)
        if _leaves_pattern(fields):
            names.add("pattern")
    return sorted(names)


def _schemas(root: Any) -> Iterator[dict[str, Any]]:
    """All schemas within a schema."""
    pending: list[Any] = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(cast("list[Any]", value))
        elif isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            yield fields
            for name, each in fields.items():
                if name in _MEMBERS and isinstance(each, dict):
                    pending.extend(cast("dict[str, Any]", each).values())
                elif name not in _DATA:
                    pending.append(each)


def _leaves_pattern(fields: Mapping[str, Any]) -> bool:
    """Whether a pattern cannot be enforced, and an enforced format stands beside it."""
    pattern = fields.get("pattern")
    looks = isinstance(pattern, str) and _AROUND.search(_plain(pattern))
    return bool(looks) and fields.get("format") in FORMATS


def _plain(pattern: str) -> str:
    return _WITHOUT_LOOKING.get(pattern, pattern)


def _extends_others(fields: Mapping[str, Any]) -> bool:
    """Whether a schema adds properties to those of others, which therefore stay open."""
    parts: Any = fields.get("allOf", ())
    combines = "$ref" in fields or "allOf" in fields
    return (isinstance(parts, list) and len(parts) > 1) or (
        combines and bool(_OBJECTS & fields.keys())
    )


def _is_closed(fields: Mapping[str, Any]) -> bool:
    """Whether an object has no properties but those that it declares, though it may have others."""
    properties, required = fields.get("properties"), fields.get("required", [])
    if not isinstance(properties, dict) or not properties or _OPEN & fields.keys():
        return False
    return isinstance(required, list) and {*cast("list[Any]", required)} <= properties.keys()


def _converted(
    document: SchemaDocument, value: Any, place: tuple[str, ...], *, may_close: bool
) -> Any:
    """`may_close`: whether objects that are silent about other properties have none."""
    if len(place) > 2 * MAX_DEPTH:
        raise SchemaFault(f"it is nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [
            _converted(document, each, (*place, str(at)), may_close=may_close)
            for at, each in enumerate(items)
        ]
    if not isinstance(value, dict):
        return value
    fields = dict(cast("dict[str, Any]", value))
    try:
        fields = _own(document, fields)
    except SchemaFault as fault:
        raise SchemaFault(f"{'.'.join(place)}: {fault}" if place else str(fault)) from fault
    if may_close and _is_closed(fields):
        fields["additionalProperties"] = False
    combines = bool(_OBJECTS & fields.keys())
    for name, each in fields.items():
        if name in _MEMBERS and isinstance(each, dict):
            members = cast("dict[str, Any]", each)
            fields[name] = {
                key: _converted(document, one, (*place, name, key), may_close=may_close)
                for key, one in members.items()
            }
        elif name not in _DATA:
            closes = may_close and not (combines and name in _COMBINING)
            fields[name] = _converted(document, each, (*place, name), may_close=closes)
    return fields


def _own(document: SchemaDocument, fields: dict[str, Any]) -> dict[str, Any]:
    """One schema's keywords, those within it as they are. Raises SchemaFault, also for references
    that lead back to themselves, in which an answer would get stuck."""
    if str(fields.get("$ref")).startswith("#"):
        _ = document.kinds(fields)
    if isinstance(is_unique := fields.get(UNIQUE), bool):
        del fields[UNIQUE]
        items = fields.get("items")
        values = constants(cast("dict[str, Any]", items)) if isinstance(items, dict) else None
        if is_unique and values is not None:
            fields["maxItems"] = min(len(values), fields.get("maxItems", len(values)))
    if isinstance(fields.get("format"), str) and fields["format"] not in FORMATS:
        del fields["format"]
    if isinstance(pattern := fields.get("pattern"), str):
        if _leaves_pattern(fields):
            del fields["pattern"]
        elif mark := _AROUND.search(_plain(pattern)):
            raise SchemaFault(f"the pattern looks around with '{mark[0]}', which is not enforced")
        else:
            fields["pattern"] = _plain(pattern)
    for name, limit in _BOUNDS.items():
        bound = fields.get(name)
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            fields[name] = max(bound, limit) if limit < 0 else min(bound, limit)
    if "propertyNames" in fields:
        fields = _with_names(document, fields)
    return fields


def _with_names(document: SchemaDocument, fields: dict[str, Any]) -> dict[str, Any]:
    """`propertyNames` as properties, or as their pattern. Raises SchemaFault."""
    names: Any = fields.pop("propertyNames")
    parts = list(document.members(names))
    others: Any = fields.get("additionalProperties", True)
    for part in parts:
        if (values := constants(part)) is not None:
            properties = cast("dict[str, Any]", fields.get("properties", {}))
            listed = {name: others for name in values if isinstance(name, str)}
            own = {name: properties[name] for name in listed if name in properties}
            return {**fields, "properties": {**listed, **own}, "additionalProperties": False}
    keywords = {name for part in parts for name in part} - _TITLES - {"$ref", "format"}
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    for part in parts:
        low, high = part.get("minLength", 0), part.get("maxLength", "")
        if low or high != "":
            patterns.append(rf"^[\s\S]{{{low},{high}}}$")
    is_pattern = len(patterns) == 1 and keywords <= {"pattern", "minLength", "maxLength"}
    if is_pattern and "patternProperties" not in fields:
        return {**fields, "patternProperties": {patterns[0]: others}, "additionalProperties": False}
    if not keywords:
        return fields
    raise SchemaFault(
        f"'propertyNames' with {', '.join(sorted(keywords))} cannot be enforced; give an 'enum', "
        "one 'pattern', or a length"
    )
