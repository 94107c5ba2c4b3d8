"""Tool calls as plain JSON, for models without a known call format.

A request can require a call of any model: a grammar restricts the whole answer to one JSON object.
If the template does not support tools, they are described in the chat itself.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .messages import joined_contents

Message = Mapping[str, Any]


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
