"""Tools and the options of a chat template, as a request declares them."""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from .bodies import StrictBody

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,256}$")]

MAX_TOOLS: Final = 512


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
        parameters = self.parameters or {"type": "object", "properties": {}}
        description = self.description or ""
        function = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}


class Tool(StrictBody):
    type: Literal["function"]
    function: Function


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
