"""`POST /v1/responses`: OpenAI's newer dialect, without any state."""

import time
from dataclasses import replace
from typing import Any, Literal, final

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
from .call_item import CallItem
from .dialects import named
from .errors import HttpFault
from .openai_api import call_id, statistics
from .responses_schema import NamedChoice, ResponsesBody
from .structured_schema import one_grammar
from .tolerant_body import parse_tolerant

Kind = Literal["message", "reasoning"]


class Responses:
    """The endpoint."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        request_id = RequestId(request.state.request_id)
        body, asked, ignored = await read_with(request, lambda raw: _read(raw, request_id))
        return await self._answering.respond(
            request,
            asked,
            _Response(body, asked.id),
            stream=bool(body.stream),
            ignored=ignored,
        )


def _read(raw: bytes, request_id: RequestId) -> tuple[ResponsesBody, GenerationRequest, list[str]]:
    """The body, its request, and the names of what has no effect. Raises InvalidRequest."""
    body, ignored = parse_tolerant(raw, ResponsesBody)
    body.check()
    fields = {"temperature": body.temperature, "top_p": body.top_p}
    given = {name: value for name, value in fields.items() if value is not None}
    tools = body.declared(ignored)
    asked = GenerationRequest(
        id=request_id,
        model=ModelId(body.model),
        messages=tuple(body.for_template(ignored)),
        sampling=replace(Sampling(temperature=1.0), **given),
        given=frozenset(given),
        max_tokens=body.max_output_tokens,
        tools=tools,
        options=body.options,
        background=body.service_tier == "flex",
        grammar=one_grammar(body.forced(tools), body.form, ignored),
        call_parts=bool(body.stream),
    )
    return body, asked, list(dict.fromkeys(ignored))


@final
class _Response:
    """One answer: a list of items, of which a stream has one open at a time."""

    def __init__(self, body: ResponsesBody, request_id: RequestId) -> None:
        self._body = body
        self._request_id = request_id
        self._created = int(time.time())
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._calls = 0
        self._call: CallItem | None = None
        """The one that is being written."""
        self._open: Kind | None = None
        self._text = ""
        self._begun = False

    def whole(self, said: Said, end: Finished) -> dict[str, Any]:
        if said.reasoning:
            self._items.append(self._thoughts(said.thought))
        if said.text or not said.calls:
            self._items.append(self._message(said.text))
        for call in said.calls:
            item = self._call_item(call.name)
            _ = item.delta(call.arguments, ends=True)
            self._items.append(item.item("completed"))
        return self._response(end)

    def heartbeat(self) -> list[bytes]:
        return self._beginning() or [self._in_progress()]

    def of(self, event: Part) -> list[bytes]:
        match event:
            case Started():
                return self._beginning()
            case TextDelta(text):
                return self._said("message", text) if text else []
            case Reasoned(text):
                return self._said("reasoning", text)
            case Called(name, arguments):
                return self._call_part(CallPart(name, arguments, ends=True))
            case CallPart():
                return self._call_part(event)
            case Finished():
                frames = [*self._beginning(), *self._close()]
                response = self._response(event)
                last = self._event(f"response.{response['status']}", response=response)
                return [*frames, last]

    def broken(self, fault: HttpFault) -> list[bytes]:
        """Items that were complete stay; clients retry by the error's code."""
        begun = self._beginning()
        error = {"code": fault.code, "message": fault.message}
        failed = self._response(None) | {"status": "failed", "error": error}
        return [*begun, self._event("response.failed", response=failed)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named(kind, {"type": kind, "sequence_number": number, **fields})

    def _beginning(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        created = self._event("response.created", response=self._response(None))
        return [created, self._in_progress()]

    def _in_progress(self) -> bytes:
        return self._event("response.in_progress", response=self._response(None))

    def _said(self, kind: Kind, text: str) -> list[bytes]:
        frames = self._beginning()
        if self._open != kind:
            frames += [*self._close(), *self._begin(kind)]
        self._text += text
        name = "output_text" if kind == "message" else "reasoning_text"
        more = {"logprobs": list[Any]()} if kind == "message" else {}
        return [*frames, self._event(f"response.{name}.delta", **self._place(), delta=text, **more)]

    def _place(self) -> dict[str, Any]:
        index = len(self._items)
        return {"item_id": self._item_id(index), "output_index": index, "content_index": 0}

    def _begin(self, kind: Kind) -> list[bytes]:
        self._open, self._text = kind, ""
        item = self._message("") if kind == "message" else self._thoughts("")
        part = item["content"][0]
        begun: dict[str, Any] = {**item, "content": [], "status": "in_progress"}
        index = len(self._items)
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.content_part.added", **self._place(), part=part),
        ]

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        kind, text = self._open, self._text
        item = self._message(text) if kind == "message" else self._thoughts(text)
        name = "output_text" if kind == "message" else "reasoning_text"
        more = {"logprobs": list[Any]()} if kind == "message" else {}
        index, place = len(self._items), self._place()
        frames = [
            self._event(f"response.{name}.done", **place, text=text, **more),
            self._event("response.content_part.done", **place, part=item["content"][0]),
            self._event("response.output_item.done", output_index=index, item=item),
        ]
        self._items.append(item)
        self._open = None
        return frames

    def _call_part(self, part: CallPart) -> list[bytes]:
        index = len(self._items)
        frames: list[bytes] = []
        if part.name:
            frames = [*self._beginning(), *self._close()]
            index = len(self._items)
            self._call = call = self._call_item(part.name)
            begun = call.item("in_progress")
            frames.append(self._event("response.output_item.added", output_index=index, item=begun))
        call = self._call
        assert call is not None
        place, kind = call.place | {"output_index": index}, call.event_prefix
        if text := call.delta(part.arguments, ends=part.ends and not part.is_cut):
            frames.append(self._event(f"{kind}.delta", **place, delta=text))
        if not part.ends:
            return frames
        self._call = None
        item = call.item("incomplete" if part.is_cut else "completed")
        self._items.append(item)
        if part.is_cut:  # clients run a call that is done
            return frames
        frames.append(self._event(f"{kind}.done", **place, **call.value))
        return [*frames, self._event("response.output_item.done", output_index=index, item=item)]

    def _item_id(self, index: int) -> str:
        return f"{self._request_id.replace('req_', 'item_', 1)}_{index}"

    def _message(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": [],
        }
        head = {"id": self._item_id(len(self._items)), "type": "message", "role": "assistant"}
        return {**head, "status": "completed", "content": [part]}

    def _thoughts(self, text: str) -> dict[str, Any]:
        head: dict[str, Any] = {"id": self._item_id(len(self._items)), "type": "reasoning"}
        head["summary"] = []
        part = {"type": "reasoning_text", "text": text}
        return {**head, "status": "completed", "content": [part]}

    def _call_item(self, tool: str) -> CallItem:
        head = {"id": self._item_id(len(self._items)), "name": tool}
        head["call_id"] = call_id(self._request_id, self._calls)
        self._calls += 1
        return CallItem(head, is_custom=tool in self._body.custom_tools)

    def _response(self, end: Finished | None) -> dict[str, Any]:
        cut = end is not None and end.reason == "length"
        status = "in_progress" if end is None else "incomplete" if cut else "completed"
        body = self._body
        told: dict[str, Any] = {
            "id": self._request_id.replace("req_", "resp_", 1),
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": body.model,
            "output": list(self._items),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": _choice(body),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "store": False,
            "usage": None,
        }
        return told if end is None else told | _usage(end)


def _choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, NamedChoice) else choice or "auto"


def _usage(end: Finished) -> dict[str, Any]:
    told = {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
    return {"usage": told, "generation_stats": statistics(end)["generation_stats"]}
