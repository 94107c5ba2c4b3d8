"""The body of an OpenAI chat request: each field is honoured, a documented no-op, or refused.

Honoured: the fields of `ChatBody`. Without effect: its `without_effect`, and the fields of
`NEUTRAL` at a value that asks for nothing. null counts as not given, as OpenAI's clients send it,
and so does -1 in fields where clients of llama.cpp and LM Studio send it for that. Everything else
is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, field_validator, model_validator

from ....proto.peer_pb2 import Grammar
from ...chat.requests import calls_of
from ..http.bodies import StrictBody, unknown_fields, unsupported
from ..http.keep_alive import KeepAlive
from ..http.strict_json import encode
from ..shared.chat_message import ChatMessage
from ..shared.choices import MAX_CHOICES
from ..shared.history import MAX_MESSAGES
from ..shared.inputs_schema import wrong
from ..shared.sampling_schema import MaxTokens, SamplingBody
from ..shared.structured_schema import one_grammar
from ..shared.thinking_schema import ThinkingFields
from ..shared.tool_schema import MAX_TOOLS, NO_CHOICE, Tool, ToolChoice

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

OF_OTHER_SERVERS: Final = (
    "include_reasoning",
    "num_ctx",
    "options",
    "plugins",
    "provider",
    "route",
    "transforms",
    "usage",
)
"""Fields of Ollama's and OpenRouter's own that their clients send to any server. They are dropped
and named; an unknown field is refused, because it may be a misspelt one."""


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
    continuous_usage_stats: bool | None = None
    """vLLM's: usage in every chunk. It comes at the end only."""

    @property
    def ignored(self) -> list[str]:
        """The names of fields that ask for something and have no effect."""
        return ["stream_options.continuous_usage_stats"] if self.continuous_usage_stats else []

    @field_validator("include_obfuscation")
    @classmethod
    def _without_padding(cls, value: bool | None) -> bool | None:
        if value:
            raise unsupported("", "is not supported by this node; send false")
        return value


class OpenAiBody(SamplingBody):
    """The common fields of chat completions and completions; bounds are OpenAI's, mlx-lm's or the
    wire's. `best_of` may ask for no more answers than `n` returns."""

    without_effect: ClassVar[frozenset[str]] = frozenset(("user", "metadata", "cache_prompt"))
    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    best_of: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    cache_prompt: bool | None = None
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

    @property
    def ignored(self) -> list[str]:
        """The names of the request's fields and parts that have no effect."""
        return self.stream_options.ignored if self.stream_options else []


class ChatBody(ThinkingFields, OpenAiBody):
    without_effect: ClassVar[frozenset[str]] = OpenAiBody.without_effect | {
        "store",
        "prompt_cache_key",
        "promptCacheKey",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
    }
    """Hints that change no answer, or that this node follows anyway: it caches every prompt."""
    ignored_fields: ClassVar[frozenset[str]] = frozenset(OF_OTHER_SERVERS)

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice = None

    store: bool | None = None
    prompt_cache_key: str | None = None
    promptCacheKey: str | None = None
    """The name that opencode's `setCacheKey` sends."""
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None
    parallel_tool_calls: bool | None = None

    include_reasoning: Any = None
    num_ctx: Any = None
    options: Any = None
    plugins: Any = None
    provider: Any = None
    route: Any = None
    transforms: Any = None
    usage: Any = None

    @model_validator(mode="after")
    def _asks_for_logprobs_at_all(self) -> "ChatBody":
        """0 asks for nothing, so it may stand without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", 'needs "logprobs": true beside it')
        return self

    @model_validator(mode="after")
    def _can_call(self) -> "ChatBody":
        """Refuses a request that insists on a call which is not possible."""
        choice = self.tool_choice
        if choice is not None and choice.hosted:
            raise wrong("tool_choice", NO_CHOICE)
        if choice is None or not choice.insists:
            return self
        names = [tool["function"]["name"] for tool in self.callable_tools]
        if not names or (choice.named is not None and choice.named.name not in names):
            raise wrong("tool_choice", "insists on a tool that 'tools' lacks")
        return self

    @property
    def required_call(self) -> Grammar | None:
        choice = self.tool_choice
        if choice is None or not choice.insists:
            return None
        names = None if choice.named is None else [choice.named.name]
        return calls_of(names, parallel=self.parallel_tool_calls is not False)

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

    @property
    def ignored(self) -> list[str]:
        dropped = [name for name in OF_OTHER_SERVERS if getattr(self, name) is not None]
        dropped += unknown_fields(self) + super().ignored
        _ = one_grammar(self.required_call, self.form, dropped)
        return dropped
