"""`POST /v1/chat/completions`: OpenAI's dialect to and from the node's own request and events."""

import time
from collections.abc import Iterable
from typing import Any, Final, assert_never

from ...placement.ids import ModelId, RequestId
from ..chat.images import gathered
from ..chat.requests import (
    CallPart,
    Finished,
    GenerationRequest,
    Part,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    WholeCall,
)
from .dialects import OPENAI, Dialect, Exchange, WholeAnswer
from .errors import HttpFault
from .openai_schema import ChatBody
from .sse import DONE, data

_LEAST_LOGPROB: Final = -9999.0
"""OpenAI's API reference has this for a token that is very unlikely; JSON has no infinity."""
_NO_TEXT: Final = TextDelta("", ())


def _parse(body: ChatBody, request_id: RequestId) -> Exchange:
    sampling, explicit_fields = body.sampling()
    messages, images = gathered([message.for_template() for message in body.messages])
    newer, older = body.max_completion_tokens, body.max_tokens
    request = GenerationRequest(
        id=request_id,
        model=ModelId(body.model),
        messages=messages,
        images=images,
        sampling=sampling,
        explicit_fields=explicit_fields,
        max_tokens=older if newer is None else newer,
        stop=tuple(body.stop or ()),
        num_draft_tokens=body.num_draft_tokens,
        draft_policy=body.draft_policy,
        tools=body.callable_tools,
        options=body.template_options,
        top_logprobs=body.num_logprobs,
        background=body.background,
        uses_cache=body.cache is not False,
        guards_loops=body.loop_guard,
        grammar=body.required_call or body.form,
        call_parts=bool(body.stream),
        keep_alive_s=body.keep_alive,
    )
    return Exchange(request, _ChatRenderer(body, request_id), bool(body.stream), body.ignored)


def call_id(request: RequestId, number: int) -> str:
    """A call's id of nine letters and digits: some templates refuse any other form."""
    return f"{request.removeprefix('req_')[:7]}{number:02x}"


class _ChatRenderer:
    """Renders one answer as a chat completion or its chunks."""

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

    def whole(self, answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        calls = [self._call(call) for call in answer.calls]
        content = None if calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.thoughts:
            message["reasoning_content"] = answer.reasoning
        choice: dict[str, Any] = {
            "index": 0,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": _logprobs(answer.logprobs) if self._with_logprobs else None,
            "finish_reason": self._reason(end),
        }
        body = {**self._head, "object": "chat.completion", "choices": [choice], **statistics(end)}
        if self._with_ids:
            choice["token_ids"] = answer.ids
            body["prompt_token_ids"] = answer.prompt_ids
        return body

    def heartbeat(self) -> bytes:
        return self._chunk({}, _NO_TEXT, None)

    def render(self, event: Part) -> bytes:
        match event:
            case Started(prompt_ids):
                self._prompt_ids = prompt_ids
                return self._beginning()
            case TextDelta():
                return self._text(event)
            case ReasoningDelta(text):
                return self._beginning() + self._chunk({"reasoning_content": text}, _NO_TEXT, None)
            case WholeCall(name, arguments):
                return self._call_part(CallPart(name, arguments, ends=True))
            case CallPart():
                return self._call_part(event)
            case Finished():
                return self._beginning() + self._end(event)
            case _:
                assert_never(event)

    def fault(self, fault: HttpFault) -> bytes:
        return OPENAI.frame(fault)

    def _call(self, call: WholeCall | CallPart) -> dict[str, Any]:
        name = call_id(self._request_id, self._calls)
        self._calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": name, "type": "function", "function": function}

    def _call_part(self, part: CallPart) -> bytes:
        if part.name:
            call = self._call(part)
        elif part.arguments:
            call = {"function": {"arguments": part.arguments}}
        else:
            return b""
        delta = {"tool_calls": [{"index": self._calls - 1, **call}]}
        return self._beginning() + self._chunk(delta, _NO_TEXT, None)

    def _reason(self, end: Finished) -> str:
        return "tool_calls" if self._calls and end.reason == "stop" else end.reason

    def _text(self, delta: TextDelta) -> bytes:
        has_news = delta.text or delta.logprobs or (delta.token_ids and self._with_ids)
        if not has_news:
            return b""
        return self._beginning() + self._chunk({"content": delta.text}, delta, None)

    def _beginning(self) -> bytes:
        """The first chunk, once: it names the role and, if requested, the prompt's ids."""
        if self._has_begun:
            return b""
        self._has_begun = True
        extra: dict[str, Any] = {"prompt_token_ids": self._prompt_ids} if self._with_ids else {}
        role = {"role": "assistant", "content": ""}
        return self._chunk(role, _NO_TEXT, None, **extra)

    def _chunk(
        self,
        delta: dict[str, Any],
        text: TextDelta,
        finish_reason: str | None,
        **extra: Any,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": _logprobs(text.logprobs) if text.logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._with_ids:
            choice["token_ids"] = text.token_ids
            choice["accepted_draft_tokens"] = text.accepted_drafts
        head = {**self._head, "object": "chat.completion.chunk"}
        return data({**head, "choices": [choice], **extra})

    def _end(self, end: Finished) -> bytes:
        reason = self._reason(end)
        if not self._usage_apart:
            return self._chunk({}, _NO_TEXT, reason, **statistics(end)) + DONE
        head = {**self._head, "object": "chat.completion.chunk"}
        usage = data({**head, "choices": [], **statistics(end)})
        return self._chunk({}, _NO_TEXT, reason) + usage + DONE


CHAT: Final = Dialect("/v1/chat/completions", ChatBody, _parse)


def _logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [{**_token(one), "top_logprobs": [_token(t) for t in one.top]} for one in entries]
    return {"content": content, "refusal": None}


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {
        "token": one.raw.decode(errors="replace"),
        "logprob": max(_LEAST_LOGPROB, one.logprob),  # NaN gives the least, in this order
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
