"""One streamed chat request to an OpenAI server, with the time of each piece of its answer."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httpx2

_SHOWN: Final = 200
"""Characters of a server's error that are kept."""
_TEXTS: Final = ("content", "reasoning_content", "reasoning")
_MAX_EVENT: Final = 16 << 20
_REFUSED: Final = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and the fields of every request to it."""

    name: str
    url: str
    model: str
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def request(self, messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's token counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome; times are of one monotonic clock, in seconds."""

    started: float
    ended: float
    chunks: tuple[float, ...]
    """The times of the events with text; an event may contain several tokens."""
    text: str
    usage: Usage | None
    finish_reason: str
    error: str
    """The reason of a failure; empty for an answer."""
    refused: bool = False
    """The server is busy: HTTP 429 or 503."""
    turn: int = 0


@dataclass(slots=True)
class Reading:
    """Collects the events of one stream; times are arguments."""

    started: float
    chunks: list[float] = field(default_factory=list[float])
    text: list[str] = field(default_factory=list[str])
    usage: Usage | None = None
    finish_reason: str = ""
    error: str = ""
    has_ended: bool = False

    def take(self, at: float, data: str) -> None:
        """Reads one event's data. An event without text, such as the role's, is not a token."""
        if data.strip() == "[DONE]":
            self.has_ended = True
            return
        try:
            parsed: Any = json.loads(data)
        except ValueError:
            self.error = self.error or f"no JSON: {data[:_SHOWN]}"
            return
        if not isinstance(parsed, dict):
            self.error = self.error or f"no object: {data[:_SHOWN]}"
            return
        event = cast(dict[str, Any], parsed)
        if fault := event.get("error"):
            self.error = self.error or f"in the stream: {str(fault)[:_SHOWN]}"
        if usage := event.get("usage"):
            self.usage = usage_of(usage) or self.usage
        for choice in event.get("choices") or ():
            self._choice(at, choice)

    def _choice(self, at: float, choice: Mapping[str, Any]) -> None:
        delta: Mapping[str, Any] = choice.get("delta") or {}
        text = "".join(delta.get(name) or "" for name in _TEXTS)
        if text or delta.get("tool_calls"):
            self.chunks.append(at)
            self.text.append(text)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def answer(self, ended: float, turn: int) -> Answer:
        """The outcome. A stream that ends without a reason or without text is a failure."""
        error = self.error
        if not error and not (self.finish_reason or self.has_ended):
            error = "the stream ended before the answer did"
        if not error and not self.chunks:
            error = "an answer without text"
        return Answer(
            self.started,
            ended,
            tuple(self.chunks),
            "".join(self.text),
            self.usage,
            self.finish_reason,
            error,
            turn=turn,
        )


def usage_of(value: Any) -> Usage | None:
    match value:
        case {"prompt_tokens": int(prompt), "completion_tokens": int(completion), **others}:
            details = others.get("prompt_tokens_details") or {}
            return Usage(prompt, completion, details.get("cached_tokens"))
        case _:
            return None


async def ask(
    client: httpx2.AsyncClient,
    server: Server,
    messages: list[dict[str, Any]],
    max_tokens: int,
    turn: int = 0,
) -> Answer:
    """Streams one answer. Any failure is returned in the answer, for a bench counts it."""
    reading = Reading(time.perf_counter())
    url = f"{server.url}/v1/chat/completions"
    body = server.request(messages, max_tokens)
    try:
        async with client.stream("POST", url, json=body, headers=server.headers) as response:
            if response.status_code != 200:
                return await _refusal(response, reading.started, turn)
            async for event in httpx2.EventSource(response, _MAX_EVENT):
                reading.take(time.perf_counter(), event.data)
    except (httpx2.HTTPError, httpx2.StreamError) as fault:
        reading.error = reading.error or f"{type(fault).__name__}: {fault}"[:_SHOWN]
    return reading.answer(time.perf_counter(), turn)


async def _refusal(response: httpx2.Response, started: float, turn: int) -> Answer:
    text = (await response.aread()).decode(errors="replace")
    error = f"HTTP {response.status_code}: {' '.join(text.split())[:_SHOWN]}"
    refused = response.status_code in _REFUSED
    return Answer(started, time.perf_counter(), (), "", None, "", error, refused, turn)
