"""Two nodes read one long prompt: the ids of one node, whatever becomes of the other."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from nodes import Node, copy_key, eventually, node, sees
from test_replicas import WITHIN_S, copies

pytestmark = pytest.mark.timeout(600)
WORDS = ["the", "a", "red", "fox", "tree", "runs", "old", "under", "over"]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Each with a copy of the demo."""
    folder: Path = tmp_path_factory.mktemp("readers")
    flags = ("--dtype", "float32")
    with node(folder / "one", *flags) as one, node(copy_key(one, folder / "two"), *flags) as two:
        eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
        _ = one.call("POST", "/v1/placements", {"model": "demo", "replicas": 2})
        eventually(lambda: len(copies(one)) == 2, WITHIN_S)
        yield one, two


def prompt(seed: int, count: int = 2500) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def asked(running: Node, text: str, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """The ids of an answer, and its stats."""
    body = {"model": "demo", "prompt": text, "max_tokens": 12, "temperature": 0}
    reply = running.call("POST", "/v1/completions", {**body, "return_token_ids": True, **fields})
    assert reply.status == 200, reply
    return reply.body["choices"][0]["token_ids"], reply.body["generation_stats"]


@pytest.mark.parametrize("k", [0, 2])
def test_two_nodes_read_a_long_prompt_as_one_does(two_nodes: tuple[Node, Node], k: int) -> None:
    one, _ = two_nodes
    stats = dict[str, Any]()
    for seed in range(5):  # on a busy machine a copy may not say in time what it has cached
        text = prompt(10 * seed + k)
        expected, alone = asked(one, text, cache=False, num_draft_tokens=k)
        assert (alone["read_by"], alone["read_reason"]) == ([], "")
        ids, stats = asked(one, text, num_draft_tokens=k)
        assert ids == expected
        if stats["read_by"]:
            break
    (reader,) = stats["read_by"]
    assert reader != stats["placement"]["stages"][0]["node"]
    assert stats["read_reason"].startswith("with ") and stats["read_bytes"] > 1_000_000
    _, short = asked(one, prompt(9, 60), num_draft_tokens=k)
    assert short["read_by"] == [] and short["read_reason"].startswith("alone: ")


def test_an_answer_outlives_its_reader(two_nodes: tuple[Node, Node]) -> None:
    one, two = two_nodes
    text = prompt(5, 3000)
    expected, _ = asked(one, text, cache=False)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asked, one, text)
        eventually(lambda: reads(one) or reads(two) or answer.done(), WITHIN_S)
        two.process.kill()
        ids, stats = answer.result()
    assert ids == expected
    assert stats["resumes"] or "alone: " in stats["read_reason"] or stats["read_by"]


def reads(running: Node) -> bool:
    """Whether a runner of the node has rows of a prompt."""
    nodes = running.call("GET", "/v1/cluster").body["nodes"]
    return any(stage["cache_bytes"] for each in nodes for stage in each["stages"])
