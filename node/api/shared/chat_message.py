"""A message of an OpenAI chat request, and its form for chat templates."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ....placement.errors import InvalidRequest
from ...chat.images import Content, content_of, latest_user_turn
from .history import NOTHING_TO_READ, History, HistoryBody, role_of
from .message_parts import Parts, image_of_base64, read_image, read_parts, thoughts_of


class FunctionCall(HistoryBody):
    name: str | None = None
    arguments: Any = None
    """A JSON object, or the text of one; a text that is none reaches the model as it is."""


class ToolCall(HistoryBody):
    """A call that the assistant made earlier in the conversation."""

    unused_fields: ClassVar[frozenset[str]] = frozenset(("index", "type"))

    id: str | None = None
    function: FunctionCall | None = None

    def for_template(self, history: History) -> dict[str, Any]:
        function = self.function or FunctionCall()
        at = "messages[].tool_calls[].function"
        return history.call(self.id, function.name, function.arguments, at)


class ChatMessage(HistoryBody):
    """One turn, as clients of OpenAI's API, of Ollama's and of other servers write it."""

    text_field: ClassVar[str] = "content"
    other_names: ClassVar[Mapping[str, str]] = {
        "reasoning": "reasoning_content",
        "thinking": "reasoning_content",
        "tool_name": "name",
    }
    unused_fields: ClassVar[frozenset[str]] = frozenset(("id",))

    role: str | None = None
    """system, developer, user, assistant or tool; the oldest clients write function for tool."""
    content: Parts | None = None
    images: list[Any] | None = None
    """Ollama's: each in base64."""
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None

    @property
    def author(self) -> str:
        """The role for a chat template."""
        calls = self.tool_calls or self.function_call
        answers = self.tool_call_id is not None
        return role_of(self.role, calls=calls is not None, answers=answers)

    def for_template(self, at: str, history: History, *, asks: bool = False) -> dict[str, Any]:
        """The message for a chat template. `asks`: it is the user's latest turn.

        Raises InvalidRequest and UnsupportedParameter for what it asks the model to read.
        """
        history.check_role(self.role, "messages[]")
        role = self.author
        message: dict[str, Any] = {"role": role, "content": self._content(at, history, asks=asks)}
        message |= {"name": self.name} if self.name else {}
        if role == "assistant":
            thoughts = self.reasoning_content or thoughts_of(self.content)
            calls = [call.for_template(history) for call in self._calls]
            message |= {"reasoning_content": thoughts} if thoughts else {}
            message |= {"tool_calls": calls} if calls else {}
        if role == "tool":
            message["tool_call_id"] = history.result_id(self.tool_call_id)
        history.ignored += [f"messages[].{name} (of role {role})" for name in self._misplaced(role)]
        return message

    def _misplaced(self, role: str) -> list[str]:
        """The fields that it has and that belong to messages of another role."""
        homes = {
            "reasoning_content": "assistant",
            "tool_calls": "assistant",
            "function_call": "assistant",
            "tool_call_id": "tool",
        }
        own = [name for name in homes if getattr(self, name) is not None]
        own = [name for name in own if homes[name] != role]
        return own + (
            ["content (thinking)"] if role != "assistant" and thoughts_of(self.content) else []
        )

    def _content(self, at: str, history: History, *, asks: bool) -> Content:
        images = [
            read_image(partial(image_of_base64, data, "", f"{at}.images[{number}]"), history, asks)
            for number, data in enumerate(self.images or ())
        ]
        parts = read_parts(self.content, f"{at}.content", history, asks=asks)
        return content_of([*images, *parts, self.refusal or ""])

    @property
    def _calls(self) -> list[ToolCall]:
        older = [] if self.function_call is None else [ToolCall(function=self.function_call)]
        return [*(self.tool_calls or ()), *older]


def messages_for_template(
    messages: Sequence[ChatMessage], history: History
) -> list[dict[str, Any]]:
    """The messages for a chat template. Raises InvalidRequest and UnsupportedParameter."""
    latest = latest_user_turn([message.author for message in messages])
    turns = [
        message.for_template(f"messages[{number}]", history, asks=number == latest)
        for number, message in enumerate(messages)
        if not message.is_empty
    ]
    if not turns:
        raise InvalidRequest(NOTHING_TO_READ, param="messages")
    return turns
