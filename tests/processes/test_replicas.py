"""Two copies of a model on two nodes: they share the answers, and one outlives the other's node."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import STORY
from nodes import Node, copy_key, eventually, node, sees

WITHIN_S = 180.0
"""Long, so that a loaded machine fails no test."""

TOKENS = 500
"""Of an answer: it lasts while the nodes are asked about it."""

pytestmark = pytest.mark.timeout(600)


def copies(running: Node) -> list[Any]:
    placements = running.call("GET", "/v1/placements").body["data"]
    return [placement for placement in placements if placement["status"] == "ready"]


def answers_by_node(running: Node) -> list[int]:
    nodes = running.call("GET", "/v1/cluster").body["nodes"]
    return sorted(sum(s["live_requests"] for s in each["stages"]) for each in nodes)


def ids_of(running: Node) -> list[int]:
    """An answer that lasts: the story, and what is likeliest after its end, which is forbidden.

    Nothing of its prompt is cached, so that answers go to the replica with the least work.
    """
    never_ends = {"logit_bias": {str(STORY["greedy_ids"][-1]): -100}}
    body = running.chat(
        STORY["prompt"], max_tokens=TOKENS, return_token_ids=True, cache=False, **never_ends
    )
    return body["choices"][0]["token_ids"]


def test_two_copies_share_answers_which_all_end_though_one_is_killed(tmp_path: Path) -> None:
    with node(tmp_path / "one", "--dtype", "float32") as one:
        flags = ("--dtype", "float32")
        with node(copy_key(one, tmp_path / "two"), *flags) as two:
            eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
            reply = one.call("POST", "/v1/placements", {"model": "demo", "replicas": 2})
            assert reply.status == 200 and reply.body["replicas"] == 2, reply
            eventually(lambda: len(copies(one)) == 2, WITHIN_S)
            assert len({each["stages"][0]["node"] for each in copies(one)}) == 2
            expected = ids_of(one)
            assert expected[: len(STORY["greedy_ids"]) - 1] == STORY["greedy_ids"][:-1]
            assert len(expected) == TOKENS
            with ThreadPoolExecutor(8) as pool:
                answers = [pool.submit(ids_of, one) for _ in range(8)]
                eventually(lambda: answers_by_node(one) == [4, 4], WITHIN_S)
                two.process.kill()
                assert all(answer.result() == expected for answer in answers)
            eventually(lambda: len(copies(one)) == 1, WITHIN_S)
            reply = one.call("POST", "/v1/placements", {"model": "demo", "replicas": 1})
            assert [each["id"] for each in copies(one)] == [reply.body["id"]]


def turn(running: Node, messages: list[dict[str, str]]) -> dict[str, Any]:
    """One more turn of a conversation: its answer is added. Returns its final stats."""
    body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0}
    reply = running.call("POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply
    messages.append(dict(reply.body["choices"][0]["message"]))
    messages.append({"role": "user", "content": "And then?"})
    return dict(reply.body["generation_stats"])


def test_conversations_stay_where_their_prompts_are_cached(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(60))
    with node(tmp_path / "one", "--dtype", "float32") as one:
        flags = ("--dtype", "float32")
        with node(copy_key(one, tmp_path / "two"), *flags) as two:
            eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
            _ = one.call("POST", "/v1/placements", {"model": "demo", "replicas": 2})
            eventually(lambda: len(copies(one)) == 2 == len(copies(two)), WITHIN_S)
            talks = [[{"role": "user", "content": f"{talk}: {words}"}] for talk in range(4)]
            with ThreadPoolExecutor(4) as pool:
                doors = [one, two, one, two]
                places = list(pool.map(turn, doors, talks))
            assert len({each["placement"]["id"] for each in places}) == 2
            for _ in range(2):
                for talk, door, first in zip(talks, reversed(doors), places, strict=True):
                    stats = turn(door, talk)
                    where = stats["placement"]
                    assert where["id"] == first["placement"]["id"], where
                    assert "prompt tokens are in its memory" in where["reason"]
                    assert stats["cached_tokens"] > 100
