"""Two copies of a model on two nodes: they share the answers, and one outlives the other's node."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import STORY
from nodes import Node, copy_key, eventually, node, sees

WITHIN_S = 180.0
"""Long, so that a loaded machine fails no test."""

pytestmark = pytest.mark.timeout(600)


def copies(running: Node) -> list[Any]:
    placements = running.call("GET", "/v1/placements").body["data"]
    return [placement for placement in placements if placement["status"] == "ready"]


def answers_by_node(running: Node) -> list[int]:
    nodes = running.call("GET", "/v1/cluster").body["nodes"]
    return sorted(sum(s["live_requests"] for s in each["stages"]) for each in nodes)


def ids_of(running: Node, count: int) -> list[int]:
    body = running.chat(STORY["prompt"], max_tokens=count, return_token_ids=True)
    return body["choices"][0]["token_ids"]


def test_two_copies_share_answers_which_all_end_though_one_is_killed(tmp_path: Path) -> None:
    count = len(STORY["greedy_ids"])
    with node(tmp_path / "one", "--dtype", "float32") as one:
        flags = ("--dtype", "float32")
        with node(copy_key(one, tmp_path / "two"), *flags) as two:
            eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
            reply = one.call("POST", "/v1/placements", {"model": "demo", "replicas": 2})
            assert reply.status == 200 and reply.body["replicas"] == 2, reply
            eventually(lambda: len(copies(one)) == 2, WITHIN_S)
            assert len({each["stages"][0]["node"] for each in copies(one)}) == 2
            with ThreadPoolExecutor(8) as pool:
                answers = [pool.submit(ids_of, one, count) for _ in range(8)]
                eventually(lambda: answers_by_node(one) == [4, 4], WITHIN_S)
                two.process.kill()
                assert all(answer.result() == STORY["greedy_ids"] for answer in answers)
            eventually(lambda: len(copies(one)) == 1, WITHIN_S)
            reply = one.call("POST", "/v1/placements", {"model": "demo", "replicas": 1})
            assert [each["id"] for each in copies(one)] == [reply.body["id"]]
