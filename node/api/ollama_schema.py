"""The bodies of Ollama's API, and their parts in the form of the node's own request."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from ...mtp.types import Penalties, Sampling
from ...placement.errors import UnsupportedParameter
from ...placement.ids import ModelId
from ..chat.images import Content, content_of
from ..chat.requests import Grammar, Image
from .bodies import TolerantBody
from .image_parts import image_of_base64
from .keep_alive import KeepAlive
from .sampling_schema import explicit_values, sampling_of
from .structured_schema import schema_grammar
from .thinking_schema import thinking_options
from .tool_schema import MAX_TOOLS, Tool, call_for_template

_UINT32: Final = 2**32 - 1
_LATEST: Final = ":latest"
PENALTIES: Final = {
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Ollama's options by OpenAI's names of them."""
Think = bool | Literal["low", "medium", "high", "max"]


def _plain_name(value: Any) -> Any:
    """Ollama's clients append `:latest` to a name without a tag."""
    return value.removesuffix(_LATEST) if isinstance(value, str) else value


ModelName = Annotated[str, Field(min_length=1, max_length=256), BeforeValidator(_plain_name)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class OllamaOptions(TolerantBody):
    """`draft_num_predict` is the K of native MTP. Negative counts have no limit."""

    temperature: Annotated[float | None, Field(ge=0, le=10)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=_UINT32)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: int | None = None
    num_predict: Annotated[int | None, Field(ge=-2, le=_UINT32)] = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]] | None,
        Field(max_length=16),
        BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
    ] = None
    repeat_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    repeat_last_n: Annotated[int | None, Field(ge=-1, le=4096)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    draft_num_predict: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None

    def sampling(self) -> tuple[Sampling, frozenset[str]]:
        """The sampling and the names of its explicit fields."""
        off = Penalties()
        fields = explicit_values(self, ("temperature", "top_p", "top_k", "min_p"))
        if self.seed is not None and self.seed > 0:  # to Ollama, 0 and -1 are no seed
            fields["seed"] = self.seed
        penalties = Penalties(
            repetition=self.repeat_penalty or off.repetition,
            presence=self.presence_penalty or off.presence,
            frequency=self.frequency_penalty or off.frequency,
            context_size=max(1, self.repeat_last_n or off.context_size),
        )
        sampling, names = sampling_of(fields, penalties)
        return sampling, names | {PENALTIES[n] for n in PENALTIES if getattr(self, n) is not None}


class OllamaFunction(TolerantBody):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: dict[str, Any]


class OllamaCall(TolerantBody):
    id: str | None = None
    type: str | None = None
    function: OllamaFunction


def with_images(text: str, images: Sequence[str] | None, at: str) -> Content:
    """A message's images in front of its text. Raises InvalidRequest."""
    prefix = f"{at}." if at else ""
    parts: list[str | Image] = [
        image_of_base64(data, "", f"{prefix}images[{number}]")
        for number, data in enumerate(images or ())
    ]
    return content_of([*parts, text])


class OllamaMessage(TolerantBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall] | None, Field(max_length=128)] = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None

    def for_template(self, at: str) -> dict[str, Any]:
        """The message for a chat template. Raises InvalidRequest for what is no image."""
        content = with_images(self.content or "", self.images, at)
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_name:
            message["name"] = self.tool_name
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id or ""
        if self.tool_calls:
            message["tool_calls"] = [
                call_for_template(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls
            ]
        return message


class _PromptBody(TolerantBody):
    """The common fields of `chat` and `generate`."""

    model: ModelName
    stream: bool | None = None
    think: Think | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    cache: bool | None = None
    """The same as in `SamplingBody`."""
    loop_guard: bool | None = None
    """The same as in `ChatBody`."""

    @property
    def id(self) -> ModelId:
        return ModelId(self.model)

    @property
    def form(self) -> Grammar | None:
        """The constraint on the answer's text."""
        if not self.format:
            return None
        return schema_grammar(None if isinstance(self.format, str) else self.format, "format")

    @property
    def template_options(self) -> dict[str, Any]:
        """The chat template's options: true and false switch thinking, a word is its effort."""
        if isinstance(self.think, bool):
            return thinking_options(switches=(self.think,))
        return thinking_options(effort=self.think)


class OllamaChatBody(_PromptBody):
    messages: Annotated[list[OllamaMessage], Field(max_length=1024)] = Field(
        default_factory=list[OllamaMessage]
    )
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None


class OllamaGenerateBody(_PromptBody):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    """The text behind the gap that the answer fills; empty: there is no gap."""
    images: list[str] | None = None

    def check(self) -> None:
        """Raises UnsupportedParameter."""
        if self.images and self.raw:
            raise UnsupportedParameter(
                "'images' has no place in a raw prompt; leave 'raw' out", param="images"
            )
        if self.images and self.suffix:
            raise UnsupportedParameter(
                "'images' has no place around a gap; leave 'suffix' out", param="images"
            )

    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = with_images(self.prompt, self.images, "")
        return [*system, {"role": "user", "content": content}]


class ShowBody(TolerantBody):
    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None

    without_effect: ClassVar[frozenset[str]] = frozenset(("verbose",))
