"""The fields of completions, tokenize and detokenize."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, SkipValidation, model_validator

from ..http.bodies import StrictBody
from ..http.strict_json import MAX_ELEMENTS
from ..shared.chat_message import ChatMessage
from ..shared.history import MAX_MESSAGES
from ..shared.inputs_schema import AnyInput, TokenId, inputs_of, wrong
from ..shared.sampling_schema import UINT32, ModelName, NoneOfMinusOne
from ..shared.thinking_schema import TemplateKwargs
from ..shared.tool_schema import MAX_TOOLS, Tool
from .openai_schema import NEUTRAL, OpenAiBody

MAX_TOKENS: Final = 16
"""OpenAI's default for this endpoint; the chat's is the end of the context."""

MAX_ANSWERS: Final = 128
"""The most answers of one request: choices of all its prompts."""


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts, which are all texts or all token ids."""
    prompts = inputs_of(value, MAX_ANSWERS)
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) != isinstance(prompts[0], str):
            sentence = "should be like those before it: all texts, or all lists of token ids"
            raise wrong(f"[{number}]", sentence)
    return prompts


class CompletionBody(OpenAiBody):
    refused_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: values for name, values in NEUTRAL.items() if name != "echo"
    }

    prompt: Annotated[
        SkipValidation[list[str | list[int]]],  # it is valid then
        BeforeValidator(_prompts, json_schema_input_type=AnyInput),
    ]
    max_tokens: Annotated[int | None, Field(ge=0, le=UINT32), NoneOfMinusOne] = None
    """0: the prompt's echo alone."""
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=5),
        BeforeValidator(
            lambda value: None if value is False else value,
            json_schema_input_type=Annotated[int | Literal[False] | None, Field(ge=0, le=5)],
        ),
    ] = None
    echo: bool | None = None
    suffix: str | None = None
    """The text after the gap that the answer fills, or empty if there is no gap."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", 'is 0 only with "echo": true beside it')
        answers = self.count * len(self.prompt)
        if answers > MAX_ANSWERS:
            sentence = f"asks for {answers} answers with 'n'; one request has at most {MAX_ANSWERS}"
            raise wrong("prompt", sentence)
        if self.suffix and not self.has_texts:
            raise wrong("suffix", "needs a 'prompt' in text; send no token ids")
        if self.suffix and self.echo:
            raise wrong("suffix", "cannot be combined with 'echo'; leave one of them out")
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
        return isinstance(self.prompt[0], str)


class TokenizeBody(StrictBody):
    """A text, or a chat as the model's template renders it."""

    model: ModelName
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
            raise wrong("prompt", "should have either 'prompt' or 'messages'")
        return self


class DetokenizeBody(StrictBody):
    model: ModelName
    tokens: Annotated[list[TokenId], Field(max_length=MAX_ELEMENTS)]
