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
            request, id=RequestId(f"{request.id}-{number}" if number else request.id), choice=number
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
    """The bodies of one request's choices, whole or as chunks.

    `usage_apart`: the statistics of all choices have a chunk of their own. `prompts`: their number,
    each of which has as many of the choices.
    """

    count: int
    usage_apart: bool
    prompts: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    _ends: dict[int, Finished] = field(default_factory=dict[int, Finished])

    def body(
        self, head: Mapping[str, Any], choice: Mapping[str, Any], end: Finished
    ) -> dict[str, Any]:
        """A choice that has ended, alone. That of the last one has the statistics of all."""
        self._ends[choice["index"]] = end
        own = {"generation_stats": dict(end.stats)} if self.count > 1 else {}
        return {**head, "choices": [{**choice, **own}], **self._totals()}

    def last(self, head: Mapping[str, Any], choice: Mapping[str, Any], end: Finished) -> bytes:
        """The frames of a choice's last chunk. After that of the last choice the stream ends."""
        chunk, totals = self.body(head, choice, end), self._totals()
        if not totals:
            return data(chunk)
        if not self.usage_apart:
            return data(chunk) + DONE
        plain = {name: value for name, value in chunk.items() if name not in totals}
        return data(plain) + data({**plain, "choices": [], **totals}) + DONE

    def _totals(self) -> dict[str, Any]:
        """`usage` of all choices when they have ended, where a prompt counts once; and
        `generation_stats` of a sole choice.

        `cached_tokens` of a prompt is the least of any of its choices: the others begin after what
        the first has read.
        """
        if len(self._ends) < self.count:
            return {}
        ends = [self._ends[number] for number in range(self.count)]
        of_each = self.count // self.prompts
        of_prompts = [ends[at : at + of_each] for at in range(0, self.count, of_each)]
        prompt = sum(choices[0].prompt_tokens for choices in of_prompts)
        completion = sum(end.completion_tokens for end in ends)
        cached = sum(min(end.cached_tokens for end in choices) for choices in of_prompts)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(end.accepted_draft_tokens for end in ends),
                "reasoning_tokens": sum(end.reasoning_tokens for end in ends),
            },
        }
        sole = {"generation_stats": dict(ends[0].stats)} if self.count == 1 else {}
        return {"usage": usage, **sole}


def joined(bodies: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One body of those of all choices."""
    if len(bodies) == 1:
        return bodies[0]
    return {**bodies[-1], "choices": [body["choices"][0] for body in bodies]}
