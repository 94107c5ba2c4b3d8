"""The items, events and final state of one response."""

import json
import time
from collections.abc import Callable
from typing import Any, Final, Literal, final

from ....placement.ids import RequestId
from ...chat.requests import (
    CallPart,
    Finished,
    Part,
    PromptLogprobs,
    ReasoningDelta,
    Started,
    TextDelta,
)
from ..http.dialects import WholeAnswer
from ..http.errors import HttpFault
from ..http.sse import named_event
from ..openai.openai_api import call_id
from .response_tools import CUSTOM_INPUT, CallForm, ToolSet, custom_input
from .responses_schema import ResponsesBody

_INPUT_BEGINS: Final = f'{{"{CUSTOM_INPUT}": "'


class CallItem:
    """A call of a tool among the items of a response, whole or during its generation.

    A custom tool's input is text to clients, and an object with one string to the model.
    """

    def __init__(self, head: dict[str, Any], form: CallForm) -> None:
        """`head`: the fields that identify the item."""
        self._head = head
        self._form = form
        self._arguments: list[str] = []
        self._texts: list[str] = []
        """The texts that `delta` returned."""
        self._pending = ""
        """Arguments of a custom tool that are no text yet."""

    @property
    def event_prefix(self) -> str | None:
        """The beginning of the kinds of its own events; None if it has none."""
        match self._form.kind:
            case "function_call":
                return "response.function_call_arguments"
            case "custom_tool_call":
                return "response.custom_tool_call_input"
            case "tool_search_call":
                return None

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self._head["id"]}

    @property
    def value(self) -> dict[str, Any]:
        """The field that the deltas add up to."""
        text = "".join(self._texts)
        match self._form.kind:
            case "function_call":
                return {"arguments": text}
            case "custom_tool_call":
                return {"input": text}
            case "tool_search_call":  # an object, which half of its text is none
                return {"arguments": _object(text)}

    def json(self, status: str) -> dict[str, Any]:
        form = self._form
        return {**self._head, "status": status, "type": form.kind, **form.fields, **self.value}

    def delta(self, arguments: str, *, ends: bool) -> str:
        """The text that the next `arguments` add to the field. `ends`: they are the last."""
        self._arguments.append(arguments)
        is_custom = self._form.kind == "custom_tool_call"
        text = self._input_text(arguments, ends=ends) if is_custom else arguments
        self._texts.append(text)
        return text

    def _input_text(self, arguments: str, *, ends: bool) -> str:
        if ends:
            return custom_input("".join(self._arguments)).removeprefix("".join(self._texts))
        self._pending += arguments
        piece = self._pending if any(self._texts) else self._pending.removeprefix(_INPUT_BEGINS)
        if not any(self._texts) and piece == self._pending:
            return ""
        try:
            text: str = json.loads(f'"{piece}"')
        except ValueError:  # half of an escape, or the object's end, which comes with `ends`
            return ""
        self._pending = "" if text else self._pending
        return text


def _object(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        return {}


Kind = Literal["message", "reasoning"]
Keep = Callable[[list[dict[str, Any]]], None]


@final
class ResponseRenderer:
    """Renders one answer as a list of items; a stream has one open at a time."""

    def __init__(self, body: ResponsesBody, request_id: RequestId, tools: ToolSet) -> None:
        self._body = body
        self._tools = tools
        self._given_tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        self._request_id = request_id
        self._created = int(time.time())
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._calls = 0
        self._call: CallItem | None = None
        """The call that is being generated."""
        self._open: Kind | None = None
        self._text = ""
        self._has_begun = False
        self.keep: Keep | None = None
        """Called once, with the items that a next response may continue."""

    @property
    def id(self) -> str:
        return self._request_id.replace("req_", "resp_", 1)

    def whole(self, answer: WholeAnswer, end: Finished) -> dict[str, Any]:
        if answer.thoughts:
            self._items.append(self._item("reasoning", answer.reasoning))
        if answer.text or not answer.calls:
            self._items.append(self._item("message", answer.text))
        for call in answer.calls:
            item = self._call_item(call.name)
            _ = item.delta(call.arguments, ends=True)
            self._items.append(item.json("completed"))
        return self.final(end)

    def heartbeat(self) -> bytes:
        return self.beginning() or self._in_progress()

    def render(self, event: Part) -> bytes:
        match event:
            case Started() | PromptLogprobs():
                return self.beginning()
            case TextDelta(text):
                return self._delta("message", text) if text else b""
            case ReasoningDelta(text):
                return self._delta("reasoning", text)
            case CallPart():
                return self._call_part(event)
            case Finished():
                return self.beginning() + self._close() + self._last(self.final(event))

    def fault(self, fault: HttpFault) -> bytes:
        """A failed response. Items that were complete stay; clients retry by the error's code."""
        self.break_off()
        return self.beginning() + self._last(self.final(fault))

    def break_off(self) -> None:
        """Keeps the items of an answer that has no end: clients refer to what they have seen."""
        items = list(self._items)
        if self._open is not None:
            items.append(self._item(self._open, self._text) | {"status": "incomplete"})
        if items:
            self._keep(items)

    def final(self, end: Finished | HttpFault) -> dict[str, Any]:
        match end:
            case Finished():
                self._keep(self._items)
                status = "incomplete" if end.reason == "length" else "completed"
                return self._response(status) | _usage(end)
            case HttpFault(code=code, message=message):
                return self._response("failed") | {"error": {"code": code, "message": message}}

    def _keep(self, items: list[dict[str, Any]]) -> None:
        keep, self.keep = self.keep, None
        if keep is not None:
            keep([item for item in items if _can_continue(item)])

    def _last(self, response: dict[str, Any]) -> bytes:
        return self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def beginning(self) -> bytes:
        """The first events, once."""
        if self._has_begun:
            return b""
        self._has_begun = True
        created = self._event("response.created", response=self._response("in_progress"))
        return created + self._in_progress()

    def _in_progress(self) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress"))

    def _delta(self, kind: Kind, text: str) -> bytes:
        frames = self.beginning()
        if self._open != kind:
            frames += self._close() + self._begin(kind)
        self._text += text
        event = f"response.{_text_name(kind)}.delta"
        return frames + self._event(event, **self._place(), delta=text, **_logprobs(kind))

    def _place(self) -> dict[str, Any]:
        index = len(self._items)
        return {"item_id": self._item_id(index), "output_index": index, "content_index": 0}

    def _begin(self, kind: Kind) -> bytes:
        self._open, self._text = kind, ""
        item, index = self._item(kind, ""), len(self._items)
        part = item["content"][0]
        item |= {"content": [], "status": "in_progress"}
        return self._event(
            "response.output_item.added", output_index=index, item=item
        ) + self._event("response.content_part.added", **self._place(), part=part)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        kind, text = self._open, self._text
        item, index, place = self._item(kind, text), len(self._items), self._place()
        part, event = item["content"][0], f"response.{_text_name(kind)}.done"
        frames = (
            self._event(event, **place, text=text, **_logprobs(kind))
            + self._event("response.content_part.done", **place, part=part)
            + self._event("response.output_item.done", output_index=index, item=item)
        )
        self._items.append(item)
        self._open = None
        return frames

    def _call_part(self, part: CallPart) -> bytes:
        frames = b""
        index = len(self._items)
        if part.name:
            frames = self.beginning() + self._close()
            index = len(self._items)
            self._call = call = self._call_item(part.name)
            item = call.json("in_progress")
            frames += self._event("response.output_item.added", output_index=index, item=item)
        call = self._call
        assert call is not None
        place, kind = call.place | {"output_index": index}, call.event_prefix
        text = call.delta(part.arguments, ends=part.ends and not part.is_cut)
        if text and kind:
            frames += self._event(f"{kind}.delta", **place, delta=text)
        if not part.ends:
            return frames
        self._call = None
        item = call.json("incomplete" if part.is_cut else "completed")
        self._items.append(item)
        if part.is_cut:  # clients run a call that is done
            return frames
        if kind:
            frames += self._event(f"{kind}.done", **place, **call.value)
        return frames + self._event("response.output_item.done", output_index=index, item=item)

    def _item_id(self, index: int) -> str:
        return f"{self._request_id.replace('req_', 'item_', 1)}_{index}"

    def _item(self, kind: Kind, text: str) -> dict[str, Any]:
        head: dict[str, Any] = {"id": self._item_id(len(self._items)), "type": kind}
        part: dict[str, Any] = {"type": _text_name(kind), "text": text}
        if kind == "message":
            head["role"] = "assistant"
            part |= {"annotations": [], "logprobs": []}
        else:
            head["summary"] = []
        return {**head, "status": "completed", "content": [part]}

    def _call_item(self, tool: str) -> "CallItem":
        head = {"id": self._item_id(len(self._items))}
        head["call_id"] = call_id(self._request_id, self._calls)
        self._calls += 1
        return CallItem(head, self._tools.form(tool))

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        cut = status == "incomplete"
        return {
            "id": self.id,
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
            "tools": self._given_tools,
            "background": False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "usage": None,
        }


def _can_continue(item: dict[str, Any]) -> bool:
    """Whether a next response can have the item in its prompt: a call that was cut has no result
    and no valid arguments."""
    return item["status"] == "completed" or not item["type"].endswith("_call")


def _text_name(kind: Kind) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _logprobs(kind: Kind) -> dict[str, Any]:
    """An event's log-probabilities: OpenAI's clients want the field in those of messages."""
    return {"logprobs": []} if kind == "message" else {}


def _choice(body: ResponsesBody) -> Any:
    return "auto" if body.tool_choice is None else body.tool_choice.body


def _usage(end: Finished) -> dict[str, Any]:
    usage = {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }
    return {"usage": usage, "generation_stats": dict(end.stats)}
