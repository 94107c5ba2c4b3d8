"""A call of a tool among the items of a response, whole or while it is written."""

import json
from typing import Any, Final

from .responses_schema import CUSTOM_INPUT, custom_input

_INPUT_BEGINS: Final = f'{{"{CUSTOM_INPUT}": "'


class CallItem:
    """A custom tool's input is text to clients, and an object with one string to the model."""

    def __init__(self, head: dict[str, Any], *, is_custom: bool) -> None:
        """`head`: what identifies the item."""
        self._head = head
        self._is_custom = is_custom
        self._arguments: list[str] = []
        self._sent: list[str] = []
        """The texts that `delta` returned."""
        self._unsent = ""
        """Arguments of a custom tool that are no text yet."""

    @property
    def event_prefix(self) -> str:
        kind = "custom_tool_call_input" if self._is_custom else "function_call_arguments"
        return f"response.{kind}"

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self._head["id"]}

    @property
    def value(self) -> dict[str, Any]:
        """The field that the deltas add up to."""
        return {"input" if self._is_custom else "arguments": "".join(self._sent)}

    def item(self, status: str) -> dict[str, Any]:
        kind = "custom_tool_call" if self._is_custom else "function_call"
        return {**self._head, "status": status, "type": kind, **self.value}

    def delta(self, arguments: str, *, ends: bool) -> str:
        """The text that `arguments`, which come next, add to the field. `ends`: none follow."""
        self._arguments.append(arguments)
        text = self._input_text(arguments, ends=ends) if self._is_custom else arguments
        self._sent.append(text)
        return text

    def _input_text(self, arguments: str, *, ends: bool) -> str:
        if ends:
            return custom_input("".join(self._arguments)).removeprefix("".join(self._sent))
        self._unsent += arguments
        piece = self._unsent if any(self._sent) else self._unsent.removeprefix(_INPUT_BEGINS)
        if not any(self._sent) and piece == self._unsent:
            return ""
        try:
            text: str = json.loads(f'"{piece}"')
        except ValueError:  # more than the input's own characters: its end tells
            return ""
        self._unsent = "" if text else self._unsent
        return text
