"""The tools that the model may or must call: `tool_choice` of chat completions and Responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, SkipValidation
from pydantic_core import PydanticCustomError

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
class Choice:
    """`named`: the one tool that it must call. `allowed`: those that it may call; None: all.

    `hosted`: the type of a tool that the vendor's own servers run; the model is then free.
    """

    mode: Mode
    named: ToolName | None = None
    allowed: tuple[ToolName, ...] | None = None
    hosted: str = ""
    given: Any = field(default=None, compare=False)
    """The client's own form, for answers that repeat it."""

    def allows(self, name: str, namespace: str | None = None) -> bool:
        """Whether the model may call a tool."""
        allowed = self.allowed is None or ToolName(name, namespace) in self.allowed
        return self.mode != "none" and allowed

    @property
    def insists(self) -> bool:
        return self.mode == "required"


def _choice_of(value: object) -> Choice | None:
    match value:
        case None:
            return None
        case str(word) | {"type": str(word)} if word in _MODES:
            return Choice(_MODES[word], given=value)
        case {"type": "allowed_tools"}:
            fields = cast(dict[str, Any], value)
            inner = fields.get("allowed_tools")
            if isinstance(inner, dict):
                return _allowed(cast(dict[str, Any], inner), ".allowed_tools", value)
            return _allowed(fields, "", value)
        case {"type": str(kind)} if kind in _NAMING:
            return Choice("required", _name_of(cast(dict[str, Any], value), ""), given=value)
        case {"type": str(kind)}:
            return Choice("auto", hosted=kind, given=value)
        case _:
            raise PydanticCustomError("tool_choice", NO_CHOICE)


def _allowed(fields: Mapping[str, Any], at: str, given: object) -> Choice:
    mode, tools = fields.get("mode", "auto"), fields.get("tools")
    if mode not in _MODES:
        raise PydanticCustomError("mode", "should be 'auto' or 'required'", {"at": f"{at}.mode"})
    if not isinstance(tools, list) or len(cast(list[Any], tools)) > MAX_ALLOWED:
        raise PydanticCustomError(
            "tools",
            "should be a list of at most {n} tools",
            {"n": MAX_ALLOWED, "at": f"{at}.tools"},
        )
    names = [
        _name_of(tool, f"{at}.tools[{number}]")
        for number, tool in enumerate(cast(Sequence[Any], tools))
    ]
    return Choice(_MODES[mode], allowed=tuple(names), given=given)


def _name_of(value: Any, at: str) -> ToolName:
    """The name in a tool's reference: its own field, or that of the object that its type names."""
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    inner = fields.get(str(fields.get("type")))
    named = cast(dict[str, Any], inner) if isinstance(inner, dict) else fields
    name, namespace = named.get("name"), named.get("namespace")
    if not isinstance(name, str) or not name or not isinstance(namespace, str | None):
        raise PydanticCustomError("name", "should name a tool by its 'name'", {"at": at})
    return ToolName(name, namespace)


ToolChoice = Annotated[
    SkipValidation[Choice | None],
    BeforeValidator(
        _choice_of,
        json_schema_input_type=Literal["none", "auto", "required", "any"] | dict[str, Any] | None,
    ),
]
