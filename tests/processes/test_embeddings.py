"""Real nodes with an embedder: both doors, cuts of inputs, a runner killed in the middle."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from embedders import INPUTS, NEAR, ROWS, SIZE, copied, difference, encoder, rows_of
from nodes import CALL_S, Node, copy_key, eventually, node, sees, struck

MODEL = "tiny-embedder"
ENCODER = "tiny-encoder"
TEXTS = [row["text"] for row in ROWS]
MANY = 600
"""Inputs of a request that lasts."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """(the head, another node). Only the folder's pooling says that the model is an embedder."""
    root = tmp_path_factory.mktemp("embedders")
    _ = copied(root / "models" / MODEL)
    _ = copied(root / "models" / ENCODER, encoder("xlm_roberta"))
    flags = ("--dtype", "float32", "--models-dir", str(root / "models"))
    with node(root / "one", *flags) as one, node(copy_key(one, root / "two"), *flags) as two:
        eventually(lambda: sees(one, 2) and sees(two, 2), CALL_S)
        cluster = one.call("GET", "/v1/cluster").body
        yield (one, two) if cluster["head"] == cluster["self"] else (two, one)


def post(door: Node, path: str, **fields: Any) -> Any:
    reply = door.call("POST", path, {"model": MODEL} | fields)
    assert reply.status == 200, reply
    return reply.body


def vectors_of(door: Node, inputs: Any, **fields: Any) -> list[list[float]]:
    data = post(door, "/v1/embeddings", input=inputs, **fields)["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return [each["embedding"] for each in data]


def are_the_oracles(vectors: list[Any]) -> bool:
    return all(
        difference(vector, ROWS[number % len(ROWS)]["embedding"]) < NEAR
        for number, vector in enumerate(vectors)
    )


def live(pair: tuple[Node, Node]) -> list[int]:
    """Inputs in progress on each of the model's runners."""
    return [stage["live_requests"] for each in pair for stage in each.stages()]


def prompt_tokens(door: Node) -> float:
    """The metric of this node's own clients."""
    with closing(door.connect(door.port, CALL_S)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    name = "vllm:prompt_tokens_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and MODEL in line)


def test_every_door_gives_transformers_embeddings_alone_and_together(
    pair: tuple[Node, Node],
) -> None:
    for door in pair:
        assert are_the_oracles(vectors_of(door, TEXTS))
        assert are_the_oracles(vectors_of(door, list(INPUTS.values())))
        alone = [vectors_of(door, text)[0] for text in TEXTS]
        assert are_the_oracles(alone)
        assert alone == [vectors_of(door, text)[0] for text in TEXTS]
        assert are_the_oracles(post(door, "/api/embed", input=TEXTS)["embeddings"])
        assert are_the_oracles([post(door, "/api/embeddings", prompt=TEXTS[0])["embedding"]])


def test_ids_get_the_end_token_unless_they_have_it(pair: tuple[Node, Node]) -> None:
    tokens = post(pair[0], "/v1/tokenize", prompt=TEXTS[0])["tokens"]
    assert tokens == INPUTS[0]
    assert vectors_of(pair[0], tokens) == vectors_of(pair[0], tokens[:-1])


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ["a", "x" * 4096]}, "input[1]", "context_length_exceeded"),
        ({"input": "x" * 70_000}, "input", "context_length_exceeded"),
        ({"input": [5] * 4096}, "input", "context_length_exceeded"),
        ({"input": [[5], [5, 260]]}, "input[1]", "invalid_value"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions", "invalid_value"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_only_the_model_can_refuse_names_its_field(
    pair: tuple[Node, Node], fields: dict[str, Any], param: str, code: str
) -> None:
    reply = pair[1].call("POST", "/v1/embeddings", {"model": MODEL, **fields})
    assert reply.status == 400
    assert (reply.body["error"]["param"], reply.body["error"]["code"]) == (param, code)
    assert are_the_oracles(vectors_of(pair[1], TEXTS[:1]))


def test_a_long_input_is_cut_where_it_is_asked_for(pair: tuple[Node, Node]) -> None:
    text, most = "word " * 2000, 4096
    body = {"model": MODEL, "input": ["a", text], "truncate": True}
    reply = pair[1].call("POST", "/v1/embeddings", body)
    assert reply.status == 200
    assert reply.headers["x-exo-node-ignored"] == "input beyond the end of the context"
    assert reply.body["usage"]["prompt_tokens"] == most + 2
    cut = reply.body["data"][1]["embedding"]
    assert difference(cut, vectors_of(pair[1], text[: most - 1])[0]) < NEAR
    assert post(pair[1], "/api/embed", input=text)["prompt_eval_count"] == most
    refused = pair[1].call("POST", "/api/embed", {"model": MODEL, "input": text, "truncate": False})
    assert refused.status == 400 and '"truncate": true' in refused.body["error"]


def test_a_runner_that_is_killed_in_the_middle_costs_no_embedding(pair: tuple[Node, Node]) -> None:
    inputs = [TEXTS[number % len(TEXTS)] for number in range(MANY)]
    count = sum(len(INPUTS[number % len(INPUTS)]) for number in range(MANY))

    def killed() -> list[Any] | None:
        before = prompt_tokens(pair[1])
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, pair[1], "/v1/embeddings", input=inputs)
            eventually(lambda: any(live(pair)) or answer.done(), CALL_S)
            [stage] = [stage for each in pair for stage in each.stages()]
            os.kill(stage["pid"], signal.SIGKILL)
            hit = not answer.done()
            body = answer.result()
        assert are_the_oracles([each["embedding"] for each in body["data"]])
        assert len(body["data"]) == MANY
        assert body["usage"]["prompt_tokens"] == count
        assert prompt_tokens(pair[1]) - before == count
        return body["data"] if hit else None

    assert struck(killed)
    stats = pair[1].call("GET", "/v1/mtp/stats").body["models"][MODEL]
    assert stats["completion_tokens"] == 0 < stats["prompt_tokens"]


def test_an_encoder_embeds_through_every_door_and_gives_no_answers(
    pair: tuple[Node, Node],
) -> None:
    rows, most = rows_of(encoder("xlm_roberta")), 1000
    texts = [row["text"] for row in rows]
    for door in pair:
        together = post(door, "/v1/embeddings", model=ENCODER, input=texts)["data"]
        alone = [vectors_of(door, text, model=ENCODER)[0] for text in texts]
        assert alone == [vectors_of(door, text, model=ENCODER)[0] for text in texts]
        ollamas = post(door, "/api/embed", model=ENCODER, input=texts)["embeddings"]
        for vectors in ([each["embedding"] for each in together], alone, ollamas):
            assert all(
                difference(vector, row["embedding"]) < NEAR
                for vector, row in zip(vectors, rows, strict=True)
            )
    ids = post(pair[0], "/v1/tokenize", model=ENCODER, prompt=texts[0])["tokens"]
    assert ids == rows[0]["ids"]
    inputs = [ids, ids[1:], ids[:-1], ids[1:-1]]
    first, *others = vectors_of(pair[1], inputs, model=ENCODER)
    assert all(difference(first, other) < NEAR for other in others)
    long = {"model": ENCODER, "input": ["a", "x" * 2000]}
    refused = pair[1].call("POST", "/v1/embeddings", long)
    error = refused.body["error"]
    assert (refused.status, error["param"]) == (400, "input[1]")
    assert error["code"] == "context_length_exceeded"
    cut = pair[1].call("POST", "/v1/embeddings", long | {"truncate": True})
    assert cut.headers["x-exo-node-ignored"] == "input beyond the end of the context"
    assert cut.body["usage"]["prompt_tokens"] == most + 3
    chat = {"model": ENCODER, "messages": [{"role": "user", "content": "hi"}]}
    reply = pair[0].call("POST", "/v1/chat/completions", chat)
    assert (reply.status, reply.body["error"]["param"]) == (400, "model")
    entries = {each["id"]: each for each in pair[0].call("GET", "/v1/models").body["data"]}
    assert entries[ENCODER]["capabilities"] == ["embeddings"]
    assert entries[ENCODER]["context_length"] == most
