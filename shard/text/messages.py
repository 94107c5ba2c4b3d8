"""Parses a chat's messages from the wire, and limits their length before any other work."""

import json
from dataclasses import dataclass, field
from typing import Any, cast

from ...placement.errors import PROMPT, ContextLengthExceeded, InvalidRequest


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat, the tools that it may call, and options of `template.TemplateOptions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def joined_contents(between: str, *contents: object) -> str | list[dict[str, Any]]:
    """Contents of messages as one: a text, or a list of parts where any of them is one."""
    present = [each for each in contents if each and isinstance(each, (str, list))]
    texts = [each for each in present if isinstance(each, str)]
    if len(texts) == len(present):
        return between.join(texts)
    parts = list[dict[str, Any]]()
    for each in present:
        if parts and between:
            parts.append({"type": "text", "text": between})
        parts += [{"type": "text", "text": each}] if isinstance(each, str) else each
    return parts


def chat_json(messages: str, tools: str, options: str) -> str:
    """Joins three fields of the wire into one text; messages alone stay as they are."""
    if not tools and not options:
        return messages
    return f'{{"messages":{messages},"tools":{tools or "[]"},"options":{options or "{}"}}}'


def chat_from_json(text: str) -> ChatPrompt:
    """Parses the text of `chat_json`. Raises InvalidRequest."""
    value: Any = _load(text, "messages")
    fields: dict[str, Any] = value if isinstance(value, dict) else {"messages": value}
    messages = _objects("messages", fields.get("messages"))
    return ChatPrompt(
        messages, _objects("tools", fields.get("tools", [])), fields.get("options", {})
    )


def _load(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise InvalidRequest(f"{name} is not JSON: {fault}", param=name) from fault


def _objects(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in cast(list[Any], value)):
        raise InvalidRequest(f"{name} must be a list of objects", param=name)
    return cast("list[dict[str, Any]]", value)


def tools_from_json(text: str) -> list[dict[str, Any]]:
    """The `tools` of the wire, each a function with a name. Raises InvalidRequest."""
    tools = _objects("tools", _load(text or "[]", "tools"))
    for tool in tools:
        function: Any = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest("tools must be functions with a name", param="tools")
    return tools


def check_length(text: str, limit: int, longest_token: int) -> None:
    """Refuses messages of more bytes than `limit`. Raises ContextLengthExceeded.

    `longest_token`: the most bytes of a token. JSON is never shorter than the text in it, so short
    messages need no parsing.
    """
    if len(text) <= limit:
        return
    prompt = chat_from_json(text)
    size, rest = 0, list[Any]((*prompt.messages, *prompt.tools))
    while rest:
        match rest.pop():
            case str() as one:
                size += len(one.encode(errors="replace"))
            case dict() as fields:
                rest.extend(fields.values())
            case list() as items:
                rest.extend(items)
            case _:
                pass
    if size > limit:
        raise too_long(size, limit, longest_token)


def too_long(size: int, limit: int, longest_token: int) -> ContextLengthExceeded:
    """The error for text of `size` bytes whose fewest possible tokens exceed the context."""
    fewest, context = -(-size // longest_token), limit // longest_token
    return ContextLengthExceeded(
        f"prompt is too long: {fewest} tokens > {context} maximum, if each of them had the "
        f"{longest_token} bytes of the longest one: it has {size} bytes of text; "
        "shorten it",
        param=PROMPT,
    )
