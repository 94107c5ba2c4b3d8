"""Renders chat templates, with their options and the places of system messages."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from jinja2 import TemplateError

from ...placement.errors import PROMPT, InvalidRequest
from .answer_format import is_harmony
from .control_tokens import ControlTokens
from .messages import joined_contents
from .plain_calls import with_tools, without_tool_roles
from .thinking import HARMONY_LEVELS, LEVELS, Effort, ThinkingVariables

Message = Mapping[str, Any]

TEMPLATE_FAULTS: Final = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The errors of a template's expressions, which are nearly all of Python's."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """A request's options for the template.

    `kwargs` are variables of the template. `effort`, `thinking` (on or off) and `budget` (tokens)
    become the variables that it has for them, or the nearest that it supports.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    effort: Effort = ""
    thinking: bool | None = None
    budget: int = 0
    insists: Sequence[str] | None = None
    """Tools of which the answer must call one, by name; empty: any tool; None: no call."""


def options_of(fields: Mapping[str, Any]) -> TemplateOptions:
    """The options in the wire's JSON. Raises InvalidRequest."""
    try:
        return TemplateOptions(**fields)
    except TypeError:
        names = ", ".join(sorted(fields))
        raise InvalidRequest(
            f"options are none of a template's: {names}", param="options"
        ) from None


class ChatTemplate:
    """A checkpoint's template, with the tokenizer that it is for."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is mlx-lm's wrapper."""
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        text: object = tokenizer.chat_template
        self._text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)

    @cached_property
    def _thinking(self) -> ThinkingVariables:
        harmony = is_harmony(self._tokenizer)
        return ThinkingVariables(
            self._text,
            self._renders,
            thinks=harmony or self._tokenizer.has_thinking,
            levels=HARMONY_LEVELS if harmony else LEVELS,
        )

    def _renders(self, variables: Mapping[str, Any]) -> bool:
        try:
            _ = self._apply([{"role": "user", "content": "hi"}], (), variables)
        except TEMPLATE_FAULTS:
            return False
        return True

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        options: TemplateOptions,
        notes: list[str],
    ) -> list[str]:
        """The prompt's parts. Each is tokenised by itself, so no text spells a control token.

        The answer continues an assistant's message that comes last. Appends to `notes` each option
        that the template does not support. Raises InvalidRequest if it refuses the messages.
        """
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; use a model that was trained for chat",
                param="model",
            )
        variables = self._variables(options, notes)
        # A call that comes last is complete, even if the template supports it as text only.
        end = f"\ufdd1{secrets.randbits(64)}\ufdd1" if _is_continued(messages) else ""
        messages = self._with_tools(messages, tools, options, notes)
        # The chat has the others, in the result of a search, where no cached prefix changes.
        tools = [tool for tool in tools if not tool.get("defer_loading")]
        mark = f"\ufdd0{secrets.randbits(64)}\ufdd0"
        placed_messages = self._place_system_messages(messages, tools, variables)
        safe_messages = [self._control.break_tokens(message, mark) for message in placed_messages]
        if end:
            safe_messages[-1]["content"] += end
        declared = [self._control.break_tokens(tool, mark) for tool in tools]
        try:
            text = self._apply(safe_messages, declared, variables, answers=not end)
        except TEMPLATE_FAULTS as fault:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {fault}", param=PROMPT
            ) from fault
        # A template that writes JSON may escape the mark.
        text = text.replace(json.dumps(mark)[1:-1], mark)
        return (_text_before(text, end) if end else text).split(mark)

    def _with_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        options: TemplateOptions,
        notes: list[str],
    ) -> Sequence[Message]:
        """Puts into the chat what the template lacks: earlier calls with their results, and the
        tools if one must be called."""
        if not self._thinking.has("tool_calls"):
            messages = without_tool_roles(messages)
        if not tools or self._thinking.has("tools"):
            return messages
        if options.insists is None:
            notes.append("tools (the model's chat template has none)")
            return messages
        names = options.insists or [tool["function"]["name"] for tool in tools]
        return with_tools(messages, [t for t in tools if t["function"]["name"] in names])

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        answers: bool = True,
    ) -> str:
        declared = {"tools": list(tools)} if tools else {}
        return self._tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=answers,
            tokenize=False,
            **declared,
            **variables,
        )

    def _variables(self, options: TemplateOptions, notes: list[str]) -> dict[str, Any]:
        thinking = self._thinking
        variables = thinking.choose(options.effort, options.thinking, options.budget, notes)
        for name, value in options.kwargs.items():
            if thinking.has(name):
                variables[name] = value
            else:
                notes.append(f"chat_template_kwargs.{name} (the model's chat template has none)")
        return variables

    def _place_system_messages(
        self, messages: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, Any]
    ) -> Sequence[Message]:
        """Keeps later system messages in place if the template supports it.

        Else they become part of a user's turn next to them. At the front they would change the
        beginning of every later prompt, and no prefix cache would match.
        """
        later = [n for n, message in enumerate(messages) if n and message.get("role") == "system"]
        if not later or self._keeps_places(messages, later, tools, variables):
            return messages
        return fold_system_messages(messages)

    def _keeps_places(
        self,
        messages: Sequence[Message],
        later: Sequence[int],
        tools: Sequence[Message],
        variables: Mapping[str, Any],
    ) -> bool:
        """Whether the template renders each `later` system message after the messages before it."""
        salt = secrets.randbits(64)
        marks = [f"\ufdd2{salt}.{number}\ufdd2" for number in range(len(messages))]
        probes = [
            {**message, "content": joined_contents("", mark, message["content"])}
            if isinstance(message.get("content"), (str, list))
            else message
            for message, mark in zip(messages, marks, strict=True)
        ]
        try:
            text = self._apply(probes, tools, variables)
        except TEMPLATE_FAULTS:
            return False
        if any(text.count(marks[number]) != 1 for number in later):
            return False
        places = [at for mark in marks if (at := text.find(mark)) >= 0]
        return places == sorted(places)


def fold_system_messages(messages: Sequence[Message]) -> list[Message]:
    """Folds each later system message into the end of the user's turn before it, or else into the
    start of the next one, or into a turn of its own."""
    converted: list[Message] = []
    pending: list[object] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if number and role == "system":
            if converted and converted[-1].get("role") == "user" and not pending:
                together = joined_contents("\n\n", converted[-1].get("content"), content)
                converted[-1] = {**converted[-1], "content": together}
            else:
                pending.append(content)
            continue
        if pending and role == "user":
            message = {**message, "content": joined_contents("\n\n", *pending, content)}
            pending = []
        elif pending:
            converted.append({"role": "user", "content": joined_contents("\n\n", *pending)})
            pending = []
        converted.append(message)
    if pending:
        converted.append({"role": "user", "content": joined_contents("\n\n", *pending)})
    return converted


def _is_continued(messages: Sequence[Message]) -> bool:
    """Whether the answer continues the last message, which a tool call does not allow."""
    last = messages[-1] if messages else {}
    return (
        last.get("role") == "assistant"
        and isinstance(last.get("content"), str)
        and not last.get("tool_calls")
    )


def _text_before(text: str, end: str) -> str:
    """The text before `end`. Raises InvalidRequest if the template lost or repeated it."""
    before, *after = text.split(end)
    if len(after) != 1:
        raise InvalidRequest(
            "the model's chat template cannot continue an assistant's message; end with a message "
            "of another role",
            param=PROMPT,
        )
    return before
