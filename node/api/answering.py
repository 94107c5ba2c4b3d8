"""One internal request to an HTTP answer, whole or streamed, in the shape of any dialect."""

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

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
    Part,
    PrefillProgress,
    Progress,
    Reasoned,
    Resuming,
    Started,
    TextDelta,
    TokenLogprob,
)
from .errors import HttpFault, JsonResponse, fault_of
from .sse import EventStream, Silence, attended, comment
from .tolerant_body import told_of

Events = AsyncGenerator[Event | None]
"""None where a heartbeat is due."""

_STATUS_HEARTBEATS: Final = 3
"""Heartbeats for which an answer's status waits for its first event, which may be a refusal."""


def progress_comment(event: Progress) -> bytes:
    """A comment, which clients skip and a person may read: the same in every dialect."""
    match event:
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
    notes: tuple[str, ...] = ()

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

    def of(self, event: Part) -> list[bytes]:
        """The frames that an event makes; those of `Finished` end the stream."""
        ...

    def heartbeat(self) -> list[bytes]:
        """Frames of data that change nothing, wherever the stream is."""
        ...

    def broken(self, fault: HttpFault) -> list[bytes]:
        """The frames that end a stream which broke off."""
        ...


class Answering:
    """Answers over a `Chat`. `heartbeat_s`: the longest time without data on a stream."""

    def __init__(
        self, chat: Chat, heartbeat_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.chat = chat
        self._heartbeat_s = heartbeat_s
        self._clock = clock

    async def respond(
        self,
        request: Request,
        asked: GenerationRequest,
        shape: Shape,
        *,
        stream: bool,
        ignored: Sequence[str] = (),
        media_type: str = EventStream.media_type,
    ) -> Response:
        """`ignored`: what of the body has no effect; a header names it, and what the model cannot
        follow as well, unless the stream had to begin before that was known."""
        silence = Silence(self._heartbeat_s, self._clock)
        state = request.state
        asked = replace(
            asked,
            trusted=state.trusted,
            cache_salt=state.cache_salt,
            client=state.cache_salt.hex() or (request.client.host if request.client else ""),
        )
        events = attended(self.chat.stream(asked), request.receive, silence)
        if not stream:
            async with aclosing(events):
                said, end = await collected(events)
            headers = told_of([*ignored, *said.notes], request.url.path)
            return JsonResponse(shape.whole(said, end), headers=headers)
        # A refusal decides the status: it is waited for, but not for long, or a client could take
        # the node for dead.
        first: Event | None = None
        for _ in range(_STATUS_HEARTBEATS):
            if (first := await anext(events, None)) is not None:
                break
        writer = _Writer(shape, silence, with_comments=media_type == EventStream.media_type)
        response = EventStream(_frames(first, events, writer), media_type)
        notes = first.notes if isinstance(first, Started) else ()
        response.headers.update(told_of([*ignored, *notes], request.url.path))
        return response


async def collected(events: Events) -> tuple[Said, Finished]:
    """All of an answer."""
    said = Said()
    async for event in events:
        match event:
            case Started(prompt_ids, notes):
                said.prompt_ids, said.notes = prompt_ids, notes
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


@dataclass(frozen=True, slots=True)
class _Writer:
    """The frames of one stream. Comments do not end its silence: not every client counts them."""

    shape: Shape
    silence: Silence
    with_comments: bool

    def frames(self, event: Event | None) -> list[bytes]:
        match event:
            case None:
                return self.shape.heartbeat()
            case Loading() | Resuming() | PrefillProgress():
                return [progress_comment(event)] if self.with_comments else []
            case _:
                frames = self.shape.of(event)
                if frames:
                    self.silence.end()
                return frames


async def _frames(first: Event | None, events: Events, writer: _Writer) -> AsyncGenerator[bytes]:
    """An ExoNodeError becomes the last frames."""
    async with aclosing(events):
        try:
            for frame in writer.frames(first):
                yield frame
            if isinstance(first, Finished):
                return
            async for event in events:
                for frame in writer.frames(event):
                    yield frame
                if isinstance(event, Finished):
                    return
            raise unfinished()
        except ExoNodeError as error:
            for frame in writer.shape.broken(fault_of(error)):
                yield frame


def unfinished() -> ExoNodeError:
    return ExoNodeError("the answer ended without its final event; please report this")
