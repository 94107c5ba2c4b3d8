"""Streams that carry data during long pauses of an answer, in every dialect.

The clock stands still but for what a script moves it by, so nothing here waits.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from itertools import pairwise
from typing import Any

import pytest
from clocks import Clock
from fakes import FINISHED, FakeChat, FakeOperations, Script
from http_node import ASK, BODIES, Node, no_files, serving_fakes
from pydantic import TypeAdapter

from exo_node.node.api.server import Services, build_app
from exo_node.node.chat.requests import (
    AnswerProgress,
    CallPart,
    Event,
    ReasoningDelta,
    Started,
    TextDelta,
)
from exo_node.node.machine.timing import LAN, LOCAL
from exo_node.placement.errors import PeerLost

IDLE_LIMIT_S = 8.0
"""A client's, as one sets Codex's `stream_idle_timeout_ms`."""
CALL = CallPart(name="weather", arguments='{"city": "Ulm"}', ends=True)
WRITING = 120
"""Half seconds."""
EVERYWHERE: tuple[Event, ...] = (
    AnswerProgress("loading 1/2"),
    Started((7, 8, 9)),
    AnswerProgress("prefill 3/3"),
    ReasoningDelta("hm"),
    ReasoningDelta(" so"),
    TextDelta("I ", (11,)),
    AnswerProgress("resuming: stage 1 is gone"),
    TextDelta("look.", (12,)),
    CALL,
    CALL,
    FINISHED,
)

HEARTBEATS = len(EVERYWHERE) - 1
"""The first one is no data: a refusal may still come."""


def paced(clock: Clock, *events: Event, step_s: float, then: Exception | None = None) -> Script:
    """These events, each `step_s` after the one before it."""

    async def script() -> AsyncGenerator[Event]:
        for event in events:
            clock.now += step_s
            yield event
        if then is not None:
            raise then

    return script


async def data_times(path: str, script: Script, clock: Clock) -> list[float]:
    """When the app sent data for that answer, by `clock`."""
    chat = FakeChat({"slow": script})
    services = Services(chat, FakeOperations())
    app = build_app(services, no_files, LAN, clock=clock)
    body = json.dumps({"model": "slow", "stream": True, **BODIES[path]}).encode()
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    times: list[float] = []

    async def receive() -> Any:
        return requests.pop() if requests else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        frame: bytes = message.get("body", b"")
        if frame and not frame.startswith(b":"):
            times.append(clock.now)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": headers}
    scope |= {"scheme": "http", "root_path": "", "http_version": "1.1"}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
    await app(scope, receive, send)
    return times


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "silence",
    [
        [Started((7,)), *(TextDelta("", (number,)) for number in range(WRITING)), CALL],
        [
            Started((7,)),
            *(AnswerProgress(f"prefill {number}/{WRITING}") for number in range(WRITING)),
        ],
        [AnswerProgress("downloading")] * WRITING,
        [Started((7,)), *([AnswerProgress("resuming: stage 1 is gone")] * WRITING)],
    ],
    ids=["a call is written", "a prompt is read", "a model is loaded", "a stage is replaced"],
)
def test_a_minute_without_news_outlives_a_clients_idle_limit(
    path: str, silence: list[Event]
) -> None:
    clock = Clock()
    script = paced(clock, *silence, FINISHED, step_s=0.5)
    began = clock.now
    times = [began, *asyncio.run(data_times(path, script, clock))]
    assert times[-1] - began > WRITING * 0.5
    longest = max(later - sooner for sooner, later in pairwise(times))
    assert longest < IDLE_LIMIT_S / 2


@pytest.fixture
def node() -> Generator[Node]:
    """`everywhere`: a heartbeat is due before each of its events."""
    clock = Clock()
    with serving_fakes(keep_alive_s=60.0, clock=clock) as running:
        running.chat.scripts["everywhere"] = paced(clock, *EVERYWHERE, step_s=61.0)
        running.chat.scripts["breaks"] = paced(
            clock, *EVERYWHERE[:5], step_s=61.0, then=PeerLost("a node is gone")
        )
        yield running


def stream_objects(node: Node, path: str, model: str = "everywhere") -> list[dict[str, Any]]:
    """The objects of a stream; each event's name is its type where it has one."""
    reply = node.ask("POST", path, {"model": model, "stream": True, **BODIES[path]})
    assert reply.status == 200
    lines = reply.body.decode().splitlines()
    if path.startswith("/api/"):
        return [json.loads(line) for line in lines]
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    objects = [json.loads(text) for text in texts if text != "[DONE]"]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert not names or names == [one["type"] for one in objects]
    return objects


def validate(kind: Any, values: list[dict[str, Any]]) -> None:
    adapter = TypeAdapter[Any](kind)
    for value in values:
        _ = adapter.validate_python(value)


def test_openais_chat_client_reads_past_heartbeats_anywhere(node: Node, openai: Any) -> None:
    types: Any = pytest.importorskip("openai.types.chat")
    chunks = stream_objects(node, "/v1/chat/completions")
    heartbeats = [c for c in chunks if c["choices"][0]["delta"] == {}][:-1]
    assert len(heartbeats) == HEARTBEATS
    validate(types.ChatCompletionChunk, chunks)
    with openai.chat.completions.stream(model="everywhere", messages=ASK) as stream:
        choice = stream.until_done().get_final_completion().choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "I look.")
    calls = [call.function.arguments for call in choice.message.tool_calls]
    assert calls == [CALL.arguments] * 2
    text = openai.completions.create(model="everywhere", prompt="hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in text) == "I look."


def test_openais_responses_client_reads_past_heartbeats_anywhere(node: Node, openai: Any) -> None:
    types: Any = pytest.importorskip("openai.types.responses")
    events = stream_objects(node, "/v1/responses")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    beats = [event for event in events if event["type"] == "response.in_progress"]
    assert len(beats) == HEARTBEATS
    until_completed = events[: [event["type"] for event in events].index("response.completed")]
    validate(types.ResponseStreamEvent, until_completed)
    with openai.responses.stream(model="everywhere", input="hi") as stream:
        response = stream.until_done().get_final_response()
    assert response.output_text == "I look."
    assert [item.type for item in response.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert [event["type"] for event in stream_objects(node, "/v1/responses", "breaks")][-1] == (
        "response.failed"
    )


def test_anthropics_client_reads_past_pings_anywhere(node: Node, anthropic: Any) -> None:
    package: Any = pytest.importorskip("anthropic")
    events = stream_objects(node, "/v1/messages")
    pings = [event for event in events if event == {"type": "ping"}]
    assert len(pings) == HEARTBEATS
    others = [event for event in events if event not in pings]
    validate(package.types.RawMessageStreamEvent, others)
    with anthropic.messages.stream(model="everywhere", max_tokens=9, messages=ASK) as stream:
        message = stream.get_final_message()
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in message.content[2:]] == [{"city": "Ulm"}] * 2
    with pytest.raises(package.APIStatusError, match="a node is gone"):
        for _ in anthropic.messages.create(model="breaks", max_tokens=9, messages=ASK, stream=True):
            pass


def test_ollamas_client_reads_past_empty_lines_of_an_answer_anywhere(
    node: Node, ollama: Any
) -> None:
    package: Any = pytest.importorskip("ollama")
    for line in stream_objects(node, "/api/chat"):
        _ = package.ChatResponse.model_validate(line)
    parts = list(ollama.chat(model="everywhere", messages=ASK, stream=True))
    assert "".join(part.message.content for part in parts) == "I look."
    assert "".join(part.message.thinking or "" for part in parts) == "hm so"
    assert sum(len(part.message.tool_calls or ()) for part in parts) == 2
    assert [part.done for part in parts].index(True) == len(parts) - 1
    parts = list(ollama.generate(model="everywhere", prompt="hi", stream=True))
    assert "".join(part.response for part in parts) == "I look."
    assert len(parts) > len(EVERYWHERE)


def test_a_refusal_within_a_few_seconds_is_still_a_status() -> None:
    clock = Clock()
    with serving_fakes(clock=clock) as node:

        async def refuses() -> AsyncGenerator[Event]:
            clock.now += 2 * LOCAL.keep_alive_s
            raise PeerLost("no head answers")
            yield

        node.chat.scripts["lost"] = refuses
        assert node.chat_reply(model="lost", stream=True).status == 503
