"""One internal request to an HTTP answer, whole or streamed, in the shape of any dialect."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ...placement.errors import ExoNodeError
from ..chat.requests import (
    Called,
    Chat,
    Event,
    Finished,
    GenerationRequest,
    Loading,
    PrefillProgress,
    Reasoned,
    Resuming,
    Started,
    TextDelta,
    TokenLogprob,
)
from .errors import HttpFault, JsonResponse, fault_of
from .sse import EventStream, attended, comment

Events = AsyncGenerator[Event | None]
"""None is a spell of silence."""


Quiet = Loading | Resuming | PrefillProgress | None
"""What says no more than that the answer gets on."""


def quiet(event: Quiet) -> bytes:
    """A comment, which clients skip and a person may read: the same in every dialect that has
    them."""
    match event:
        case None:
            return comment("keep-alive")
        case Loading(step):
            return comment(step)
        case Resuming(step):
            return comment(f"resuming: {step}")
        case PrefillProgress(done, total):
            return comment(f"prefill {done}/{total}")


@dataclass(slots=True)
class Said:
    """The parts of a whole answer."""

    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[Called] = field(default_factory=list[Called])
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def thought(self) -> str:
        return "".join(self.reasoning)


class Shape(Protocol):
    """How one answer looks in a dialect."""

    def whole(self, said: Said, end: Finished) -> Mapping[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def of(self, event: Event | None) -> list[bytes]:
        """The frames that an event makes; those of `Finished` end the stream."""
        ...

    def broken(self, fault: HttpFault) -> list[bytes]:
        """The frames that end a stream which broke off."""
        ...


class Answering:
    """Answers over a `Chat`. `keep_alive_s` is the longest silence on a stream."""

    def __init__(self, chat: Chat, keep_alive_s: float) -> None:
        self.chat = chat
        self._keep_alive_s = keep_alive_s

    async def respond(
        self,
        request: Request,
        asked: GenerationRequest,
        shape: Shape,
        *,
        stream: bool,
        headers: Mapping[str, str] | None = None,
        media_type: str = EventStream.media_type,
    ) -> Response:
        events = attended(self.chat.stream(asked), request.receive, self._keep_alive_s)
        if not stream:
            async with aclosing(events):
                said, end = await collected(events)
            return JsonResponse(shape.whole(said, end), headers=headers)
        # A refusal, or the end of a model's loading, decides the status: it is waited for, but not
        # past the first silence, in which a client could take the node for dead.
        first = await anext(events, None)
        response = EventStream(_frames(first, events, shape), media_type)
        response.headers.update(headers or {})
        return response


async def collected(events: Events) -> tuple[Said, Finished]:
    """All of an answer."""
    said = Said()
    async for event in events:
        match event:
            case Started(prompt_ids):
                said.prompt_ids = prompt_ids
            case TextDelta():
                said.texts.append(event.text)
                said.ids.extend(event.token_ids)
                said.logprobs.extend(event.logprobs)
            case Reasoned(text):
                said.reasoning.append(text)
            case Called():
                said.calls.append(event)
            case Finished():
                return said, event
            case _:
                pass
    raise unfinished()


async def _frames(first: Event | None, events: Events, shape: Shape) -> AsyncGenerator[bytes]:
    """An ExoNodeError becomes the last frames."""
    async with aclosing(events):
        try:
            for frame in shape.of(first):
                yield frame
            if isinstance(first, Finished):
                return
            async for event in events:
                for frame in shape.of(event):
                    yield frame
                if isinstance(event, Finished):
                    return
            raise unfinished()
        except ExoNodeError as error:
            for frame in shape.broken(fault_of(error)):
                yield frame


def unfinished() -> ExoNodeError:
    return ExoNodeError("the answer ended without its final event; please report this")
