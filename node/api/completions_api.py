"""`POST /v1/completions`, `/v1/tokenize` and `/v1/detokenize`: text and ids without a template."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, cast, final

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...mtp.types import Sampling
from ...placement.ids import ModelId, RequestId
from ..chat.requests import (
    Finished,
    GenerationRequest,
    Part,
    TextDelta,
)
from .answering import Answering, Said
from .body_schema import StrictBody, read_body
from .dialects import fault_frame
from .errors import HttpFault, JsonResponse
from .keep_alive import KeepAlive
from .openai_api import statistics
from .openai_schema import NEUTRAL, Message, StreamOptions, without_neutral
from .sampling_schema import SamplingBody
from .sse import DONE, data
from .strict_json import MAX_ELEMENTS
from .thinking_schema import thinking_options
from .tool_schema import MAX_TOOLS, TemplateKwargs, Tool

MAX_TOKENS: Final = 16
"""OpenAI's default for this endpoint; the chat's is the end of the context."""

_NO_LOGPROBS: Final[Mapping[str, tuple[Any, ...]]] = {"logprobs": (0, False)}


def _whole(value: Any) -> Any:
    """To JSON, 5.0 is the integer 5, and some languages have no other numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


TokenId = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=2**32 - 1)]
Prompt = str | list[TokenId]


def _one_prompt(value: Any) -> Any:
    """A list of one prompt is that prompt; several answers at once are for several requests."""
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


class Completions:
    """The endpoints."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def complete(self, request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        sampling, given = body.sampling()
        text, ids = (body.prompt, None) if isinstance(body.prompt, str) else (None, body.prompt)
        asked = GenerationRequest(
            id=RequestId(request.state.request_id),
            model=ModelId(body.model),
            messages=(),
            sampling=sampling,
            given=given,
            max_tokens=body.max_tokens or MAX_TOKENS,
            stop=tuple(body.stop or ()),
            num_draft_tokens=body.num_draft_tokens,
            draft_policy=body.draft_policy,
            background=body.background,
            grammar=body.form,
            text=text,
            ids=None if ids is None else tuple(ids),
            keep_alive_s=body.keep_alive,
        )
        shape = _Completion(body, asked.id)
        return await self._answering.respond(request, asked, shape, stream=bool(body.stream))

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, TokenizeBody)
        request_id = RequestId(request.state.request_id)
        if body.prompt is not None:
            asked = bare_request(body.model, request_id, body.prompt)
        else:
            asked = GenerationRequest(
                request_id,
                ModelId(body.model),
                tuple(message.for_template() for message in body.messages or ()),
                Sampling(),
                tools=tuple(tool.function.for_template() for tool in body.tools or ()),
                options=thinking_options(kwargs=body.chat_template_kwargs),
            )
        found = await self._answering.chat.encode(asked)
        told = {"count": len(found.ids), "max_model_len": found.context_length}
        return JsonResponse({**told, "tokens": found.ids})

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        asked = bare_request(body.model, RequestId(request.state.request_id), body.tokens)
        return JsonResponse({"prompt": (await self._answering.chat.encode(asked)).text})


@final
class _Completion:
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

    def whole(self, said: Said, end: Finished) -> dict[str, Any]:
        choice = self._choice(said.text, tuple(said.ids), end.reason)
        return {**self._head, "choices": [choice], **statistics(end)}

    def heartbeat(self) -> list[bytes]:
        return [self._chunk(self._choice("", (), None))]

    def of(self, event: Part) -> list[bytes]:
        match event:
            case TextDelta() if event.text or (event.token_ids and self._with_ids):
                return [self._chunk(self._choice(event.text, event.token_ids, None))]
            case Finished():
                last = self._choice("", (), event.reason)
                if not self._usage_apart:
                    return [self._chunk(last, **statistics(event)), DONE]
                usage = data({**self._head, "choices": [], **statistics(event)})
                return [self._chunk(last), usage, DONE]
            case _:
                return []

    def broken(self, fault: HttpFault) -> list[bytes]:
        return [fault_frame(fault, "/v1/completions")]

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        return data({**self._head, "choices": [choice], **more})

    def _choice(self, text: str, ids: tuple[int, ...], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None}
        told = {"token_ids": ids} if self._with_ids else {}
        return {**choice, "finish_reason": reason, **told}
