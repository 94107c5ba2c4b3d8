"""The body of OpenAI's `POST /v1/responses`, and its parts in the form of chat templates."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from ....placement.errors import InvalidRequest, UnsupportedParameter
from ....proto.peer_pb2 import Grammar
from ...chat.images import Content, latest_user_turn
from ..http.bodies import NoEffect, TolerantBody
from ..shared.history import History, HistoryBody, role_of
from ..shared.message_parts import Parts, content_for_template, plain_text
from ..shared.sampling_schema import UINT32, AnswerBody, schema_grammar
from ..shared.thinking_schema import Effort, thinking_options
from ..shared.tool_schema import MAX_TOOLS, ToolChoice, required_call, tool_name
from .response_memory import PREVIOUS
from .response_tools import CUSTOM_INPUT, SEARCH, ResponsesTool, ToolSet, tool_set

_UNSUPPORTED: Final = {
    "conversation": "this node has no conversations; continue a response by 'previous_response_id'",
    "prompt": "this node has no templates of prompts; send the text as 'input'",
}
_KINDS: Final = {
    "output": "function_call_output",
    "tools": "tool_search_output",
    "arguments": "function_call",
    "input": "custom_tool_call",
    "summary": "reasoning",
    "content": "message",
}


class InputItem(HistoryBody):
    """One item of the conversation; which fields it has follows from its type."""

    text_field: ClassVar[str] = "content"

    type: str | None = None
    """A message if it is None."""
    id: str | None = None
    status: str | None = None
    role: str | None = None
    phase: str | None = None
    content: Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    """The namespace of the tool that the item calls."""
    execution: str | None = None
    tools: Annotated[list[ResponsesTool] | None, Field(max_length=MAX_TOOLS)] = None
    """The tools that a search has found."""
    arguments: Any = None
    """A JSON object, or the text of one; a text that is none reaches the model as it is."""
    input: str | None = None
    output: Parts | None = None

    @property
    def is_reference(self) -> bool:
        """Whether it stands for the item with its id; OpenAI lets the type of these be left out."""
        if self.type not in (None, "message") or self.id is None:
            return self.type == "item_reference"
        fields = {name for name in type(self).model_fields if getattr(self, name) is not None}
        return fields <= {"id", "type"} and not self.dropped

    @property
    def kind(self) -> str:
        return self.kind_of(self.type, _KINDS)

    @property
    def author(self) -> str:
        """The role of a message for a chat template; "" of other items."""
        return role_of(self.role) if self.kind == "message" else ""


class Reasoning(TolerantBody):
    effort: Effort | None = None
    summary: str | None = None


class TextFormat(TolerantBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(TolerantBody):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(AnswerBody, TolerantBody):
    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(_UNSUPPORTED, ())

    input: str | Annotated[list[InputItem], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=UINT32)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    tools: Annotated[list[ResponsesTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    previous_response_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    store: bool | None = None
    include: NoEffect[list[str]] = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: NoEffect[str] = None
    safety_identifier: NoEffect[str] = None
    service_tier: str | None = None
    truncation: NoEffect[Literal["disabled", "auto"]] = None
    user: NoEffect[str] = None

    def check(self) -> None:
        """Checks what the schema cannot see. Raises InvalidRequest."""
        for name, why in _UNSUPPORTED.items():
            if getattr(self, name) is not None:
                raise UnsupportedParameter(f"'{name}' is not supported: {why}", param=name)
        if self.background:
            raise UnsupportedParameter(
                "'background' is not supported: an answer ends with its client's connection; leave "
                "it out and read the stream",
                param="background",
            )
        text_format = self.text.format if self.text else None
        if text_format and text_format.type == "json_schema" and text_format.json_schema is None:
            raise InvalidRequest("'text.format' has no schema", param="text.format.schema")

    def required_call(self, tools: ToolSet) -> Grammar | None:
        """The call that the model must make. Raises InvalidRequest if `tools` lack it."""
        choice = self.tool_choice
        if choice is None or not choice.insists:
            return None
        named = choice.named
        name = None if named is None else tools.function(named.name, named.namespace)
        may_call, parallel = self.callable_functions(tools), self.parallel_tool_calls is not False
        return required_call(name, may_call, parallel=parallel, loaded=tools.loaded)

    def callable_functions(self, tools: ToolSet) -> tuple[dict[str, Any], ...]:
        choice = self.tool_choice
        if choice is None:
            return tools.functions
        forms = [(each, tools.form(tool_name(each))) for each in tools.functions]
        return tuple(each for each, form in forms if choice.allows(form.name, form.namespace))

    @property
    def is_background(self) -> bool:
        return self.service_tier == "flex"

    @property
    def form(self) -> Grammar | None:
        text_format = self.text.format if self.text else None
        if text_format is None or text_format.type == "text":
            return None
        strict = text_format.strict is True
        return schema_grammar(text_format.json_schema, "text.format", strict=strict)

    def tool_set(self, ignored: list[str], earlier: Sequence[InputItem] = ()) -> ToolSet:
        """The tools that the model may call; the others are appended to `ignored`.

        `earlier`: the conversation that the response continues.
        """
        if self.tool_choice is not None and self.tool_choice.hosted:
            ignored.append(f"tool_choice of type {self.tool_choice.hosted}")
        results = [tool for item in (*earlier, *self.items) for tool in item.tools or ()]
        return tool_set(self.tools or (), results, ignored)

    @property
    def template_options(self) -> dict[str, Any]:
        return thinking_options(effort=self.reasoning.effort if self.reasoning else None)

    @property
    def references(self) -> Mapping[int, str]:
        """The ids of the items that the input refers to, by their places."""
        return {n: item.id or "" for n, item in enumerate(self.items) if item.is_reference}

    def with_items(self, items: Mapping[int, InputItem]) -> "ResponsesBody":
        whole = [items.get(number, item) for number, item in enumerate(self.items)]
        return self.model_copy(update={"input": whole})

    @property
    def items(self) -> Sequence[InputItem]:
        if isinstance(self.input, str):
            return (InputItem(role="user", content=self.input),)
        return self.input

    def for_template(
        self, tools: ToolSet, ignored: list[str], earlier: Sequence[InputItem] = ()
    ) -> list[dict[str, Any]]:
        """The messages for a chat template: consecutive items of the assistant become one.

        `earlier`: the conversation that the response continues.
        """
        history = History(ignored)
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [*earlier, *self.items]
        latest = latest_user_turn([item.author for item in items])
        for number, item in enumerate(items):
            new = number - len(earlier)
            at = PREVIOUS if new < 0 else f"input[{new}]"
            _add(item, at, tools, messages, history, asks=number == latest)
        if not messages:
            raise InvalidRequest("'input' has no item that this node can read", param="input")
        return messages


def _add(
    item: InputItem,
    at: str,
    tools: ToolSet,
    messages: list[dict[str, Any]],
    history: History,
    *,
    asks: bool,
) -> None:
    """`asks`: it is the user's latest turn."""
    match item.kind:
        case "message" if item.author != "assistant":
            history.check_role(item.role, "input[]")
            content = content_for_template(item.content, f"{at}.content", history, asks=asks)
            messages.append({"role": item.author, "content": content})
        case "message":
            _assistant(messages)["content"] += plain_text(item.content, at, history)
        case "reasoning":
            thought = plain_text(item.content, at, history) or plain_text(item.summary, at, history)
            if thought:
                _assistant(messages, new=True)["reasoning_content"] = thought
        case "function_call" | "custom_tool_call":
            _add_call(_call(item, tools, history), messages)
        case "tool_search_call" if item.call_id:
            name = tools.function(SEARCH)
            _add_call(history.call(item.call_id, name, item.arguments, "input[]"), messages)
        case "tool_search_output" if item.call_id:
            _add_result(item, tools.schemas(item.tools or ()), messages, history)
        case "function_call_output" | "custom_tool_call_output":
            content = content_for_template(item.output, f"{at}.output", history)
            _add_result(item, content, messages, history)
        case "":
            pass
        case kind:
            history.ignored.append(f"an item of type {kind}")


def _assistant(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_call(call: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _add_result(
    item: InputItem, content: Content, messages: list[dict[str, Any]], history: History
) -> None:
    id = history.result_id(item.call_id)
    messages.append({"role": "tool", "content": content, "tool_call_id": id})


def _call(item: InputItem, tools: ToolSet, history: History) -> dict[str, Any]:
    is_custom = item.kind == "custom_tool_call"
    arguments = {CUSTOM_INPUT: item.input or ""} if is_custom else item.arguments
    name = tools.function(item.name, item.namespace) if item.name else None
    return history.call(item.call_id, name, arguments, "input[]")
