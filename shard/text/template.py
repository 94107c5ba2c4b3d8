"""Chat templates: what they are given, and what they make of it."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from jinja2 import TemplateError

from ...placement.errors import InvalidRequest
from .answer_format import is_harmony
from .control_tokens import ControlTokens

Message = Mapping[str, Any]
Effort = Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"]

_SWITCHES: Final = ("enable_thinking", "thinking")
"""The names under which templates have the switch of reasoning."""
_EFFORT: Final = "reasoning_effort"
_BUDGET: Final = "thinking_budget"
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
"""What an expression in a template can raise: nearly all that one in Python can."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a request asks of the template beside its messages.

    `kwargs` are variables of the template. `effort` and `budget` go to those that it has for them.
    `lenient`: an effort that it cannot follow is no error, but as near as it can.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    effort: Effort = ""
    budget: int = 0
    lenient: bool = False


def options_of(told: Mapping[str, Any]) -> TemplateOptions:
    """From the wire's JSON. Raises InvalidRequest."""
    try:
        return TemplateOptions(**told)
    except TypeError:
        names = ", ".join(sorted(told))
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

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message], options: TemplateOptions
    ) -> list[str]:
        """The parts of the prompt, each to be tokenised by itself: so no text spells a control
        token.

        An assistant's message that comes last is the beginning of the answer, which continues it.
        Raises InvalidRequest where the template refuses this.
        """
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; use a model that was trained for chat",
                param="model",
            )
        variables = self._variables(options)
        mark = f"\ufdd0{secrets.randbits(64)}\ufdd0"
        placed = self._placed(messages, tools, variables)
        broken = [self._control.broken(message, mark) for message in placed]
        end = f"\ufdd1{secrets.randbits(64)}\ufdd1" if _is_continued(messages) else ""
        if end:
            broken[-1]["content"] += end
        declared = [self._control.broken(tool, mark) for tool in tools]
        try:
            text = self._apply(broken, declared, variables, answers=not end)
        except TEMPLATE_FAULTS as fault:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {fault}", param="messages"
            ) from fault
        # Where a template writes JSON, the mark may be escaped.
        text = text.replace(json.dumps(mark)[1:-1], mark)
        return (_until(text, end) if end else text).split(mark)

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

    def _has(self, variable: str) -> bool:
        return re.search(rf"\b{re.escape(variable)}\b", self._text) is not None

    def _variables(self, options: TemplateOptions) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if options.effort:
            variables |= self._effort(options.effort, lenient=options.lenient)
        if options.budget and self._has(_BUDGET):
            variables[_BUDGET] = options.budget
        for name, value in options.kwargs.items():
            if not self._has(name):
                raise InvalidRequest(
                    f"this model's chat template has no '{name}'; leave it out",
                    param=f"chat_template_kwargs.{name}",
                )
            variables[name] = value
        return variables

    def _effort(self, effort: Effort, *, lenient: bool) -> dict[str, Any]:
        """A template that has a switch only follows "none"; one without either thinks as it does"""
        switches = [name for name in _SWITCHES if self._has(name)]
        found: dict[str, Any] = dict.fromkeys(switches, effort != "none")
        scaled = self._has(_EFFORT)
        if effort != "none":
            return found | {_EFFORT: effort} if scaled else found
        if switches or not (scaled or self._tokenizer.has_thinking or is_harmony(self._tokenizer)):
            return found
        if scaled and re.search(r"['\"]none['\"]", self._text):
            return {_EFFORT: "none"}
        if lenient:
            return {_EFFORT: "low"} if scaled else {}
        raise InvalidRequest(
            "this model cannot be kept from thinking; leave reasoning_effort out, or send 'low'",
            param="reasoning_effort",
        )

    def _placed(
        self, messages: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, Any]
    ) -> Sequence[Message]:
        """System messages behind the first one keep their place where the template lets them.

        Else they become part of a user's turn next to them. Moved to the front they would change
        the beginning of every later prompt, and no cache of it would fit.
        """
        later = [n for n, message in enumerate(messages) if n and message.get("role") == "system"]
        if not later or self._keeps(messages, later, tools, variables):
            return messages
        return folded(messages)

    def _keeps(
        self,
        messages: Sequence[Message],
        later: Sequence[int],
        tools: Sequence[Message],
        variables: Mapping[str, Any],
    ) -> bool:
        """Whether each of the `later` ones stands where it was said, behind what came before it."""
        salt = secrets.randbits(64)
        marks = [f"\ufdd2{salt}.{number}\ufdd2" for number in range(len(messages))]
        probes = [
            {**message, "content": f"{mark}{message['content']}"}
            if isinstance(message.get("content"), str)
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


def folded(messages: Sequence[Message]) -> list[Message]:
    """Each later system message at the end of the user's turn before it, or else before the next
    one, or a turn of its own."""
    done: list[Message] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if number and role == "system":
            if done and done[-1].get("role") == "user" and not waiting:
                said = cast(str, done[-1].get("content") or "")
                done[-1] = {**done[-1], "content": _joined(said, cast(str, content or ""))}
            else:
                waiting.append(cast(str, content or ""))
            continue
        if waiting and role == "user":
            message = {**message, "content": _joined(*waiting, cast(str, content or ""))}
            waiting = []
        elif waiting:
            done.append({"role": "user", "content": _joined(*waiting)})
            waiting = []
        done.append(message)
    if waiting:
        done.append({"role": "user", "content": _joined(*waiting)})
    return done


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _is_continued(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the answer: a call of tools is whole."""
    last = messages[-1] if messages else {}
    return (
        last.get("role") == "assistant"
        and isinstance(last.get("content"), str)
        and not last.get("tool_calls")
    )


def _until(text: str, end: str) -> str:
    """What stands before `end`. Raises InvalidRequest where the template lost or repeated it."""
    before, *after = text.split(end)
    if len(after) != 1:
        raise InvalidRequest(
            "the model's chat template cannot continue an assistant's message; end with a message "
            "of another role",
            param="messages",
        )
    return before
