"""The chat endpoint over a real server: its frames, its statistics, its errors, its ends."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from fakes import ANSWER, FINISHED, STATS, hangs, repeats, says
from http_node import ASK, PATIENCE_S, Node, Reply, raw_chat
from openai import APIError, BadRequestError, NotFoundError, RateLimitError

from exo_node.mtp.types import Sampling
from exo_node.node.chat.requests import (
    AnswerProgress,
    CallPart,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
)
from exo_node.placement.errors import (
    ContextLengthExceeded,
    DownloadFailed,
    ExoNodeError,
    InsufficientMemory,
    InvalidCheckpoint,
    LoadFailed,
    NumericError,
    PeerLost,
    QueueFull,
)
from exo_node.proto import peer_pb2 as pb
from exo_node.proto.fields import set_fields

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"accepted_prediction_tokens": 1, "reasoning_tokens": 0},
}


def frames(reply: Reply) -> list[str]:
    text = reply.body.decode()
    assert text.endswith("\n\n")
    assert "\r" not in text
    return text[:-2].split("\n\n")


def chunks(reply: Reply) -> list[Any]:
    texts = [frame.removeprefix("data: ") for frame in frames(reply) if frame.startswith("data:")]
    return [json.loads(text) for text in texts if text != "[DONE]"]


def test_an_answer_comes_whole_with_usage_and_statistics(node: Node) -> None:
    reply = node.chat_reply()
    body = reply.json
    assert body.pop("id") == reply.headers["x-request-id"].replace("req_", "chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "héllo", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
        "generation_stats": STATS,
    }


def test_a_stream_has_progress_a_role_text_an_end_statistics_and_done(node: Node) -> None:
    reply = node.chat_reply(stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert frames(reply)[:2] == [": prefill 2/3", ": prefill 3/3"]
    assert frames(reply)[-1] == "data: [DONE]"
    spoken = chunks(reply)
    assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in spoken] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "hé"}, None),
        ({"content": "llo"}, None),
        ({}, "stop"),
    ]
    assert [c.get("usage") for c in spoken] == [None, None, None, USAGE]
    assert spoken[-1]["generation_stats"] == STATS
    assert {chunk["object"] for chunk in chunks(reply)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks(reply)}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
def test_every_chunk_has_a_choice_unless_the_usage_was_asked_for(
    node: Node, options: dict[str, object] | None
) -> None:
    """OpenAI's own example reads `choices[0]` of every chunk."""
    all_chunks = chunks(node.chat_reply(stream=True, stream_options=options))
    assert all(len(chunk["choices"]) == 1 for chunk in all_chunks)
    last = all_chunks[-1]
    assert (last["usage"], last["choices"][0]["finish_reason"]) == (USAGE, "stop")


def test_the_usage_has_a_chunk_of_its_own_where_it_was_asked_for(node: Node) -> None:
    reply = node.chat_reply(stream=True, stream_options={"include_usage": True})
    *spoken, last = chunks(reply)
    assert not any("usage" in chunk for chunk in spoken)
    assert (last["choices"], last["usage"], last["generation_stats"]) == ([], USAGE, STATS)
    assert spoken[-1]["choices"][0]["finish_reason"] == "stop"
    assert frames(reply)[-1] == "data: [DONE]"


THOUGHT = (
    Started((7,)),
    TextDelta("", (10,)),
    ReasoningDelta("hm"),
    ReasoningDelta("m"),
    TextDelta("I look.", (11,)),
    CallPart(name="weather", arguments='{"city": "Ulm"}', ends=True),
    CallPart(name="weather", arguments='{"city": "Bonn"}', ends=True),
    FINISHED,
)


def test_reasoning_and_calls_stand_apart_from_the_content(node: Node) -> None:
    node.chat.scripts["demo"] = says(*THOUGHT)
    (choice,) = node.chat_reply().json["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "hmm")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Ulm"}'},
        {"name": "weather", "arguments": '{"city": "Bonn"}'},
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(re.fullmatch("[a-z0-9]{9}", each) for each in ids)
    assert choice["finish_reason"] == "tool_calls"


def test_an_answer_of_calls_alone_has_no_content(node: Node) -> None:
    node.chat.scripts["demo"] = says(
        Started((7,)), CallPart(name="f", arguments="{}", ends=True), FINISHED
    )
    (choice,) = node.chat_reply().json["choices"]
    assert choice["message"]["content"] is None
    node.chat.scripts["demo"] = says(
        Started((7,)),
        CallPart(name="f", arguments="{}", ends=True),
        replace(FINISHED, reason="length"),
    )
    assert node.chat_reply().json["choices"][0]["finish_reason"] == "length"


def test_reasoning_and_calls_are_streamed_in_their_order(node: Node) -> None:
    node.chat.scripts["demo"] = says(*THOUGHT)
    choices = [chunk["choices"][0] for chunk in chunks(node.chat_reply(stream=True))]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[:4] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"reasoning_content": "m"},
        {"content": "I look."},
    ]
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [call["index"] for (call,) in calls] == [0, 1]
    assert [call["function"]["arguments"] for (call,) in calls] == [
        '{"city": "Ulm"}',
        '{"city": "Bonn"}',
    ]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_tools_and_options_reach_the_chat_service(node: Node) -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    tools = [{"type": "function", "function": function}]
    node.chat_reply(
        tools=tools, reasoning_effort="none", chat_template_kwargs={"enable_thinking": False}
    )
    node.chat_reply(tools=tools, tool_choice="none")
    first, second = node.chat.requests
    rendered = {"name": "f", "description": "", "parameters": {"type": "object"}}
    assert first.tools == ({"type": "function", "function": rendered},)
    assert first.options == {"thinking": False, "effort": "none"}
    assert (second.tools, second.options) == ((), {})


def test_token_ids_come_on_request_in_the_body(node: Node) -> None:
    body = node.chat_reply(return_token_ids=True).json
    assert body["prompt_token_ids"] == [7, 8, 9]
    assert body["choices"][0]["token_ids"] == [10, 11, 12]


def test_token_ids_come_on_request_in_each_chunk(node: Node) -> None:
    reply = node.chat_reply(return_token_ids=True, stream=True)
    spoken = [chunk for chunk in chunks(reply) if chunk["choices"]]
    assert [chunk.get("prompt_token_ids") for chunk in spoken] == [[7, 8, 9], *[None] * 4]
    assert [chunk["choices"][0]["token_ids"] for chunk in spoken] == [[], [10], [11], [12], []]


def test_chunks_with_token_ids_say_which_were_drafted(node: Node) -> None:
    drafted = TextDelta("a b", (10, 11, 12), accepted_drafts=2)
    node.chat.scripts["demo"] = says(Started((7,)), drafted, TextDelta("c", (13,)), FINISHED)
    for with_ids, expected in ((True, [0, 2, 0, 0]), (False, [None] * 4)):
        reply = node.chat_reply(return_token_ids=with_ids, stream=True)
        choices = [chunk["choices"][0] for chunk in chunks(reply) if chunk["choices"]]
        assert [choice.get("accepted_draft_tokens") for choice in choices] == expected


# "hé" from two tokens of which the first holds half of the é, then the end token.
SPOKEN = (
    Started((7,)),
    TextDelta(
        "h",
        (10,),
        (
            TokenLogprob(
                id=10,
                bytes=b"h\xc3",
                logprob=-0.5,
                top=(TokenLogprob(id=10, bytes=b"h\xc3", logprob=-0.5),),
            ),
        ),
    ),
    TextDelta("", (11,), (TokenLogprob(id=11, bytes=b"\xa9", logprob=-math.inf),)),
    TextDelta(
        "",
        (12,),
        (
            TokenLogprob(
                id=12,
                bytes=b"",
                logprob=-0.25,
                top=(TokenLogprob(id=13, bytes=b"!", logprob=-0.1),),
            ),
        ),
    ),
    TextDelta("é", ()),
    FINISHED,
)
ENTRIES: list[dict[str, Any]] = [
    {
        "token": "h\ufffd",
        "logprob": -0.5,
        "bytes": [104, 195],
        "top_logprobs": [{"token": "h\ufffd", "logprob": -0.5, "bytes": [104, 195]}],
    },
    {"token": "\ufffd", "logprob": -9999.0, "bytes": [169], "top_logprobs": []},
    {
        "token": "",
        "logprob": -0.25,
        "bytes": None,
        "top_logprobs": [{"token": "!", "logprob": -0.1, "bytes": [33]}],
    },
]


def test_logprobs_have_an_entry_for_each_token_of_the_answer(node: Node) -> None:
    node.chat.scripts["demo"] = says(*SPOKEN)
    body = node.chat_reply(logprobs=True, top_logprobs=1, return_token_ids=True).json
    (choice,) = body["choices"]
    assert choice["logprobs"] == {"content": ENTRIES, "refusal": None}
    assert len(choice["token_ids"]) == len(ENTRIES) == body["usage"]["completion_tokens"]
    whole = b"".join(bytes(entry["bytes"] or ()) for entry in choice["logprobs"]["content"])
    assert whole.decode() == choice["message"]["content"] == "hé"


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_no_logprob_that_json_cannot_say_reaches_a_client(node: Node, logprob: float) -> None:
    spoken = TextDelta("h", (10,), (TokenLogprob(id=10, bytes=b"h", logprob=logprob),))
    node.chat.scripts["demo"] = says(Started((7,)), spoken, FINISHED)
    reply = node.chat_reply(logprobs=True)
    (entry,) = reply.json["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999.0


def test_logprobs_come_with_the_chunk_of_their_tokens_also_where_it_has_no_text(node: Node) -> None:
    node.chat.scripts["demo"] = says(*SPOKEN)
    spoken = [c["choices"][0] for c in chunks(node.chat_reply(logprobs=True, stream=True))]
    assert [(c["delta"].get("content"), c["logprobs"]) for c in spoken] == [
        ("", None),
        ("h", {"content": ENTRIES[:1], "refusal": None}),
        ("", {"content": ENTRIES[1:2], "refusal": None}),
        ("", {"content": ENTRIES[2:], "refusal": None}),
        ("é", None),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None)),
        ({"logprobs": None, "top_logprobs": 0}, (None, None)),
        ({"logprobs": False}, (None, None)),
        ({"logprobs": True, "top_logprobs": None}, (0, None)),
        ({"logprobs": True, "top_logprobs": 20}, (20, None)),
        ({"logprobs": True}, (0, None)),
        ({"logprobs": True, "top_logprobs": 5, "draft_policy": "fixed"}, (5, "fixed")),
        ({"draft_policy": "adaptive"}, (None, "adaptive")),
    ],
)
def test_logprobs_and_draft_policy_reach_the_chat_service(
    node: Node, fields: dict[str, object], expected: tuple[object, object]
) -> None:
    node.chat_reply(**fields)
    (request,) = node.chat.requests
    assert (set_fields(request.output).get("top_logprobs"), request.draft_policy) == expected


def test_the_request_reaches_the_chat_service_with_what_it_leaves_to_the_card(node: Node) -> None:
    reply = node.chat_reply(
        messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": "u"}],
        temperature=0,
        min_p=0.25,
        seed=5,
        stop="END",
        max_tokens=10,
        max_completion_tokens=20,
        num_draft_tokens=0,
    )
    (request,) = node.chat.requests
    assert request.id == reply.headers["x-request-id"]
    assert request.sampling == Sampling(temperature=0, min_p=0.25, seed=5)
    assert request.explicit_fields == {"temperature", "min_p", "seed"}
    limits = pb.Limits(stop=["END"], max_tokens=20)
    assert (request.limits, request.num_draft_tokens) == (limits, 0)
    assert request.messages == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
    )


def test_a_top_p_of_0_is_the_likeliest_token_and_minus_one_is_nothing(node: Node) -> None:
    node.chat_reply(top_p=0, seed=-1, max_tokens=-1)
    (request,) = node.chat.requests
    assert 0 < request.sampling.top_p < 1e-6  # 0 would be no filter at all
    assert (request.sampling.seed, request.limits) == (None, pb.Limits())
    assert "seed" not in request.explicit_fields


REFUSALS: list[tuple[ExoNodeError, int, str, str | None, str | None]] = [
    (ContextLengthExceeded("x"), 400, "invalid_request_error", None, None),
    (QueueFull("x"), 429, "rate_limit_error", "1", "true"),
    (PeerLost("x"), 503, "server_error", "2", "true"),
    (InsufficientMemory("x"), 503, "server_error", None, "false"),
    (NumericError("x"), 500, "server_error", None, "false"),
    (LoadFailed("x"), 503, "server_error", "30", "false"),
    (DownloadFailed("x"), 503, "server_error", "30", "false"),
    (InvalidCheckpoint("x"), 503, "server_error", None, "false"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", REFUSALS, ids=[case[0].code for case in REFUSALS])
def test_a_refusal_before_the_first_event_is_a_status(
    node: Node, case: tuple[ExoNodeError, int, str, str | None, str | None], stream: bool
) -> None:
    error, status, kind, retry_after, should_retry = case
    node.chat.scripts["refused"] = says(then=type(error)("why", param="here"))
    reply = node.chat_reply(model="refused", stream=stream)
    assert reply.status == status
    assert reply.error == {"message": "why", "type": kind, "param": "here", "code": error.code}
    assert reply.headers.get("retry-after") == retry_after
    assert reply.headers.get("x-should-retry") == should_retry


@pytest.mark.parametrize(
    "events",
    [(Started((1,)),), (AnswerProgress("prefill 1/2"),), (AnswerProgress("12 %"),), ANSWER[:-1]],
)
def test_an_error_within_a_stream_is_its_last_event_and_there_is_no_done(
    node: Node, events: tuple[Any, ...]
) -> None:
    node.chat.scripts["dying"] = says(*events, then=PeerLost("peer b was lost"))
    reply = node.chat_reply(model="dying", stream=True)
    assert reply.status == 200
    assert json.loads(frames(reply)[-1].removeprefix("data: ")) == {
        "error": {
            "message": "peer b was lost",
            "type": "server_error",
            "param": None,
            "code": "peer_lost",
        }
    }
    assert b"[DONE]" not in reply.body


def test_a_defect_within_a_stream_ends_it_and_tells_nothing(node: Node) -> None:
    node.chat.scripts["broken"] = says(*ANSWER[:4], then=RuntimeError("the secret"))
    reply = node.chat_reply(model="broken", stream=True)
    assert chunks(reply)[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in reply.body
    assert b"[DONE]" not in reply.body


@pytest.mark.parametrize("events", [(), ANSWER[:-1]], ids=["nothing", "no end"])
def test_an_answer_without_an_end_is_an_error_not_a_success(
    node: Node, events: tuple[Any, ...]
) -> None:
    node.chat.scripts["torn"] = says(*events)
    assert node.chat_reply(model="torn").status == 500
    streamed = node.chat_reply(model="torn", stream=True)
    assert b"internal_error" in streamed.body
    assert b"[DONE]" not in streamed.body


def test_loading_is_told_as_a_comment_of_one_line(node: Node) -> None:
    node.chat.scripts["loaded"] = says(AnswerProgress("downloading\n\ndata: 12 %"), *ANSWER)
    reply = node.chat_reply(model="loaded", stream=True)
    assert frames(reply)[0] == ": downloading data: 12 %"
    assert node.chat_reply(model="loaded").status == 200


def addressed(node: Node, **fields: object) -> bytes:
    return raw_chat(**fields).replace(b"{port}", str(node.port).encode())


@pytest.mark.parametrize(
    "script",
    [hangs(), hangs(Started((1,))), repeats(TextDelta("a", (1,)))],
    ids=["before the first event", "in silence", "in a flood"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_ends_its_generation(node: Node, script: Any, stream: bool) -> None:
    node.chat.scripts["long"] = script
    with node.raw(addressed(node, model="long", stream=stream)):
        assert node.chat.began.wait(PATIENCE_S)
        assert not node.chat.closed.is_set()
    assert node.chat.closed.wait(PATIENCE_S)


def test_a_finished_answer_closes_its_events(node: Node) -> None:
    node.chat.scripts["more"] = says(FINISHED, TextDelta("after the end", ()))
    for stream in (False, True):
        node.chat.closed.clear()
        assert b"after the end" not in node.chat_reply(model="more", stream=stream).body
        assert node.chat.closed.wait(PATIENCE_S)


def test_openais_client_raises_its_own_errors(node: Node, openai: Any) -> None:
    node.chat.scripts["full"] = says(then=QueueFull("full"))
    node.chat.scripts["dying"] = says(Started((1,)), then=PeerLost("lost"))
    create = openai.chat.completions.create
    with pytest.raises(NotFoundError) as missing:
        create(model="nope", messages=ASK)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(BadRequestError) as refused:
        create(model="demo", messages=ASK, modalities=["audio"])
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "modalities")
    with pytest.raises(RateLimitError):
        create(model="full", messages=ASK)
    with pytest.raises(APIError) as lost:
        list(create(model="dying", messages=ASK, stream=True))
    assert lost.value.code == "peer_lost"
