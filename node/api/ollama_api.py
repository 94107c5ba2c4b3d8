"""Ollama's API: `/api/chat`, `/api/generate`, and what its clients ask of the models."""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...mtp.types import Sampling
from ...placement.errors import InvalidRequest
from ...placement.ids import RequestId
from ..chat.requests import Called, Finished, GenerationRequest, Part, Reasoned, TextDelta
from ..trust.local_token import TOKEN_FILE, TOKEN_HEADER
from .answering import Answering, Said
from .dialects import fault_frame, fault_response
from .errors import HttpFault, JsonResponse
from .ollama_models import VERSION, loaded, shown, tag
from .ollama_schema import OllamaChatBody, OllamaGenerateBody, OllamaOptions, ShowBody
from .operations_api import Json, Operations
from .strict_json import encode
from .tolerant_body import read_tolerant
from .unreadable_parts import latest_own

NDJSON: Final = "application/x-ndjson"
Kind = Literal["chat", "generate"]
_NOT_TO_UNLOAD: Final = HttpFault(
    403,
    "local_token_required",
    "only the node's own user may unload a model: `exo-node models unload`, or send the "
    f"content of the data folder's {TOKEN_FILE} as '{TOKEN_HEADER}'",
    TOKEN_HEADER,
)


class Ollama:
    """The endpoints. Nothing here loads a model but a prompt, or removes one."""

    def __init__(self, answering: Answering, operations: Operations) -> None:
        self._answering = answering
        self._operations = operations

    def routes(self) -> list[Route]:
        return [
            Route("/api/version", self.version, methods=["GET"]),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/ps", self.ps, methods=["GET"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
        ]

    async def version(self, _: Request) -> Response:
        return JsonResponse({"version": VERSION})

    async def tags(self, _: Request) -> Response:
        entries = [entry for entry in await self._entries() if entry.get("downloaded", True)]
        return JsonResponse({"models": [tag(entry) for entry in entries]})

    async def ps(self, _: Request) -> Response:
        nodes = (await self._operations.cluster())["nodes"]
        entries = [entry for entry in await self._entries() if entry.get("loaded")]
        return JsonResponse({"models": [loaded(entry, nodes) for entry in entries]})

    async def show(self, request: Request) -> Response:
        body, _ = await read_tolerant(request, ShowBody)
        wanted = body.model or body.name
        if wanted is None:
            raise InvalidRequest("'model' is required", param="model")
        for entry in await self._entries():
            if entry["id"] == wanted:
                return JsonResponse(shown(entry))
        raise await self._operations.no_model(wanted)

    async def chat(self, request: Request) -> Response:
        body, ignored = await read_tolerant(request, OllamaChatBody)
        latest = latest_own([message.role for message in body.messages])
        messages = tuple(
            message.for_template(f"messages[{number}]", ignored, latest=number == latest)
            for number, message in enumerate(body.messages)
        )
        if not messages:
            return await self._load(body, "chat", request)
        tools = tuple(tool.function.for_template() for tool in body.tools or ())
        asked = _request(request, body, messages=messages, tools=tools)
        return await self._respond(request, asked, "chat", body.stream, ignored)

    async def generate(self, request: Request) -> Response:
        body, ignored = await read_tolerant(request, OllamaGenerateBody)
        body.check()
        if not body.prompt:
            return await self._load(body, "generate", request)
        if body.raw:
            asked = _request(request, body, text=body.prompt)
        else:
            asked = _request(request, body, messages=tuple(body.messages()))
        return await self._respond(request, asked, "generate", body.stream, ignored)

    async def _respond(
        self,
        request: Request,
        asked: GenerationRequest,
        kind: Kind,
        stream: bool | None,
        ignored: list[str],
    ) -> Response:
        return await self._answering.respond(
            request,
            asked,
            _Lines(kind, asked.model),
            stream=stream is not False,
            ignored=ignored,
            media_type=NDJSON,
        )

    async def _load(
        self, body: OllamaChatBody | OllamaGenerateBody, kind: Kind, request: Request
    ) -> Response:
        """A request without a prompt asks for the model to be loaded, or unloaded."""
        asked = GenerationRequest(
            RequestId(request.state.request_id),
            body.id,
            (),
            Sampling(),
            text=".",
            keep_alive_s=body.keep_alive,
            trusted=request.state.trusted,
        )
        releases = body.keep_alive == 0
        if releases and not asked.trusted:
            return fault_response(_NOT_TO_UNLOAD, request.url.path)
        if releases:
            await self._answering.chat.release(asked)
        else:
            _ = await self._answering.chat.encode(asked)
        empty = {"message": {"role": "assistant", "content": ""}}
        told = empty if kind == "chat" else {"response": ""}
        head = {"model": body.model, "created_at": _now()}
        reason = "unload" if releases else "load"
        return JsonResponse({**head, **told, "done": True, "done_reason": reason})

    async def _entries(self) -> list[Json]:
        return (await self._operations.models())["data"]


def _request(
    request: Request,
    body: OllamaChatBody | OllamaGenerateBody,
    *,
    messages: tuple[dict[str, Any], ...] = (),
    tools: tuple[dict[str, Any], ...] = (),
    text: str | None = None,
) -> GenerationRequest:
    options = body.options or OllamaOptions()
    sampling, given = options.sampling()
    limit = options.num_predict
    return GenerationRequest(
        id=RequestId(request.state.request_id),
        model=body.id,
        sampling=sampling,
        given=given,
        max_tokens=limit if limit is not None and limit > 0 else None,
        stop=tuple(options.stop or ()),
        num_draft_tokens=options.draft_num_predict,
        options=body.template_options,
        grammar=body.form,
        messages=messages,
        tools=tools,
        text=text,
        keep_alive_s=body.keep_alive,
    )


@final
class _Lines:
    """One answer as lines of JSON."""

    def __init__(self, kind: Kind, model: str) -> None:
        self._kind: Kind = kind
        self._model = model
        self._began = time.monotonic()
        self._called = False

    def whole(self, said: Said, end: Finished) -> dict[str, Any]:
        calls = [_call(call) for call in said.calls]
        return self._line(said.text, said.thought, calls) | self._last(end)

    def heartbeat(self) -> list[bytes]:
        return [self._encoded(self._line("", "", []))]

    def of(self, event: Part) -> list[bytes]:
        match event:
            case TextDelta(text) if text:
                return [self._encoded(self._line(text, "", []))]
            case Reasoned(text):
                return [self._encoded(self._line("", text, []))]
            case Called():
                return [self._encoded(self._line("", "", [_call(event)]))]
            case Finished():
                return [self._encoded(self._line("", "", []) | self._last(event))]
            case _:
                return []

    def broken(self, fault: HttpFault) -> list[bytes]:
        return [fault_frame(fault, "/api/chat")]

    def _encoded(self, line: Mapping[str, Any]) -> bytes:
        return encode(line) + b"\n"

    def _line(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        head: dict[str, Any] = {"model": self._model, "created_at": _now()}
        thinking = {"thinking": thought} if thought else {}
        if self._kind == "generate":
            return {**head, "response": text, **thinking, "done": False}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thinking}
        message |= {"tool_calls": calls} if calls else {}
        return {**head, "message": message, "done": False}

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


def _call(call: Called) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
