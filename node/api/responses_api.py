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
    Event,
    Finished,
    GenerationRequest,
    Loading,
    PrefillProgress,
    Reasoned,
    Resuming,
    Started,
    TextDelta,
)
from .answering import Answering, Said, quiet
from .dialects import named
from .errors import HttpFault
from .openai_api import call_id, statistics
from .responses_schema import NamedChoice, ResponsesBody, custom_input
from .tolerant_body import read_tolerant, told_of

Kind = Literal["message", "reasoning"]


class Responses:
    """The endpoint."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        body, ignored = await read_tolerant(request, ResponsesBody)
        body.check()
        fields = {"temperature": body.temperature, "top_p": body.top_p}
        given = {name: value for name, value in fields.items() if value is not None}
        tools = body.declared(ignored)
        asked = GenerationRequest(
            id=RequestId(request.state.request_id),
            model=ModelId(body.model),
            messages=tuple(body.for_template(ignored)),
            sampling=replace(Sampling(temperature=1.0), **given),
            given=frozenset(given),
            max_tokens=body.max_output_tokens,
            tools=tools,
            options=body.options,
            background=body.service_tier == "flex",
            grammar=body.forced(tools) or body.form,
        )
        return await self._answering.respond(
            request,
            asked,
            _Response(body, asked.id),
            stream=bool(body.stream),
            headers=told_of(list(dict.fromkeys(ignored)), request.url.path),
        )


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
        self._open: Kind | None = None
        self._text = ""
        self._begun = False

    def whole(self, said: Said, end: Finished) -> dict[str, Any]:
        if said.reasoning:
            self._items.append(self._thoughts(said.thought))
        if said.text or not said.calls:
            self._items.append(self._message(said.text))
        for call in said.calls:
            self._items.append(self._call(call))
        return self._response(end)

    def of(self, event: Event | None) -> list[bytes]:
        match event:
            case None | Loading() | Resuming() | PrefillProgress():
                return [quiet(event)]
            case Started():
                return self._beginning()
            case TextDelta(text):
                return self._said("message", text) if text else []
            case Reasoned(text):
                return self._said("reasoning", text)
            case Called():
                return [*self._beginning(), *self._close(), *self._called(event)]
            case Finished():
                kind = "completed" if event.reason == "stop" else "incomplete"
                frames = [*self._beginning(), *self._close()]
                last = self._event(f"response.{kind}", response=self._response(event))
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
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response(None)) for kind in kinds]

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

    def _called(self, call: Called) -> list[bytes]:
        item = self._call(call)
        index = len(self._items)
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        prefix = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        begun = item | {field: "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        self._items.append(item)
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event(f"response.{prefix}.delta", **place, delta=item[field]),
            self._event(f"response.{prefix}.done", **place, **{field: item[field]}),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

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

    def _call(self, call: Called) -> dict[str, Any]:
        head = {"id": self._item_id(len(self._items)), "status": "completed"}
        head |= {"call_id": call_id(self._request_id, self._calls), "name": call.name}
        self._calls += 1
        if call.name in self._body.custom_tools:
            return {**head, "type": "custom_tool_call", "input": custom_input(call.arguments)}
        return {**head, "type": "function_call", "arguments": call.arguments}

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
        "input_tokens_details": {"cached_tokens": end.cached_tokens},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
    return {"usage": told, "generation_stats": statistics(end)["generation_stats"]}
