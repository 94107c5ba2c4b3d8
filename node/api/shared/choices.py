"""The choices of one request in OpenAI's dialect: a request for each, one stream and one body.

A request of several prompts has choices of each, in the order of the prompts.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from ....placement.errors import InvalidRequest
from ....placement.ids import RequestId
from ...chat.requests import AnswerProgress, Event, Finished, GenerationRequest, TokenLogprob
from ...machine.tasks import cancel
from ..http.sse import DONE, data

MAX_CHOICES: Final = 8

MAX_TOGETHER: Final = 16
"""Choices that are answered at a time: as many requests run at once on a model."""

MAX_LOGPROBS: Final = 1_000_000
"""Log-probabilities of an answer that is not streamed: its node holds some 170 MB of them."""

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
        )
        for number in range(count)
    ]


class LogprobLimit:
    """Bounds the log-probabilities of all choices of one answer that is not streamed.

    Raises InvalidRequest: at once where `max_tokens` of the choices allows more, else when they
    have come to more.
    """

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._count = 0
        asking = [each for each in requests if each.output.HasField("top_logprobs")]
        declared = sum((1 + r.output.top_logprobs) * r.limits.max_tokens for r in asking)
        self._check(declared, "may come to")

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        if entries:
            self._count += sum(1 + len(entry.top) for entry in entries)
            self._check(self._count, "came to")

    def _check(self, count: int, verb: str) -> None:
        if count > MAX_LOGPROBS:
            raise InvalidRequest(
                f"'logprobs': those of all choices and alternatives {verb} {count:,}, and a whole "
                f'body has at most {MAX_LOGPROBS:,}; set "stream": true, or ask for fewer '
                "alternatives, choices or tokens (max_tokens)",
                param="logprobs",
            )


async def merged(streams: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[NumberedEvent]:
    """The events of all streams as they come; of progress, the first stream's only.

    At most `MAX_TOGETHER` run at a time, in order. An error of one stream ends all of them. They
    are closed at the end in every case; a pending step of each is cancelled first.
    """
    async with AsyncExitStack() as stack:
        for stream in streams:
            _ = await stack.enter_async_context(aclosing(stream))
        if len(streams) == 1:
            async for event in streams[0]:
                yield 0, event
            return
        waiting = iter(range(len(streams)))
        steps = {_step(streams[number]): number for number in islice(waiting, MAX_TOGETHER)}
        # A generator cannot be closed while a step of it runs.
        _ = stack.push_async_callback(cancel, steps)
        while steps:
            _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in [step for step in steps if step.done()]:
                event, number = step.result(), steps.pop(step)
                if event is None:
                    steps |= {_step(streams[number]): number for number in islice(waiting, 1)}
                    continue
                if number == 0 or not isinstance(event, AnswerProgress):
                    yield number, event
                steps[_step(streams[number])] = number


def _step(stream: AsyncGenerator[Event]) -> asyncio.Future[Event | None]:
    return asyncio.ensure_future(anext(stream, None))


@dataclass(slots=True)
class ChoiceStream:
    """The state that the renderers of one request's choices share.

    `usage_apart`: the statistics of all choices have a chunk of their own. `prompts`: their number,
    each of which has as many of the choices.
    """

    count: int
    usage_apart: bool
    prompts: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    _ends: dict[int, Finished] = field(default_factory=dict[int, Finished])

    def last(self, end: Finished, chunk: Mapping[str, Any]) -> bytes:
        """The frames of a choice's last chunk. After that of the last choice the stream ends."""
        self._ends[chunk["choices"][0]["index"]] = end
        if self.count > 1:
            chunk = {**chunk, "choices": [_with_stats(chunk["choices"][0], end.stats)]}
        if len(self._ends) < self.count:
            return data(chunk)
        totals = statistics([self._ends[number] for number in range(self.count)], self.prompts)
        if self.usage_apart:
            return data(chunk) + data({**chunk, "choices": [], **totals}) + DONE
        return data({**chunk, **totals}) + DONE


def _with_stats(choice: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, Any]:
    """One of several choices, which has the statistics of its own answer."""
    return {**choice, "generation_stats": dict(stats)}


def joined(bodies: Sequence[Mapping[str, Any]], prompts: int = 1) -> Mapping[str, Any]:
    """One body of those that each choice of so many prompts would have alone."""
    if len(bodies) == 1:
        return bodies[0]
    choices = [_with_stats(body["choices"][0], body["generation_stats"]) for body in bodies]
    common = {name: value for name, value in bodies[0].items() if name != "generation_stats"}
    return {
        **common,
        "choices": choices,
        "usage": _total([body["usage"] for body in bodies], prompts),
    }


def statistics(ends: Sequence[Finished], prompts: int = 1) -> dict[str, Any]:
    """`usage` of all choices, where a prompt counts once; `generation_stats` of a sole choice."""
    usage = {"usage": _total([_usage(end) for end in ends], prompts)}
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


def _total(usages: Sequence[Mapping[str, Any]], prompts: int) -> dict[str, Any]:
    """`usage` of all choices.

    `cached_tokens` of a prompt is the least of any of its choices: the others begin after what the
    first has read.
    """
    count = len(usages) // prompts
    of_prompts = [usages[at : at + count] for at in range(0, len(usages), count)]
    prompt = sum(each[0]["prompt_tokens"] for each in of_prompts)
    completion = sum(each["completion_tokens"] for each in usages)
    details = [each["completion_tokens_details"] for each in usages]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(
                min(each["prompt_tokens_details"]["cached_tokens"] for each in choices)
                for choices in of_prompts
            )
        },
        "completion_tokens_details": {
            name: sum(each[name] for each in details) for name in details[0]
        },
    }
