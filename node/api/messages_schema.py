"""The body of Anthropic's `POST /v1/messages`, and its parts in the form of chat templates."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from ...placement.errors import InvalidRequest
from ..chat.images import Content, content_of, latest_user_turn
from ..chat.requests import Grammar, Image
from .bodies import MAX_PARTS, TolerantBody, check_parts
from .image_parts import image_of_base64, image_of_url
from .structured_schema import schema_grammar
from .thinking_schema import thinking_options
from .tool_schema import (
    MAX_TOOLS,
    call_for_template,
    required_call,
    schemas_text,
    tool_for_template,
)
from .unreadable_parts import refuse_unreadable

_UINT32: Final = 2**32 - 1
_BILLING: Final = "x-anthropic-billing-header:"
"""The beginning of a line of Claude Code that means nothing to a model. It differs between
conversations, so with it the rows after it could never come from the prefix cache."""
_HOSTED_SEARCH: Final = "tool_search_tool"
"""The beginning of the types of searches for deferred tools that Anthropic's servers run."""
_NO_IMAGE: Final = "Could not process image: "
_NO_DOCUMENT: Final = "This model does not support PDF input: "
"""Sentences of Anthropic's API about such blocks, which Claude Code looks for: it then removes the
block from its conversation. After any other sentence it repeats it in every turn."""


class ImageSource(TolerantBody):
    """The place of an image: `data` of type `base64`, or `url`."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(TolerantBody):
    """One part of a message; which fields it has follows from its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: Annotated[str | None, Field(max_length=256)] = None
    name: Annotated[str | None, Field(max_length=256)] = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str | None, Field(max_length=256)] = None
    content: "str | Annotated[list[Block], Field(max_length=MAX_PARTS)] | None" = None
    source: ImageSource | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None
    """The end of the cached prefix; every turn is cached anyway."""
    citations: list[Any] | None = None
    tool_name: Annotated[str | None, Field(max_length=256)] = None
    """The tool that a `tool_reference` in the result of a client's search names."""

    @property
    def referenced_tools(self) -> tuple[str, ...]:
        """The names of the tools that the result of a search refers to, each once."""
        parts = self.content if self.type == "tool_result" else None
        references = [p for p in parts or () if isinstance(p, Block) and p.type == "tool_reference"]
        return tuple(dict.fromkeys(reference.tool_name or "" for reference in references))


class AnthropicMessage(TolerantBody):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS)]

    @property
    def author(self) -> str:
        """The message's role, or `tool` if it consists of results of tools."""
        blocks = self.content if isinstance(self.content, list) else []
        results = [block for block in blocks if block.type == "tool_result"]
        return "tool" if results and results == blocks else self.role


class AnthropicTool(TolerantBody):
    """`type` other than `custom` is a tool that Anthropic's own servers run."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    defer_loading: bool | None = None
    """The model learns of it by a `tool_reference`, in the result of the client's search."""

    def for_template(self, *, deferred: bool = False) -> dict[str, Any]:
        schema = self.input_schema
        return tool_for_template(self.name, self.description, schema, deferred=deferred)


class ToolChoice(TolerantBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(TolerantBody):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=0, le=_UINT32)] = None


class OutputFormat(TolerantBody):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(TolerantBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesBody(TolerantBody):
    """`max_tokens` may be missing: `count_tokens` has none, and the context has an end."""

    without_effect: ClassVar[frozenset[str]] = frozenset(("metadata", "service_tier"))

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int | None, Field(ge=1, le=_UINT32)] = None
    system: str | Annotated[list[Block], Field(max_length=MAX_PARTS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=_UINT32)] = None
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]] | None, Field(max_length=16)
    ] = None
    tools: Annotated[list[AnthropicTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The field's place in the beta of structured outputs."""
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache: bool | None = None
    """The same as in `SamplingBody`."""
    loop_guard: bool | None = None
    """The same as in `ChatBody`."""

    @model_validator(mode="after")
    def _has_parts_to_read(self) -> "MessagesBody":
        check_parts((_parts(message.content) for message in self.messages), "messages")
        return self

    def for_template(self, ignored: list[str]) -> list[dict[str, Any]]:
        """The messages for a chat template; types of dropped blocks are appended to `ignored`."""
        messages: list[dict[str, Any]] = []
        if (system := self._system(ignored)) != "":
            messages.append({"role": "system", "content": system})
        latest = latest_user_turn([message.author for message in self.messages])
        for number, message in enumerate(self.messages):
            if number == latest:
                _refuse_unreadable(message.content, f"messages[{number}]")
            shown = self._with_schemas(message, ignored)
            messages += _turns(shown, f"messages[{number}]", ignored)
        return messages

    def _with_schemas(self, message: AnthropicMessage, ignored: list[str]) -> AnthropicMessage:
        """The message with the schemas of tools in the place of the references to them.

        So they stand where the search's result stands, and the prompt before it, with its list of
        tools, stays as it was.
        """
        if not isinstance(message.content, list):
            return message
        blocks = [self._with_schema_text(block, ignored) for block in message.content]
        return message.model_copy(update={"content": blocks})

    def _with_schema_text(self, result: Block, ignored: list[str]) -> Block:
        names, declared = result.referenced_tools, {tool.name: tool for tool in self.tools or ()}
        if not names:
            return result
        tools = [declared[name] for name in names if name in declared]
        missing = [name for name in names if name not in declared]
        ignored += [f"a tool_reference to {name}, which 'tools' lacks" for name in missing]
        lines = [schemas_text(tool.for_template() for tool in tools)] if tools else []
        lines += [f"There is no tool {name} now." for name in missing]
        blocks = result.content if isinstance(result.content, list) else []
        others = [block for block in blocks if block.type != "tool_reference"]
        text = Block(type="text", text="\n".join(lines))
        return result.model_copy(update={"content": [*others, text]})

    def _system(self, ignored: list[str]) -> Content:
        blocks = self.system or ""
        if isinstance(blocks, list) and (blocks[0].text or "").startswith(_BILLING):
            ignored.append("system[0] (a line about billing)")
            blocks = blocks[1:]
        _refuse_unreadable(blocks, "system")
        return _content(blocks, "system", ignored)

    def callable_tools(self, ignored: list[str]) -> tuple[dict[str, Any], ...]:
        """The tools that the model may call; the others are appended to `ignored`."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return ()
        own = [tool for tool in self.tools or () if tool.type in (None, "custom")]
        hosted = [tool.type or "" for tool in self.tools or () if tool not in own]
        ignored += [f"tools[] of type {kind}" for kind in hosted]
        # Without the search that its own servers run, a model would never learn of the others.
        defers = not any(kind.startswith(_HOSTED_SEARCH) for kind in hosted)
        return tuple(
            tool.for_template(deferred=defers and tool.defer_loading is True) for tool in own
        )

    def required_call(self, tools: Sequence[dict[str, Any]]) -> Grammar | None:
        """The call that the model must make. Raises InvalidRequest if `tools` lack it."""
        choice = self.tool_choice
        if choice is None or choice.type not in ("any", "tool"):
            return None
        name = (choice.name or "") if choice.type == "tool" else None
        blocks = [b for m in self.messages if isinstance(m.content, list) for b in m.content]
        loaded = frozenset[str]().union(*(block.referenced_tools for block in blocks))
        parallel = choice.disable_parallel_tool_use is not True
        return required_call(name, tools, parallel=parallel, loaded=loaded)

    @property
    def form(self) -> Grammar | None:
        """The constraint on the answer's text."""
        if self.output_config is not None and self.output_config.format is not None:
            return schema_grammar(self.output_config.format.json_schema, "output_config.format")
        if self.output_format is not None:
            return schema_grammar(self.output_format.json_schema, "output_format")
        return None

    @property
    def options(self) -> dict[str, Any]:
        """The options of the chat template; without any field of thinking the model decides."""
        thinking, config = self.thinking, self.output_config
        return thinking_options(
            effort=config.effort if config else None,
            switches=(thinking.type != "disabled",) if thinking else (),
            budget=thinking.budget_tokens if thinking else None,
        )


def _parts(content: str | list[Block] | None) -> int:
    """The number of blocks, including those within results of tools."""
    total, open_contents = 0, [content]
    while open_contents:
        if isinstance(blocks := open_contents.pop(), list):
            total += len(blocks)
            open_contents += [block.content for block in blocks]
    return total


def _turns(message: AnthropicMessage, at: str, ignored: list[str]) -> list[dict[str, Any]]:
    """The turns of a message: each result of a tool in a user's message is a turn of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, at, ignored)]
    turns: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        if block.type == "tool_result":
            turns.append(_result(block, f"{at}.content[{number}]", ignored))
    rest = [block for block in message.content if block.type != "tool_result"]
    if rest or not turns:
        turns.append({"role": message.role, "content": _content(rest, f"{at}.content", ignored)})
    return turns


def _result(block: Block, at: str, ignored: list[str]) -> dict[str, Any]:
    if not block.tool_use_id:
        raise InvalidRequest(f"the tool_result '{at}' has no tool_use_id", param=at)
    content = _content(block.content or "", f"{at}.content", ignored)
    if block.is_error:
        error = [{"type": "text", "text": "Error: "}]
        content = f"Error: {content}" if isinstance(content, str) else [*error, *content]
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _assistant(blocks: list[Block], at: str, ignored: list[str]) -> dict[str, Any]:
    thoughts = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    calls = [
        call_for_template(block.id, block.name or "", block.input or {})
        for block in blocks
        if block.type == "tool_use"
    ]
    others = [block for block in blocks if block.type not in ("thinking", "tool_use")]
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": _content(others, f"{at}.content", ignored),
    }
    turn |= {"reasoning_content": thoughts} if thoughts else {}
    return turn | ({"tool_calls": calls} if calls else {})


def _refuse_unreadable(content: str | list[Block], at: str) -> None:
    """Raises UnsupportedParameter with Anthropic's sentence."""
    for block in content if isinstance(content, list) else ():
        refuse_unreadable(block.type, at, _NO_DOCUMENT if block.type == "document" else "")


def _content(content: str | list[Block], at: str, ignored: list[str]) -> Content:
    if isinstance(content, str):
        return content
    parts: list[str | Image] = []
    for number, block in enumerate(content):
        if block.type == "text":
            parts.append(block.text or "")
        elif block.type == "image":
            parts.append(_image(block, f"{at}[{number}]"))
        else:
            ignored.append(f"a block of type {block.type}")
    return content_of([part for part in parts if part], "\n")


def _image(block: Block, at: str) -> Image:
    """Raises InvalidRequest."""
    match block.source:
        case ImageSource(type="base64", data=str(data), media_type=media_type):
            return image_of_base64(data, media_type or "", f"{at}.source.data", _NO_IMAGE)
        case ImageSource(type="url", url=str(url)):
            return image_of_url(url, f"{at}.source.url", _NO_IMAGE)
        case _:
            raise InvalidRequest(
                f"'{at}.source' should have the type 'base64' with 'data', or 'url' with 'url'",
                param=f"{at}.source",
            )
