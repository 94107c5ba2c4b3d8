"""`POST /v1/chat/completions`: OpenAI's dialect to and from the node's own request and events."""

from collections.abc import Iterable
from typing import Any, Final, assert_never

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
    TokenLogprob,
)
from ..http.bodies import unknown_fields
from ..http.dialects import Dialect, Exchange, WholeAnswer
from ..http.sse import data
from ..shared.chat_message import messages_for_template
from ..shared.choices import ChoiceStream
from ..shared.history import History
from ..shared.sampling_schema import generation, one_grammar
from .completion_logprobs import finite
from .openai_schema import ChatBody

_NO_TEXT: Final = TextDelta("", ())
CALLS_OF_CHOICE: Final = 32
"""Numbers of calls between those of two choices: 256 for the eight of them."""


def _parse(body: ChatBody, request_id: RequestId) -> Exchange:
    history = History(unknown_fields(body))
    grammar = one_grammar(body.required_call, body.form, history.ignored)
    request = generation(
        body,
        request_id,
        messages_for_template(body.messages, history),
        limits={"max_tokens": body.token_limit},
        output=pb.Output(
            top_logprobs=body.num_logprobs, call_parts=bool(body.stream), grammar=grammar
        ),
        tools=body.callable_tools,
    )
    stream = ChoiceStream(body.count, body.has_usage_apart)
    renderers = [_ChatRenderer(body, request_id, number, stream) for number in range(body.count)]
    return Exchange(request, renderers, bool(body.stream), history.names)


def call_id(request: RequestId, number: int) -> str:
    """A call's id of nine letters and digits: some templates refuse any other form."""
    return f"{request.removeprefix('req_')[:7]}{number:02x}"


class _ChatRenderer:
    """Renders one choice of a chat completion, or its chunks."""

    def __init__(
        self, body: ChatBody, request_id: RequestId, number: int, stream: ChoiceStream
    ) -> None:
        """`number`: the choice's. `stream`: that of all choices."""
        self._number = number
        self._stream = stream
        self._with_ids = bool(body.return_token_ids)
        self._with_logprobs = bool(body.logprobs)
        self._head = {
            "id": request_id.replace("req_", "chatcmpl-", 1),
            "created": stream.created,
            "model": body.model,
        }
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
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
            "index": self._number,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": _logprobs(answer.logprobs) if self._with_logprobs else None,
            "finish_reason": self._reason(end),
        }
        head: dict[str, Any] = {**self._head, "object": "chat.completion"}
        if self._with_ids:
            choice["token_ids"] = answer.ids
            head["prompt_token_ids"] = answer.prompt_ids
        return self._stream.body(head, choice, end)

    def heartbeat(self) -> bytes:
        return self._chunk({})

    def render(self, event: Part) -> bytes:
        match event:
            case Started(prompt_ids):
                self._prompt_ids = prompt_ids
                return self._beginning()
            case TextDelta():
                return self._text(event)
            case PromptLogprobs():
                return b""  # of completions only
            case ReasoningDelta(text):
                return self._beginning() + self._chunk({"reasoning_content": text})
            case CallPart():
                return self._call_part(event)
            case Finished():
                head, choice = self._chunk_head, self._choice({}, end=event)
                return self._beginning() + self._stream.last(head, choice, event)
            case _:
                assert_never(event)

    def _call(self, call: CallPart) -> dict[str, Any]:
        name = call_id(self._request_id, self._calls + CALLS_OF_CHOICE * self._number)
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
        return self._beginning() + self._chunk(delta)

    def _reason(self, end: Finished) -> str:
        return "tool_calls" if self._calls and end.reason == "stop" else end.reason

    def _text(self, delta: TextDelta) -> bytes:
        has_news = delta.text or delta.logprobs or (delta.token_ids and self._with_ids)
        if not has_news:
            return b""
        return self._beginning() + self._chunk({"content": delta.text}, delta)

    def _beginning(self) -> bytes:
        """The first chunk, once: it names the role and, if requested, the prompt's ids."""
        if self._has_begun:
            return b""
        self._has_begun = True
        with_ids = self._with_ids and self._number == 0
        extra: dict[str, Any] = {"prompt_token_ids": self._prompt_ids} if with_ids else {}
        role = {"role": "assistant", "content": ""}
        return self._chunk(role, **extra)

    def _chunk(self, delta: dict[str, Any], text: TextDelta = _NO_TEXT, **extra: Any) -> bytes:
        return data({**self._chunk_head, "choices": [self._choice(delta, text)], **extra})

    def _choice(
        self, delta: dict[str, Any], text: TextDelta = _NO_TEXT, end: Finished | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self._number,
            "delta": delta,
            "logprobs": _logprobs(text.logprobs) if text.logprobs else None,
            "finish_reason": None if end is None else self._reason(end),
        }
        if self._with_ids:
            choice["token_ids"] = text.token_ids
            choice["accepted_draft_tokens"] = text.accepted_drafts
        return choice


CHAT: Final = Dialect("/v1/chat/completions", ChatBody, _parse)


def _logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = ({**_token(one), "top_logprobs": [_token(t) for t in one.top]} for one in entries)
    return {"content": content, "refusal": None}


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {
        "token": one.bytes.decode(errors="replace"),
        "logprob": finite(one.logprob),
        "bytes": list(one.bytes) or None,
    }
