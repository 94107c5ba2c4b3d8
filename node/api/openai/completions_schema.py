"""The fields of completions, tokenize and detokenize."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast

from pydantic import (
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..http.bodies import StrictBody
from ..http.keep_alive import KeepAlive
from ..http.strict_json import MAX_ELEMENTS
from ..shared.chat_message import ChatMessage
from ..shared.choices_schema import ChoicesFields
from ..shared.history import MAX_MESSAGES
from ..shared.sampling_schema import SamplingBody, none_of_minus_one
from ..shared.tool_schema import MAX_TOOLS, TemplateKwargs, Tool
from .openai_schema import NEUTRAL, StreamOptions, without_neutral

MAX_TOKENS: Final = 16
"""OpenAI's default for this endpoint; the chat's is the end of the context."""

_REFUSED: Final = {name: values for name, values in NEUTRAL.items() if name != "echo"}


def _whole(value: Any) -> Any:
    """Accepts 5.0 for 5: they are the same JSON number, and some languages write only the first."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


MOST_ID: Final = 2**32 - 1
TokenId = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST_ID)]
_TOKEN_IDS: Final = TypeAdapter[list[int]](
    Annotated[list[TokenId], FailFast()], config=ConfigDict(strict=True)
)
Prompt = str | list[TokenId]
MAX_ANSWERS: Final = 128
"""The most answers of one request: choices of all its prompts."""


def _prompts(value: Any) -> Any:
    """The prompts: a text, a list of token ids, or a list of either kind."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "should be a text or a list of token ids")
    items = cast(list[object], value)
    if not items or not isinstance(items[0], str | list):
        return [_token_ids(items)]
    if len(items) > MAX_ANSWERS:
        raise PydanticCustomError("prompt", "should be at most {most} prompts", _MOST)
    if all(isinstance(item, str) for item in items):
        return items
    for number, item in enumerate(items):
        if not isinstance(item, list):
            context = {"at": f"[{number}]"}
            sentence = "should be a list of token ids, as those before it, or all be texts"
            raise PydanticCustomError("prompt", sentence, context)
    lists = cast(list[list[object]], items)
    one = len(lists) == 1
    return [_token_ids(ids, "" if one else f"[{at}]") for at, ids in enumerate(lists)]


_MOST: Final = {"most": MAX_ANSWERS}


def _token_ids(ids: list[object], place: str = "") -> list[int]:
    """The ids of a prompt. Raises for an empty list, and naming the one that is none."""
    if not ids:
        raise PydanticCustomError("prompt", "should have at least 1 token id", {"at": place})
    try:
        return _TOKEN_IDS.validate_python(ids)
    except ValidationError as fault:
        number = fault.errors()[0]["loc"][0]
        context = {"at": f"{place}[{number}]", "most": MOST_ID}
        sentence = "should be a token id of 0 to {most}"
        raise PydanticCustomError("prompt", sentence, context) from None


def _none_of_false(value: Any) -> Any:
    return None if value is False else value


class CompletionBody(SamplingBody, ChoicesFields):
    """The body of `POST /v1/completions`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    without_effect: ClassVar[frozenset[str]] = frozenset(("user", "metadata", "cache_prompt"))
    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED

    prompt: Annotated[
        SkipValidation[list[Prompt]],  # it is valid then
        BeforeValidator(
            _prompts,
            json_schema_input_type=str | list[TokenId] | list[str] | list[list[TokenId]],
        ),
    ]
    max_tokens: Annotated[
        Annotated[int, Field(ge=0, le=2**32 - 1)] | None,
        BeforeValidator(
            none_of_minus_one,
            json_schema_input_type=Annotated[int | None, Field(ge=-1, le=2**32 - 1)],
        ),
    ] = None
    """0: the prompt's echo alone."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=5)] | None,
        BeforeValidator(
            _none_of_false,
            json_schema_input_type=Annotated[int | Literal[False] | None, Field(ge=0, le=5)],
        ),
    ] = None
    echo: bool | None = None
    suffix: str | None = None
    """The text after the gap that the answer fills, or empty if there is no gap."""
    user: str | None = None
    metadata: dict[str, str] | None = None
    cache_prompt: bool | None = None
    keep_alive: KeepAlive = None

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing_else(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return without_neutral(fields, refused=_REFUSED)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "without_echo", 'is 0 only with "echo": true beside it', {"at": "max_tokens"}
            )
        answers = self.count * len(self.prompt)
        if answers > MAX_ANSWERS:
            raise PydanticCustomError(
                "too_many",
                "asks for {answers} answers with 'n'; at most {most} come of one request",
                {"answers": answers, "at": "prompt", **_MOST},
            )
        if self.suffix and not self.has_texts:
            raise PydanticCustomError(
                "not_text", "needs a 'prompt' in text; send no token ids", {"at": "suffix"}
            )
        if self.suffix and self.echo:
            raise PydanticCustomError(
                "one_of", "cannot be combined with 'echo'; leave one of them out", {"at": "suffix"}
            )
        return self

    @property
    def token_limit(self) -> int:
        return MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt's tokens are part of the answer. They carry
        the text of a prompt in ids, too."""
        return bool(self.echo) and (self.logprobs is not None or not self.has_texts)

    @property
    def has_texts(self) -> bool:
        """Whether the prompts are texts; else they are token ids."""
        return isinstance(self.prompt[0], str)


class TokenizeBody(StrictBody):
    """A text, or a chat as the model's template renders it."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1, max_length=MAX_MESSAGES)] = (
        None
    )
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: Literal[True] | None = None
    add_special_tokens: Literal[True] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(
                "one_of", "should have either 'prompt' or 'messages'", {"at": "prompt"}
            )
        return self


class DetokenizeBody(StrictBody):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    tokens: Annotated[list[TokenId], Field(max_length=MAX_ELEMENTS)]
