"""Tools as a request declares them, and those that the model may or must call."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, cast

from pydantic import AfterValidator, BeforeValidator, SkipValidation, StringConstraints

from ....placement.errors import InvalidRequest
from ....proto.peer_pb2 import Grammar
from ...chat.requests import calls_of
from ..http.bodies import StrictBody
from .inputs_schema import wrong

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,256}$")]

MAX_TOOLS: Final = 512
DEFERRED: Final = "defer_loading"
"""The mark of a template's tool that the template does not list."""


def _is_object_schema(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Refuses a schema whose fields have the wrong type: chat templates iterate over them."""
    for name, kind in (("properties", dict), ("required", list)):
        if value and name in value and not isinstance(value[name], kind):
            raise wrong("", "is no JSON schema of an object")
    return value


class Function(StrictBody):
    """A tool that the model may call; `strict` changes nothing while arguments are checked."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_is_object_schema)] = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        return tool_for_template(self.name, self.description, self.parameters)


class Tool(StrictBody):
    type: Literal["function"]
    function: Function


def tool_for_template(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, deferred: bool = False
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
    callables = [tool for tool in tools if not tool.get(DEFERRED) or tool_name(tool) in loaded]
    if name not in map(tool_name, tools) if name is not None else not callables:
        raise InvalidRequest(
            "'tool_choice' insists on a tool that 'tools' lacks", param="tool_choice"
        )
    if name is not None:
        return calls_of([name], parallel=parallel)
    some = len(callables) < len(tools)
    return calls_of([tool_name(tool) for tool in callables] if some else None, parallel=parallel)


Mode = Literal["auto", "none", "required"]
_MODES: Final[Mapping[str, Mode]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
    "required": "required",
}
_NAMING: Final = ("custom", "function", "tool")
MAX_ALLOWED: Final = 512
NO_CHOICE: Final = (
    "should be 'none', 'auto', 'required', or an object that names a tool by its 'type' and 'name'"
)


@dataclass(frozen=True, slots=True)
class ToolName:
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class CallChoice:
    """`named`: the one tool that it must call. `allowed`: those that it may call, by default all.

    `hosted`: the type of a tool that the vendor's own servers run; the model is then free.
    """

    mode: Mode
    named: ToolName | None = None
    allowed: tuple[ToolName, ...] | None = None
    hosted: str = ""
    body: Any = field(default=None, compare=False)
    """The client's own form, for answers that repeat it."""

    def allows(self, name: str, namespace: str | None = None) -> bool:
        allowed = self.allowed is None or ToolName(name, namespace) in self.allowed
        return self.mode != "none" and allowed

    @property
    def insists(self) -> bool:
        return self.mode == "required"


def _choice_of(value: object) -> CallChoice | None:
    match value:
        case None:
            return None
        case str(word) | {"type": str(word)} if word in _MODES:
            return CallChoice(_MODES[word], body=value)
        case {"type": "allowed_tools"}:
            fields = cast(dict[str, Any], value)
            inner = fields.get("allowed_tools")
            if isinstance(inner, dict):
                return _allowed(cast(dict[str, Any], inner), ".allowed_tools", value)
            return _allowed(fields, "", value)
        case {"type": str(kind)} if kind in _NAMING:
            return CallChoice("required", _name_of(cast(dict[str, Any], value), ""), body=value)
        case {"type": str(kind)}:
            return CallChoice("auto", hosted=kind, body=value)
        case _:
            raise wrong("", NO_CHOICE)


def _allowed(fields: Mapping[str, Any], at: str, body: object) -> CallChoice:
    mode, tools = fields.get("mode", "auto"), fields.get("tools")
    if mode not in _MODES:
        raise wrong(f"{at}.mode", "should be 'auto' or 'required'")
    if not isinstance(tools, list) or len(cast(list[Any], tools)) > MAX_ALLOWED:
        raise wrong(f"{at}.tools", f"should be a list of at most {MAX_ALLOWED} tools")
    names = [
        _name_of(tool, f"{at}.tools[{number}]")
        for number, tool in enumerate(cast(Sequence[Any], tools))
    ]
    return CallChoice(_MODES[mode], allowed=tuple(names), body=body)


def _name_of(value: Any, at: str) -> ToolName:
    """The name in a tool's reference: its own field, or that of the object that its type names."""
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    inner = fields.get(str(fields.get("type")))
    named = cast(dict[str, Any], inner) if isinstance(inner, dict) else fields
    name, namespace = named.get("name"), named.get("namespace")
    if not isinstance(name, str) or not name or not isinstance(namespace, str | None):
        raise wrong(at, "should name a tool by its 'name'")
    return ToolName(name, namespace)


ToolChoice = Annotated[
    SkipValidation[CallChoice | None],
    BeforeValidator(
        _choice_of,
        json_schema_input_type=Literal["none", "auto", "required", "any"] | dict[str, Any] | None,
    ),
]
