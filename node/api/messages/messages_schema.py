"""The body of Anthropic's `POST /v1/messages`, and its parts in the form of chat templates."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from ....placement.errors import InvalidRequest
from ....proto.peer_pb2 import Grammar
from ...chat.images import Content, latest_user_turn
from ..http.bodies import NoEffect, TolerantBody
from ..shared.history import MAX_MESSAGES, NOTHING_TO_READ, History, HistoryBody, role_of
from ..shared.message_parts import Part, PartList, Parts, content_for_template, thoughts_of
from ..shared.sampling_schema import UINT32, AnswerBody, StopStrings, TopK, schema_grammar
from ..shared.thinking_schema import ThinkingWish, thinking_options
from ..shared.tool_schema import MAX_TOOLS, required_call, schemas_text, tool_for_template

_BILLING: Final = "x-anthropic-billing-header:"
"""The beginning of a line of Claude Code that means nothing to a model. It differs between
conversations, so with it the rows after it could never come from the prefix cache."""
_HOSTED_SEARCH: Final = "tool_search_tool"
"""The beginning of the types of searches for deferred tools that Anthropic's servers run."""
_NO_IMAGE: Final = "Could not process image: "
_NO_DOCUMENT: Final = "This model does not support PDF input: "
"""Sentences of Anthropic's API about such blocks, which Claude Code looks for: it then removes the
block from its conversation. After any other sentence it repeats it in every turn."""


class AnthropicMessage(HistoryBody):
    text_field: ClassVar[str] = "content"
    unused_fields: ClassVar[frozenset[str]] = frozenset(
        (
            *("id", "type", "model", "stop_reason", "stop_sequence", "usage"),
            *("container", "context_management", "generation_stats", "stop_details"),
        )
    )
    """The other fields of an answer, which some clients repeat as a whole."""

    role: str | None = None
    """user, assistant or system."""
    content: Parts | None = None

    @property
    def author(self) -> str:
        """The message's role, or `tool` if it consists of results of tools."""
        blocks = self.content if isinstance(self.content, list) else []
        results = [block for block in blocks if block.kind == "tool_result"]
        return "tool" if results and results == blocks else role_of(self.role)


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


class OutputFormat(TolerantBody):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(TolerantBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesBody(AnswerBody, TolerantBody):
    """`max_tokens` may be missing: `count_tokens` has none, and the context has an end."""

    messages: Annotated[
        list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    max_tokens: Annotated[int | None, Field(ge=1, le=UINT32)] = None
    system: str | PartList | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: TopK = None
    stop_sequences: StopStrings = None
    tools: Annotated[list[AnthropicTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingWish | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The field's place in the beta of structured outputs."""
    metadata: NoEffect[dict[str, Any]] = None
    service_tier: NoEffect[str] = None

    def for_template(self, ignored: list[str]) -> list[dict[str, Any]]:
        """The messages for a chat template; what was dropped is appended to `ignored`."""
        history = History(ignored, {"image": _NO_IMAGE, "document": _NO_DOCUMENT})
        messages: list[dict[str, Any]] = []
        if (system := self._system(history)) != "":
            messages.append({"role": "system", "content": system})
        latest = latest_user_turn([message.author for message in self.messages])
        for number, message in enumerate(self.messages):
            if not message.is_empty:
                with_schemas = self._with_schemas(message, ignored)
                at = f"messages[{number}].content"
                messages += _turns(with_schemas, at, history, asks=number == latest)
        if len(messages) == (system != ""):
            raise InvalidRequest(NOTHING_TO_READ, param="messages")
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

    def _with_schema_text(self, result: Part, ignored: list[str]) -> Part:
        names, declared = _referenced_tools(result), {tool.name: tool for tool in self.tools or ()}
        if not names:
            return result
        tools = [declared[name] for name in names if name in declared]
        missing = [name for name in names if name not in declared]
        ignored += [f"a tool_reference to {name}, which 'tools' lacks" for name in missing]
        lines = [schemas_text(tool.for_template() for tool in tools)] if tools else []
        lines += [f"There is no tool {name} now." for name in missing]
        blocks = result.content if isinstance(result.content, list) else []
        others = [block for block in blocks if block.kind != "tool_reference"]
        text = Part(type="text", text="\n".join(lines))
        return result.model_copy(update={"content": [*others, text]})

    def _system(self, history: History) -> Content:
        blocks = self.system
        if isinstance(blocks, list) and blocks and (blocks[0].text or "").startswith(_BILLING):
            history.ignored.append("system[0] (a line about billing)")
            blocks = blocks[1:]
        return content_for_template(blocks, "system", history, separator="\n", asks=True)

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
        loaded = frozenset[str]().union(*map(_referenced_tools, blocks))
        parallel = choice.disable_parallel_tool_use is not True
        return required_call(name, tools, parallel=parallel, loaded=loaded)

    @property
    def form(self) -> Grammar | None:
        newer = self.output_config.format if self.output_config else None
        if newer is not None:
            return schema_grammar(newer.json_schema, "output_config.format")
        older = self.output_format
        return None if older is None else schema_grammar(older.json_schema, "output_format")

    @property
    def template_options(self) -> dict[str, Any]:
        thinking, config = self.thinking or ThinkingWish(), self.output_config
        return thinking_options(
            effort=(config.effort if config else None) or thinking.effort,
            switches=(thinking.switch,),
            budget=thinking.budget,
        )


def _referenced_tools(block: Part) -> tuple[str, ...]:
    """The names of the tools that the result of a search refers to, each once."""
    parts = block.content if block.kind == "tool_result" else None
    references = [p for p in parts or () if isinstance(p, Part) and p.kind == "tool_reference"]
    return tuple(dict.fromkeys(reference.tool_name or "" for reference in references))


def _turns(
    message: AnthropicMessage, at: str, history: History, *, asks: bool
) -> list[dict[str, Any]]:
    """The turns of a message: each result of a tool in a user's message is a turn of its own.

    `asks`: it is the user's latest turn.
    """
    history.check_role(message.role, "messages[]")
    role = role_of(message.role)
    if not isinstance(message.content, list):
        return [{"role": role, "content": message.content or ""}]
    if role == "assistant":
        return [_assistant(message.content, at, history)]
    results = [
        _result(block, f"{at}[{number}].content", history)
        for number, block in enumerate(message.content)
        if block.kind == "tool_result"
    ]
    rest = [block for block in message.content if block.kind != "tool_result"]
    if results and not rest:
        return results
    content = content_for_template(rest, at, history, separator="\n", asks=asks)
    return [*results, {"role": role, "content": content}]


def _result(block: Part, at: str, history: History) -> dict[str, Any]:
    content = content_for_template(block.content, at, history, separator="\n")
    if block.is_error:
        error = [{"type": "text", "text": "Error: "}]
        content = f"Error: {content}" if isinstance(content, str) else [*error, *content]
    id = history.result_id(block.tool_use_id)
    return {"role": "tool", "content": content, "tool_call_id": id}


def _assistant(blocks: list[Part], at: str, history: History) -> dict[str, Any]:
    thoughts = thoughts_of(blocks)
    calls = [
        history.call(block.id, block.name, block.input, "messages[].content[]", "input")
        for block in blocks
        if block.kind == "tool_use"
    ]
    others = [block for block in blocks if block.kind != "tool_use"]
    content = content_for_template(others, at, history, separator="\n")
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    turn |= {"reasoning_content": thoughts} if thoughts else {}
    return turn | ({"tool_calls": calls} if calls else {})
