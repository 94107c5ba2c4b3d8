"""The body of OpenAI's `POST /v1/responses`, and its parts in the form of chat templates."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from ...placement.errors import InvalidRequest, UnsupportedParameter
from ..chat.images import Content, content_of, latest_user_turn
from ..chat.requests import Grammar, Image
from .bodies import MAX_ALL_PARTS, MAX_PARTS, TolerantBody, check_parts
from .image_parts import image_of_url
from .response_tools import CUSTOM_INPUT, SEARCH, ResponsesTool, ToolSet, tool_set
from .strict_json import decode
from .structured_schema import schema_grammar
from .thinking_schema import thinking_options
from .tool_schema import MAX_TOOLS, Effort, call_for_template, required_call
from .unreadable_parts import refuse_unreadable

_UINT32: Final = 2**32 - 1
_UNSUPPORTED: Final = {
    "conversation": "this node has no conversations; continue a response by 'previous_response_id'",
    "prompt": "this node has no templates of prompts; send the text as 'input'",
}
_MAX_ITEMS: Final = 8192
PREVIOUS: Final = "previous_response_id"


class ContentPart(TolerantBody):
    type: str
    text: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: str | None = None
    """The data URL of a part of type `input_image`."""


Parts = Annotated[list[ContentPart], Field(max_length=MAX_PARTS)]


class InputItem(TolerantBody):
    """One item of the conversation; which fields it has follows from its type."""

    type: Annotated[str, BeforeValidator(lambda value: value or "message")] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    phase: str | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    call_id: Annotated[str | None, Field(max_length=256)] = None
    name: Annotated[str | None, Field(max_length=256)] = None
    namespace: Annotated[str | None, Field(max_length=256)] = None
    """The namespace of the tool that the item calls."""
    execution: str | None = None
    tools: Annotated[list[ResponsesTool] | None, Field(max_length=MAX_TOOLS)] = None
    """The tools that a search has found."""
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | Parts | None = None

    @property
    def is_reference(self) -> bool:
        """Whether it stands for the item with its id; OpenAI lets the type of these be left out."""
        named_alone = self.type == "message" and self.model_fields_set <= {"id", "type"}
        return self.type == "item_reference" or (named_alone and self.id is not None)

    @property
    def parts(self) -> int:
        lists = (self.content, self.summary, self.output)
        return sum(len(parts) for parts in lists if isinstance(parts, list))


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


class NamedChoice(TolerantBody):
    """The one tool that the model must call."""

    type: Literal["function", "custom"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    namespace: Annotated[str | None, Field(max_length=256)] = None


class ResponsesBody(TolerantBody):
    without_effect: ClassVar[frozenset[str]] = frozenset(
        (
            "include",
            "prompt_cache_key",
            "safety_identifier",
            "truncation",
            "user",
        )
    )
    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(_UNSUPPORTED, ())

    model: Annotated[str, Field(min_length=1, max_length=256)]
    input: str | Annotated[list[InputItem], Field(max_length=_MAX_ITEMS)]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=_UINT32)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    tools: Annotated[list[ResponsesTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    previous_response_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    truncation: Literal["disabled", "auto"] | None = None
    user: str | None = None
    cache: bool | None = None
    """The same as in `SamplingBody`."""
    loop_guard: bool | None = None
    """The same as in `ChatBody`."""

    @model_validator(mode="after")
    def _has_parts_to_read(self) -> "ResponsesBody":
        if not isinstance(self.input, str):
            check_parts((item.parts for item in self.input), "input")
        return self

    def check(self, earlier: Sequence[InputItem] = ()) -> None:
        """Raises InvalidRequest for what the schema cannot see.

        `earlier`: the conversation that the response continues, which counts as if it were sent.
        """
        for name, why in _UNSUPPORTED.items():
            if getattr(self, name) is not None:
                raise UnsupportedParameter(f"'{name}' is not supported: {why}", param=name)
        if self.background and not self.store:
            raise InvalidRequest(
                "'background' needs \"store\": true, so that the answer can be read later; add it, "
                "or leave 'background' out",
                param="background",
            )
        items = [*earlier, *self.items]
        if len(items) > _MAX_ITEMS or sum(item.parts for item in items) > MAX_ALL_PARTS:
            raise InvalidRequest(
                f"the conversation behind '{PREVIOUS}' has, with 'input', more than {_MAX_ITEMS} "
                f"items or {MAX_ALL_PARTS} parts; begin another one with what matters of it",
                param=PREVIOUS,
            )
        text_format = self.text.format if self.text else None
        if text_format and text_format.type == "json_schema" and text_format.json_schema is None:
            raise InvalidRequest("'text.format' has no schema", param="text.format.schema")

    def required_call(self, tools: ToolSet) -> Grammar | None:
        """The call that the model must make. Raises InvalidRequest if `tools` lack it."""
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return None
        named = isinstance(choice, NamedChoice)
        name = tools.function(choice.name, choice.namespace) if named else None
        parallel = self.parallel_tool_calls is not False
        return required_call(name, tools.functions, parallel=parallel, loaded=tools.loaded)

    @property
    def form(self) -> Grammar | None:
        """The constraint on the answer's text."""
        text_format = self.text.format if self.text else None
        if text_format is None or text_format.type == "text":
            return None
        strict = text_format.strict is True
        return schema_grammar(text_format.json_schema, "text.format", strict=strict)

    def tool_set(self, ignored: list[str], earlier: Sequence[InputItem] = ()) -> ToolSet:
        """The tools that the model may call; the others are appended to `ignored`.

        `earlier`: the conversation that the response continues.
        """
        found = [tool for item in (*earlier, *self.items) for tool in item.tools or ()]
        return tool_set(self.tools or (), found, ignored)

    @property
    def options(self) -> dict[str, Any]:
        return thinking_options(effort=self.reasoning.effort if self.reasoning else None)

    @property
    def references(self) -> Mapping[int, str]:
        """The ids of the items that the input refers to, by their places."""
        return {n: item.id or "" for n, item in enumerate(self.items) if item.is_reference}

    def with_items(self, items: Mapping[int, InputItem]) -> "ResponsesBody":
        """The body with these items in their places."""
        whole = [items.get(number, item) for number, item in enumerate(self.items)]
        return self.model_copy(update={"input": whole})

    @property
    def items(self) -> Sequence[InputItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return (InputItem(role="user", content=self.input),)
        return self.input

    def for_template(
        self, tools: ToolSet, ignored: list[str], earlier: Sequence[InputItem] = ()
    ) -> list[dict[str, Any]]:
        """The messages for a chat template: consecutive items of the assistant become one.

        `earlier`: the conversation that the response continues.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [*earlier, *self.items]
        latest = latest_user_turn([item.role or "" for item in items])
        for number, item in enumerate(items, -len(earlier)):
            at = PREVIOUS if number < 0 else f"input[{number}]"
            if number == latest - len(earlier) and isinstance(item.content, list):
                for part in item.content:
                    refuse_unreadable(part.type, at)
            _add(item, at, tools, messages, ignored)
        if not messages:
            raise InvalidRequest("'input' has no item that this node can read", param="input")
        return messages


def _add(
    item: InputItem, at: str, tools: ToolSet, messages: list[dict[str, Any]], ignored: list[str]
) -> None:
    match item.type:
        case "message" if item.role in ("user", "system", "developer"):
            role = "user" if item.role == "user" else "system"
            content = _content(item.content, f"{at}.content", ignored)
            messages.append({"role": role, "content": content})
        case "message":
            _assistant(messages)["content"] += _text(item.content, ignored)
        case "reasoning":
            thought = _text(item.content, ignored) or _text(item.summary, ignored)
            if thought:
                _assistant(messages, new=True)["reasoning_content"] = thought
        case "function_call" | "custom_tool_call":
            _assistant(messages).setdefault("tool_calls", []).append(_call(item, at, tools))
        case "tool_search_call" if item.call_id:
            call = call_for_template(item.call_id, tools.function(SEARCH), item.arguments or {})
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "tool_search_output" if item.call_id:
            content = tools.schemas(item.tools or ())
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        case "function_call_output" | "custom_tool_call_output":
            if not item.call_id:
                raise InvalidRequest(f"'{at}' has no call_id", param=at)
            content = _content(item.output, f"{at}.output", ignored)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        case kind:
            ignored.append(f"an item of type {kind}")


def _assistant(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(item: InputItem, at: str, tools: ToolSet) -> dict[str, Any]:
    if not item.name or not item.call_id:
        raise InvalidRequest(f"'{at}' needs a name and a call_id", param=at)
    arguments: Any = {CUSTOM_INPUT: item.input or ""}
    if item.type == "function_call":
        arguments = item.arguments or "{}"
        if isinstance(arguments, str):
            arguments = decode(arguments.encode(errors="replace"))
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"'{at}.arguments' is no JSON object", param=f"{at}.arguments")
    name = tools.function(item.name, item.namespace)
    return call_for_template(item.call_id, name, arguments)


def _text(content: str | list[ContentPart] | None, ignored: list[str]) -> str:
    """The text of an item that has no images."""
    if content is None or isinstance(content, str):
        return content or ""
    ignored += [f"a part of type {part.type}" for part in content if part.text is None]
    return "".join(part.text or "" for part in content)


def _content(content: str | list[ContentPart] | None, at: str, ignored: list[str]) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str | Image] = []
    for number, part in enumerate(content):
        if part.type == "input_image":
            parts.append(image_of_url(part.image_url, f"{at}[{number}].image_url"))
        elif part.text is not None:
            parts.append(part.text)
        else:
            ignored.append(f"a part of type {part.type}")
    return content_of(parts)
