"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's dialect."""

from dataclasses import replace
from typing import Any, Final, Literal, final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...mtp.types import Sampling
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
)
from .answering import Answering, Said
from .body_schema import read_with
from .dialects import fault_frame, named
from .errors import HttpFault, JsonResponse
from .messages_schema import MessagesBody, as_json
from .openai_api import call_id
from .structured_schema import one_grammar
from .tolerant_body import parse_tolerant

_SIGNATURE: Final = "exo-node"
"""Clients send a thinking block back with its signature, which must not be empty."""
_NO_USAGE: Final = {
    "input_tokens": 0,
    "cache_read_input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "output_tokens": 0,
}
"""As a stream begins nobody knows how much comes from the cache: `message_delta` has it all, and
who adds the two up counts nothing twice."""
BlockKind = Literal["text", "thinking", "tool_use"]


def generation_request(
    body: MessagesBody, request_id: RequestId, ignored: list[str]
) -> GenerationRequest:
    fields = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: value for name, value in fields.items() if value is not None}
    tools = body.declared(ignored)
    return GenerationRequest(
        id=request_id,
        model=ModelId(body.model),
        messages=tuple(body.for_template(ignored)),
        sampling=replace(Sampling(temperature=1.0), **given),
        given=frozenset(given),
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        tools=tools,
        options=body.options,
        grammar=one_grammar(body.forced(tools), body.form, ignored),
        call_parts=bool(body.stream),
    )


class Messages:
    """The endpoints."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        body, asked, ignored = await _read(request)
        return await self._answering.respond(
            request,
            asked,
            _Message(body.model, asked.id),
            stream=bool(body.stream),
            ignored=ignored,
        )

    async def count(self, request: Request) -> Response:
        _, asked, _ = await _read(request)
        found = await self._answering.chat.encode(asked)
        return JsonResponse({"input_tokens": len(found.ids)})


async def _read(request: Request) -> tuple[MessagesBody, GenerationRequest, list[str]]:
    """The body, its request, and the names of what has no effect. Raises InvalidRequest."""
    request_id = RequestId(request.state.request_id)

    def read(raw: bytes) -> tuple[MessagesBody, GenerationRequest, list[str]]:
        body, ignored = parse_tolerant(raw, MessagesBody)
        asked = generation_request(body, request_id, ignored)
        return body, asked, list(dict.fromkeys(ignored))

    return await read_with(request, read)


@final
class _Message:
    """One answer: a list of blocks, of which a stream has one open at a time."""

    def __init__(self, model: str, request_id: RequestId) -> None:
        self._model = model
        self._request_id = request_id
        self._index = -1
        self._open: BlockKind | None = None
        self._calls = 0
        self._begun = False

    def whole(self, said: Said, end: Finished) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        if said.reasoning:
            thinking = {"type": "thinking", "thinking": said.thought}
            blocks.append({**thinking, "signature": _SIGNATURE})
        if said.text or not (said.calls or blocks):
            blocks.append({"type": "text", "text": said.text})
        for call in said.calls:
            blocks.append(self._tool_use(call.name) | {"input": as_json(call.arguments)})
        message = self._message(blocks, self._reason(end), _usage(end))
        message["stop_sequence"] = end.stopped_by or None
        return message | {"generation_stats": dict(end.stats)}

    def heartbeat(self) -> list[bytes]:
        return [named("ping", {"type": "ping"})]

    def of(self, event: Part) -> list[bytes]:
        match event:
            case Started():
                return self._beginning()
            case TextDelta(text):
                return self._said("text", {"type": "text_delta", "text": text}) if text else []
            case Reasoned(text):
                return self._said("thinking", {"type": "thinking_delta", "thinking": text})
            case Called(name, arguments):
                return self._call_part(CallPart(name, arguments, ends=True))
            case CallPart():
                return self._call_part(event)
            case Finished():
                return self._end(event)

    def broken(self, fault: HttpFault) -> list[bytes]:
        return [fault_frame(fault, "/v1/messages")]

    def _beginning(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        message = self._message([], None, _NO_USAGE)
        return [named("message_start", {"type": "message_start", "message": message})]

    def _said(self, kind: BlockKind, delta: dict[str, Any]) -> list[bytes]:
        frames = self._beginning()
        if self._open != kind:
            empty: dict[str, Any] = {"type": kind, kind: ""}
            begins = empty | ({"signature": ""} if kind == "thinking" else {})
            frames += [*self._close(), self._start(kind, begins)]
        return [*frames, self._delta(delta)]

    def _call_part(self, part: CallPart) -> list[bytes]:
        frames: list[bytes] = []
        if part.name:
            frames = [*self._beginning(), *self._close()]
            frames.append(self._start("tool_use", self._tool_use(part.name) | {"input": {}}))
        if part.arguments:
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            frames.append(self._delta(delta))
        return [*frames, *(self._close() if part.ends else ())]

    def _start(self, kind: BlockKind, block: dict[str, Any]) -> bytes:
        self._index, self._open = self._index + 1, kind
        told = {"type": "content_block_start", "index": self._index, "content_block": block}
        return named("content_block_start", told)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        told = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named("content_block_delta", told)

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        frames: list[bytes] = []
        if self._open == "thinking":
            frames.append(self._delta({"type": "signature_delta", "signature": _SIGNATURE}))
        self._open = None
        stop = {"type": "content_block_stop", "index": self._index}
        return [*frames, named("content_block_stop", stop)]

    def _end(self, end: Finished) -> list[bytes]:
        delta = {"stop_reason": self._reason(end), "stop_sequence": end.stopped_by or None}
        told = {"type": "message_delta", "delta": delta, "usage": _usage(end)}
        last = named("message_delta", told | {"generation_stats": dict(end.stats)})
        stop = named("message_stop", {"type": "message_stop"})
        return [*self._beginning(), *self._close(), last, stop]

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


def _usage(end: Finished) -> dict[str, Any]:
    """To Anthropic, input that came from the cache is counted apart."""
    return {
        "input_tokens": end.prompt_tokens - end.cached_tokens,
        "cache_read_input_tokens": end.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": end.completion_tokens,
    }
