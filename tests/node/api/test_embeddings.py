"""Embeddings in OpenAI's and Ollama's API, as their own clients see them, over a scripted chat."""

import base64
import struct
from typing import Any

import pytest
from fakes import FINISHED, says
from http_node import Node

from exo_node.node.chat.requests import Embedded, Started, embeddings_of
from exo_node.placement.errors import PeerLost

VECTORS = {0: (0.6, -0.8), 1: (1.0, 0.0), 2: (0.0, -1.0)}
PACKED = {index: struct.pack("<2f", *vector) for index, vector in VECTORS.items()}
PATHS = {
    "/v1/embeddings": {"input": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": 7}, "input"),
    ({"input": {"a": 1}}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 1]}, "input[1]"),
    ({"input": ["a", []]}, "input[1]"),
    ({"input": ["a", None]}, "input[1]"),
    ({"input": ["a"] * 2049}, "input"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": -1}, "dimensions"),
    ({"dimensions": 2.5}, "dimensions"),
    ({"dimensions": "9"}, "dimensions"),
    ({"truncate": "yes"}, "truncate"),
    ({"keep_alive": "soon"}, "keep_alive"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
]


@pytest.fixture
def node(running: Node) -> Node:
    running.chat.reset()
    # As they were computed: in no order.
    vectors = (Embedded(index=index, vector=PACKED[index], tokens=5) for index in (2, 0, 1))
    running.chat.scripts["demo"] = says(Started(()), *vectors, FINISHED)
    running.chat.scripts["one"] = says(
        Started(()), Embedded(index=0, vector=PACKED[0], tokens=5), FINISHED
    )
    running.chat.scripts["cuts"] = says(
        Started((), ("input beyond the end of the context",)),
        Embedded(index=0, vector=PACKED[0], tokens=5),
        FINISHED,
    )
    running.chat.scripts["breaks"] = says(Started(()), then=PeerLost("a node is gone"))
    return running


def near(numbers: list[float], index: int) -> bool:
    return numbers == pytest.approx(VECTORS[index], abs=1e-7)


def test_openais_client_gets_embeddings_in_the_order_of_its_inputs(node: Node, openai: Any) -> None:
    got = openai.embeddings.create(model="demo", input=["a", "b", "c"], dimensions=2)
    assert [each.index for each in got.data] == [0, 1, 2]
    assert all(near(each.embedding, each.index) for each in got.data)
    assert (got.model, got.usage.prompt_tokens) == ("demo", FINISHED.prompt_tokens)
    assert got.usage.total_tokens == FINISHED.prompt_tokens
    plain = openai.embeddings.create(model="one", input="a", encoding_format="float")
    assert near(plain.data[0].embedding, 0)
    _ = openai.embeddings.create(model="demo", input=[[1, 2], [3], [4]], user="me")
    _ = openai.embeddings.create(model="one", input=[1, 2], extra_body={"truncate": True})
    assert [request.embeddings for request in node.chat.requests] == [
        embeddings_of(("a", "b", "c"), 2),
        embeddings_of(("a",)),
        embeddings_of(((1, 2), (3,), (4,))),
        embeddings_of(((1, 2),), truncate=True),
    ]
    assert not any(request.sharing.cache for request in node.chat.requests)


def test_base64_is_float32_little_endian(node: Node) -> None:
    body = {"model": "one", "input": "a", "encoding_format": "base64"}
    [each] = node.ask("POST", "/v1/embeddings", body).json["data"]
    assert base64.b64decode(each["embedding"]) == PACKED[0]


def test_ollamas_client_gets_embeddings(node: Node, ollama: Any) -> None:
    got = ollama.embed(model="demo:latest", input=["a", "b", "c"], dimensions=2, keep_alive="5m")
    assert [near(list(vector), index) for index, vector in enumerate(got.embeddings)] == [True] * 3
    assert (got.model, got.prompt_eval_count) == ("demo", FINISHED.prompt_tokens)
    assert got.total_duration > 0
    assert len(ollama.embed(model="one", input="a", truncate=False).embeddings) == 1
    older = ollama.embeddings(model="one", prompt="a")
    assert near(list(older.embedding), 0)
    first, second, third = node.chat.requests
    assert (first.embeddings, first.keep_alive_s) == (
        embeddings_of(("a", "b", "c"), 2, truncate=True),
        300,
    )
    assert second.embeddings == embeddings_of(("a",))
    assert third.embeddings == embeddings_of(("a",), truncate=True)


def test_fields_that_ollamas_clients_send_beside_are_named_or_have_no_effect(node: Node) -> None:
    body = {"model": "one", "input": "a", "options": {"num_gpu": 9}, "novel": 1}
    reply = node.ask("POST", "/api/embed", body)
    assert reply.status == 200
    assert set(reply.headers["x-exo-node-ignored"].split(", ")) == {"novel", "options.num_gpu"}


def test_an_input_that_was_cut_is_named_in_the_header(node: Node) -> None:
    for path, fields in PATHS.items():
        reply = node.ask("POST", path, {"model": "cuts", **fields})
        assert reply.headers["x-exo-node-ignored"] == "input beyond the end of the context"


def test_background_and_the_clients_identity_reach_the_request(node: Node) -> None:
    _ = node.ask("POST", "/v1/embeddings", {"model": "one", "input": "a", "background": True})
    [request] = node.chat.requests
    assert request.sharing.background and request.client == "127.0.0.1"


@pytest.mark.parametrize("path", PATHS)
def test_an_error_has_the_dialects_form(node: Node, path: str) -> None:
    reply = node.ask("POST", path, {"model": "breaks", **PATHS[path]})
    assert reply.status == 503 and "a node is gone" in str(reply.error)
    assert node.ask("POST", path, {"model": "nope", **PATHS[path]}).status == 404
    if path.startswith("/api/"):
        assert set(reply.json) == {"error"}


def test_an_empty_input_is_not_to_be_left_out(node: Node) -> None:
    reply = node.ask("POST", "/v1/embeddings", {"model": "one", "input": ""})
    assert reply.error["message"] == "'input' should not be empty; send a text or token ids"


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_names_its_field(node: Node, fields: dict[str, Any], param: str) -> None:
    for path in ("/v1/embeddings", "/api/embed"):
        reply = node.ask("POST", path, {"model": "one", "input": "a", **fields})
        assert reply.status == 400
        assert f"'{param}'" in str(reply.error), path
    assert not node.chat.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [1, -1]}, "input[1]"),
        ({"input": [1, True]}, "input[1]"),
        ({"input": [1, 2.5]}, "input[1]"),
        ({"input": [1, 2**31]}, "input[1]"),
        ({"input": [[1], [2, "a"]]}, "input[1][1]"),
        ({"input": [["a"]]}, "input[0][0]"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"background": 1}, "background"),
        ({"user": 1}, "user"),
        ({"dimension": 9}, "dimension"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_of_openais_own_fields_names_its_field(
    node: Node, fields: dict[str, Any], param: str
) -> None:
    reply = node.ask("POST", "/v1/embeddings", {"model": "one", "input": "a", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("inputs", [[1, 2], [[1, 2], [3]], ["a", [1]]])
def test_ollamas_inputs_are_texts(node: Node, inputs: Any) -> None:
    reply = node.ask("POST", "/api/embed", {"model": "one", "input": inputs})
    assert reply.status == 400 and "should be a text" in str(reply.error)
