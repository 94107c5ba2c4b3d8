"""One answer that is stored: it runs without its client, and readers follow its events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

from ....placement.errors import (
    ContextLengthExceeded,
    ExoNodeError,
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponsesUnavailable,
)
from ...chat.requests import AnswerProgress, Embedded, Event, Finished, Started
from ...machine.tasks import background
from ...responses.store import EndedResponse, NewResponse, ResponseStore
from ..http.drain import Drain
from ..http.errors import fault_of, internal_fault
from ..http.sse import comment
from ..shared.answering import unfinished
from .response_renderer import End, ResponseRenderer

_LOG: Final = logging.getLogger(__name__)
_END: Final = b"\n\n"


class FrameLog:
    """Frames by number, from 0. They stay until the last reader has left."""

    def __init__(self, frames: bytes = b"") -> None:
        self._frames = list[bytes]()
        self._is_complete = False
        self._change = asyncio.Event()
        self.append(frames)

    @property
    def last(self) -> int:
        """The number of the last frame; -1 before the first one."""
        return len(self._frames) - 1

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def __bytes__(self) -> bytes:
        return b"".join(self._frames)

    def append(self, frames: bytes) -> None:
        """Adds frames: JSON has no raw line break, so an empty line ends each."""
        self._frames += [frame + _END for frame in frames.split(_END)[:-1]]
        self._wake()

    def complete(self) -> None:
        self._is_complete = True
        self._wake()

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """The frames after a number, also those to come, until the stream is complete."""
        number = after + 1
        while True:
            while number < len(self._frames):
                yield self._frames[number]
                number += 1
            if self._is_complete:
                return
            _ = await self._change.wait()

    def _wake(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()


class ResponseRun:
    """An answer and its log. Its end is stored before the last event is in the log."""

    def __init__(
        self, request: NewResponse, renderer: ResponseRenderer, store: ResponseStore, leaving: Drain
    ) -> None:
        self.request = request
        self.renderer = renderer
        self.log = FrameLog()
        self.notes: Sequence[str] = ()
        """The parts of the request without effect, once the answer has started."""
        self.fault: ExoNodeError | None = None
        """The error that ended the answer."""
        self._store = store
        self._leaving = leaving
        self._progress = b""
        self._beginning: asyncio.Task[None] | None = None
        self._answer: asyncio.Task[Finished] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._final: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        return self.renderer.id

    @property
    def response(self) -> dict[str, Any]:
        return self.renderer.state() if self._final is None else self._final

    @property
    def is_lost(self) -> bool:
        """Whether it has ended and is nowhere but here."""
        return self.log.is_complete and bool(self.renderer.not_stored)

    def start(self, events: AsyncGenerator[Event]) -> "asyncio.Task[None]":
        """Starts the answer. The task ends when its end is stored."""
        self._answer = asyncio.create_task(self._attended(events))
        self._ending = background(self._end(self._answer), f"the answer {self.id}")
        return self._ending

    async def begin(self) -> None:
        """Stores the response, once, before its first event is in the log.

        Raises ResponsesUnavailable and PreviousResponseNotFound for one in the background. Another
        is answered all the same, with the reason why it is not stored.
        """
        self._beginning = self._beginning or asyncio.create_task(self._begin())
        await asyncio.shield(self._beginning)

    def cancel(self) -> None:
        """Ends the answer, unless it has ended or the node ends it."""
        if self._answer is not None and not self._leaving.is_cut_off:
            _ = self._answer.cancel()

    async def ended(self) -> None:
        """Returns when the end is stored."""
        if self._ending is not None:
            _ = await asyncio.wait((self._ending,))

    def sign_of_life(self, number: int) -> bytes:
        """The state for one reader, whose last event had that number."""
        return self._progress + self.renderer.state_event(max(0, number))

    async def _begin(self) -> None:
        try:
            await self._store.begin(self.request, self.renderer.state())
        except (ResponsesUnavailable, PreviousResponseNotFound) as fault:
            if self.request.is_background:
                raise
            self._note_not_stored(fault)
        is_background = self.request.is_background
        self.log.append(self.renderer.queued() if is_background else self.renderer.beginning())

    async def _attended(self, events: AsyncGenerator[Event]) -> Finished:
        return await self._leaving.attend(self._read(events))

    async def _read(self, events: AsyncGenerator[Event]) -> Finished:
        async with aclosing(events):
            async for event in events:
                match event:
                    case AnswerProgress(step):
                        self._progress = comment(step)
                    case Finished():
                        return event
                    case Embedded():
                        pass
                    case _:
                        self._progress = b""
                        self.notes = event.notes if isinstance(event, Started) else self.notes
                        await self.begin()
                        self.log.append(self.renderer.render(event))
        raise unfinished()

    async def _end(self, answer: "asyncio.Task[Finished]") -> None:
        try:
            _ = await asyncio.wait((answer,))
            end = self._end_of(answer)
            if self._beginning is None and not isinstance(end, Finished):
                return  # no client has seen any of it: it was refused
            await self.begin()
            self.log.append(self.renderer.closing(end))
            await self._finish(end)
        finally:
            self._store.release(self.id)
            self.log.complete()

    def _end_of(self, answer: "asyncio.Task[Finished]") -> End:
        if answer.cancelled():
            return None
        match answer.exception():
            case None:
                return answer.result()
            case ExoNodeError() as fault:
                self.fault = fault
                return fault_of(fault)
            case defect:
                _LOG.error("the answer %s failed unexpectedly", self.id, exc_info=defect)
                fault = internal_fault(self.id)
                self.fault = ExoNodeError(fault.message)
                return fault

    async def _finish(self, end: End) -> None:
        """Stores the end; the last event has the reason if that fails."""
        is_too_long = isinstance(self.fault, ContextLengthExceeded)
        if is_too_long:
            self.renderer.forget_prompt()
        response = self.renderer.final(end)
        last = self.renderer.last(response)
        if not self.renderer.not_stored:
            events = bytes(self.log) + last if self.request.is_background else b""
            output = [item for item in response["output"] if _can_continue(item)]
            try:
                await self._store.finish(
                    self.id, EndedResponse(response, output, events, is_too_long)
                )
            except (ResponsesUnavailable, ResponseNotFound) as fault:
                self._note_not_stored(fault)
                response = self.renderer.final(end)
                last = self.renderer.last(response)
        self._final = response
        self.log.append(last)

    def _note_not_stored(self, fault: ExoNodeError) -> None:
        self.renderer.not_stored = fault.message
        _LOG.warning("the response %s is not stored: %s", self.id, fault.message)


def _can_continue(item: dict[str, Any]) -> bool:
    """Whether a next response can have the item in its prompt: a call that was cut has no result
    and no valid arguments."""
    return item["status"] == "completed" or not item["type"].endswith("_call")
