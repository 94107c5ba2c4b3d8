"""The choices of one request in OpenAI's dialect: a request for each, one stream and one body."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ...placement.ids import RequestId
from ..chat.requests import (
    Event,
    Finished,
    GenerationRequest,
    LoadProgress,
    PrefillProgress,
    ResumeProgress,
)
from .sse import closing

MAX_CHOICES: Final = 8

NumberedEvent = tuple[int, Event]
"""An event with the number of its choice."""


def choice_requests(request: GenerationRequest, count: int) -> list[GenerationRequest]:
    """A request for each choice, which is an answer of its own: it takes its own turn, drafts, and
    resumes after losses."""
    if count == 1:
        return [request]
    return [
        replace(
            request,
            id=RequestId(f"{request.id}-{number}" if number else request.id),
            choice=number,
            choice_of=request.id,
        )
        for number in range(count)
    ]


async def merged(streams: Sequence[AsyncIterator[Event]]) -> AsyncGenerator[NumberedEvent]:
    """The events of all streams as they come; of progress, the first stream's only.

    An error of one stream ends all of them. They are closed at the end in every case; a pending
    step of each is cancelled first.
    """
    async with AsyncExitStack() as stack:
        for stream in streams:
            _ = await stack.enter_async_context(closing(stream))
        if len(streams) == 1:
            async for event in streams[0]:
                yield 0, event
            return
        steps = {_step(stream): number for number, stream in enumerate(streams)}
        _ = stack.push_async_callback(_cancel, steps)
        while steps:
            _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in [step for step in steps if step.done()]:
                event, number = step.result(), steps.pop(step)
                if event is None:
                    continue
                if number == 0 or not isinstance(event, _PROGRESS):
                    yield number, event
                steps[_step(streams[number])] = number


_PROGRESS: Final = LoadProgress | ResumeProgress | PrefillProgress


def _step(stream: AsyncIterator[Event]) -> asyncio.Future[Event | None]:
    return asyncio.ensure_future(anext(stream, None))


async def _cancel(steps: Mapping[asyncio.Future[Event | None], int]) -> None:
    """Cancels steps and waits for them: a generator cannot be closed while a step of it runs."""
    for step in steps:
        _ = step.cancel()
    _ = await asyncio.gather(*steps, return_exceptions=True)


@dataclass(slots=True)
class Ends:
    """The ends of a stream's choices, which its renderers share."""

    count: int
    _ends: list[Finished] = field(default_factory=list[Finished])

    def add(self, end: Finished) -> dict[str, Any] | None:
        """The fields `usage` and `generation_stats` of all choices, once the last one has ended."""
        self._ends.append(end)
        return statistics(self._ends) if len(self._ends) == self.count else None

    def of_choice(self, end: Finished) -> dict[str, Any]:
        """The statistics of one of several choices, which are part of that choice."""
        return {"generation_stats": dict(end.stats)} if self.count > 1 else {}


def joined(bodies: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One body of those that each choice would have alone."""
    if len(bodies) == 1:
        return bodies[0]
    choices = [
        {**body["choices"][0], "generation_stats": body["generation_stats"]} for body in bodies
    ]
    common = {name: value for name, value in bodies[0].items() if name != "generation_stats"}
    return {**common, "choices": choices, "usage": _total([body["usage"] for body in bodies])}


def statistics(ends: Sequence[Finished]) -> dict[str, Any]:
    """`usage` of all choices, whose prompt counts once; `generation_stats` of a sole choice."""
    usage = {"usage": _total([_usage(end) for end in ends])}
    return usage if len(ends) > 1 else {**usage, "generation_stats": dict(ends[0].stats)}


def _usage(end: Finished) -> dict[str, Any]:
    """`usage` of one choice."""
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": end.accepted_draft_tokens,
            "reasoning_tokens": end.reasoning_tokens,
        },
    }


def _total(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`usage` of all choices.

    `cached_tokens` is the least of any choice: the others begin behind what the first has read.
    """
    prompt = usages[0]["prompt_tokens"]
    completion = sum(each["completion_tokens"] for each in usages)
    details = [each["completion_tokens_details"] for each in usages]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": min(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
        },
        "completion_tokens_details": {
            name: sum(each[name] for each in details) for name in details[0]
        },
    }
