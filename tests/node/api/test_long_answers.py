"""The longest answers of each dialect: the event loop runs while they are encoded and sent."""

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from fakes import FINISHED, repeats
from http_node import BODIES, serving_fakes

from exo_node.node.api.http.dialects import WholeAnswer
from exo_node.node.api.http.long_bodies import json_response
from exo_node.node.api.http.sse import EventStream
from exo_node.node.api.openai.openai_api import CHAT
from exo_node.node.api.openai.openai_schema import ChatBody
from exo_node.node.api.shared.choices import joined
from exo_node.node.chat.requests import (
    CallPart,
    Event,
    PromptLogprobs,
    Started,
    TextDelta,
    TokenLogprob,
)
from exo_node.placement.ids import RequestId

TOKENS = 600
TOP = tuple(
    TokenLogprob(id=number, bytes=b"token%d" % number, logprob=-1.5) for number in range(20)
)
ENTRIES = tuple(
    TokenLogprob(id=number, bytes=b"word", logprob=-0.5, top=TOP) for number in range(TOKENS)
)
ARGUMENTS = json.dumps({"rows": [{"x": n, "y": "text"} for n in range(40_000)]})
CALL_OR_TEXT = (
    CallPart(name="f", arguments=ARGUMENTS, ends=True),
    TextDelta("text " * 200_000, (1,)),
)
GAP_S = 0.25
"""CPU seconds of the loop's thread in one of its steps. One step took up to 1.5 s."""
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
MANY = {"type": "object", "properties": {f"x{n}": {"type": "string"} for n in range(1000)}}


class Watched:
    """A script that watches the loop from its first event to the end of the test."""

    def __init__(self, *events: Event, pause_every: int = 32) -> None:
        self._events = events
        self._pause_every = pause_every
        self._ticker: asyncio.Task[None] | None = None
        self.gaps: list[float] = []

    async def __call__(self) -> AsyncGenerator[Event]:
        self._ticker = self._ticker or asyncio.create_task(self._tick())
        yield Started(tuple(range(TOKENS)))
        for number, event in enumerate(self._events):
            if number % self._pause_every == 0:
                await asyncio.sleep(0)
            yield event
        yield FINISHED

    async def _tick(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.gaps.append(now - last)
            last = now


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No collection of garbage: after ten thousand tests one takes longer than the limit."""
    gc.disable()
    yield
    gc.enable()


def deltas() -> list[TextDelta]:
    return [TextDelta("word ", (each.id,), (each,)) for each in ENTRIES]


PROMPT = [PromptLogprobs(ENTRIES[at : at + 250]) for at in range(0, TOKENS, 250)]


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("path", "fields", "events"),
    [
        ("/v1/chat/completions", {"n": 8, "logprobs": True, "top_logprobs": 20}, deltas()),
        ("/v1/chat/completions", {"tools": CHAT_TOOLS}, CALL_OR_TEXT),
        ("/v1/completions", {"n": 8, "logprobs": 5, "echo": True}, [*PROMPT, *deltas()]),
        ("/v1/completions", {"logprobs": 5, "echo": True, "max_tokens": 0}, [*PROMPT * 8]),
        ("/v1/responses", {"tools": [{"type": "function", **FUNCTION}]}, CALL_OR_TEXT),
        (
            "/v1/responses",
            {"tools": [{"type": "function", **FUNCTION, "parameters": MANY}] * 40},
            [TextDelta("text", (1,))],
        ),
        pytest.param(
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": MANY}]},
            CALL_OR_TEXT,
            marks=pytest.mark.smoke,
        ),
        ("/api/chat", {"stream": False, "tools": CHAT_TOOLS}, CALL_OR_TEXT),
        ("/api/generate", {"stream": False}, [TextDelta("text " * 200_000, (1,))]),
    ],
)
def test_the_loop_runs_while_the_longest_answers_are_given(
    path: str, fields: dict[str, Any], events: Any
) -> None:
    script = Watched(*events)
    with serving_fakes() as node:
        node.chat.scripts["demo"] = script
        reply = node.ask("POST", path, {"model": "demo", **BODIES[path], **fields})
        longest = max(script.gaps)
    assert reply.status == 200
    assert longest < GAP_S
    if "n" in fields:
        choices = reply.json["choices"]
        assert len(choices) == 8
        lists = choices[7]["logprobs"]
        assert len(lists.get("content") or lists["top_logprobs"]) >= TOKENS


def test_a_long_body_needs_little_memory_beside_its_answer() -> None:
    """4 MB of JSON; with all of its lists in memory it took 15 MB and more."""
    body = {"model": "m", **BODIES["/v1/chat/completions"], "n": 4, "logprobs": True}
    parsed = CHAT.parse(ChatBody.model_validate({**body, "top_logprobs": 20}), RequestId("req_1"))
    answer = WholeAnswer(texts=["word "] * TOKENS, logprobs=list(ENTRIES))

    async def sent_bytes() -> int:
        response = json_response(
            joined([each.whole(answer, FINISHED) for each in parsed.renderers])
        )
        assert isinstance(response, EventStream)
        sizes = list[int]()

        async def send(message: Any) -> None:
            sizes.append(len(message.get("body", b"")))

        await response({}, send, send)  # pyright: ignore[reportArgumentType]
        return sum(sizes)

    tracemalloc.start()
    try:
        size = asyncio.run(sent_bytes())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 3_000_000 and peak < 3_000_000


CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 20}


@pytest.mark.parametrize(
    ("path", "fields", "is_refused_at_once"),
    [
        ("/v1/chat/completions", {**CHAT_LOGPROBS, "n": 8, "max_tokens": 6000}, True),
        ("/v1/chat/completions", {**CHAT_LOGPROBS, "max_tokens": 50_000}, True),
        ("/v1/completions", {"logprobs": 5, "max_tokens": 200_000}, True),
        ("/v1/completions", {"logprobs": 5, "prompt": ["a"] * 16, "max_tokens": 20_000}, True),
        ("/v1/chat/completions", CHAT_LOGPROBS, False),
        ("/v1/chat/completions", {**CHAT_LOGPROBS, "n": 8}, False),
        ("/v1/completions", {"logprobs": 5, "n": 4, "max_tokens": None}, False),
        ("/v1/completions", {"logprobs": 5, "echo": True, "max_tokens": 0}, False),
    ],
)
def test_the_log_probabilities_of_a_whole_answer_are_bounded(
    path: str, fields: dict[str, Any], is_refused_at_once: bool
) -> None:
    with serving_fakes() as node:
        event = PromptLogprobs(ENTRIES) if "echo" in fields else TextDelta("w", (1,), ENTRIES)
        node.chat.scripts["demo"] = repeats(event)
        reply = node.ask("POST", path, {"model": "demo", **BODIES[path], **fields})
        error = reply.json["error"]
        assert (reply.status, error["param"]) == (400, "logprobs")
        assert '"stream": true' in error["message"] and "1,000,000" in error["message"]
        if is_refused_at_once:
            assert not node.chat.requests and not node.chat.streams
            return
        assert node.chat.closed.wait(30) and node.chat.open == 0
        assert node.chat.events <= 100


@pytest.mark.smoke
def test_answers_within_the_limit_or_streamed_are_given() -> None:
    with serving_fakes() as node:
        path = "/v1/chat/completions"
        body = {"model": "demo", **BODIES[path], **CHAT_LOGPROBS, "n": 8, "max_tokens": 5900}
        assert node.ask("POST", path, body).status == 200
        longer = {**body, "max_tokens": 32_000, "stream": True}
        assert node.ask("POST", path, longer).status == 200
        without = {**body, "logprobs": False, "top_logprobs": None, "max_tokens": 10_000_000}
        assert node.ask("POST", path, without).status == 200
