"""A node with a model that goes in circles ends its answers with tools, and says why."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import make_checkpoint
from nodes import Node, node
from small import LAYERS, fit_head

ASK = [{"role": "user", "content": "Who are you?"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
COOL: dict[str, Any] = {"temperature": 0}
MANY = 1200


def circling(models: Path) -> None:
    folder = make_checkpoint(
        models / "circles",
        "qwen3_5",
        dtype="float32",
        layers=LAYERS,
        hidden=64,
        vocab=4096,
        raw=False,
        seed=7,
    )
    fit_head(folder, 0.1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    circling(folder)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Node]:
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(models))
    with node(tmp_path_factory.mktemp("circles"), *flags) as running:
        yield running


def post(served: Node, path: str, body: dict[str, Any]) -> Any:
    reply = served.call("POST", path, {"model": "circles", **body})
    assert reply.status == 200, reply
    return reply.body


def chat(served: Node, **fields: Any) -> Any:
    body = {"messages": ASK, **COOL, "max_tokens": MANY, "return_token_ids": True, **fields}
    return post(served, "/v1/chat/completions", body)


def looped(served: Node) -> int:
    body = served.call("GET", "/v1/mtp/stats").body
    return sum(totals["looped_requests"] for totals in body["models"].values())


def test_every_dialect_ends_the_answer_as_cut_and_gives_the_reason(served: Node) -> None:
    before = looped(served)
    whole = chat(served)
    cut = chat(served, tools=TOOLS)
    assert whole["generation_stats"]["loop_reason"] == ""
    ids = cut["choices"][0]["token_ids"]
    assert ids == whole["choices"][0]["token_ids"][: len(ids)] and 1024 <= len(ids) < MANY
    assert cut["choices"][0]["finish_reason"] == "length"
    why: str = cut["generation_stats"]["loop_reason"]
    assert why.startswith("the last 1024 tokens are a loop of ")
    body: dict[str, Any] = {"messages": ASK, **COOL, "max_tokens": MANY}
    own = [{"name": "f", "input_schema": {"type": "object"}}]
    message = post(served, "/v1/messages", {**body, "tools": own})
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == len(ids)
    asked = {"input": "Who are you?", **COOL, "max_output_tokens": MANY}
    response = post(served, "/v1/responses", {**asked, "tools": [{"type": "function", **FUNCTION}]})
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    options = {**COOL, "num_predict": MANY}
    line = {"messages": ASK, "options": options, "stream": False, "tools": TOOLS}
    answer = post(served, "/api/chat", line)
    assert answer["done_reason"] == "length" and answer["eval_count"] == len(ids)
    for each in (message, response, answer):
        assert each["generation_stats"]["loop_reason"] == why
    assert looped(served) == before + 4


def test_a_request_a_grammar_and_the_nodes_setting_let_it_continue(
    served: Node, models: Path, tmp_path: Path
) -> None:
    before = looped(served)
    assert chat(served, tools=TOOLS, loop_guard=False)["usage"]["completion_tokens"] == MANY
    bells = chat(served, tools=TOOLS, regex="\x07{1300}")["choices"][0]["token_ids"]
    assert bells == bells[:1] * MANY, "one token over and over"
    assert looped(served) == before
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(models))
    with node(tmp_path / "off", *flags, env={"EXO_LOOP_GUARD": "0"}) as off:
        answer = chat(off, tools=TOOLS, loop_guard=True)
        assert answer["usage"]["completion_tokens"] == MANY
        assert answer["generation_stats"]["loop_reason"] == ""
        assert looped(off) == 0
