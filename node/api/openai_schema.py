"""The body of an OpenAI chat request: each field is honoured, a documented no-op, or refused.

Honoured: the fields of `ChatBody`. Without effect: `WITHOUT_EFFECT`, and the fields of
`NEUTRAL` at a value that asks for nothing. null counts as not given, as OpenAI's clients send it,
and so does -1 in fields where clients of llama.cpp and LM Studio send it for that. Everything else
is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    SkipValidation,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ...placement.errors import InvalidRequest
from ..chat.images import Content, content_of
from ..chat.requests import Grammar, Image, calls_of
from .bodies import MAX_PARTS, StrictBody, unknown_fields
from .choices_schema import ChoicesFields
from .image_parts import image_of_url
from .keep_alive import KeepAlive
from .sampling_schema import MaxTokens, SamplingBody
from .strict_json import brief, decode, encode
from .structured_schema import one_grammar
from .thinking_schema import ThinkingFields
from .tool_schema import MAX_TOOLS, Tool
from .unreadable_parts import refusal_of

Role = Literal["system", "developer", "user", "assistant", "tool"]

# Fields that this node does not implement, and the values that ask for nothing.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "dry_multiplier": (0,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
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

WITHOUT_EFFECT: Final = frozenset(
    (
        "user",
        "metadata",
        "store",
        "cache_prompt",
        "prompt_cache_key",
        "promptCacheKey",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
    )
)
"""Hints that change no answer, or that this node follows anyway: it caches every prompt."""

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


def without_neutral(
    fields: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> dict[str, Any]:
    """`fields` without the unsupported ones; raises for an unsupported one that asks for something.

    `refused`: those of the endpoint, with the values that ask for nothing.
    """
    for name, neutral in refused.items():
        value = fields.get(name)
        if value is not None and not _is_neutral(value, neutral):
            example = f" or send {encode(neutral[0]).decode()}" if neutral else ""
            raise _unsupported(name, f"is not supported by this node; leave it out{example}")
    return {name: value for name, value in fields.items() if name not in refused}


def _unsupported(at: str, sentence: str) -> PydanticCustomError:
    return PydanticCustomError(
        "unsupported_parameter", "{sentence}", {"sentence": sentence, "at": at}
    )


_DETAIL: Final = frozenset({"detail", "format", "media_type"})
"""Hints beside an image's URL: its own processor decides on its size."""
_PART_HINTS: Final = frozenset({"cache_control"})
"""Requests to begin a cached prefix there; this node caches every turn."""


def _joined(value: Any) -> Any:
    """Text parts as one string, without a separator, as mlx-lm's server joins them; with images,
    parts as `content_of` gives them."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "should be text or a list of parts")
    parts = cast(list[object], value)
    if len(parts) > MAX_PARTS:
        raise PydanticCustomError("too_long", "should have at most {n} parts", {"n": MAX_PARTS})
    return content_of([_part_of(part, f"[{index}]") for index, part in enumerate(parts)])


def _part_of(part: Any, at: str) -> str | Image:
    match part:
        case {"type": "image_url", "image_url": {"url": url, **extra}} if (
            not extra.keys() - _DETAIL
        ):
            return _image(url, f"{at}.image_url.url")
        case {"type": "image_url", "image_url": str(url)}:
            return _image(url, f"{at}.image_url")
        case {"type": "image_url"}:
            raise PydanticCustomError(
                "invalid_part", "should be an object with a 'url'", {"at": f"{at}.image_url"}
            )
        case {"type": "text", "text": str(text), **extra} if not extra.keys() - _PART_HINTS:
            return text
        case {"type": "text", "text": str(), **extra}:
            unknown = next(name for name in extra if name not in _PART_HINTS)
            raise _unsupported(f"{at}.{brief(unknown)}", "is not supported; remove it")
        case {"type": str(kind)} if kind != "text":
            other = (
                f"is a part of type '{brief(kind)}'; this node reads parts of type 'text' and "
                "'image_url'"
            )
            sentence = refusal_of(kind) or other
            raise _unsupported(f"{at}.type", sentence)
        case _:
            raise PydanticCustomError(
                "invalid_part", "should be a part of type 'text' with its 'text'", {"at": at}
            )


def _image(url: object, at: str) -> Image:
    try:
        return image_of_url(url, at)
    except InvalidRequest as fault:
        sentence = fault.message.removeprefix(f"'{at}' ")
        raise PydanticCustomError("image", "{sentence}", {"sentence": sentence, "at": at}) from None


def _decoded(value: Any) -> Any:
    """Chat templates take arguments as an object, OpenAI's clients send them as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return decode(value.encode())
    except InvalidRequest as fault:
        raise PydanticCustomError("arguments", "{why}", {"why": fault.message}) from None


class TextPart(StrictBody):
    """A part of a message as the document describes it; `_joined` reads it."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class ImageUrl(StrictBody):
    url: str
    """`data:image/…;base64,…`; `https://…` where the node's owner allows it."""
    detail: str | None = None


class ImagePart(StrictBody):
    """An image in a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


Parts = Annotated[list[TextPart | ImagePart], Field(max_length=MAX_PARTS)]


class FunctionCall(StrictBody):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_decoded, json_schema_input_type=str | dict[str, Any])
    ]


class ToolCall(StrictBody):
    """A call that the assistant made earlier in the conversation."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: FunctionCall


class Message(StrictBody):
    """One turn. `refusal`, `audio`, `annotations` and `function_call` come back from OpenAI's
    clients as null when they repeat an answer; other values are refused.
    """

    role: Role
    id: Annotated[str | None, Field(max_length=256)] = None
    """Some clients number their messages; no answer depends on it."""
    content: Annotated[
        SkipValidation[Content | None],
        BeforeValidator(
            _joined,
            json_schema_input_type=str | Parts | None,
        ),
    ] = None
    name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=128)] = None
    tool_call_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None

    @field_validator("refusal", "audio", "annotations", "function_call", mode="before")
    @classmethod
    def _nothing_only(cls, value: Any) -> None:
        if value is not None and value != []:
            raise PydanticCustomError("unsupported_parameter", "is not supported; remove it")

    @model_validator(mode="after")
    def _fits_role(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError(
                "missing_content", "should be text or text parts", {"at": ".content"}
            )
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise PydanticCustomError(
                    "wrong_role", "belongs to the assistant's messages only", {"at": f".{name}"}
                )
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError(
                "wrong_role",
                "is required in a message of role 'tool' and has no place in another",
                {"at": ".tool_call_id"},
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """The message for a chat template; `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


class NamedFunction(StrictBody):
    name: Annotated[str, Field(min_length=1, max_length=256)]


class NamedTool(StrictBody):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(StrictBody):
    """`include_usage` true asks for a last chunk without choices; without it the usage comes with
    the chunk that has the finish reason, since plain clients read `choices[0]` of every chunk.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None

    @field_validator("include_obfuscation")
    @classmethod
    def _without_padding(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError(
                "unsupported_parameter", "is not supported by this node; send false"
            )
        return value


class ChatBody(SamplingBody, ChoicesFields, ThinkingFields):
    """The body of `POST /v1/chat/completions`; bounds are OpenAI's, mlx-lm's or the wire's."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=1024)]
    max_completion_tokens: MaxTokens = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    return_token_ids: bool | None = None
    loop_guard: bool | None = None
    """False: an answer with tools may repeat itself without end."""
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    cache_prompt: bool | None = None
    prompt_cache_key: str | None = None
    promptCacheKey: str | None = None
    """The name that opencode's `setCacheKey` sends."""
    prompt_cache_retention: str | None = None
    keep_alive: KeepAlive = None
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

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing_else(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return without_neutral(fields)

    @model_validator(mode="after")
    def _asks_for_logprobs_at_all(self) -> "ChatBody":
        """0 asks for nothing, so it may stand without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "without_logprobs", 'needs "logprobs": true beside it', {"at": "top_logprobs"}
            )
        return self

    @model_validator(mode="after")
    def _can_call(self) -> "ChatBody":
        """Raises if the request insists on a call that is not possible."""
        if self.required_call is None:
            return self
        names = [tool.function.name for tool in self.tools or ()]
        missing = [name for name in self.required_names or () if name not in names]
        if missing or not names:
            raise PydanticCustomError(
                "not_declared", "insists on a tool that 'tools' lacks", {"at": "tool_choice"}
            )
        return self

    @property
    def required_names(self) -> list[str] | None:
        """The tools of which the model must call one; None: any."""
        choice = self.tool_choice
        return [choice.function.name] if isinstance(choice, NamedTool) else None

    @property
    def required_call(self) -> Grammar | None:
        """The call that the model must make."""
        if self.tool_choice in (None, "auto", "none"):
            return None
        return calls_of(self.required_names, parallel=self.parallel_tool_calls is not False)

    @property
    def num_logprobs(self) -> int | None:
        """The number of likely tokens for each emitted one; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model may call, for a chat template."""
        if self.tool_choice == "none":
            return ()
        return tuple(tool.function.for_template() for tool in self.tools or ())

    @property
    def ignored(self) -> list[str]:
        """The names of the request's fields and parts that have no effect."""
        dropped = [name for name in OF_OTHER_SERVERS if getattr(self, name) is not None]
        dropped += unknown_fields(self)
        _ = one_grammar(self.required_call, self.form, dropped)
        return dropped

    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT
    ignored_fields: ClassVar[frozenset[str]] = frozenset(OF_OTHER_SERVERS)
    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL
