"""JSON schemas of a call's arguments: their references, and the values that they allow.

The grammar of a call and the reader of its text both ask here, so that they agree.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

Kind = str
KINDS: Final = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
MAX_DEPTH: Final = 64
MAX_CALL_CHARS: Final = 1 << 20
"""Of the text of a call."""


class SchemaFault(ValueError):
    """The reason why a schema cannot be followed."""


class SchemaDocument:
    """The schema of one tool's arguments. Every method takes a schema that stands in it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._kinds: dict[int, tuple[object, frozenset[Kind]]] = {}
        """By id; the schema is kept because ids are reused."""
        self._open: list[int] = []

    def kinds(self, schema: object) -> frozenset[Kind]:
        """The kinds of value that `schema` allows; all of them where it says nothing.

        Raises SchemaFault for a reference that leads nowhere or back to itself.
        """
        if not isinstance(schema, dict):
            return frozenset() if schema is False else KINDS
        fields = cast("dict[str, Any]", schema)
        known = self._kinds.get(id(fields))
        if known is None:
            if id(fields) in self._open or len(self._open) >= MAX_DEPTH:
                raise SchemaFault(
                    f"its references lead back to themselves, or go deeper than {MAX_DEPTH}"
                )
            self._open.append(id(fields))
            try:
                known = fields, self._allowed(fields)
            finally:
                _ = self._open.pop()
            self._kinds[id(fields)] = known
        return known[1]

    def _allowed(self, fields: dict[str, Any]) -> frozenset[Kind]:
        kinds = declared_kinds(fields)
        for part in self.parts(fields):
            kinds &= self.kinds(part)
        for choices in alternatives(fields):
            kinds &= frozenset[Kind]().union(*map(self.kinds, choices))
        return kinds | {"null"} if fields.get("nullable") is True else kinds

    def parts(self, fields: Mapping[str, Any]) -> Iterator[object]:
        """The schemas that hold besides: the target of `$ref`, and `allOf`. Raises SchemaFault."""
        if "$ref" in fields:
            yield self._target(fields["$ref"])
        yield from _schemas(fields.get("allOf"))

    def _target(self, reference: object) -> object:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaFault(f"the reference {reference!r} leaves the schema")
        found: object = self.root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            match found:
                case dict() if name in found:
                    found = cast("dict[str, object]", found)[name]
                case list() if name.isdecimal() and int(name) < len(cast("list[object]", found)):
                    found = cast("list[object]", found)[int(name)]
                case _:
                    raise SchemaFault(f"the reference {reference!r} names nothing in the schema")
        return found

    def members(self, schema: object) -> Iterator[dict[str, Any]]:
        """`schema` and all that it consists of at its own level, each once."""
        waiting, seen = [schema], set[int]()
        while waiting:
            one = waiting.pop()
            if not isinstance(one, dict) or id(cast("object", one)) in seen:
                continue
            fields = cast("dict[str, Any]", one)
            seen.add(id(fields))
            yield fields
            waiting.extend(self.parts(fields))
            for choices in alternatives(fields):
                waiting.extend(choices)


def member(parts: Sequence[Mapping[str, Any]], name: str) -> object:
    """The schema of an object's member, by the parts of the object's: what one of them allows."""
    found: list[object] = []
    for fields in parts:
        properties = fields.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(cast("dict[str, object]", properties)[name])
        elif isinstance(others := fields.get("additionalProperties"), dict):
            found.append(cast("object", others))
    return any_of(found)


def alternatives(fields: Mapping[str, Any]) -> Iterator[list[object]]:
    """The lists of which one schema must hold."""
    for name in ("anyOf", "oneOf"):
        if isinstance(fields.get(name), list):
            yield cast("list[object]", fields[name])


def constants(fields: Mapping[str, Any]) -> list[object] | None:
    """The values that `enum` and `const` leave; None where there is neither."""
    found: list[object] | None = None
    if isinstance(choices := fields.get("enum"), list):
        found = cast("list[object]", choices)
    if "const" in fields:
        const: object = fields["const"]
        found = [const] if found is None or is_among(const, found) else []
    return found


def kind_of(value: object) -> Kind:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def declared_kinds(fields: Mapping[str, Any]) -> frozenset[Kind]:
    """The kinds that a schema's own words allow."""
    kinds = KINDS
    match fields.get("type"):
        case str(one):
            kinds &= {one}
        case list() as several:
            kinds &= {str(one) for one in cast("list[object]", several)}
        case _:
            pass
    if "number" in kinds:
        kinds |= {"integer"}
    left = constants(fields)
    return kinds if left is None else kinds & {kind_of(value) for value in left}


def _schemas(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def any_of(schemas: list[object]) -> object:
    if not schemas:
        return True
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def is_among(value: object, choices: list[object]) -> bool:
    """Equality as JSON has it: 1 is 1.0, and true is no number."""
    return any(
        choice == value and isinstance(choice, bool) == isinstance(value, bool)
        for choice in choices
    )
