"""A real node with the demo model gives the same tokens in every dialect."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from engines import ORACLE
from nodes import CALL_S, Node, node

PROMPT = "Who are you?"
ROW: dict[str, Any] = next(row for row in ORACLE if row["prompt"] == PROMPT)
ASK = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("demo")
    profiles = folder / "profiles.toml"
    _ = profiles.write_text('[brief]\nmodel = "demo"\nmax_tokens = 3\ntemperature = 0\n')
    env = {"EXO_PROFILES_FILE": str(profiles)}
    with node(folder, "--no-mdns", "--dtype", "float32", env=env) as running:
        yield running


def url(demo: Node) -> str:
    return f"http://127.0.0.1:{demo.port}"


def post(demo: Node, path: str, body: dict[str, Any]) -> Any:
    reply = demo.call("POST", path, {"model": "demo", **body})
    assert reply.status == 200, reply
    return reply.body


@pytest.mark.smoke
def test_every_dialect_gives_the_oracles_answer_with_native_mtp(demo: Node) -> None:
    text: str = ROW["text"]
    message = post(demo, "/v1/messages", {"messages": ASK, "max_tokens": 200, "temperature": 0})
    assert (message["content"][0]["text"], message["stop_reason"]) == (text, "end_turn")
    response = post(demo, "/v1/responses", {"input": PROMPT, "temperature": 0})
    assert response["output"][0]["content"][0]["text"] == text
    options = {"temperature": 0}
    answer = post(demo, "/api/chat", {"messages": ASK, "options": options, "stream": False})
    assert answer["message"]["content"] == text
    generation = post(
        demo, "/api/generate", {"prompt": PROMPT, "options": options, "stream": False}
    )
    assert generation["response"] == text
    for body in (message, response, answer, generation):
        assert body["generation_stats"]["drafter_kind"] == "native_mtp"
        assert body["generation_stats"]["accepted_draft_tokens"] > 0


def test_a_prompt_in_text_and_in_ids_is_the_rendered_chat(demo: Node) -> None:
    ids = post(demo, "/v1/tokenize", {"messages": ASK})["tokens"]
    assert ids == ROW["prompt_ids"]
    text = post(demo, "/v1/detokenize", {"tokens": ids})["prompt"]
    assert post(demo, "/v1/tokenize", {"prompt": text})["tokens"] == ids
    wish = {"temperature": 0, "max_tokens": 200, "return_token_ids": True}
    for prompt in (text, ids):
        (choice,) = post(demo, "/v1/completions", {"prompt": prompt, **wish})["choices"]
        assert choice["token_ids"] == ROW["greedy_ids"]
        assert choice["text"] == ROW["text"]
    count = post(demo, "/v1/messages/count_tokens", {"messages": ASK})
    assert count == {"input_tokens": len(ids)}


def test_features_that_the_template_lacks_change_no_token_and_are_named_in_every_dialect(
    demo: Node,
) -> None:
    """The demo's template has neither tools nor thinking: all of its text is content."""
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    chat: dict[str, Any] = {"messages": ASK, "temperature": 0, "max_tokens": 200}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False, "clear_thinking": True}}
    body = {**chat, "tools": tools, "reasoning_effort": "none", "return_token_ids": True, **kwargs}
    reply = demo.call("POST", "/v1/chat/completions", {"model": "demo", **body})
    assert reply.status == 200, reply
    assert reply.body["choices"][0]["token_ids"] == ROW["greedy_ids"]
    no_tools = "tools (the model's chat template has none)"
    no_variable = "chat_template_kwargs.clear_thinking (the model's chat template has none)"
    assert ignored(reply) == {no_tools, no_variable}
    own = [{"name": "f", "input_schema": {"type": "object"}}]
    more = {"tools": own, "output_config": {"effort": "high"}}
    reply = demo.call("POST", "/v1/messages", {"model": "demo", **chat, **more, "max_tokens": 2})
    assert ignored(reply) == {no_tools, "reasoning effort high (the model has no levels)"}
    body = {"model": "demo", "input": PROMPT, "tools": [{"type": "function", **function}]}
    reply = demo.call("POST", "/v1/responses", {**body, "max_output_tokens": 2})
    assert ignored(reply) == {no_tools}
    body = {"model": "demo", "messages": ASK, "tools": tools, "think": "low", "stream": False}
    reply = demo.call("POST", "/api/chat", {**body, "options": {"num_predict": 2}})
    assert ignored(reply) == {no_tools, "reasoning effort low (the model has no levels)"}


def ignored(reply: Any) -> set[str]:
    return set(reply.headers["x-exo-node-ignored"].split(", "))


CONTEXT = 4096
"""The demo's context length, in tokens."""


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", {"messages": ASK, "max_tokens": 32_000}, "stop"),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 32_000}, None),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 32_000}, "completed"),
        ("/v1/messages", {"messages": ASK, "max_tokens": 32_000}, "end_turn"),
        ("/api/chat", {"messages": ASK, "options": {"num_predict": 32_000}}, "stop"),
    ],
)
def test_max_tokens_beyond_the_context_are_cut_and_reported_in_every_dialect(
    demo: Node, path: str, body: dict[str, Any], reason: str | None
) -> None:
    stop = {"stop": ["."]} if path == "/v1/completions" else {}
    fixed = {} if path == "/api/chat" else {"temperature": 0}
    reply = demo.call("POST", path, {"model": "demo", "stream": False, **body, **fixed, **stop})
    assert reply.status == 200, reply
    assert "max_tokens beyond the end of the context" in ignored(reply)
    answer = reply.body
    choice = answer.get("choices", [{}])[0]
    ends = [answer.get(name) for name in ("status", "stop_reason", "done_reason")]
    assert reason is None or reason in (choice.get("finish_reason"), *ends)


def test_a_prompt_that_does_not_fit_is_refused_with_the_message_that_claude_code_parses(
    demo: Node,
) -> None:
    anthropic = pytest.importorskip("anthropic")
    ids = post(demo, "/v1/tokenize", {"prompt": "ocean " * 4500})["tokens"]
    long = post(demo, "/v1/detokenize", {"tokens": ids[:CONTEXT]})["prompt"]
    with anthropic.Anthropic(base_url=url(demo), api_key="any", max_retries=0) as client:
        for text in (long, "ocean " * 200_000):
            with pytest.raises(anthropic.BadRequestError) as caught:
                messages = [{"role": "user", "content": text}]
                _ = client.messages.create(model="demo", max_tokens=8_000, messages=messages)
            error = caught.value.body["error"]
            assert re.match(r"prompt is too long: (\d+) tokens > 4096 maximum", error["message"])
    body = {"model": "demo", "prompt": ids[:CONTEXT], "max_tokens": 7}
    refused = demo.call("POST", "/v1/completions", body)
    assert refused.body["error"]["code"] == "context_length_exceeded", "the code that Codex knows"
    start = "input length and `max_tokens` exceed context limit: 4096 + 7 > 4096"
    assert refused.body["error"]["message"].startswith(start)


def test_the_beginning_of_an_answer_is_continued_with_the_same_tokens(demo: Node) -> None:
    beginning = ROW["text"][: len(ROW["text"]) // 2].rpartition(" ")[0]
    chat = [*ASK, {"role": "assistant", "content": beginning}]
    body = {"messages": chat, "temperature": 0, "max_tokens": 200}
    continuation = post(demo, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert beginning + continuation == ROW["text"]
    prompt = post(demo, "/v1/tokenize", {"messages": chat})["tokens"]
    assert post(demo, "/v1/detokenize", {"tokens": prompt})["prompt"].endswith(beginning)


UNKNOWN = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/x"}}}
MANY = {"properties": {f"p{i}": {"$ref": "#"} for i in range(9000)}}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/detokenize", {"tokens": [10**6]}, 400),
        ("/v1/completions", {"prompt": "x", "regex": "("}, 400),
        ("/v1/completions", {"prompt": "x", "grammar": "start: start"}, 400),
        ("/api/chat", {"messages": ASK, "format": {"type": "nonsense"}}, 400),
        ("/api/chat", {"messages": ASK, "format": MANY}, 400),
        (
            "/v1/chat/completions",
            {"messages": ASK, "tool_choice": "required", "tools": [UNKNOWN]},
            400,
        ),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [10**6]}, 400),
        ("/api/chat", {"messages": ASK, "options": {"draft_num_predict": 99}}, 400),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_input_is_refused_and_the_next_request_is_served(
    demo: Node, path: str, body: dict[str, Any], status: int
) -> None:
    reply = demo.call("POST", path, {"model": "demo", **body})
    assert reply.status == status, reply
    (choice,) = demo.chat(PROMPT, max_tokens=8, return_token_ids=True)["choices"]
    assert choice["token_ids"] == ROW["greedy_ids"][:8]


LITELLM = """
import json, sys
import litellm
base, text = sys.argv[1:]
asked = dict(model="openai/demo", api_base=base, api_key="any", temperature=0, num_retries=0)
asked["messages"] = [{"role": "user", "content": text}]
whole = litellm.completion(**asked).choices[0].message.content
stream = litellm.completion(**asked, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
try:
    litellm.completion(**asked | {"model": "openai/nope"})
except litellm.NotFoundError as fault:
    print(json.dumps([whole, streamed, "nope" in str(fault)]))
"""


def test_litellm_reads_the_oracles_answer(demo: Node) -> None:
    """In a process of its own: its import warns, and logs to handlers that it leaves open."""
    if find_spec("litellm") is None:
        pytest.skip("litellm is not installed: it is in the extra `clients`")
    process = subprocess.run(
        [sys.executable, "-c", LITELLM, f"{url(demo)}/v1", PROMPT],
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=CALL_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert json.loads(process.stdout.splitlines()[-1]) == [ROW["text"], ROW["text"], True]
