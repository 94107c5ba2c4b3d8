"""`POST /v1/chat/completions`: OpenAI's dialect to and from the node's own request and events."""

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, assert_never

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...mtp.types import Penalties, Sampling
from ...placement.errors import ExoNodeError
from ...placement.ids import ModelId, RequestId
from ..chat.requests import (
    Called,
    Chat,
    Event,
    Finished,
    GenerationRequest,
    Loading,
    PrefillProgress,
    Reasoned,
    Resuming,
    Started,
    TextDelta,
    TokenLogprob,
)
from .body_schema import read_body
from .errors import JsonResponse, error_object, fault_of
from .openai_schema import ChatBody
from .sse import DONE, EventStream, attended, comment, data

_SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "seed",
)

_LEAST_TOP_P: Final = 1e-9

_LEAST_LOGPROB: Final = -9999.0
"""OpenAI's API reference has this for a token that is very unlikely; JSON has no infinity."""

Number = TypeVar("Number", int, float)

Events = AsyncGenerator[Event | None]
"""None is a spell of silence."""


def generation_request(body: ChatBody, request_id: RequestId) -> GenerationRequest:
    off = Penalties()
    penalties = Penalties(
        repetition=_or(body.repetition_penalty, off.repetition),
        presence=_or(body.presence_penalty, off.presence),
        frequency=_or(body.frequency_penalty, off.frequency),
        context_size=_or(body.repetition_context_size, off.context_size),
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
    )
    fields = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    given = {name: value for name, value in fields.items() if value is not None}
    if given.get("top_p") == 0:  # to OpenAI the likeliest token; to mlx-lm no filter at all
        given["top_p"] = _LEAST_TOP_P
    newer, older = body.max_completion_tokens, body.max_tokens
    return GenerationRequest(
        id=request_id,
        model=ModelId(body.model),
        messages=tuple(message.for_template() for message in body.messages),
        sampling=replace(Sampling(temperature=1.0, penalties=penalties), **given),
        given=frozenset(given),
        max_tokens=older if newer is None else newer,
        stop=tuple(body.stop or ()),
        num_draft_tokens=body.num_draft_tokens,
        draft_policy=body.draft_policy,
        tools=body.declared,
        options=body.template_options,
        top_logprobs=body.wanted_logprobs,
        background=body.background,
    )


def call_id(request: RequestId, number: int) -> str:
    """Nine letters and digits, since some templates refuse any other id of a call."""
    return f"{request.removeprefix('req_')[:7]}{number:02x}"


def _or(given: Number | None, otherwise: Number) -> Number:
    return otherwise if given is None else given


class ChatCompletions:
    """The endpoint over a `Chat`. `keep_alive_s` is the longest silence on a stream."""

    def __init__(self, chat: Chat, keep_alive_s: float) -> None:
        self._chat = chat
        self._keep_alive_s = keep_alive_s

    def routes(self) -> list[Route]:
        return [Route("/v1/chat/completions", self.complete, methods=["POST"])]

    async def complete(self, request: Request) -> Response:
        body = await read_body(request, ChatBody)
        request_id = RequestId(request.state.request_id)
        generation = generation_request(body, request_id)
        events = attended(self._chat.stream(generation), request.receive, self._keep_alive_s)
        answer = _Answer(body, generation.id)
        if not body.stream:
            async with aclosing(events):
                return JsonResponse(await answer.whole(events))
        # A refusal, or the end of a model's loading, decides the status: it is waited for, but not
        # past the first silence, in which a client could take the node for dead.
        first = await anext(events, None)
        return EventStream(answer.frames(first, events))


class _Answer:
    """One answer in the making."""

    def __init__(self, body: ChatBody, request_id: RequestId) -> None:
        self._with_ids = bool(body.return_token_ids)
        self._with_logprobs = bool(body.logprobs)
        options = body.stream_options
        self._usage_apart = options is not None and options.include_usage is True
        self._head = {
            "id": request_id.replace("req_", "chatcmpl-", 1),
            "created": int(time.time()),
            "model": body.model,
        }
        self._request_id = request_id
        self._prompt_ids: tuple[int, ...] = ()
        self._has_begun = False
        self._calls = 0

    async def whole(self, events: Events) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        said = _Said()
        async for event in events:
            match event:
                case None | Loading() | Resuming() | PrefillProgress():
                    pass
                case Started(prompt_ids):
                    self._prompt_ids = prompt_ids
                case TextDelta():
                    said.texts.append(event.text)
                    said.ids.extend(event.token_ids)
                    said.logprobs.extend(event.logprobs)
                case Reasoned(text):
                    said.reasoning.append(text)
                case Called():
                    said.calls.append(self._call(event))
                case Finished():
                    return self._body(said, event)
                case _:
                    assert_never(event)
        raise _unfinished()

    def _body(self, said: "_Said", end: Finished) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "message": said.message(),
            "logprobs": _logprobs(said.logprobs) if self._with_logprobs else None,
            "finish_reason": self._reason(end),
        }
        body = {**self._head, "object": "chat.completion", "choices": [choice], **_statistics(end)}
        if self._with_ids:
            choice["token_ids"] = said.ids
            body["prompt_token_ids"] = self._prompt_ids
        return body

    async def frames(self, first: Event | None, events: Events) -> AsyncGenerator[bytes]:
        """The frames of a stream; an ExoNodeError becomes its last one, in place of `[DONE]`."""
        async with aclosing(events):
            try:
                for frame in self._of(first):
                    yield frame
                if isinstance(first, Finished):
                    return
                async for event in events:
                    for frame in self._of(event):
                        yield frame
                    if isinstance(event, Finished):
                        return
                raise _unfinished()
            except ExoNodeError as error:
                yield data(error_object(fault_of(error)))

    def _of(self, event: Event | None) -> list[bytes]:
        match event:
            case None:
                return [comment("keep-alive")]
            case Loading(step):
                return [comment(step)]
            case Resuming(step):
                return [comment(f"resuming: {step}")]
            case PrefillProgress(done, total):
                return [comment(f"prefill {done}/{total}")]
            case Started(prompt_ids):
                self._prompt_ids = prompt_ids
                return self._beginning()
            case TextDelta():
                return self._spoken(event)
            case Reasoned(text):
                delta: dict[str, Any] = {"reasoning_content": text}
                return [*self._beginning(), self._chunk(delta, TextDelta("", ()), None)]
            case Called():
                index = self._calls
                delta = {"tool_calls": [{"index": index, **self._call(event)}]}
                return [*self._beginning(), self._chunk(delta, TextDelta("", ()), None)]
            case Finished():
                return [*self._beginning(), *self._end(event)]
            case _:
                assert_never(event)

    def _call(self, called: Called) -> dict[str, Any]:
        name = call_id(self._request_id, self._calls)
        self._calls += 1
        function = {"name": called.name, "arguments": called.arguments}
        return {"id": name, "type": "function", "function": function}

    def _reason(self, end: Finished) -> str:
        return "tool_calls" if self._calls and end.reason == "stop" else end.reason

    def _spoken(self, delta: TextDelta) -> list[bytes]:
        tells = delta.text or delta.logprobs or (delta.token_ids and self._with_ids)
        if not tells:
            return []
        return [*self._beginning(), self._chunk({"content": delta.text}, delta, None)]

    def _beginning(self) -> list[bytes]:
        """The first chunk, once: it names the role and, where asked for, the prompt's ids."""
        if self._has_begun:
            return []
        self._has_begun = True
        extra: dict[str, Any] = {"prompt_token_ids": self._prompt_ids} if self._with_ids else {}
        role = {"role": "assistant", "content": ""}
        return [self._chunk(role, TextDelta("", ()), None, **extra)]

    def _chunk(
        self,
        delta: dict[str, Any],
        spoken: TextDelta,
        finish_reason: str | None,
        **extra: Any,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": _logprobs(spoken.logprobs) if spoken.logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._with_ids:
            choice["token_ids"] = spoken.token_ids
        head = {**self._head, "object": "chat.completion.chunk"}
        return data({**head, "choices": [choice], **extra})

    def _end(self, end: Finished) -> list[bytes]:
        told, nothing = _statistics(end), TextDelta("", ())
        if not self._usage_apart:
            return [self._chunk({}, nothing, self._reason(end), **told), DONE]
        head = {**self._head, "object": "chat.completion.chunk"}
        last = data({**head, "choices": [], **told})
        return [self._chunk({}, nothing, self._reason(end)), last, DONE]


@dataclass(slots=True)
class _Said:
    """The parts of an answer that is not streamed."""

    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])

    def message(self) -> dict[str, Any]:
        text = "".join(self.texts)
        content = None if self.calls and not text else text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        return message | ({"tool_calls": self.calls} if self.calls else {})


def _logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [{**_token(one), "top_logprobs": [_token(t) for t in one.top]} for one in entries]
    return {"content": content, "refusal": None}


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {
        "token": one.raw.decode(errors="replace"),
        "logprob": max(_LEAST_LOGPROB, one.logprob),  # in this order NaN is the least, too
        "bytes": list(one.raw) or None,
    }


def _statistics(end: Finished) -> dict[str, Any]:
    return {
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "total_tokens": end.prompt_tokens + end.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
            "completion_tokens_details": {"accepted_prediction_tokens": end.accepted_draft_tokens},
        },
        "generation_stats": dict(end.stats),
    }


def _unfinished() -> ExoNodeError:
    return ExoNodeError("the answer ended without its final event; please report this")
