"""Tools as a chat template gets them where it cannot read their schemas, or need not."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

Schema = Mapping[str, Any]

_NESTED: Final = 32
"""Levels of a schema that stay; a template's own recursion ends not far below."""


def outlined(tools: Sequence[Schema]) -> list[Schema]:
    """The names of the tools, without what describes them."""
    return [
        plainer_tool({"type": "function", "function": {"name": tool["function"]["name"]}})
        for tool in tools
    ]


def plainer_tool(tool: Schema) -> Schema:
    """The tool with a description, and with a type and a description in each schema.

    Templates add strings to what a schema may lack, and look into those that are true or false.
    """
    function: Schema = tool["function"]
    parameters = plainer_schema(function.get("parameters") or {}, "object")
    described = {"description": "", **function, "parameters": parameters}
    return {**tool, "function": described}


def plainer_schema(value: object, default: str = "string", level: int = 0) -> dict[str, Any]:
    schema = dict(cast("Schema", value)) if isinstance(value, dict) and level < _NESTED else {}
    schema["type"] = kind = _type_of(schema, default)
    schema.setdefault("description", "")
    if kind == "object":
        properties: object = schema.get("properties")
        named = cast("Schema", properties) if isinstance(properties, dict) else {}
        schema["properties"] = {
            name: plainer_schema(each, level=level + 1) for name, each in named.items()
        }
        schema.setdefault("required", [])
    elif kind == "array":
        schema["items"] = plainer_schema(schema.get("items"), level=level + 1)
    return schema


def _type_of(schema: Schema, default: str) -> str:
    """The first type that a schema or one of its alternatives names, null aside."""
    names: list[object] = [schema.get("type")]
    if isinstance(names[0], list):
        names = cast("list[object]", names[0])
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(alternatives, list):
            each = cast("list[object]", alternatives)
            names += [cast("Schema", one).get("type") for one in each if isinstance(one, dict)]
    strings = [name for name in names if isinstance(name, str) and name != "null"]
    return strings[0] if strings else "object" if "properties" in schema else default
