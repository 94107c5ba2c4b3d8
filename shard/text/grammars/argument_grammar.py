"""The grammar, in llguidance's Lark, of a tagged call's arguments: their order, and their texts."""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple, cast

from ..tools.schemas import (
    MAX_CALL_CHARS,
    Kind,
    SchemaDocument,
    SchemaFault,
    alternatives,
    constants,
    member,
)
from .enforceable import FORMATS, leaves_pattern
from .grammars import MAX_CHARS
from .lark import ANY, Words, json_document, quoted
from .look_ahead import plain_patterns, regex_alternatives

_MAX_SHAPES: Final = 32
_MAX_EXACT_CHARS: Final = 2_000
"""The longest bounded text from which the lexer can exclude a word."""
_MAX_DEPTH: Final = 100
_MAX_WORK: Final = 16 * MAX_CHARS
"""The most characters of all rules, repeated ones included."""
_NEVER: Final = r"/[^\s\S]/"
_FREE: Final = "/(?s:.)*/"
_FLAGS: Final = re.compile(r"\(\?[a-zA-Z]+\)")


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
                Argument(name, _undeclared_schema(member(parts, name)), True)
                for name in sorted(shape.required - set(shape.properties))
            ),
        ]
        for shape in _shapes(document, document.root)
    ]


def _undeclared_schema(schema: object) -> object:
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
    return [_merge(shapes) for shapes in product(*lists)]


def _check_count(shapes: int) -> None:
    if shapes > _MAX_SHAPES:
        raise SchemaFault(f"its arguments have more than {_MAX_SHAPES} alternatives")


def _merge(shapes: tuple[_Shape, ...]) -> _Shape:
    properties: dict[str, object] = {}
    for shape in shapes:
        for name, schema in shape.properties.items():
            former = properties.get(name)
            properties[name] = schema if former is None else {"allOf": [former, schema]}
    return _Shape(properties, frozenset[str]().union(*(shape.required for shape in shapes)))


class ValueRules:
    """The rules of one grammar for values of arguments, each with its closing text.

    Strings have no quotes and contain neither the word that closes them nor `after`, which ends the
    call. Other values are JSON. If a schema allows strings and arrays or objects, text that begins
    with a bracket is JSON.
    """

    def __init__(self, closing: str, words: Words, after: str) -> None:
        self.rules: list[str] = []
        self.place = ""
        """A comment for new rules."""
        self._closing = closing
        self._words = words
        self._after = after
        self._names: dict[str, str] = {}
        """Names of rules by their bodies: most strings of most tools share one rule."""
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
            standalone, definitions = _standalone(document, schema)
            if "string" in kinds:
                standalone = {"allOf": [standalone, {"type": sorted(others)}]}
            json_text = json_document(standalone | ({"$defs": definitions} if definitions else {}))
            ways.append(self._add_rule("json", f"{json_text} {self._words(self._closing)}"))
        if not ways:
            raise SchemaFault("no value satisfies its schema")
        return f"({' | '.join(ways)})"

    def _add_rule(self, kind: str, body: str, option: str = "") -> str:
        self._work += len(body)
        if self._work > _MAX_WORK:
            raise SchemaFault("what it refers to is too large; write it once, in one argument")
        if body not in self._names:
            self._names[body] = name = f"{kind}_{len(self._names)}"
            self._write(f"{name}{option}: {body}")
        return self._names[body]

    def count(self, text: str) -> None:
        """Adds `text` to the size of the grammar. Raises SchemaFault if that is too large."""
        self._size += len(text)
        if self._size > MAX_CHARS:
            raise SchemaFault(
                f"its grammar and those before it have more than {MAX_CHARS} characters"
            )

    def _write(self, rule: str) -> None:
        self.count(rule)
        self.rules.append(self.place + rule)

    def _text(self, document: SchemaDocument, schema: object, kinds: frozenset[Kind]) -> str:
        strings = RawStrings(document, f"PART_{len(self.rules)}")
        text, word = strings.expression(schema), self._closing.strip()
        exact = strings.longest <= _MAX_EXACT_CHARS
        exclusions = [
            f"{ANY} {quoted(each)} {ANY}" for each in (word, self._after) if each and exact
        ]
        brackets = {"array": "[", "object": "{"}
        exclusions += [f"{quoted(brackets[kind])} {ANY}" for kind in sorted(kinds & set(brackets))]
        text = f"({' & '.join([text, *(f'~({each})' for each in exclusions)])})"
        for terminal in strings.terminals:
            self._write(terminal)
        before, _, after_it = self._closing.partition(word)
        token = self._words.token(word)
        end = before if token else self._closing
        terminal = self._add_rule("TEXT", f"{text} {quoted(end)}" if end else text)
        # A text that ends with the first closing word needs no exclusion, which is expensive for
        # long ones.
        rule = self._add_rule("text", terminal, "" if exact or token else "[lazy]")
        tail = [token, quoted(after_it)] if after_it else [token]
        return " ".join([rule, *tail]) if token else rule


def _standalone(
    document: SchemaDocument, schema: object
) -> tuple[dict[str, object], dict[str, object]]:
    """A copy of `schema` and the `$defs` that it needs outside of its document."""
    names: dict[int, str] = {}
    targets: list[object] = []

    def convert(value: object, depth: int = 0) -> object:
        if depth > _MAX_DEPTH:
            raise SchemaFault(f"it is nested deeper than {_MAX_DEPTH}")
        if isinstance(value, list):
            return [convert(each, depth + 1) for each in cast("list[object]", value)]
        if not isinstance(value, dict):
            return value
        copy: dict[str, object] = {}
        fields = cast("dict[str, object]", value)
        for name, each in fields.items():
            match name, each:
                case "$ref", str():
                    copy[name] = reference(each)
                case (("$defs" | "definitions" | "nullable"), _):
                    pass
                case (("enum" | "const" | "default" | "examples"), _):
                    copy[name] = each
                case (("properties" | "patternProperties"), dict()):
                    members = cast("dict[str, object]", each)
                    copy[name] = {key: convert(one, depth + 1) for key, one in members.items()}
                case _:
                    copy[name] = convert(each, depth + 1)
        return {"anyOf": [copy, {"type": "null"}]} if fields.get("nullable") is True else copy

    def reference(name: str) -> str:
        [target] = document.parts({"$ref": name})
        if id(target) not in names:
            names[id(target)] = str(len(targets))
            targets.append(target)
        return f"#/$defs/{names[id(target)]}"

    converted = convert(schema)
    definitions: dict[str, object] = {}
    while len(definitions) < len(targets):
        definitions[str(len(definitions))] = convert(targets[len(definitions)])
    root = cast("dict[str, object]", converted) if isinstance(converted, dict) else {}
    return root, definitions


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
