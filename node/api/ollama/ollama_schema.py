"""The bodies of Ollama's API, and their parts in the form of the node's own request."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from ....mtp.types import Sampling
from ....placement.errors import InvalidRequest, UnsupportedParameter
from ....proto.peer_pb2 import Grammar
from ...chat.images import content_of
from ..http.bodies import KeepAlive, NoEffect, TolerantBody
from ..shared.chat_message import ChatMessage
from ..shared.history import MAX_MESSAGES
from ..shared.message_parts import image_of_base64
from ..shared.sampling_schema import (
    UINT32,
    AnswerBody,
    Stop,
    TopK,
    explicit_values,
    sampling_of,
    schema_grammar,
)
from ..shared.thinking_schema import thinking_options
from ..shared.tool_schema import MAX_TOOLS, Tool

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


OllamaName = Annotated[str, Field(min_length=1, max_length=256), BeforeValidator(_plain_name)]


class OllamaOptions(TolerantBody):
    """`draft_num_predict` is the K of native MTP. Negative counts have no limit."""

    temperature: Annotated[float | None, Field(ge=0, le=10)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: TopK = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: int | None = None
    num_predict: Annotated[int | None, Field(ge=-2, le=UINT32)] = None
    num_ctx: Annotated[int | None, Field(ge=0, le=UINT32)] = None
    """The bound of an answer; the model's context is what it is."""
    stop: Stop = None
    repeat_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    repeat_last_n: Annotated[int | None, Field(ge=-1, le=4096)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    draft_num_predict: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None

    @property
    def token_limit(self) -> int | None:
        return min((n for n in (self.num_predict, self.num_ctx) if n and n > 0), default=None)

    def sampling(self) -> tuple[Sampling, frozenset[str]]:
        fields = explicit_values(self, ("temperature", "top_p", "top_k", "min_p"))
        if self.seed is not None and self.seed > 0:  # to Ollama, 0 and -1 are no seed
            fields["seed"] = self.seed
        own = explicit_values(self, PENALTIES)
        fields |= {PENALTIES[name]: value for name, value in own.items()}
        if self.repeat_last_n is not None:
            window = self.repeat_last_n or Sampling().repetition_context_size
            fields["repetition_context_size"] = max(1, window)
        return sampling_of(fields)


class _PromptBody(AnswerBody, TolerantBody):
    """The common fields of `chat` and `generate`."""

    model: OllamaName
    think: Think | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None

    def sampling(self) -> tuple[Sampling, frozenset[str]]:
        return (self.options or OllamaOptions()).sampling()

    @property
    def form(self) -> Grammar | None:
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
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        default_factory=list[ChatMessage]
    )
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None


class OllamaGenerateBody(_PromptBody):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    """The text after the gap that the answer fills, or empty if there is no gap."""
    images: list[str] | None = None

    def check(self) -> None:
        """Refuses what this node cannot do. Raises UnsupportedParameter."""
        for name, place in (("raw", "in a raw prompt"), ("suffix", "around a gap")):
            if self.images and getattr(self, name):
                message = f"'images' has no place {place}; leave '{name}' out"
                raise UnsupportedParameter(message, param="images")

    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        images = [
            image_of_base64(data, "", f"images[{number}]")
            for number, data in enumerate(self.images or ())
        ]
        content = content_of([*images, self.prompt])
        return [*system, {"role": "user", "content": content}]


class ShowBody(TolerantBody):
    """`name` is the older name of `model`."""

    model: OllamaName | None = None
    name: OllamaName | None = None
    verbose: NoEffect[bool] = None

    @property
    def named_model(self) -> str:
        """The model's name. Raises InvalidRequest if it is missing."""
        model = (self.model or self.name or "").removeprefix("hf.co/")
        model = model.removeprefix("huggingface.co/")
        if not model:
            raise InvalidRequest("'model' is required; write owner/name", param="model")
        return model
