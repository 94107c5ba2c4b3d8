"""JSON schemas of a call's arguments: their references, and the values that they allow.

The grammar of calls and their parser both use this module, so they agree.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

Kind = str
KINDS: Final = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
MAX_DEPTH: Final = 64
MAX_CALL_CHARS: Final = 1 << 20
"""The most characters of a call's text."""


class SchemaFault(ValueError):
    """A schema cannot be followed; the message is the reason."""


class SchemaDocument:
    """The schema of one tool's arguments. Every method takes a schema within it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._kinds: dict[int, tuple[object, frozenset[Kind]]] = {}
        """Kinds by the schema's id, with the schema itself: ids of freed objects are reused."""
        self._open: list[int] = []

    def kinds(self, schema: object) -> frozenset[Kind]:
        """The kinds of value that `schema` allows; all of them if it restricts none.

        Raises SchemaFault for a reference that leads nowhere or back to itself.
        """
        if not isinstance(schema, dict):
            return frozenset() if schema is False else KINDS
        fields = cast("dict[str, Any]", schema)
        entry = self._kinds.get(id(fields))
        if entry is None:
            if id(fields) in self._open or len(self._open) >= MAX_DEPTH:
                raise SchemaFault(
                    f"its references lead back to themselves, or go deeper than {MAX_DEPTH}"
                )
            self._open.append(id(fields))
            try:
                entry = fields, self._allowed(fields)
            finally:
                _ = self._open.pop()
            self._kinds[id(fields)] = entry
        return entry[1]

    def _allowed(self, fields: dict[str, Any]) -> frozenset[Kind]:
        kinds = declared_kinds(fields)
        for part in self.parts(fields):
            kinds &= self.kinds(part)
        for choices in alternatives(fields):
            kinds &= frozenset[Kind]().union(*map(self.kinds, choices))
        return kinds | {"null"} if fields.get("nullable") is True else kinds

    def parts(self, fields: Mapping[str, Any]) -> Iterator[object]:
        """The schemas that apply in addition: the target of `$ref`, and `allOf`.

        Raises SchemaFault.
        """
        if "$ref" in fields:
            yield self._target(fields["$ref"])
        if isinstance(parts := fields.get("allOf"), list):
            yield from cast("list[object]", parts)

    def _target(self, reference: object) -> object:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaFault(f"the reference {reference!r} leaves the schema")
        target: object = self.root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            match target:
                case dict() if name in target:
                    target = cast("dict[str, object]", target)[name]
                case list() if name.isdecimal() and int(name) < len(cast("list[object]", target)):
                    target = cast("list[object]", target)[int(name)]
                case _:
                    raise SchemaFault(f"the reference {reference!r} names nothing in the schema")
        return target

    def members(self, schema: object) -> Iterator[dict[str, Any]]:
        """`schema` and the schemas that it combines at its own level, each once."""
        pending, visited = [schema], set[int]()
        while pending:
            candidate = pending.pop()
            if not isinstance(candidate, dict) or id(cast("object", candidate)) in visited:
                continue
            fields = cast("dict[str, Any]", candidate)
            visited.add(id(fields))
            yield fields
            pending.extend(self.parts(fields))
            for choices in alternatives(fields):
                pending.extend(choices)


def member(parts: Sequence[Mapping[str, Any]], name: str) -> object:
    """The schema of an object's member: any of those in the parts of the object's schema."""
    schemas: list[object] = []
    for fields in parts:
        properties = fields.get("properties")
        if isinstance(properties, dict) and name in properties:
            schemas.append(cast("dict[str, object]", properties)[name])
        elif isinstance(others := fields.get("additionalProperties"), dict):
            schemas.append(cast("object", others))
    return any_of(schemas)


def alternatives(fields: Mapping[str, Any]) -> Iterator[list[object]]:
    """The `anyOf` and `oneOf` lists, of each of which one schema must apply."""
    for name in ("anyOf", "oneOf"):
        if isinstance(fields.get(name), list):
            yield cast("list[object]", fields[name])


def constants(fields: Mapping[str, Any]) -> list[object] | None:
    """The values that `enum` and `const` allow; None if there is neither."""
    values: list[object] | None = None
    if isinstance(choices := fields.get("enum"), list):
        values = cast("list[object]", choices)
    if "const" in fields:
        const: object = fields["const"]
        values = [const] if values is None or is_among(const, values) else []
    return values


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
    """The kinds that a schema allows by `type`, `enum` and `const`."""
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
    values = constants(fields)
    return kinds if values is None else kinds & {kind_of(value) for value in values}


def any_of(schemas: list[object]) -> object:
    if not schemas:
        return True
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def is_among(value: object, choices: list[object]) -> bool:
    """Whether `value` equals a choice in JSON: 1 is 1.0, and true is not a number."""
    return any(
        choice == value and isinstance(choice, bool) == isinstance(value, bool)
        for choice in choices
    )
