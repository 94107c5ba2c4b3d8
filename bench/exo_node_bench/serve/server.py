"""A server under test: its address, its model, and requests to it."""

import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httpx2

from exo_node.node.machine.log import escape_controls
from exo_node.placement.errors import ExoNodeError

from .answer import Answer, AnswerFailure, AnswerReader

CONNECT_S: Final = 10.0
_MAX_EVENT: Final = 16 << 20
_MAX_REFUSAL: Final = 1 << 16
_SHOWN: Final = 300
_LISTED: Final = 5
_REFUSED: Final = frozenset({429, 503})


class UnusableServer(ExoNodeError):
    """A server that cannot be measured; the message has the reason and the remedy."""

    def __init__(self, message: str) -> None:
        """The message becomes one line without control characters: it may quote the server."""
        super().__init__(escape_controls(" ".join(message.split())))


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and the fields of every request to it."""

    name: str
    url: str
    model: str = ""
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    def request(self, messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }


@asynccontextmanager
async def connections(silence_s: float, most: int = 1) -> AsyncGenerator[httpx2.AsyncClient]:
    """A client of at most `most` connections; a read fails after `silence_s` without a byte."""
    timeout = httpx2.Timeout(silence_s, connect=CONNECT_S)
    limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most)
    # Without the environment's proxies, which would be measured too.
    async with httpx2.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
        yield client


async def ask(
    client: httpx2.AsyncClient,
    server: Server,
    messages: list[dict[str, Any]],
    max_tokens: int,
    turn: int = 0,
) -> Answer:
    """Streams one answer. Any failure is returned in the answer, for a bench counts it."""
    reader = AnswerReader(time.perf_counter())
    url = f"{server.url}/v1/chat/completions"
    body = server.request(messages, max_tokens)
    try:
        async with client.stream("POST", url, json=body, headers=server.headers) as response:
            if response.status_code != 200:
                return await _refusal(response, reader.started, turn)
            async for event in httpx2.EventSource(response, _MAX_EVENT):
                reader.take(time.perf_counter(), event.data)
                if len(reader.chunks) > max_tokens + _SHOWN:
                    reader.fail("more text than max_tokens allows")
                    break
    except httpx2.TimeoutException as fault:
        reader.fail("no byte within the time limit", type(fault).__name__)
    except (httpx2.HTTPError, httpx2.StreamError) as fault:
        reader.fail("the connection failed", f"{type(fault).__name__} {fault}")
    return reader.answer(time.perf_counter(), turn)


async def _refusal(response: httpx2.Response, started: float, turn: int) -> Answer:
    text = bytearray()
    async for part in response.aiter_bytes():
        text += part
        if len(text) > _MAX_REFUSAL:
            break
    failure = AnswerFailure(f"HTTP {response.status_code}", _reason(text.decode(errors="replace")))
    refused = response.status_code in _REFUSED
    return Answer(started, time.perf_counter(), failure=failure, refused=refused, turn=turn)


def _reason(text: str) -> str:
    """The message of an error's body, else its beginning; one line."""
    try:
        match json.loads(text):
            case {"error": {"message": str(message)}}:
                text = message
            case _:
                pass
    except (ValueError, RecursionError):
        pass  # another form, or a proxy's page
    return " ".join(text[:_SHOWN].split())


async def fetch(
    client: httpx2.AsyncClient, server: Server, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """GET `path`, or POST `body` to it; the JSON object of the reply. Raises UnusableServer."""
    method, url = "GET" if body is None else "POST", f"{server.url}{path}"
    what = f"server {server.name}: {method} {url}"
    try:
        reply = await client.request(method, url, json=body, headers=server.headers)
        value: object = reply.json() if reply.status_code == 200 else None
    except httpx2.ReadTimeout as fault:
        raise UnusableServer(f"{what}: no byte within the time limit; see its log") from fault
    except (httpx2.HTTPError, httpx2.StreamError) as fault:
        remedy = "start the server, or correct its --server"
        raise UnusableServer(f"{what}: {type(fault).__name__} {fault}; {remedy}") from fault
    except (ValueError, RecursionError) as fault:
        raise UnusableServer(f"{what} gives no JSON; is this an OpenAI server?") from fault
    if reply.status_code != 200:
        text = _reason(reply.text)
        remedy = "; give its key by --key NAME=VARIABLE" if reply.status_code == 401 else ""
        raise UnusableServer(f"{what} gives HTTP {reply.status_code}: {text}{remedy}")
    if not isinstance(value, dict):
        raise UnusableServer(f"{what} gives no JSON object; is this an OpenAI server?")
    return cast(dict[str, Any], value)


def choose_model(server: str, listing: Mapping[str, Any]) -> str:
    """The model of `GET /v1/models` that is loaded, or the only one. Raises UnusableServer.

    exo-node lists the models on its disks too, each with `loaded`; other servers list what answers.
    """
    entries: list[Mapping[str, Any]] = [
        cast(Mapping[str, Any], entry) for entry in _entries(listing) if isinstance(entry, dict)
    ]
    ids = [str(entry.get("id")) for entry in entries if entry.get("loaded", True)]
    if len(ids) == 1:
        return ids[0]
    if not entries:
        raise UnusableServer(f"{server}: /v1/models lists no model; load one first")
    if ids:
        raise UnusableServer(
            f"{server} has {len(ids)} models ({_some(ids)}); say which is asked: --model ID"
        )
    on_disk = _some([str(entry.get("id")) for entry in entries])
    raise UnusableServer(
        f"{server} has no model loaded; name one with --model ID, which loads it (on disk: "
        f"{on_disk})"
    )


def _entries(listing: Mapping[str, Any]) -> list[object]:
    data = listing.get("data")
    return cast(list[object], data) if isinstance(data, list) else []


def _some(ids: list[str]) -> str:
    return ", ".join([*ids[:_LISTED], *(["…"] if len(ids) > _LISTED else [])])
