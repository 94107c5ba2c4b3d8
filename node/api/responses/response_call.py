"""One call of a tool among the items of a response."""

import json
from typing import Any, Final

from .response_tools import CUSTOM_INPUT, CallForm, custom_input

_INPUT_BEGINS: Final = f'{{"{CUSTOM_INPUT}": "'


class CallItem:
    """A call of a tool among the items of a response, whole or during its generation.

    A custom tool's input is text to clients, and an object with one string to the model.
    """

    def __init__(self, head: dict[str, Any], form: CallForm) -> None:
        """`head`: the fields that identify the item."""
        self._head = head
        self._form = form
        self._arguments: list[str] = []
        self._texts: list[str] = []
        """The texts that `delta` returned."""
        self._pending = ""
        """Arguments of a custom tool that are no text yet."""

    @property
    def event_prefix(self) -> str | None:
        """The beginning of the kinds of its own events; None if it has none."""
        match self._form.kind:
            case "function_call":
                return "response.function_call_arguments"
            case "custom_tool_call":
                return "response.custom_tool_call_input"
            case "tool_search_call":
                return None

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self._head["id"]}

    @property
    def value(self) -> dict[str, Any]:
        """The field that the deltas add up to."""
        text = "".join(self._texts)
        match self._form.kind:
            case "function_call":
                return {"arguments": text}
            case "custom_tool_call":
                return {"input": text}
            case "tool_search_call":  # an object, which half of its text is none
                return {"arguments": _object(text)}

    def json(self, status: str) -> dict[str, Any]:
        form = self._form
        return {**self._head, "status": status, "type": form.kind, **form.fields, **self.value}

    def delta(self, arguments: str, *, ends: bool) -> str:
        """The text that the next `arguments` add to the field. `ends`: they are the last."""
        self._arguments.append(arguments)
        is_custom = self._form.kind == "custom_tool_call"
        text = self._input_text(arguments, ends=ends) if is_custom else arguments
        self._texts.append(text)
        return text

    def _input_text(self, arguments: str, *, ends: bool) -> str:
        if ends:
            return custom_input("".join(self._arguments)).removeprefix("".join(self._texts))
        self._pending += arguments
        piece = self._pending if any(self._texts) else self._pending.removeprefix(_INPUT_BEGINS)
        if not any(self._texts) and piece == self._pending:
            return ""
        try:
            text: str = json.loads(f'"{piece}"')
        except ValueError:  # half of an escape, or the object's end, which comes with `ends`
            return ""
        self._pending = "" if text else self._pending
        return text


def _object(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        return {}
