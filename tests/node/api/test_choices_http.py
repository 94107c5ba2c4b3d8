"""Several choices of one request: a request for each, one body, one stream, one end."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from fakes import FINISHED, STATS, Script, hangs, says
from http_node import ASK, PATIENCE_S, Node, raw_chat
from openai import APIError

from exo_node.node.api.shared.choices import merged
from exo_node.node.chat.requests import (
    AnswerProgress,
    CallPart,
    Event,
    Started,
    TextDelta,
    TokenLogprob,
)
from exo_node.placement.errors import PeerLost

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 1 + 2 + 3,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"accepted_prediction_tokens": 3, "reasoning_tokens": 0},
}


def by_choice(*scripts: Script) -> Script:
    """Each stream has the next script; the API asks for the choices in order."""
    turns = itertools.cycle(scripts)
    return lambda: next(turns)()


def answers() -> Script:
    """Three answers of one, two and three tokens."""
    return by_choice(
        *(
            says(
                AnswerProgress("prefill 3/3"),
                Started((7, 8, 9)),
                *(
                    TextDelta(
                        f"{number}",
                        (10 + number,),
                        (TokenLogprob(id=10, bytes=b"x", logprob=-0.5),),
                    )
                    for _ in range(1 + number)
                ),
                replace(FINISHED, completion_tokens=1 + number, cached_tokens=3 - number),
            )
            for number in range(3)
        )
    )


def test_choices_come_in_one_body_with_the_prompt_counted_once(node: Node, openai: Any) -> None:
    node.chat.scripts["demo"] = answers()
    reply = openai.chat.completions.create(model="demo", messages=ASK, n=3, seed=4, logprobs=True)
    body = reply.to_dict()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["0", "11", "222"]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert [len(choice["logprobs"]["content"]) for choice in body["choices"]] == [1, 2, 3]
    assert body["usage"] == USAGE and "generation_stats" not in body
    assert all(choice["generation_stats"] == STATS for choice in body["choices"])
    first, *others = node.chat.requests
    assert [each.id for each in others] == [f"{first.id}-1", f"{first.id}-2"]
    assert [each.choice for each in (first, *others)] == [0, 1, 2]
    assert {each.sampling.seed for each in (first, *others)} == {4}


def test_one_choice_is_the_request_that_it_was(node: Node) -> None:
    body = node.chat_reply(n=1).json
    assert body["generation_stats"] == STATS and "generation_stats" not in body["choices"][0]
    (request,) = node.chat.requests
    assert request.choice == 0


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("path", ["chat", "completions"])
def test_a_stream_has_the_chunks_of_all_choices_and_one_usage(
    node: Node, openai: Any, path: str, apart: bool
) -> None:
    node.chat.scripts["demo"] = answers()
    fields: dict[str, Any] = {"model": "demo", "n": 3, "stream": True}
    fields |= {"stream_options": {"include_usage": True}} if apart else {}
    create = openai.chat.completions.create if path == "chat" else openai.completions.create
    prompt = {"messages": ASK} if path == "chat" else {"prompt": "hi"}
    chunks = [chunk.to_dict() for chunk in create(**prompt, **fields)]
    texts, ends, roles = Counter[int](), dict[int, str](), Counter[int]()
    for chunk in chunks:
        assert chunk["id"] == chunks[0]["id"] and chunk["created"] == chunks[0]["created"]
        for choice in chunk["choices"]:
            number = choice["index"]
            assert number not in ends, "a chunk behind its choice's end"
            text = choice["delta"].get("content", "") if path == "chat" else choice["text"]
            roles[number] += path == "chat" and choice["delta"].get("role") == "assistant"
            texts[number] += len(text)
            if choice["finish_reason"] is not None:
                ends[number] = choice["finish_reason"]
                assert choice["generation_stats"] == STATS
    assert texts == {0: 1, 1: 2, 2: 3} and ends == dict.fromkeys(range(3), "stop")
    assert set(roles.values()) == {int(path == "chat")}
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert usages == [USAGE] and chunks[-1]["usage"] == USAGE
    assert (chunks[-1]["choices"] == []) is apart


def test_a_stream_of_choices_says_done_once_and_reports_progress_once(node: Node) -> None:
    node.chat.scripts["demo"] = answers()
    text = node.chat_reply(n=3, stream=True).body.decode()
    assert text.count("data: [DONE]") == 1 and text.endswith("data: [DONE]\n\n")
    assert text.count(": prefill 3/3") == 1


def test_calls_of_each_choice_have_ids_of_their_own(node: Node, openai: Any) -> None:
    call = CallPart(name="f", arguments="{}", ends=True)
    node.chat.scripts["demo"] = says(Started((1,)), call, call, FINISHED)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    fields: dict[str, Any] = {"model": "demo", "messages": ASK, "n": 8, "tools": tools}
    whole = openai.chat.completions.create(**fields)
    ids = [one.id for choice in whole.choices for one in choice.message.tool_calls]
    assert len(set(ids)) == 16 and {len(each) for each in ids} == {9}
    assert {choice.finish_reason for choice in whole.choices} == {"tool_calls"}
    streamed = list[tuple[int, int]]()
    for chunk in openai.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            streamed += [(choice.index, one.index) for one in choice.delta.tool_calls or ()]
    assert set(streamed) == set(itertools.product(range(8), range(2)))


@pytest.mark.parametrize("stream", [False, True])
def test_one_choice_that_fails_fails_the_request_and_ends_the_others(
    node: Node, openai: Any, stream: bool
) -> None:
    waits, fails = hangs(Started((1,))), says(then=PeerLost("stage 1 is gone"))
    node.chat.scripts["demo"] = by_choice(waits, fails, waits)
    with pytest.raises(APIError, match="stage 1 is gone"):
        _ = list(openai.chat.completions.create(model="demo", messages=ASK, n=3, stream=stream))
    assert node.chat.closed.wait(PATIENCE_S) and len(node.chat.streams) == 3
    assert node.chat.open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_choices(node: Node, stream: bool) -> None:
    node.chat.scripts["demo"] = hangs(Started((1,)), TextDelta("a", (1,)))
    with node.raw(raw_chat(n=8, stream=stream).replace(b"{port}", b"%d" % node.port)) as client:
        assert node.chat.began.wait(PATIENCE_S)
        if stream:
            assert client.recv(10)
    assert node.chat.closed.wait(PATIENCE_S)
    assert node.chat.open == 0 and len(node.chat.streams) == 8


BAD: list[object] = [0, 9, -1, 2.5, "2", True, [2], 2**70]


@pytest.mark.parametrize("value", BAD, ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_no_number_of_choices_is_refused(node: Node, path: str, value: object) -> None:
    prompt = {"messages": ASK} if "chat" in path else {"prompt": "hi"}
    reply = node.ask("POST", path, {"model": "demo", "n": value, **prompt})
    assert (reply.status, reply.error["param"]) == (400, "n"), reply.body
    assert not node.chat.requests


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"n": 3, "best_of": 2}, {"best_of": "1"}])
def test_best_of_asks_for_no_answer_that_is_not_returned(
    node: Node, fields: dict[str, object]
) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": ASK}),
    ):
        reply = node.ask("POST", path, {"model": "demo", **prompt, **fields})
        assert (reply.status, reply.error["param"]) == (400, "best_of")
    for fine in ({"best_of": 1}, {"n": 2, "best_of": 2}, {"n": 2, "best_of": None}):
        assert (
            node.ask("POST", "/v1/completions", {"model": "demo", "prompt": "a", **fine}).status
            == 200
        )


async def test_a_stream_that_is_slow_keeps_no_other_waiting() -> None:
    gate = asyncio.Event()

    async def slow() -> AsyncGenerator[Event]:
        yield Started((1,))
        await gate.wait()
        yield FINISHED

    async def quick() -> AsyncGenerator[Event]:
        for number in range(100):
            yield TextDelta("a", (number,))
        gate.set()
        yield FINISHED

    streams = [slow(), quick()]
    events = [each async for each in merged(streams)]
    assert sum(number == 1 for number, _ in events) == 101
    last_text = max(index for index, (_, event) in enumerate(events) if event != FINISHED)
    assert events.index((0, FINISHED)) > last_text
