"""Completions: log-probabilities in OpenAI's four lists, the prompt's echo, and gaps."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fakes import FINISHED, says
from http_node import ASK, Node

from exo_node.node.api.openai.completion_logprobs import CompletionLogprobs, token_name
from exo_node.node.api.shared.choices import MAX_TOGETHER
from exo_node.node.chat.requests import (
    Event,
    GenerationRequest,
    PromptLogprobs,
    Started,
    TextDelta,
    TokenLogprob,
)
from exo_node.proto import peer_pb2 as pb


def scored(id: int, raw: bytes, logprob: float = -1.0) -> TokenLogprob:
    """A token with two likely ones, itself not among them."""
    top = (
        TokenLogprob(id=1, bytes=b"the", logprob=-0.5),
        TokenLogprob(id=2, bytes="é".encode()[:1], logprob=float("-inf")),
    )
    return TokenLogprob(id=id, bytes=raw, logprob=logprob, top=top)


PROMPT = [scored(5, b"<s>", 0.0), scored(6, b"Hel", -2.0), scored(7, b"lo", -3.0)]
SPOKEN = [
    TextDelta("", (10,), (scored(10, b" w", -0.25),)),
    TextDelta(" wé", (11,), (scored(11, "é".encode(), -4.0),)),
]
LIKELY = {"the": -0.5, "bytes:\\xc3": -9999.0}


def complete(node: Node, **fields: object) -> Any:
    reply = node.ask("POST", "/v1/completions", {"model": "demo", "prompt": "Hello", **fields})
    assert reply.status == 200, reply.body
    return reply.json


def streamed(openai: Any, **fields: Any) -> tuple[str, dict[str, list[Any]]]:
    """The text and the four lists of a stream's chunks, joined."""
    text, lists = "", dict[str, list[Any]]()
    create = openai.completions.create
    for chunk in create(**{"model": "demo", "prompt": "Hello", "stream": True} | fields):
        for choice in chunk.to_dict()["choices"]:
            text += choice["text"]
            logprobs: dict[str, list[Any]] = choice["logprobs"] or {}
            for name, values in logprobs.items():
                lists.setdefault(name, []).extend(values)
    return text, lists


@pytest.fixture
def spoken(node: Node) -> Node:
    node.chat.scripts["demo"] = says(Started((5, 6, 7)), *SPOKEN, FINISHED)
    return node


@pytest.fixture
def echoed(node: Node) -> Node:
    parts = PromptLogprobs(tuple(PROMPT[:2])), PromptLogprobs(tuple(PROMPT[2:]))
    node.chat.scripts["demo"] = says(Started((5, 6, 7)), *parts, *SPOKEN, FINISHED)
    return node


OF_ANSWER: dict[str, list[Any]] = {
    "tokens": [" w", "é"],
    "token_logprobs": [-0.25, -4.0],
    "top_logprobs": [{**LIKELY, " w": -0.25}, {**LIKELY, "é": -4.0}],
    "text_offset": [0, 2],
}
OF_ALL: dict[str, list[Any]] = {
    "tokens": ["<s>", "Hel", "lo", " w", "é"],
    "token_logprobs": [None, -2.0, -3.0, -0.25, -4.0],
    "top_logprobs": [
        None,
        {**LIKELY, "Hel": -2.0},
        {**LIKELY, "lo": -3.0},
        *OF_ANSWER["top_logprobs"],
    ],
    "text_offset": [0, 0, 3, 5, 7],
}


def test_log_probabilities_are_four_lists(spoken: Node, openai: Any) -> None:
    body = complete(spoken, logprobs=2)
    assert body["choices"][0]["logprobs"] == OF_ANSWER
    assert streamed(openai, logprobs=2) == (" wé", OF_ANSWER)
    (first, _) = spoken.chat.requests
    assert (first.output.top_logprobs, first.output.prompt_logprobs) == (2, False)


@pytest.mark.parametrize(
    ("fields", "top"), [({}, None), ({"logprobs": None}, None), ({"logprobs": False}, None),
                        ({"logprobs": 0}, 0), ({"logprobs": 5}, 5)], ids=str
)  # fmt: skip
def test_each_token_has_the_alternatives_that_were_asked_for(
    spoken: Node, fields: dict[str, object], top: int | None
) -> None:
    body = complete(spoken, **fields)
    assert (body["choices"][0]["logprobs"] is None) is (top is None)
    (request,) = spoken.chat.requests
    assert request.output == pb.Output(top_logprobs=top)


def test_the_prompt_is_echoed_in_front_of_the_answer(node: Node, openai: Any) -> None:
    assert complete(node, echo=True)["choices"][0]["text"] == "Hellohéllo"
    assert streamed(openai, extra_body={"echo": True})[0] == "Hellohéllo"
    assert all(request.output == pb.Output() for request in node.chat.requests)
    for off in (False, None):
        assert complete(node, echo=off)["choices"][0]["text"] == "héllo"


def test_an_echo_with_log_probabilities_has_the_prompts_first_without_one(
    echoed: Node, openai: Any
) -> None:
    body = complete(echoed, echo=True, logprobs=2)
    assert body["choices"][0]["logprobs"] == OF_ALL
    assert body["choices"][0]["text"] == "Hello wé"
    assert streamed(openai, echo=True, logprobs=2) == ("Hello wé", OF_ALL)
    assert all(request.output.prompt_logprobs for request in echoed.chat.requests)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_prompt_in_ids_is_echoed_as_the_text_of_its_tokens(
    echoed: Node, openai: Any, logprobs: int | None
) -> None:
    body = complete(echoed, prompt=[5, 6, 7], echo=True, logprobs=logprobs)
    (choice,) = body["choices"]
    assert choice["text"] == "<s>Hello wé"
    text, lists = streamed(openai, prompt=[5, 6, 7], echo=True, logprobs=logprobs)
    assert text == choice["text"]
    assert (choice["logprobs"] or {}) == lists
    assert lists.get("text_offset", [0, 3, 6, 8, 10]) == [0, 3, 6, 8, 10]
    assert {r.output.top_logprobs for r in echoed.chat.requests} == {logprobs or 0}


def test_no_tokens_are_the_echo_alone(echoed: Node, openai: Any) -> None:
    """As evaluations want the log-probabilities of a text; one token is computed and left out."""
    body = complete(echoed, echo=True, logprobs=1, max_tokens=0)
    (choice,) = body["choices"]
    assert choice["text"] == "Hello" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -3.0]
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["total_tokens"] == 3
    text, lists = streamed(openai, echo=True, logprobs=1, max_tokens=0)
    assert (text, lists["token_logprobs"]) == ("Hello", [None, -2.0, -3.0])
    assert {request.limits.max_tokens for request in echoed.chat.requests} == {1}
    several = complete(echoed, echo=True, max_tokens=0, n=3)["usage"]
    assert several["completion_tokens"] == 0 and several["total_tokens"] == 3


NO_PROMPTS: list[tuple[Any, str, str]] = [
    (5, "prompt", "a text, a list of token ids"),
    ([], "prompt", "at least 1 token id"),
    ([[]], "prompt[0]", "at least 1 token id"),
    (["a", 5], "prompt[1]", "a list of token ids"),
    (["a", [5]], "prompt[1]", "all texts"),
    ([[5], "a"], "prompt[1]", "all texts"),
    ([[5], []], "prompt[1]", "at least 1 token id"),
    ([[5], [6, -1]], "prompt[1][1]", "a token id of 0 to 2147483647"),
    (["a"] * 129, "prompt", "at most 128 entries"),
    ([1, "a"], "prompt[1]", "a token id of 0 to 2147483647"),
    ([1, 2**31], "prompt[1]", "a token id of 0 to 2147483647"),
    ([[1, True]], "prompt[0][1]", "a token id of 0 to 2147483647"),
]


@pytest.mark.parametrize(("prompt", "param", "why"), NO_PROMPTS)
def test_what_is_no_prompt_is_refused_by_what_it_should_be(
    node: Node, prompt: object, param: str, why: str
) -> None:
    reply = node.ask("POST", "/v1/completions", {"model": "demo", "prompt": prompt})
    assert reply.status == 400 and reply.error["param"] == param
    assert why in reply.error["message"]


@dataclass
class Several:
    """Answers each prompt with itself in capitals; `holds_first`: the first one ends last."""

    node: Node
    holds_first: bool = False
    open: int = 0
    most_open: int = 0
    ended: int = 0

    def __call__(self) -> AsyncGenerator[Event]:
        return self._events(self.node.chat.requests[-1])

    async def _events(self, request: GenerationRequest) -> AsyncGenerator[Event]:
        words = request.text or "".join(map(chr, request.ids or ()))
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        yield Started(tuple(range(len(words))))
        await asyncio.sleep(0)
        while self.holds_first and words == "a" and self.ended < 3:
            await asyncio.sleep(0)
        yield TextDelta(f"{words.upper()}{request.choice}", (1,))
        self.open, self.ended = self.open - 1, self.ended + 1
        yield replace(FINISHED, prompt_tokens=len(words), cached_tokens=1 if request.choice else 2)


def several(node: Node, *, holds_first: bool = False) -> Several:
    script = node.chat.scripts["demo"] = Several(node, holds_first)
    return script


@pytest.mark.parametrize("prompt", [["a", "bc"], [[97], [98, 99]]], ids=["texts", "ids"])
@pytest.mark.parametrize("n", [None, 2])
def test_several_prompts_have_their_choices_in_order(
    node: Node, prompt: Any, n: int | None
) -> None:
    _ = several(node)
    body = complete(node, prompt=prompt, n=n, seed=5, logprobs=1)
    each = [(number, text) for text in ("A", "BC") for number in range(n or 1)]
    assert [choice["text"] for choice in body["choices"]] == [f"{t}{i}" for i, t in each]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(each)))
    assert all("generation_stats" in choice for choice in body["choices"])
    usage, answers = body["usage"], len(each)
    assert usage["prompt_tokens"] == 1 + 2, "each prompt counts once"
    assert usage["completion_tokens"] == answers * FINISHED.completion_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * (1 if n else 2)
    requests = node.chat.requests
    assert len({request.id for request in requests}) == answers
    assert [request.prompt_field for request in requests] == [
        f"prompt[{number}]" for number in (0, 1) for _ in range(n or 1)
    ]
    if n:
        assert [request.choice for request in requests] == [0, 1, 0, 1]


def test_a_stream_of_several_prompts_names_each_choice_and_sums_at_its_end(
    node: Node, openai: Any
) -> None:
    _ = several(node, holds_first=True)
    prompts, texts, last, usage = ["a", "b", "c", "d"], dict[int, str](), None, None
    options = {"include_usage": True}
    for chunk in openai.completions.create(
        model="demo", prompt=prompts, stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                last = choice.index
        usage = chunk.usage or None
    assert texts == {number: f"{text.upper()}0" for number, text in enumerate(prompts)}
    assert last == 0, "the first prompt's answer ended last"
    assert usage is not None and usage.prompt_tokens == 4


def test_one_prompt_in_a_list_is_that_prompt(node: Node) -> None:
    for prompt in (["Hello"], [[5, 6]]):
        body = complete(node, prompt=prompt)
        assert "generation_stats" in body and len(body["choices"]) == 1
        assert node.chat.requests[-1].prompt_field == "prompt"


def test_echoes_are_those_of_each_prompt(node: Node) -> None:
    _ = several(node)
    body = complete(node, prompt=["ab", "cd"], echo=True, n=2)
    assert [choice["text"] for choice in body["choices"]] == ["abAB0", "abAB1", "cdCD0", "cdCD1"]


def test_many_prompts_are_answered_some_at_a_time(node: Node) -> None:
    script = several(node)
    body = complete(node, prompt=[chr(97 + i % 26) for i in range(128)])
    assert [choice["text"] for choice in body["choices"]] == [
        f"{chr(65 + i % 26)}0" for i in range(128)
    ]
    assert 1 < script.most_open <= MAX_TOGETHER


def test_more_answers_than_one_request_may_have_are_refused(node: Node) -> None:
    body = {"model": "demo", "prompt": ["a"] * 65, "n": 2}
    reply = node.ask("POST", "/v1/completions", body)
    assert reply.status == 400 and reply.error["param"] == "prompt"
    assert "130 answers" in reply.error["message"] and not node.chat.requests


def test_the_text_after_a_gap_goes_to_the_model(node: Node, openai: Any) -> None:
    _ = openai.completions.create(model="demo", prompt="def f(", suffix="return x")
    _ = complete(node, prompt="a", suffix="")
    first, second = node.chat.requests
    assert (first.text, first.suffix) == ("def f(", "return x") and second.suffix is None


@pytest.mark.parametrize("prompt", ["x = ", ""])
def test_ollamas_generate_fills_a_gap(node: Node, prompt: str) -> None:
    body = {"model": "demo", "prompt": prompt, "suffix": "\nprint(x)", "stream": False}
    reply = node.ask("POST", "/api/generate", body | {"system": "Be brief."})
    assert reply.json["response"] == "héllo"
    assert reply.headers["x-exo-node-ignored"] == "system"
    (request,) = node.chat.requests
    assert (request.text, request.suffix, request.messages) == (prompt, "\nprint(x)", ())


BAD: list[tuple[dict[str, object], str]] = [
    *(({"logprobs": value}, "logprobs") for value in (6, -1, "2", True, [1])),
    *(({"echo": value}, "echo") for value in ("yes", 1, 0, [True])),
    *(({"suffix": value}, "suffix") for value in (1, ["a"], {"text": "a"}, True)),
    ({"suffix": "b", "prompt": [1, 2]}, "suffix"),
    ({"suffix": "b", "prompt": ["a"], "echo": True}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
    ({"max_tokens": -2, "echo": True}, "max_tokens"),
    ({"max_tokens": "0", "echo": True}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
def test_what_does_not_fit_is_refused_by_its_field(
    node: Node, fields: dict[str, object], param: str
) -> None:
    body = {"model": "demo", "prompt": "a", **fields}
    reply = node.ask("POST", "/v1/completions", body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert not node.chat.requests and f"'{param}'" in reply.error["message"]


def test_ollamas_gap_has_no_images(node: Node) -> None:
    body = {"model": "demo", "prompt": "a", "suffix": "b", "images": ["aGk="]}
    reply = node.ask("POST", "/api/generate", body)
    assert reply.status == 400 and "'images'" in reply.json["error"]


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [
        ("Hello", [b"Hel", b"lo"], [0, 3]),
        ("Hello", [b"<s>", b" Hel", b"lo"], [0, 0, 3]),
        ("<s>Hi", [b"<s>", b"Hi"], [0, 3]),
        ("h€y", [b"h", "€".encode()[:2], "€".encode()[2:], b"y"], [0, 1, 2, 2]),
        (None, [b"<s>", b"Hi"], [0, 3]),
    ],
)
def test_offsets_are_the_characters_in_front_of_a_token(
    prompt: str | None, tokens: list[bytes], offsets: list[int]
) -> None:
    entries = [
        TokenLogprob(id=number, bytes=raw, logprob=-1.0) for number, raw in enumerate(tokens)
    ]
    lists = CompletionLogprobs(prompt).of_prompt(entries)
    assert [*lists["text_offset"]] == offsets


def test_different_tokens_have_different_names() -> None:
    euro = "€".encode()
    raws = (b"", b"", euro, euro[:1], euro[:2], b"bytes", b"\xff")
    names = [
        token_name(TokenLogprob(id=number, bytes=raw, logprob=-1.0))
        for number, raw in enumerate(raws)
    ]
    assert len(set(names)) == len(raws) and names[3] == "bytes:\\xe2"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_chunk_is_named_as_ignored(node: Node, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompt = {"prompt": "a", "messages": ASK}
    body = {"model": "demo", "stream": True, "stream_options": options}
    body |= {name: value for name, value in prompt.items() if ("chat" in path) == (name[0] == "m")}
    reply = node.ask("POST", path, body)
    assert reply.status == 200
    assert reply.headers["x-exo-node-ignored"] == "stream_options.continuous_usage_stats"
