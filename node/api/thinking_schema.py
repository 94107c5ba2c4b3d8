"""How much a model should think, as requests of each dialect and of other servers say it."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from .body_schema import StrictBody
from .tolerant_body import TolerantBody
from .tool_schema import Effort, TemplateKwargs

_TOKENS: Final = 2**31 - 1
_SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORT: Final = "reasoning_effort"


class ThinkingWish(TolerantBody):
    """The objects of Anthropic's and OpenRouter's APIs, and what says the same in a word."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    enabled: bool | None = None
    effort: Effort | None = None
    budget_tokens: Annotated[int | None, Field(ge=0, le=_TOKENS)] = None
    max_tokens: Annotated[int | None, Field(ge=0, le=_TOKENS)] = None

    @property
    def switch(self) -> bool | None:
        return self.enabled if self.type is None else self.type != "disabled"


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
    """What chat completions know of it: OpenAI's field, and those that clients write for vLLM,
    Ollama, OpenRouter and others."""

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
        budgets = [
            self.thinking_budget,
            *(wish.budget_tokens or wish.max_tokens for wish in wishes),
        ]
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
    """The options of the chat template; see `shard/text/template.py`. Of two switches "off" counts.

    The template's own variables for thinking are taken out of `kwargs`, since a model may have
    another name for them, or other levels.
    """
    variables = {} if kwargs is None else kwargs.given()
    known = [*switches, *(variables.pop(name, None) for name in _SWITCHES)]
    level = variables.pop(_EFFORT, None)
    options = {"effort": effort or level, "thinking": _joint(known), "budget": budget or None}
    given = {name: value for name, value in options.items() if value is not None}
    return given | ({"kwargs": variables} if variables else {})


def _joint(switches: list[bool | None]) -> bool | None:
    given = [switch for switch in switches if switch is not None]
    return all(given) if given else None


def merge_options(profile: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a request asked for, and its profile's where it leaves them open."""
    below = dict(profile)
    if "effort" in asked:
        _ = below.pop("thinking", None)
    if asked.get("thinking") and below.get("effort") == "none":
        del below["effort"]
    kwargs = {**below.get("kwargs", {}), **asked.get("kwargs", {})}
    return {**below, **asked, **({"kwargs": kwargs} if kwargs else {})}
