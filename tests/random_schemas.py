"""Random JSON schemas of which a model that knows no JSON can still give a whole document."""

import random
from typing import Any

_PATTERNS = (r"^[a-z]{2,4}$", r"^\d{3}-\d{2}$", r"^(yes|no|maybe)$", r"^#[0-9a-f]{6}$")
_WORDS = ("red", "green", "a b", 'quo"te', "ümlaut", "7", "日本")


def random_schema(seed: int) -> dict[str, Any]:
    """Strict as OpenAI has it: no further properties, everything of bounded length."""
    return _object(random.Random(seed), depth=0)


def _object(r: random.Random, depth: int) -> dict[str, Any]:
    names = r.sample(("name", "age", "is ok", "tags", "x", "größe"), r.randint(1, 3))
    required = [n for n in names if r.random() < 0.7]
    properties = {n: _value(r, depth + 1) for n in names}
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value(r: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "pattern", "integer", "number", "boolean", "enum", "const", "null", "any"]
    kinds += ["object", "array"] if depth < 3 else []
    match r.choice(kinds):
        case "string":
            low = r.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + r.randint(0, 6)}
        case "pattern":
            return {"type": "string", "pattern": r.choice(_PATTERNS)}
        case "integer":
            low = r.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + r.randint(0, 500)}
        case "number":
            # A range by itself bounds no decimals.
            whole = {"type": "integer", "minimum": 0, "maximum": r.randint(1, 9)}
            return {"anyOf": [whole, {"enum": r.sample((0.5, -2.25, 1e-3, 12.75), 2)}]}
        case "boolean":
            return {"type": "boolean"}
        case "enum":
            return {"enum": r.sample(_WORDS, r.randint(1, 3))}
        case "const":
            return {"const": r.choice(_WORDS)}
        case "null":
            return {"type": ["null", "boolean"]}
        case "any":
            return {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
        case "object":
            return _object(r, depth)
        case _:
            return {"type": "array", "items": _value(r, depth), "maxItems": r.randint(0, 2)}


def random_arguments(seed: int) -> dict[str, Any]:
    """The parameters of a tool, as programs declare them: optional, by reference, in unions."""
    r = random.Random(seed)
    definitions: dict[str, Any] = {}
    schema = _object(r, depth=1)
    members: dict[str, Any] = schema["properties"]
    for name in members:
        members[name] = _declared(r, members[name], definitions)
    return {**schema, "$defs": definitions}


def _declared(r: random.Random, schema: dict[str, Any], definitions: dict[str, Any]) -> Any:
    match r.choice(("as it is", "optional", "reference", "all", "union", "one", "format", "const")):
        case "optional":
            return {"anyOf": [schema, {"type": "null"}], "default": None, "title": "T"}
        case "reference":
            name = f"d{len(definitions)}"
            definitions[name] = {}
            definitions[name] = _declared(r, schema, definitions)
            return {"$ref": f"#/$defs/{name}", "description": "by reference"}
        case "all":
            return {"allOf": [schema], "title": "T"}
        case "union":
            whole = {"type": "integer", "minimum": -9, "maximum": 9}
            return {"anyOf": [schema, whole, {"type": "string", "maxLength": r.randint(1, 5)}]}
        case "one":
            tags = ("cat", "dog")
            return {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": tag}, "of": _value(r, 3)},
                        "required": ["kind", "of"],
                        "additionalProperties": False,
                    }
                    for tag in tags
                ],
                "discriminator": {"propertyName": "kind"},
            }
        case "format":
            return {"type": ["string", "null"], "format": r.choice(("date", "ipv4", "uuid"))}
        case "const":
            return {"const": r.choice((*_WORDS, 5, True, None))}
        case _:
            return schema
