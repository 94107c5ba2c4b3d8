"""The choices of one request in OpenAI's dialect: a request for each, one stream and one body."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ...placement.ids import RequestId
from ..chat.requests import AnswerProgress, Event, Finished, GenerationRequest
from ..machine.tasks import cancel
from .sse import DONE, data

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


async def merged(streams: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[NumberedEvent]:
    """The events of all streams as they come; of progress, the first stream's only.

    An error of one stream ends all of them. They are closed at the end in every case; a pending
    step of each is cancelled first.
    """
    async with AsyncExitStack() as stack:
        for stream in streams:
            _ = await stack.enter_async_context(aclosing(stream))
        if len(streams) == 1:
            async for event in streams[0]:
                yield 0, event
            return
        steps = {_step(stream): number for number, stream in enumerate(streams)}
        # A generator cannot be closed while a step of it runs.
        _ = stack.push_async_callback(cancel, steps)
        while steps:
            _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in [step for step in steps if step.done()]:
                event, number = step.result(), steps.pop(step)
                if event is None:
                    continue
                if number == 0 or not isinstance(event, AnswerProgress):
                    yield number, event
                steps[_step(streams[number])] = number


def _step(stream: AsyncGenerator[Event]) -> asyncio.Future[Event | None]:
    return asyncio.ensure_future(anext(stream, None))


@dataclass(slots=True)
class ChoiceStream:
    """The state that the renderers of one request's choices share.

    `usage_apart`: the statistics of all choices have a chunk of their own.
    """

    count: int
    usage_apart: bool
    created: int = field(default_factory=lambda: int(time.time()))
    _ends: list[Finished] = field(default_factory=list[Finished])

    def last(self, end: Finished, chunk: Mapping[str, Any]) -> bytes:
        """The frames of a choice's last chunk. After that of the last choice the stream ends."""
        self._ends.append(end)
        if self.count > 1:
            chunk = {**chunk, "choices": [_with_stats(chunk["choices"][0], end.stats)]}
        if len(self._ends) < self.count:
            return data(chunk)
        totals = statistics(self._ends)
        if self.usage_apart:
            return data(chunk) + data({**chunk, "choices": [], **totals}) + DONE
        return data({**chunk, **totals}) + DONE


def _with_stats(choice: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, Any]:
    """One of several choices, which has the statistics of its own answer."""
    return {**choice, "generation_stats": dict(stats)}


def joined(bodies: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One body of those that each choice would have alone."""
    if len(bodies) == 1:
        return bodies[0]
    choices = [_with_stats(body["choices"][0], body["generation_stats"]) for body in bodies]
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
