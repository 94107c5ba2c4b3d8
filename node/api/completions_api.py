"""`POST /v1/completions`, `/v1/tokenize` and `/v1/detokenize`: text and ids without a template."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, cast, final

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from ...mtp.types import Sampling
from ...placement.ids import ModelId, RequestId
from ..chat.requests import Chat, Finished, GenerationRequest, Part, TextDelta
from .bodies import StrictBody
from .dialects import OPENAI, Dialect, Exchange, WholeAnswer
from .errors import HttpFault
from .keep_alive import KeepAlive
from .openai_api import statistics
from .openai_schema import NEUTRAL, Message, StreamOptions, without_neutral
from .routes import ApiRoute, post_json
from .sampling_schema import SamplingBody
from .sse import DONE, data
from .strict_json import MAX_ELEMENTS
from .thinking_schema import thinking_options
from .tool_schema import MAX_TOOLS, TemplateKwargs, Tool

MAX_TOKENS: Final = 16
"""OpenAI's default for this endpoint; the chat's is the end of the context."""

_NO_LOGPROBS: Final[Mapping[str, tuple[Any, ...]]] = {"logprobs": (0, False)}


def _whole(value: Any) -> Any:
    """Accepts 5.0 for 5: they are the same JSON number, and some languages write only the first."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


TokenId = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=2**32 - 1)]
Prompt = str | list[TokenId]


def _one_prompt(value: Any) -> Any:
    """The prompt itself for a list of one prompt. Raises for several: they need a request each."""
    if not isinstance(value, list):
        return value
    items = cast(list[object], value)
    if items and not all(isinstance(item, int) for item in items):
        if len(items) > 1:
            raise PydanticCustomError(
                "unsupported_parameter", "should be one prompt; send the others by themselves"
            )
        return items[0]
    return items


class CompletionBody(SamplingBody):
    """The body of `POST /v1/completions`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    without_effect: ClassVar[frozenset[str]] = frozenset(("user", "metadata", "cache_prompt"))

    @classmethod
    def refused_fields(cls) -> Mapping[str, tuple[Any, ...]]:
        return {**NEUTRAL, **_NO_LOGPROBS, "suffix": ()}

    @classmethod
    def known_fields(cls) -> list[str]:
        return list(dict.fromkeys((*cls.model_fields, *cls.refused_fields())))

    prompt: Annotated[
        Prompt,
        BeforeValidator(
            _one_prompt,
            json_schema_input_type=str | list[TokenId] | list[str] | list[list[TokenId]],
        ),
    ]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    suffix: None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    cache_prompt: bool | None = None
    keep_alive: KeepAlive = None

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing_else(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return without_neutral(fields, _NO_LOGPROBS)


class TokenizeBody(StrictBody):
    """A text, or a chat as the model's template renders it."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=1024)] = None
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


def bare_request(model: str, request_id: RequestId, prompt: Prompt) -> GenerationRequest:
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, tuple(prompt))
    return GenerationRequest(request_id, ModelId(model), (), Sampling(), text=text, ids=ids)


def _parse(body: CompletionBody, request_id: RequestId) -> Exchange:
    sampling, explicit_fields = body.sampling()
    text, ids = (body.prompt, None) if isinstance(body.prompt, str) else (None, body.prompt)
    request = GenerationRequest(
        id=request_id,
        model=ModelId(body.model),
        messages=(),
        sampling=sampling,
        explicit_fields=explicit_fields,
        max_tokens=body.max_tokens or MAX_TOKENS,
        stop=tuple(body.stop or ()),
        num_draft_tokens=body.num_draft_tokens,
        draft_policy=body.draft_policy,
        background=body.background,
        uses_cache=body.cache is not False,
        grammar=body.form,
        text=text,
        ids=None if ids is None else tuple(ids),
        keep_alive_s=body.keep_alive,
    )
    return Exchange(request, _CompletionRenderer(body, request_id), bool(body.stream))


class TokenizerApi:
    """The endpoints that encode and decode without an answer."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def routes(self) -> list[ApiRoute]:
        return [
            post_json("/v1/tokenize", self.tokenize, TokenizeBody),
            post_json("/v1/detokenize", self.detokenize, DetokenizeBody),
        ]

    async def tokenize(self, request: Request, body: TokenizeBody) -> dict[str, Any]:
        request_id = RequestId(request.state.request_id)
        if body.prompt is not None:
            generation = bare_request(body.model, request_id, body.prompt)
        else:
            generation = GenerationRequest(
                request_id,
                ModelId(body.model),
                tuple(message.for_template() for message in body.messages or ()),
                Sampling(),
                tools=tuple(tool.function.for_template() for tool in body.tools or ()),
                options=thinking_options(kwargs=body.chat_template_kwargs),
            )
        prompt = await self._chat.encode(generation)
        count, limit = len(prompt.ids), prompt.context_length
        return {"count": count, "max_model_len": limit, "tokens": prompt.ids}

    async def detokenize(self, request: Request, body: DetokenizeBody) -> dict[str, Any]:
        generation = bare_request(body.model, RequestId(request.state.request_id), body.tokens)
        return {"prompt": (await self._chat.encode(generation)).text}


@final
class _CompletionRenderer:
    """Renders one answer as a text completion or its chunks."""

    def __init__(self, body: CompletionBody, request_id: RequestId) -> None:
        self._with_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._usage_apart = options is not None and options.include_usage is True
        self._head = {
            "id": request_id.replace("req_", "cmpl-", 1),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }

    def whole(self, answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        choice = self._choice(answer.text, tuple(answer.ids), end.reason)
        return {**self._head, "choices": [choice], **statistics(end)}

    def heartbeat(self) -> bytes:
        return self._chunk(self._choice("", (), None))

    def render(self, event: Part) -> bytes:
        match event:
            case TextDelta() if event.text or (event.token_ids and self._with_ids):
                return self._chunk(self._choice(event.text, event.token_ids, None))
            case Finished():
                last = self._choice("", (), event.reason)
                if not self._usage_apart:
                    return self._chunk(last, **statistics(event)) + DONE
                usage = data({**self._head, "choices": [], **statistics(event)})
                return self._chunk(last) + usage + DONE
            case _:
                return b""

    def fault(self, fault: HttpFault) -> bytes:
        return OPENAI.frame(fault)

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        return data({**self._head, "choices": [choice], **more})

    def _choice(self, text: str, ids: tuple[int, ...], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return choice | ({"token_ids": ids} if self._with_ids else {})


COMPLETIONS: Final = Dialect("/v1/completions", CompletionBody, _parse)
