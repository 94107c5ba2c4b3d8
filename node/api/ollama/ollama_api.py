"""Ollama's API: `/api/chat`, `/api/generate`, and what its clients ask of the models."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal, final

from starlette.requests import Request
from starlette.responses import Response

from ....placement.ids import RequestId
from ....proto import peer_pb2 as pb
from ...chat.requests import CallPart, Finished, GenerationRequest, Part, ReasoningDelta, TextDelta
from ...trust.local_token import TOKEN_FILE, TOKEN_HEADER
from ..http.bodies import unknown_fields
from ..http.dialects import Body, Dialect, Exchange, WholeAnswer, fault_response
from ..http.errors import HttpFault
from ..http.long_bodies import json_response
from ..http.routes import ApiRoute, get_json, post_json, profiles_of
from ..http.strict_json import encode
from ..operations.model_entries import (
    OLLAMA_VERSION,
    ollama_loaded,
    ollama_shown,
    ollama_tag,
    with_profiles,
)
from ..operations.operations_api import Json, Operations
from ..shared.answering import Answering, read
from ..shared.chat_message import messages_for_template
from ..shared.history import History
from ..shared.sampling_schema import generation
from .ollama_schema import OllamaChatBody, OllamaGenerateBody, OllamaOptions, ShowBody

PromptBody = OllamaChatBody | OllamaGenerateBody
Kind = Literal["chat", "generate"]
_NOT_TO_UNLOAD: Final = HttpFault(
    403,
    "local_token_required",
    "only the node's own user may unload a model: `exo-node models unload`, or send the "
    f"content of the data folder's {TOKEN_FILE} as '{TOKEN_HEADER}'",
    TOKEN_HEADER,
)


def _parse_chat(body: OllamaChatBody, request_id: RequestId) -> Exchange:
    history = History(unknown_fields(body))
    messages = messages_for_template(body.messages, history) if body.messages else []
    tools = tuple(tool.function.for_template() for tool in body.tools or ())
    return _exchange(body, _request(body, request_id, messages, tools=tools), "chat", history.names)


def _parse_generate(body: OllamaGenerateBody, request_id: RequestId) -> Exchange:
    body.check()
    ignored = unknown_fields(body)
    if body.suffix:
        request = _request(body, request_id, text=body.prompt, suffix=body.suffix)
        ignored += ["system"] if body.system else []
    elif body.raw:
        request = _request(body, request_id, text=body.prompt)
    else:
        messages = body.messages() if body.prompt or body.images else ()
        request = _request(body, request_id, messages)
    return _exchange(body, request, "generate", ignored)


def _request(
    body: PromptBody,
    request_id: RequestId,
    prompt: Sequence[dict[str, Any]] = (),
    *,
    tools: tuple[dict[str, Any], ...] = (),
    text: str | None = None,
    suffix: str | None = None,
) -> GenerationRequest:
    options = body.options or OllamaOptions()
    return generation(
        body,
        request_id,
        prompt,
        limits={"max_tokens": options.token_limit, "stop": options.stop},
        output=pb.Output(grammar=body.form),
        num_draft_tokens=options.draft_num_predict,
        tools=tools,
        text=text,
        suffix=suffix,
    )


def _exchange(
    body: PromptBody, request: GenerationRequest, kind: Kind, ignored: list[str]
) -> Exchange:
    return Exchange(request, [_LineRenderer(kind, body.model)], body.stream is not False, ignored)


OLLAMA_CHAT: Final = Dialect("/api/chat", OllamaChatBody, _parse_chat)
OLLAMA_GENERATE: Final = Dialect("/api/generate", OllamaGenerateBody, _parse_generate)


class Ollama:
    """The endpoints. Only a prompt loads a model, and none removes one from disk."""

    def __init__(self, answering: Answering, operations: Operations) -> None:
        self._answering = answering
        self._operations = operations

    def routes(self) -> list[ApiRoute]:
        return [
            get_json("/api/version", self.version),
            ApiRoute("GET", "/api/tags", self.tags),
            get_json("/api/ps", self.ps),
            post_json("/api/show", self.show, ShowBody),
            self._prompt_route(OLLAMA_CHAT),
            self._prompt_route(OLLAMA_GENERATE),
        ]

    async def version(self) -> Json:
        return {"version": OLLAMA_VERSION}

    async def tags(self, request: Request) -> Response:
        entries = with_profiles(await self._entries(), profiles_of(request))
        downloaded = [entry for entry in entries if entry.get("downloaded", True)]
        return json_response({"models": [ollama_tag(entry) for entry in downloaded]})

    async def ps(self) -> Json:
        nodes = (await self._operations.cluster())["nodes"]
        entries = [entry for entry in await self._entries() if entry.get("loaded")]
        return {"models": [ollama_loaded(entry, nodes) for entry in entries]}

    async def show(self, request: Request, body: ShowBody) -> Json:
        model = body.named_model
        for entry in with_profiles(await self._entries(), profiles_of(request)):
            if entry["id"] == model and entry.get("downloaded", True):
                return ollama_shown(entry)
        raise await self._operations.no_model(model)

    def _prompt_route(self, dialect: Dialect[Body]) -> ApiRoute:
        async def answer(request: Request) -> Response:
            exchange = await read(request, dialect)
            generation = exchange.request
            if generation.text or generation.suffix or generation.messages:
                return await self._answering.respond(request, exchange)
            return await self._load(request, generation)

        return ApiRoute("POST", dialect.path, answer, body=dialect.body)

    async def _load(self, request: Request, generation: GenerationRequest) -> Response:
        """The answer to a request without a prompt, which loads or unloads the model."""
        generation = replace(generation, text=".", trusted=request.state.trusted)
        unloads = generation.keep_alive_s == 0
        if unloads and not generation.trusted:
            return fault_response(_NOT_TO_UNLOAD, request.url.path)
        if unloads:
            await self._answering.chat.release(await self._answering.profiled(generation))
        else:
            _ = await self._answering.encode(generation)
        kind: Kind = "chat" if request.url.path == OLLAMA_CHAT.path else "generate"
        end = {"done": True, "done_reason": "unload" if unloads else "load"}
        return json_response(_line(kind, generation.model) | end)

    async def _entries(self) -> list[Json]:
        return (await self._operations.models())["data"]


@final
class _LineRenderer:
    """Renders one answer as lines of JSON."""

    def __init__(self, kind: Kind, model: str) -> None:
        self._line = partial(_line, kind, model)
        self._began = time.monotonic()

    def whole(self, answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        calls = [_call(call) for call in answer.calls]
        return self._line(answer.text, answer.reasoning, calls) | self._last(end)

    def heartbeat(self) -> bytes:
        return _encoded(self._line())

    def render(self, event: Part) -> bytes:
        match event:
            case TextDelta(text) if text:
                return _encoded(self._line(text))
            case ReasoningDelta(text):
                return _encoded(self._line(thinking=text))
            case CallPart():
                return _encoded(self._line(calls=[_call(event)]))
            case Finished():
                return _encoded(self._line() | self._last(event))
            case _:
                return b""

    def _last(self, end: Finished) -> dict[str, Any]:
        stats, total = end.stats, time.monotonic() - self._began
        first = float(stats.get("time_to_first_token_s", 0.0))
        speed = float(stats.get("generation_tps", 0.0))
        return {
            "done": True,
            "done_reason": end.reason,
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": end.completion_tokens,
            "eval_duration": _nanoseconds(end.completion_tokens / speed if speed else 0.0),
            "generation_stats": dict(stats),
        }


def _line(
    kind: Kind,
    model: str,
    text: str = "",
    thinking: str = "",
    calls: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    head: dict[str, Any] = {"model": model, "created_at": now}
    thoughts = {"thinking": thinking} if thinking else {}
    if kind == "generate":
        return {**head, "response": text, **thoughts, "done": False}
    message: dict[str, Any] = {"role": "assistant", "content": text, **thoughts}
    message |= {"tool_calls": calls} if calls else {}
    return {**head, "message": message, "done": False}


def _encoded(line: Mapping[str, Any]) -> bytes:
    return encode(line) + b"\n"


def _call(call: CallPart) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
