"""The body of an OpenAI chat request: each field is honoured, a documented no-op, or refused.

Honoured: the fields of `ChatBody`. Without effect: those of them marked so, and the fields of
`NEUTRAL` at a value that asks for nothing. null counts as not given, as OpenAI's clients send it,
and so does -1 in fields where clients of llama.cpp and LM Studio send it for that. Everything else
is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, field_validator, model_validator

from ....proto.peer_pb2 import Grammar
from ..http.bodies import Ignored, KeepAlive, NoEffect, StrictBody, unsupported
from ..http.strict_json import encode
from ..shared.chat_message import ChatMessage
from ..shared.choices import MAX_CHOICES
from ..shared.history import MAX_MESSAGES
from ..shared.inputs_schema import wrong
from ..shared.sampling_schema import MaxTokens, SamplingBody
from ..shared.thinking_schema import ThinkingFields
from ..shared.tool_schema import MAX_TOOLS, NO_CHOICE, Tool, ToolChoice, required_call

# Fields that this node does not implement, and the values that ask for nothing.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "dry_multiplier": (0,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n_probs": (0,),
    "prediction": (),
    "prompt_cache_options": (),
    "skip_special_tokens": (True,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def _is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether the value asks for nothing. To Python True equals 1, to a JSON client it does not."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


class StreamOptions(StrictBody):
    """`include_usage` true asks for a last chunk without choices; without it the usage comes with
    the chunk that has the finish reason, since plain clients read `choices[0]` of every chunk.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Ignored[bool | None] = None
    """vLLM's: usage in every chunk. It comes at the end only."""

    @field_validator("include_obfuscation")
    @classmethod
    def _without_padding(cls, value: bool | None) -> bool | None:
        if value:
            raise unsupported("", "is not supported by this node; send false")
        return value


class OpenAiBody(SamplingBody):
    """The common fields of chat completions and completions; bounds are OpenAI's, mlx-lm's or the
    wire's. `best_of` may ask for no more answers than `n` returns."""

    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    best_of: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: NoEffect[str] = None
    metadata: NoEffect[dict[str, str]] = None
    cache_prompt: NoEffect[bool] = None
    keep_alive: KeepAlive = None

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing_else(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Refuses an unsupported field that asks for something, and drops one that does not."""
        for name, neutral in cls.refused_fields.items():
            value = fields.get(name)
            if value is not None and not _is_neutral(value, neutral):
                example = f" or send {encode(neutral[0]).decode()}" if neutral else ""
                raise unsupported(name, f"is not supported by this node; leave it out{example}")
        return {name: value for name, value in fields.items() if name not in cls.refused_fields}

    @model_validator(mode="after")
    def _returns_every_answer(self) -> Self:
        if self.best_of not in (None, 1, self.count):
            sentence = "is not supported by this node; leave it out or send the value of 'n'"
            raise unsupported("best_of", sentence)
        return self

    @property
    def count(self) -> int:
        return self.n or 1

    @property
    def has_usage_apart(self) -> bool:
        """Whether a stream's statistics have a chunk of their own."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class ChatBody(ThinkingFields, OpenAiBody):
    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice = None

    parallel_tool_calls: bool | None = None

    # Hints that change no answer, or that this node follows anyway: it caches every prompt.
    store: NoEffect[bool] = None
    prompt_cache_key: NoEffect[str] = None
    promptCacheKey: NoEffect[str] = None
    """The name that opencode's `setCacheKey` sends."""
    prompt_cache_retention: NoEffect[str] = None
    safety_identifier: NoEffect[str] = None
    verbosity: NoEffect[str] = None

    # Ollama's and OpenRouter's own, which their clients send to any server. An unknown field is
    # refused, because it may be a misspelt one.
    include_reasoning: Ignored[Any] = None
    num_ctx: Ignored[Any] = None
    options: Ignored[Any] = None
    plugins: Ignored[Any] = None
    provider: Ignored[Any] = None
    route: Ignored[Any] = None
    transforms: Ignored[Any] = None
    usage: Ignored[Any] = None

    @model_validator(mode="after")
    def _asks_for_logprobs_at_all(self) -> "ChatBody":
        """0 asks for nothing, so it may stand without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", 'needs "logprobs": true beside it')
        return self

    @model_validator(mode="after")
    def _has_no_hosted_tool(self) -> "ChatBody":
        if self.tool_choice is not None and self.tool_choice.hosted:
            raise wrong("tool_choice", NO_CHOICE)
        return self

    @property
    def required_call(self) -> Grammar | None:
        """The call that the model must make. Raises InvalidRequest if `tools` lack it."""
        choice = self.tool_choice
        if choice is None or not choice.insists:
            return None
        name = None if choice.named is None else choice.named.name
        parallel = self.parallel_tool_calls is not False
        return required_call(name, self.callable_tools, parallel=parallel)

    @property
    def token_limit(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def num_logprobs(self) -> int | None:
        """The number of likely tokens for each emitted one, or None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        tools, choice = [tool.function for tool in self.tools or ()], self.tool_choice
        may_call = [tool for tool in tools if choice is None or choice.allows(tool.name)]
        return tuple(tool.for_template() for tool in may_call)
