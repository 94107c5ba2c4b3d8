"""Renders chat templates with their options."""

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from jinja2 import TemplateError

from ...placement.errors import PROMPT, InvalidRequest
from .control_tokens import ControlTokens
from .plain_calls import outlined, plainer_tool, with_tools, without_tool_roles
from .rewritings import MarkedChat, needed_rewritings, rewrite
from .thinking import HARMONY_LEVELS, LEVELS, Effort, ThinkingVariables
from .tools.answer_format import is_harmony

Message = Mapping[str, Any]
Chat = Sequence[Message]
Variables = Mapping[str, Any]

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


_SEARCH_S: Final = 0.5
"""CPU seconds after which no other rewriting of the messages is tried."""


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
    """Tools of which the answer must call one, by name, or any if empty. None requires no call."""


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

    def _renders(self, variables: Variables) -> bool:
        return self._accepts([{"role": "user", "content": "hi"}], (), variables)

    def _accepts(self, messages: Chat, tools: Chat, variables: Variables) -> bool:
        try:
            _ = self._apply(messages, tools, variables)
        except TEMPLATE_FAULTS:
            return False
        return True

    def render(
        self, messages: Chat, tools: Chat, options: TemplateOptions, notes: list[str]
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
        messages = [{**message, "content": message.get("content") or ""} for message in messages]
        messages = self._with_tools(messages, tools, options, notes)
        # The chat has the others, in the result of a search, where no cached prefix changes.
        tools = [tool for tool in tools if not tool.get("defer_loading")]
        mark = f"\ufdd0{secrets.randbits(64)}\ufdd0"
        messages = self._rewritten(messages, tools, variables, notes)
        safe_messages = [self._control.break_tokens(message, mark) for message in messages]
        if end:
            safe_messages[-1]["content"] = _with_end(safe_messages[-1]["content"], end)
        declared = [self._control.break_tokens(tool, mark) for tool in tools]
        try:
            text = self._applied_with(declared, safe_messages, variables, notes, answers=not end)
        except TEMPLATE_FAULTS as fault:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {fault}", param=PROMPT
            ) from fault
        # A template that writes JSON may escape the mark.
        text = text.replace(json.dumps(mark)[1:-1], mark)
        return (_text_before(text, end) if end else text).split(mark)

    def _with_tools(
        self, messages: Chat, tools: Chat, options: TemplateOptions, notes: list[str]
    ) -> Chat:
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

    def _applied_with(
        self, tools: Chat, messages: Chat, variables: Variables, notes: list[str], *, answers: bool
    ) -> str:
        """The rendered text; where the template refuses the tools' schemas, of plainer ones."""
        try:
            return self._apply(messages, tools, variables, answers=answers)
        except TEMPLATE_FAULTS:
            plainer = [plainer_tool(tool) for tool in tools]
            if plainer == list(tools):
                raise
            text = self._apply(messages, plainer, variables, answers=answers)
        notes.append("tools (schemas became plainer, for the model's chat template)")
        return text

    def _apply(
        self, messages: Chat, tools: Chat, variables: Variables, *, answers: bool = True
    ) -> str:
        declared = {"tools": list(tools)} if tools else {}
        options = {"add_generation_prompt": answers, "tokenize": False}
        return self._tokenizer.apply_chat_template(
            list(messages), **options, **declared, **variables
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

    def _rewritten(
        self, messages: Chat, tools: Chat, variables: Variables, notes: list[str]
    ) -> Chat:
        """The messages as the template takes them; appends to `notes` what was changed."""
        chat, outlines = MarkedChat(messages), outlined(tools)
        began = time.process_time()

        def faults(turns: Chat) -> float:
            if time.process_time() - began > _SEARCH_S:
                return math.inf
            try:
                return chat.faults(self._apply(turns, outlines, variables))
            except TEMPLATE_FAULTS:
                # A template may refuse nothing but the marks.
                unchanged = turns is chat.messages and self._accepts(messages, tools, variables)
                return 0 if unchanged else math.inf

        needed = needed_rewritings(chat.messages, faults)
        notes += [f"messages ({each.note}, for the model's chat template)" for each in needed]
        return rewrite(messages, needed)


def _is_continued(messages: Chat) -> bool:
    """Whether the answer continues the last message, which a tool call does not allow."""
    last = messages[-1] if messages else {}
    return (
        last.get("role") == "assistant"
        and isinstance(last.get("content"), str)
        and not last.get("tool_calls")
    )


def _with_end(content: str | list[dict[str, Any]], end: str) -> str | list[dict[str, Any]]:
    """The content with `end` after its text."""
    if isinstance(content, str):
        return content + end
    *others, last = content
    return [*others, {**last, "text": last["text"] + end}]


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
