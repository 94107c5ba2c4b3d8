"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's dialect."""

import json
from typing import Any, Final, Literal, final

from starlette.requests import Request
from starlette.responses import Response

from ....placement.ids import RequestId
from ....proto import peer_pb2 as pb
from ...chat.requests import (
    CallPart,
    Finished,
    Part,
    PromptLogprobs,
    ReasoningDelta,
    Started,
    TextDelta,
)
from ..http.bodies import unknown_fields
from ..http.dialects import Dialect, Exchange, WholeAnswer
from ..http.long_bodies import json_response
from ..http.routes import ApiRoute
from ..http.sse import named_event
from ..openai.openai_api import call_id
from ..shared.answering import Answering, read
from ..shared.sampling_schema import generation, one_grammar
from .messages_schema import MessagesBody

_SIGNATURE: Final = "exo-node"
"""Clients send a thinking block back with its signature, which must not be empty."""
BlockKind = Literal["text", "thinking", "tool_use"]


def _parse(body: MessagesBody, request_id: RequestId) -> Exchange:
    ignored = unknown_fields(body)
    tools = body.callable_tools(ignored)
    request = generation(
        body,
        request_id,
        body.for_template(ignored),
        limits={"stop": body.stop_sequences},
        output=pb.Output(
            call_parts=bool(body.stream),
            grammar=one_grammar(body.required_call(tools), body.form, ignored),
        ),
        tools=tools,
    )
    renderer = _MessageRenderer(body.model, request_id)
    return Exchange(request, [renderer], bool(body.stream), tuple(dict.fromkeys(ignored)))


MESSAGES: Final = Dialect("/v1/messages", MessagesBody, _parse)


def count_route(answering: Answering) -> ApiRoute:
    """The endpoint that counts a prompt's tokens without an answer."""

    async def count(request: Request) -> Response:
        exchange = await read(request, MESSAGES)
        prompt = await answering.encode(exchange.request)
        return json_response({"input_tokens": len(prompt.ids)})

    return ApiRoute("POST", "/v1/messages/count_tokens", count, body=MessagesBody)


@final
class _MessageRenderer:
    """Renders one answer as a list of blocks; a stream has one open at a time."""

    def __init__(self, model: str, request_id: RequestId) -> None:
        self._model = model
        self._request_id = request_id
        self._index = -1
        self._open: BlockKind | None = None
        self._calls = 0
        self._has_begun = False

    def whole(self, answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        if answer.thoughts:
            thinking = {"type": "thinking", "thinking": answer.reasoning}
            blocks.append({**thinking, "signature": _SIGNATURE})
        if answer.text or not (answer.calls or blocks):
            blocks.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            blocks.append(self._tool_use(call.name) | {"input": json.loads(call.arguments)})
        message = self._message(blocks, self._reason(end), _usage_of(end))
        message["stop_sequence"] = end.stopped_by or None
        return message | {"generation_stats": dict(end.stats)}

    def heartbeat(self) -> bytes:
        return named_event("ping", {"type": "ping"})

    def render(self, event: Part) -> bytes:
        match event:
            case Started() | PromptLogprobs():
                return self._beginning()
            case TextDelta(text):
                return self._piece("text", {"type": "text_delta", "text": text}) if text else b""
            case ReasoningDelta(text):
                return self._piece("thinking", {"type": "thinking_delta", "thinking": text})
            case CallPart():
                return self._call_part(event)
            case Finished():
                return self._end(event)

    def _beginning(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        # The cached part of the prompt is unknown as yet: `message_delta` has all counts, so that
        # clients which add the two up count nothing twice.
        return _event("message_start", message=self._message([], None, _usage(0, 0, 0)))

    def _piece(self, kind: BlockKind, delta: dict[str, Any]) -> bytes:
        frames = self._beginning()
        if self._open != kind:
            empty: dict[str, Any] = {"type": kind, kind: ""}
            begins = empty | ({"signature": ""} if kind == "thinking" else {})
            frames += self._close() + self._start(kind, begins)
        return frames + self._delta(delta)

    def _call_part(self, part: CallPart) -> bytes:
        frames = b""
        if part.name:
            frames = self._beginning() + self._close()
            frames += self._start("tool_use", self._tool_use(part.name) | {"input": {}})
        if part.arguments:
            frames += self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        return frames + (self._close() if part.ends else b"")

    def _start(self, kind: BlockKind, block: dict[str, Any]) -> bytes:
        self._index, self._open = self._index + 1, kind
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signature = {"type": "signature_delta", "signature": _SIGNATURE}
        frames = self._delta(signature) if self._open == "thinking" else b""
        self._open = None
        return frames + _event("content_block_stop", index=self._index)

    def _end(self, end: Finished) -> bytes:
        delta = {"stop_reason": self._reason(end), "stop_sequence": end.stopped_by or None}
        stats = dict(end.stats)
        last = _event("message_delta", delta=delta, usage=_usage_of(end), generation_stats=stats)
        return self._beginning() + self._close() + last + _event("message_stop")

    def _tool_use(self, tool: str) -> dict[str, Any]:
        name = call_id(self._request_id, self._calls)
        self._calls += 1
        return {"type": "tool_use", "id": name, "name": tool}

    def _reason(self, end: Finished) -> str:
        if end.reason == "length":
            return "max_tokens"
        if self._calls:
            return "tool_use"
        return "stop_sequence" if end.stopped_by else "end_turn"

    def _message(
        self, blocks: list[dict[str, Any]], reason: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._request_id.replace("req_", "msg_", 1),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _usage_of(end: Finished) -> dict[str, Any]:
    return _usage(end.prompt_tokens, end.cached_tokens, end.completion_tokens)


def _usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """Token counts; Anthropic counts cached input apart from the rest."""
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": completion,
    }
