"""`POST /v1/chat/completions`: OpenAI's dialect to and from the node's own request and events."""

import time
from collections.abc import Iterable
from typing import Any, Final, assert_never

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...placement.ids import ModelId, RequestId
from ..chat.requests import (
    Called,
    CallPart,
    Finished,
    GenerationRequest,
    Part,
    Reasoned,
    Started,
    TextDelta,
    TokenLogprob,
)
from .answering import Answering, Said
from .body_schema import parse_body, read_with
from .dialects import fault_frame
from .errors import HttpFault
from .openai_schema import ChatBody
from .sse import DONE, data

_LEAST_LOGPROB: Final = -9999.0
"""OpenAI's API reference has this for a token that is very unlikely; JSON has no infinity."""


def generation_request(body: ChatBody, request_id: RequestId) -> GenerationRequest:
    sampling, given = body.sampling()
    newer, older = body.max_completion_tokens, body.max_tokens
    return GenerationRequest(
        id=request_id,
        model=ModelId(body.model),
        messages=tuple(message.for_template() for message in body.messages),
        sampling=sampling,
        given=given,
        max_tokens=older if newer is None else newer,
        stop=tuple(body.stop or ()),
        num_draft_tokens=body.num_draft_tokens,
        draft_policy=body.draft_policy,
        tools=body.declared,
        options=body.template_options,
        top_logprobs=body.wanted_logprobs,
        background=body.background,
        grammar=body.forced or body.form,
        call_parts=bool(body.stream),
        keep_alive_s=body.keep_alive,
    )


def call_id(request: RequestId, number: int) -> str:
    """Nine letters and digits, since some templates refuse any other id of a call."""
    return f"{request.removeprefix('req_')[:7]}{number:02x}"


class ChatCompletions:
    """The endpoint."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [Route("/v1/chat/completions", self.complete, methods=["POST"])]

    async def complete(self, request: Request) -> Response:
        request_id = RequestId(request.state.request_id)

        def read(raw: bytes) -> tuple[ChatBody, GenerationRequest, list[str]]:
            body = parse_body(raw, ChatBody)
            return body, generation_request(body, request_id), body.ignored

        body, asked, ignored = await read_with(request, read)
        return await self._answering.respond(
            request, asked, _Answer(body, asked.id), stream=bool(body.stream), ignored=ignored
        )


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

    def whole(self, said: Said, end: Finished) -> dict[str, Any]:
        calls = [self._call(call) for call in said.calls]
        content = None if calls and not said.text else said.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.thought
        choice: dict[str, Any] = {
            "index": 0,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": _logprobs(said.logprobs) if self._with_logprobs else None,
            "finish_reason": self._reason(end),
        }
        body = {**self._head, "object": "chat.completion", "choices": [choice], **statistics(end)}
        if self._with_ids:
            choice["token_ids"] = said.ids
            body["prompt_token_ids"] = said.prompt_ids
        return body

    def heartbeat(self) -> list[bytes]:
        return [self._chunk({}, TextDelta("", ()), None)]

    def of(self, event: Part) -> list[bytes]:
        match event:
            case Started(prompt_ids):
                self._prompt_ids = prompt_ids
                return self._beginning()
            case TextDelta():
                return self._spoken(event)
            case Reasoned(text):
                delta: dict[str, Any] = {"reasoning_content": text}
                return [*self._beginning(), self._chunk(delta, TextDelta("", ()), None)]
            case Called(name, arguments):
                return self._call_part(CallPart(name, arguments, ends=True))
            case CallPart():
                return self._call_part(event)
            case Finished():
                return [*self._beginning(), *self._end(event)]
            case _:
                assert_never(event)

    def broken(self, fault: HttpFault) -> list[bytes]:
        return [fault_frame(fault, "/v1/chat/completions")]

    def _call(self, called: Called | CallPart) -> dict[str, Any]:
        name = call_id(self._request_id, self._calls)
        self._calls += 1
        function = {"name": called.name, "arguments": called.arguments}
        return {"id": name, "type": "function", "function": function}

    def _call_part(self, part: CallPart) -> list[bytes]:
        if part.name:
            call = self._call(part)
        elif part.arguments:
            call = {"function": {"arguments": part.arguments}}
        else:
            return []
        delta = {"tool_calls": [{"index": self._calls - 1, **call}]}
        return [*self._beginning(), self._chunk(delta, TextDelta("", ()), None)]

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
            choice["accepted_draft_tokens"] = spoken.accepted_drafts
        head = {**self._head, "object": "chat.completion.chunk"}
        return data({**head, "choices": [choice], **extra})

    def _end(self, end: Finished) -> list[bytes]:
        told, nothing = statistics(end), TextDelta("", ())
        if not self._usage_apart:
            return [self._chunk({}, nothing, self._reason(end), **told), DONE]
        head = {**self._head, "object": "chat.completion.chunk"}
        last = data({**head, "choices": [], **told})
        return [self._chunk({}, nothing, self._reason(end)), last, DONE]


def _logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [{**_token(one), "top_logprobs": [_token(t) for t in one.top]} for one in entries]
    return {"content": content, "refusal": None}


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {
        "token": one.raw.decode(errors="replace"),
        "logprob": max(_LEAST_LOGPROB, one.logprob),  # in this order NaN is the least, too
        "bytes": list(one.raw) or None,
    }


def statistics(end: Finished) -> dict[str, Any]:
    return {
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "total_tokens": end.prompt_tokens + end.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": end.accepted_draft_tokens,
                "reasoning_tokens": end.reasoning_tokens,
            },
        },
        "generation_stats": dict(end.stats),
    }
