"""Tools and their calls for models and templates that have no form of their own for them.

A request can require a call of any model: a grammar restricts the whole answer to one JSON object.
If the template does not support tools, they are described in the chat itself; if it cannot read
their schemas, it gets plainer ones.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from .messages import joined_contents

Message = Mapping[str, Any]
Schema = Mapping[str, Any]

_NESTED: Final = 32
"""Levels of a schema that stay; a template's own recursion ends not far below."""


def with_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """The chat with a description of `tools`, one of which the answer must call.

    It is put in front of the system message if there is one, else of the first user message: some
    templates do not support system messages.
    """
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        "You can call these functions. Each line describes one as JSON, with the JSON schema of "
        f"its arguments:\n{functions}\n"
        'Call one of them now. Answer only with JSON: {"name": the function\'s name, "arguments": '
        "an object with its arguments}."
    )
    system = bool(messages) and messages[0].get("role") == "system"
    users = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    if not system and not users:
        return [{"role": "user", "content": text}, *messages]
    place = 0 if system else users[0]
    message = messages[place]
    content = joined_contents("\n", text, message.get("content"))
    return [*messages[:place], {**message, "content": content}, *messages[place + 1 :]]


def without_tool_roles(messages: Sequence[Message]) -> list[Message]:
    """The chat with earlier calls as the assistant's text, and their results as user messages."""
    converted: list[Message] = []
    answers_tool = False
    for message in messages:
        role = message.get("role")
        if role == "assistant" and message.get("tool_calls"):
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            fields = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**fields, "content": joined_contents("\n", message.get("content"), *calls)}
        elif role == "tool":
            message = result_as_text(message)
        if answers_tool and message.get("role") == "user":
            # Templates may refuse two turns of the user in a row.
            content = joined_contents("\n", converted.pop().get("content"), message.get("content"))
            message = {**message, "content": content}
        answers_tool = message.get("role") == "user" and (role == "tool" or answers_tool)
        converted.append(message)
    return converted


def result_as_text(message: Message) -> Message:
    """The user's turn that has a tool's result."""
    return {"role": "user", "content": joined_contents("\n", "Result:", message.get("content"))}


def _call_text(function: Mapping[str, Any]) -> str:
    arguments: object = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)


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
