"""Tools and the options of a chat template, as a request declares them."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from ....placement.errors import InvalidRequest
from ....proto.peer_pb2 import Grammar
from ...chat.requests import calls_of
from ..http.bodies import StrictBody

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,256}$")]

MAX_TOOLS: Final = 512
DEFERRED: Final = "defer_loading"
"""The mark of a template's tool that the template does not list."""


def _is_object_schema(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Refuses a schema whose fields have the wrong type: chat templates iterate over them."""
    for name, kind in (("properties", dict), ("required", list)):
        if value and name in value and not isinstance(value[name], kind):
            raise PydanticCustomError("schema", "is no JSON schema of an object")
    return value


class Function(StrictBody):
    """A tool that the model may call; `strict` changes nothing while arguments are checked."""

    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_is_object_schema)] = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        return tool_for_template(self.name, self.description, self.parameters)


class Tool(StrictBody):
    type: Literal["function"]
    function: Function


def tool_for_template(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    *,
    deferred: bool = False,
) -> dict[str, Any]:
    """A tool for a chat template. `parameters`: its JSON schema, or None if it takes none.

    `deferred`: the template does not list it, since the result of a search has or will have its
    schema (`schemas_text`). It can be called like any other.
    """
    schema = parameters or {"type": "object", "properties": {}}
    function = {"name": name, "description": description or "", "parameters": schema}
    tool: dict[str, Any] = {"type": "function", "function": function}
    return tool | {DEFERRED: True} if deferred else tool


def tool_name(tool: Mapping[str, Any]) -> str:
    """The name of a template's tool."""
    return tool["function"]["name"]


def schemas_text(tools: Iterable[dict[str, Any]]) -> str:
    """The schemas of a template's tools as a search's result, in the form that Claude Code's
    description of its search announces to the model."""
    functions = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    lines = (f"<function>{function}</function>" for function in functions)
    return "\n".join(("<functions>", *lines, "</functions>"))


def call_for_template(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """A call of an earlier turn for a chat template."""
    function = {"name": name, "arguments": arguments}
    return {"id": id or "", "type": "function", "function": function}


def required_call(
    name: str | None,
    tools: Sequence[dict[str, Any]],
    *,
    parallel: bool,
    loaded: Collection[str] = (),
) -> Grammar:
    """The call that the model must make; `name` None: of any of `tools` that it knows, which are a
    template's. `loaded`: names of the deferred ones among them.

    Raises InvalidRequest if they lack it.
    """
    known = [tool for tool in tools if not tool.get(DEFERRED) or tool_name(tool) in loaded]
    if name not in map(tool_name, tools) if name is not None else not known:
        raise InvalidRequest(
            "'tool_choice' insists on a tool that 'tools' lacks", param="tool_choice"
        )
    if name is not None:
        return calls_of([name], parallel=parallel)
    some = len(known) < len(tools)
    return calls_of([tool_name(tool) for tool in known] if some else None, parallel=parallel)


class TemplateKwargs(StrictBody):
    """The variables of chat templates that a request may set: no other one reaches a template."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    thinking_budget: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    reasoning_effort: Effort | None = None
    clear_thinking: bool | None = None
    preserve_thinking: bool | None = None
    model_identity: Annotated[str | None, Field(max_length=4096)] = None

    def values(self) -> dict[str, Any]:
        """The fields that are set, by name, without further fields of a subclass."""
        fields = {name: getattr(self, name) for name in TemplateKwargs.model_fields}
        return {name: value for name, value in fields.items() if value is not None}
