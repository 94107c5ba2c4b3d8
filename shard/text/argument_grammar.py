"""The grammar of the arguments of a tagged call: which there are, and how each is spelled."""

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple, cast

from .grammars import MAX_CHARS
from .lark import ANY, Words, json_document, quoted
from .raw_strings import RawStrings
from .schemas import Kind, SchemaDocument, SchemaFault, alternatives, member

_MOST_SHAPES: Final = 32
_LONGEST_EXACT: Final = 2_000
"""The longest bounded text that the lexer can keep from containing a word."""
_DEEPEST: Final = 100
_MOST_WORK: Final = 16 * MAX_CHARS
"""Characters of rules, those among them that were written before."""


class Argument(NamedTuple):
    name: str
    schema: object
    required: bool


class _Shape(NamedTuple):
    """One alternative of an object's members."""

    properties: Mapping[str, object]
    required: frozenset[str]


def argument_lists(document: SchemaDocument) -> list[list[Argument]]:
    """The arguments of a call, in order; several where the schema has alternatives.

    Raises SchemaFault.
    """
    if "object" not in document.kinds(document.root):
        raise SchemaFault("the schema allows no object")
    parts = list(document.members(document.root))
    return [
        [
            *(
                Argument(name, schema, name in shape.required)
                for name, schema in shape.properties.items()
            ),
            *(
                Argument(name, _of_undeclared(member(parts, name)), True)
                for name in sorted(shape.required - set(shape.properties))
            ),
        ]
        for shape in _shapes(document, document.root)
    ]


def _of_undeclared(schema: object) -> object:
    return {"type": "string"} if schema is True else schema


def _shapes(document: SchemaDocument, schema: object) -> list[_Shape]:
    if not isinstance(schema, dict):
        return [_Shape({}, frozenset())]
    fields = cast("dict[str, Any]", schema)
    properties, required = fields.get("properties"), fields.get("required")
    own = _Shape(
        cast("dict[str, object]", properties) if isinstance(properties, dict) else {},
        frozenset(map(str, cast("list[object]", required)))
        if isinstance(required, list)
        else frozenset(),
    )
    lists = [[own], *(_shapes(document, part) for part in document.parts(fields))]
    for choices in alternatives(fields):
        objects = [choice for choice in choices if "object" in document.kinds(choice)]
        either: list[_Shape] = []
        for choice in objects:
            either += _shapes(document, choice)
            _check_count(len(either))
        lists.append(either)
    _check_count(prod(map(len, lists)))
    return [_merged(shapes) for shapes in product(*lists)]


def _check_count(shapes: int) -> None:
    if shapes > _MOST_SHAPES:
        raise SchemaFault(f"its arguments have more than {_MOST_SHAPES} alternatives")


def _merged(shapes: tuple[_Shape, ...]) -> _Shape:
    properties: dict[str, object] = {}
    for shape in shapes:
        for name, schema in shape.properties.items():
            known = properties.get(name)
            properties[name] = schema if known is None else {"allOf": [known, schema]}
    return _Shape(properties, frozenset[str]().union(*(shape.required for shape in shapes)))


class ValueRules:
    """The rules of one grammar for values of arguments, each with what closes it.

    Strings stand as they are and contain neither the word that closes them nor `after`, which ends
    the call. All else is JSON. Where both are allowed and arrays or objects are, text that begins
    with their bracket is JSON.
    """

    def __init__(self, closing: str, words: Words, after: str) -> None:
        self.rules: list[str] = []
        self._closing = closing
        self._words = words
        self._after = after
        self._names: dict[str, str] = {}
        """By what they say: most strings of most tools have one rule."""
        self._size = 0
        self._work = 0

    def name(self, document: SchemaDocument, schema: object) -> str:
        """The rule, in Lark, of the values that `schema` allows. Raises SchemaFault."""
        kinds = document.kinds(schema)
        others = kinds - {"string"}
        ways: list[str] = []
        if "string" in kinds:
            ways.append(self._text(document, schema, kinds))
        if others:
            alone, definitions = _standalone(document, schema)
            if "string" in kinds:
                alone = {"allOf": [alone, {"type": sorted(others)}]}
            shown = json_document(alone | ({"$defs": definitions} if definitions else {}))
            ways.append(self._added("json", f"{shown} {self._words(self._closing)}"))
        if not ways:
            raise SchemaFault("no value satisfies its schema")
        return f"({' | '.join(ways)})"

    def _added(self, kind: str, body: str, option: str = "") -> str:
        self._work += len(body)
        if self._work > _MOST_WORK:
            raise SchemaFault("what it refers to is too large; write it once, in one argument")
        if body not in self._names:
            self._names[body] = name = f"{kind}_{len(self._names)}"
            self._write(f"{name}{option}: {body}")
        return self._names[body]

    def count(self, text: str) -> None:
        """Counts `text` as a part of the grammar. Raises SchemaFault where that is too large."""
        self._size += len(text)
        if self._size > MAX_CHARS:
            raise SchemaFault(
                f"its grammar and those before it have more than {MAX_CHARS} characters"
            )

    def _write(self, rule: str) -> None:
        self.count(rule)
        self.rules.append(rule)

    def _text(self, document: SchemaDocument, schema: object, kinds: frozenset[Kind]) -> str:
        strings = RawStrings(document, f"PART_{len(self.rules)}")
        text, word = strings.expression(schema), self._closing.strip()
        exact = strings.longest <= _LONGEST_EXACT
        unwanted = [f"{ANY} {quoted(each)} {ANY}" for each in (word, self._after) if each and exact]
        brackets = {"array": "[", "object": "{"}
        unwanted += [f"{quoted(brackets[kind])} {ANY}" for kind in sorted(kinds & set(brackets))]
        text = f"({' & '.join([text, *(f'~({each})' for each in unwanted)])})"
        for terminal in strings.terminals:
            self._write(terminal)
        before, _, behind = self._closing.partition(word)
        token = self._words.token(word)
        end = before if token else self._closing
        terminal = self._added("TEXT", f"{text} {quoted(end)}" if end else text)
        # A text that ends with the first closing word needs no exclusion, which is dear for long
        # ones.
        rule = self._added("text", terminal, "" if exact or token else "[lazy]")
        tail = [token, quoted(behind)] if behind else [token]
        return " ".join([rule, *tail]) if token else rule


def _standalone(
    document: SchemaDocument, schema: object
) -> tuple[dict[str, object], dict[str, object]]:
    """`schema` and the `$defs` that it needs outside of its document."""
    names: dict[int, str] = {}
    targets: list[object] = []

    def moved(value: object, depth: int = 0) -> object:
        if depth > _DEEPEST:
            raise SchemaFault(f"it is nested deeper than {_DEEPEST}")
        if isinstance(value, list):
            return [moved(each, depth + 1) for each in cast("list[object]", value)]
        if not isinstance(value, dict):
            return value
        made: dict[str, object] = {}
        fields = cast("dict[str, object]", value)
        for name, each in fields.items():
            match name, each:
                case "$ref", str():
                    made[name] = reference(each)
                case (("$defs" | "definitions" | "nullable"), _):
                    pass
                case (("enum" | "const" | "default" | "examples"), _):
                    made[name] = each
                case (("properties" | "patternProperties"), dict()):
                    members = cast("dict[str, object]", each)
                    made[name] = {key: moved(one, depth + 1) for key, one in members.items()}
                case _:
                    made[name] = moved(each, depth + 1)
        return {"anyOf": [made, {"type": "null"}]} if fields.get("nullable") is True else made

    def reference(name: str) -> str:
        [target] = document.parts({"$ref": name})
        if id(target) not in names:
            names[id(target)] = str(len(targets))
            targets.append(target)
        return f"#/$defs/{names[id(target)]}"

    alone = moved(schema)
    definitions: dict[str, object] = {}
    while len(definitions) < len(targets):
        definitions[str(len(definitions))] = moved(targets[len(definitions)])
    made = cast("dict[str, object]", alone) if isinstance(alone, dict) else {}
    return made, definitions
