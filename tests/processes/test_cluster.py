"""Two nodes as processes: discovery, trust, split models with the same ids, orderly ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ORACLE, STORY, answer, request, whole_engine
from listening import events
from nodes import (
    Node,
    alive,
    copy_key,
    eventually,
    grpc_address,
    node,
    sees,
    statuses,
)
from trials import NEVER_END

WITHIN_S = 180.0
"""Long, so that a loaded machine fails no test."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Two nodes that discover each other by mDNS on loopback; they differ in --dtype."""
    root = tmp_path_factory.mktemp("pair")
    with (
        node(root / "one", "--dtype", "float32") as one,
        node(copy_key(one, root / "two"), "--dtype", "bfloat16") as two,
    ):
        eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
        yield one, two


def head_of(pair: tuple[Node, Node]) -> tuple[Node, Node]:
    """(the head, the other)."""
    one, two = pair
    cluster = one.call("GET", "/v1/cluster").body
    return (one, two) if cluster["head"] == cluster["self"] else (two, one)


def place(door: Node, *on: Node) -> Any:
    """Places the demo on these nodes, the generator first."""
    layers = [{"node": _id(running), "layers": 16 // len(on)} for running in on]
    body = {"model": "demo", "layers": layers}
    reply = door.call("POST", "/v1/placements", body)
    assert reply.status == 200, reply
    return reply.body


def test_a_split_placement_gives_the_ids_of_one_node(pair: tuple[Node, Node]) -> None:
    """In the generator's dtype: the other node alone would compute in bfloat16."""
    head, other = head_of(pair)
    placed = place(head, *pair)
    stages, copies = placed["stages"], placed["drafting"]["prompt_lookup"]
    assert [stages[0]["layers"][0], stages[1]["layers"][1]] == [0, 16]
    assert stages[0]["layers"][1] == stages[1]["layers"][0]
    assert [stage["node"] for stage in stages] == [_id(running) for running in pair]
    # Each node's own count: of 33 MB in all a stage needs its layers only.
    bytes_read = [s["checkpoint_bytes_read"] for s in stages]
    assert all(1_000_000 < count < 25_000_000 for count in bytes_read), bytes_read
    # Said at once: the page asks again only when something changes.
    assert copies["enabled"] and not copies["reason"]
    for row in ORACLE[:2]:
        body = head.chat(row["prompt"], return_token_ids=True)
        assert body["choices"][0]["token_ids"] == row["greedy_ids"]
        stats = body["generation_stats"]
        assert stats["num_draft_tokens"] == 0 and stats["drafter_kind"] != "native_mtp"
        assert stats["lookup_accepted_tokens"] == stats["accepted_draft_tokens"]
        assert "2 stages" in stats["drafting_reason"]
        assert len(stats["placement"]["stages"]) == 2
    # The other node's API answers as well: the request goes to the head.
    assert other.chat("Who are you?", max_tokens=2)["generation_stats"]["placement"]


def test_every_stage_computes_in_the_generators_dtype(pair: tuple[Node, Node]) -> None:
    """A whole model in the generator's dtype gives the same ids as the two nodes together."""
    head, _ = head_of(pair)
    _ = place(head, *reversed(pair))
    split = head.chat("Tell me a story.", return_token_ids=True, max_tokens=32)
    whole = answer(whole_engine(dtype="bfloat16"), request(STORY["prompt_ids"], 0, 32))
    assert split["choices"][0]["token_ids"] == list(whole.ids)


def test_a_named_peer_joins_and_once_it_is_dead_the_other_node_serves_and_drains(
    tmp_path: Path,
) -> None:
    flags = ("--no-mdns", "--dtype", "float32")
    with (
        node(tmp_path / "a", *flags) as one,
        node(copy_key(one, tmp_path / "b"), *flags, "--peer", grpc_address(one)) as two,
    ):
        eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
        placed = two.call("POST", "/v1/placements", {"model": "demo", "min_nodes": 2})
        assert placed.status == 200, placed
        body = one.chat("Tell me a story.", return_token_ids=True, max_tokens=24)
        assert body["choices"][0]["token_ids"] == STORY["greedy_ids"][:24]
        assert one.call("DELETE", f"/v1/placements/{placed.body['id']}").status == 200
        two.process.kill()
        eventually(lambda: "dead" in statuses(one), WITHIN_S)
        body = one.chat("Tell me a story.", return_token_ids=True, max_tokens=24)
        assert body["choices"][0]["token_ids"] == STORY["greedy_ids"][:24]
        assert body["generation_stats"]["drafter_kind"] == "native_mtp"
        assert_drains(one)


def assert_drains(one: Node) -> None:
    """Stops the node: answers in progress end and new requests are refused."""
    with one.stream("Tell me a story.", max_tokens=100, **NEVER_END) as events:
        _ = next(events)
        one.process.terminate()

        def refuses() -> bool:
            reply = one.call("POST", "/v1/chat/completions", {"model": "demo"})
            return reply.status == 503 and "retry-after" in reply.headers

        eventually(refuses, WITHIN_S)
        assert list(events)[-1] == "[DONE]"
    assert one.process.wait(WITHIN_S) == 0


def _id(running: Node) -> str:
    return running.call("GET", "/v1/cluster").body["self"]


def assert_other_left(rest: Node) -> None:
    """A node that is only silent would be dead first, and stay in the list for a minute."""
    eventually(lambda: len(statuses(rest)) == 1, WITHIN_S)
    assert "died" not in [event["kind"] for event in events(rest)]
    assert " left" in rest.log.read_text()


def test_a_joining_node_does_not_replace_the_head_whose_orderly_end_stops_its_stages(
    tmp_path: Path,
) -> None:
    with node(tmp_path / "first", "--no-mdns") as first:
        _ = first.chat("Who are you?", max_tokens=2)
        [pid] = [stage["pid"] for stage in first.stages()]
        # It led for more terms than the first node before they meet.
        joining = copy_key(first, tmp_path / "joining")
        _ = (joining / "term").write_text("7\n")
        with node(joining, "--no-mdns", "--peer", grpc_address(first)) as second:
            eventually(lambda: sees(first, 2) and sees(second, 2), WITHIN_S)
            eventually(
                lambda: second.call("GET", "/v1/cluster").body["head"] == _id(first), WITHIN_S
            )
            assert first.call("GET", "/v1/cluster").body["term"] == 8
            body = second.chat("Who are you?", max_tokens=8)
            assert body["generation_stats"]["drafter_kind"] == "native_mtp"
            assert alive(pid), "the head's placement stays"
            assert first.stop() == 0
            eventually(
                lambda: second.call("GET", "/v1/cluster").body["head"] == _id(second), WITHIN_S
            )
            eventually(lambda: not alive(pid), WITHIN_S)
            assert_other_left(second)
            assert second.chat("Who are you?", max_tokens=2)["choices"]
