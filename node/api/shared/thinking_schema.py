"""How much a model should think: the fields of each dialect and of other servers."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from ..http.bodies import StrictBody, TolerantBody

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_TOKENS: Final = 2**31 - 1
_SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORT: Final = "reasoning_effort"


class TemplateKwargs(StrictBody):
    """The variables of chat templates that a request may set: no other one reaches a template."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    thinking_budget: Annotated[int | None, Field(ge=0, le=_TOKENS)] = None
    reasoning_effort: Effort | None = None
    clear_thinking: bool | None = None
    preserve_thinking: bool | None = None
    model_identity: Annotated[str | None, Field(max_length=4096)] = None

    def values(self) -> dict[str, Any]:
        """The fields that are set, by name, without further fields of a subclass."""
        fields = {name: getattr(self, name) for name in TemplateKwargs.model_fields}
        return {name: value for name, value in fields.items() if value is not None}


class ThinkingWish(TolerantBody):
    """The objects of Anthropic's and OpenRouter's APIs; a word or a boolean stands for one."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    enabled: bool | None = None
    effort: Effort | None = None
    budget_tokens: Annotated[int | None, Field(ge=0, le=_TOKENS)] = None
    max_tokens: Annotated[int | None, Field(ge=0, le=_TOKENS)] = None

    @property
    def switch(self) -> bool | None:
        return self.enabled if self.type is None else self.type != "disabled"

    @property
    def budget(self) -> int | None:
        return self.budget_tokens or self.max_tokens


def _as_object(value: Any) -> Any:
    match value:
        case bool():
            return {"enabled": value}
        case str():
            return {"effort": value}
        case _:
            return value


Wish = Annotated[
    ThinkingWish | None,
    BeforeValidator(_as_object, json_schema_input_type=bool | Effort | ThinkingWish | None),
]


class RequestKwargs(TemplateKwargs):
    """A request's variables of the template; unknown ones never reach it, and are named."""

    model_config = ConfigDict(extra="allow")


class ThinkingFields(StrictBody):
    """The fields of chat completions: OpenAI's, and those of vLLM, Ollama, OpenRouter and more."""

    reasoning_effort: Effort | None = None
    chat_template_kwargs: RequestKwargs | None = None
    enable_thinking: bool | None = None
    think: Wish = None
    thinking: Wish = None
    reasoning: Wish = None
    thinking_budget: Annotated[int | None, Field(ge=0, le=_TOKENS)] = None

    @property
    def template_options(self) -> dict[str, Any]:
        wishes = [wish for wish in (self.reasoning, self.thinking, self.think) if wish]
        efforts = [self.reasoning_effort, *(wish.effort for wish in wishes)]
        budgets = [self.thinking_budget, *(wish.budget for wish in wishes)]
        return thinking_options(
            effort=next(filter(None, efforts), None),
            switches=(self.enable_thinking, *(wish.switch for wish in wishes)),
            budget=next(filter(None, budgets), None),
            kwargs=self.chat_template_kwargs,
        )


def thinking_options(
    *,
    effort: str | None = None,
    switches: tuple[bool | None, ...] = (),
    budget: int | None = None,
    kwargs: TemplateKwargs | None = None,
) -> dict[str, Any]:
    """The options of the chat template; see `shard/text/template.py`. "Off" overrides "on".

    The template's own variables for thinking are removed from `kwargs`, since a model may have
    another name for them, or other levels.
    """
    variables = {} if kwargs is None else kwargs.values()
    own = (variables.pop(name, None) for name in _SWITCHES)
    settings = [switch for switch in (*switches, *own) if switch is not None]
    level = variables.pop(_EFFORT, None)
    options = {
        "effort": effort or level,
        "thinking": all(settings) if settings else None,
        "budget": budget or None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    return options | ({"kwargs": variables} if variables else {})


def merge_options(profile: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request, and its profile's for those that the request leaves open."""
    below = dict(profile)
    if "effort" in request:
        _ = below.pop("thinking", None)
    if request.get("thinking") and below.get("effort") == "none":
        del below["effort"]
    kwargs = {**below.get("kwargs", {}), **request.get("kwargs", {})}
    return {**below, **request, **({"kwargs": kwargs} if kwargs else {})}
