"""One request in any dialect to its HTTP answer, whole or streamed."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....placement.errors import ExoNodeError
from ....placement.ids import RequestId
from ....proto.fields import changed
from ...chat.requests import (
    AnswerProgress,
    CallPart,
    Chat,
    Embedded,
    Encoded,
    Event,
    Finished,
    GenerationRequest,
    PromptLogprobs,
    ReasoningDelta,
    Started,
    TextDelta,
)
from ..http.bodies import ignored_header, parse_body, read_with
from ..http.dialects import (
    EVENT_STREAM,
    Body,
    Dialect,
    Exchange,
    Renderer,
    WholeAnswer,
    wire_format,
)
from ..http.errors import HttpFault, fault_of
from ..http.long_bodies import json_response
from ..http.routes import ApiRoute
from ..http.sse import EventStream, Silence, attended, comment
from .choices import LogprobLimit, NumberedEvent, choice_requests, joined, merged
from .profile_file import ProfileFile, profiled

Events = AsyncGenerator[NumberedEvent | None]
"""The events of an answer's choices; None when a heartbeat is due."""

_STATUS_HEARTBEATS: Final = 3
"""Heartbeats for which an answer's status waits for its first event, which may be a refusal."""


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers over a `Chat`. `heartbeat_s`: the longest time without data on a stream."""

    chat: Chat
    heartbeat_s: float
    clock: Callable[[], float] = time.monotonic
    profiles: ProfileFile | None = None

    def route(self, dialect: Dialect[Body]) -> ApiRoute:

        async def answer(request: Request) -> Response:
            return await self.respond(request, await read(request, dialect))

        return ApiRoute("POST", dialect.path, answer, body=dialect.body)

    async def profiled(self, generation: GenerationRequest) -> GenerationRequest:
        """The generation, to the profile's model if it names one. Raises ModelNotFound."""
        return await profiled(self.profiles, generation) if self.profiles else generation

    async def encode(self, generation: GenerationRequest) -> Encoded:
        """The model's input. Raises the errors of `Chat.encode`."""
        return await self.chat.encode(await self.profiled(generation))

    def silence(self) -> Silence:
        return Silence(self.heartbeat_s, self.clock)

    async def respond(self, request: Request, exchange: Exchange) -> Response:
        """The answer to `exchange`.

        A header names the ignored fields, and also what the model cannot follow, unless the stream
        had to begin before that was known.
        """
        path = request.url.path
        silence = self.silence()
        prompts = (exchange.request, *exchange.more_prompts)
        generations = [await self.profiled(of_client(request, each)) for each in prompts]
        count = len(exchange.renderers) // len(prompts)
        choices = [choice for each in generations for choice in choice_requests(each, count)]
        logprobs = None if exchange.stream else LogprobLimit(choices)
        streams = [self.chat.stream(choice) for choice in choices]
        events = attended(merged(streams), request.receive, silence)
        if logprobs is not None:
            async with aclosing(events):
                answers, ends = await _collect(events, len(choices), logprobs)
            headers = ignored_header([*exchange.ignored, *answers[0].notes], path)
            triples = zip(exchange.renderers, answers, ends, strict=True)
            bodies = [r.whole(answer, end) for r, answer, end in triples]
            return json_response(joined(bodies), headers=headers)
        # A refusal decides the status: it is waited for, but not for long, or a client could take
        # the node for dead.
        first: NumberedEvent | None = None
        for _ in range(_STATUS_HEARTBEATS):
            if (first := await anext(events, None)) is not None:
                break
        wire = wire_format(path)
        writer = _Writer(exchange.renderers, silence, wire.stream_type == EVENT_STREAM)
        frames = _frames(first, events, writer, exchange.fault or wire.frame, exchange.close)
        response = EventStream(frames, wire.stream_type)
        notes = first[1].notes if first and isinstance(first[1], Started) else ()
        response.headers.update(ignored_header([*exchange.ignored, *notes], path))
        return response


def of_client(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """The generation with the rights and the identity of the request's client."""
    state = request.state
    return replace(
        generation,
        trusted=state.trusted,
        sharing=changed(generation.sharing, cache_salt=state.cache_salt),
        client=state.cache_salt.hex() or (request.client.host if request.client else ""),
    )


async def read(request: Request, dialect: Dialect[Body]) -> Exchange:
    """The request of the body. Raises InvalidRequest that names the field at fault."""
    request_id = RequestId(request.state.request_id)
    return await read_with(
        request, lambda raw: dialect.parse(parse_body(raw, dialect.body), request_id)
    )


async def _collect(
    events: Events, count: int, limit: LogprobLimit
) -> tuple[list[WholeAnswer], list[Finished]]:
    answers, ends = [WholeAnswer() for _ in range(count)], dict[int, Finished]()
    async for numbered in events:
        if numbered is None:
            continue
        number, event = numbered
        if not isinstance(event, Finished):
            if isinstance(event, PromptLogprobs | TextDelta):
                limit.add(event.logprobs)
            _add(answers[number], event)
            continue
        ends[number] = event
        if len(ends) == count:
            return answers, [ends[number] for number in range(count)]
    raise _unfinished()


def _add(answer: WholeAnswer, event: Event) -> None:
    match event:
        case Started(prompt_ids, notes):
            answer.prompt_ids, answer.notes = prompt_ids, notes
        case PromptLogprobs(logprobs):
            answer.prompt_logprobs.extend(logprobs)
        case TextDelta():
            answer.texts.append(event.text)
            answer.ids.extend(event.token_ids)
            answer.logprobs.extend(event.logprobs)
        case ReasoningDelta(text):
            answer.thoughts.append(text)
        case CallPart():
            answer.calls.append(event)
        case Embedded():
            answer.vectors[event.index] = event.vector
        case _:
            pass


@dataclass(slots=True)
class _Writer:
    """The frames of one stream. Comments do not end its silence: not every client counts them."""

    renderers: Sequence[Renderer]
    silence: Silence
    with_comments: bool
    ended_choices: int = 0

    @property
    def is_complete(self) -> bool:
        return self.ended_choices == len(self.renderers)

    def frames(self, numbered: NumberedEvent | None) -> bytes:
        if numbered is None:
            return self.renderers[0].heartbeat()
        number, event = numbered
        match event:
            case AnswerProgress(step):
                return comment(step) if self.with_comments else b""
            case Embedded():
                return b""  # embeddings are not streamed
            case _:
                frames = self.renderers[number].render(event)
                self.ended_choices += isinstance(event, Finished)
                if frames:
                    self.silence.end()
                return frames


async def _frames(
    first: NumberedEvent | None,
    events: Events,
    writer: _Writer,
    fault_frames: Callable[[HttpFault], bytes],
    close: Callable[[], None],
) -> AsyncGenerator[bytes]:
    """The stream of an answer; an ExoNodeError becomes its last frames."""
    async with aclosing(events):
        try:
            if frames := writer.frames(first):
                yield frames
            if writer.is_complete:
                return
            async for event in events:
                if frames := writer.frames(event):
                    yield frames
                if writer.is_complete:
                    return
            raise _unfinished()
        except ExoNodeError as error:
            yield fault_frames(fault_of(error))
        finally:
            close()


def _unfinished() -> ExoNodeError:
    """The error of events that lack their last one."""
    return ExoNodeError("the answer ended without its final event; please report this")
