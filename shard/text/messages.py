"""A chat's messages as the wire has them: read, and measured before anything else is done."""

import json
from typing import Any

from ...placement.errors import ContextLengthExceeded, InvalidRequest


def messages_from_json(text: str) -> list[dict[str, Any]]:
    """The `Messages` message of the wire. Raises InvalidRequest."""
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise InvalidRequest(f"messages is not JSON: {fault}", param="messages") from fault
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest("messages must be a list of objects", param="messages")
    return messages


def check_length(text: str, limit: int) -> None:
    """Raises ContextLengthExceeded where the messages have more bytes of text than `limit`.

    JSON is never shorter than the text in it, so that short messages are not read for this.
    """
    if len(text) <= limit:
        return
    size, rest = 0, list[Any](messages_from_json(text))
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
        raise too_long(size, limit)


def too_long(size: int, limit: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the messages have {size} bytes of text, and the model's context holds {limit} at most; "
        "shorten the messages",
        param="messages",
    )
