"""Two nodes as two processes with their own data folders: found, trusted, split, the same ids."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from engines import ORACLE
from listening import events
from nodes import Node, alive, eventually, node, throughout

STORY: dict[str, Any] = next(row for row in ORACLE if row["prompt"] == "Tell me a story.")


def join(first: Node, data_dir: Path) -> Path:
    """A data folder that holds the first node's cluster key."""
    data_dir.mkdir(parents=True)
    _ = shutil.copy(first.data_dir / "cluster.key", data_dir / "cluster.key")
    return data_dir


def statuses(running: Node) -> list[str]:
    return [n["status"] for n in running.call("GET", "/v1/cluster").body["nodes"]]


def sees(running: Node, count: int) -> bool:
    return statuses(running).count("alive") == count


def grpc_address(running: Node) -> str:
    cluster = running.call("GET", "/v1/cluster").body
    own = next(n for n in cluster["nodes"] if n["self"])
    return f"{own['host']}:{own['port']}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Found by mDNS on loopback; started with different --dtype, the first one's first."""
    root = tmp_path_factory.mktemp("pair")
    with (
        node(root / "one", "--dtype", "float32") as one,
        node(join(one, root / "two"), "--dtype", "bfloat16") as two,
    ):
        eventually(lambda: sees(one, 2) and sees(two, 2), 15)
        yield one, two


def head_of(pair: tuple[Node, Node]) -> tuple[Node, Node]:
    """(the head, the other)."""
    one, two = pair
    cluster = one.call("GET", "/v1/cluster").body
    return (one, two) if cluster["head"] == cluster["self"] else (two, one)


def test_both_nodes_name_the_same_head(pair: tuple[Node, Node]) -> None:
    views = [running.call("GET", "/v1/cluster").body for running in pair]
    assert views[0]["head"] == views[1]["head"]
    assert views[0]["head"] in {view["self"] for view in views}
    assert views[0]["term"] == views[1]["term"]
    assert views[0]["cluster"] == views[1]["cluster"]


def test_a_split_placement_gives_the_ids_of_one_node(pair: tuple[Node, Node]) -> None:
    head, other = head_of(pair)
    placed = head.call("POST", "/v1/placements", {"model": "demo", "min_nodes": 2})
    assert placed.status == 200, placed
    stages = placed.body["stages"]
    assert [stages[0]["layers"][0], stages[1]["layers"][1]] == [0, 16]
    assert stages[0]["layers"][1] == stages[1]["layers"][0]
    assert stages[0]["node"] != stages[1]["node"]
    # Each node's own words on what it read: 33 MB in all, of which a stage needs its layers only.
    read = [s["checkpoint_bytes_read"] for s in stages]
    assert all(1_000_000 < count < 25_000_000 for count in read), read
    generator_is_float32 = stages[0]["node"] == _id(pair[0])
    for row in ORACLE[:4]:
        body = head.chat(row["prompt"], return_token_ids=True)
        if generator_is_float32:
            assert body["choices"][0]["token_ids"] == row["greedy_ids"]
        stats = body["generation_stats"]
        assert (stats["drafter_kind"], stats["num_draft_tokens"]) == ("none", 0)
        assert "2 stages" in stats["drafting_reason"]
        assert len(stats["placement"]["stages"]) == 2
    # The other node's API answers as well: the request goes to the head.
    assert other.chat("Who are you?", return_token_ids=True)["generation_stats"]["placement"]


def test_the_generators_dtype_holds_for_every_stage(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    """One node alone in the generator's dtype gives what the two gave together."""
    head, _ = head_of(pair)
    placed = head.call("POST", "/v1/placements", {"model": "demo", "min_nodes": 2}).body
    dtype = "float32" if placed["stages"][0]["node"] == _id(pair[0]) else "bfloat16"
    split = head.chat("Tell me a story.", return_token_ids=True)
    with node(tmp_path / "alone", "--no-mdns", "--dtype", dtype) as alone:
        whole = alone.chat("Tell me a story.", return_token_ids=True, num_draft_tokens=0)
    assert split["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]


def test_a_peer_that_is_named_needs_no_mdns(tmp_path: Path) -> None:
    flags = ("--no-mdns", "--dtype", "float32")
    with (
        node(tmp_path / "a", *flags) as one,
        node(join(one, tmp_path / "b"), *flags, "--peer", grpc_address(one)) as two,
    ):
        eventually(lambda: sees(one, 2) and sees(two, 2), 10)
        placed = two.call("POST", "/v1/placements", {"model": "demo", "min_nodes": 2})
        assert placed.status == 200, placed
        body = one.chat("Tell me a story.", return_token_ids=True)
        assert body["choices"][0]["token_ids"] == STORY["greedy_ids"]


def test_a_node_with_another_key_stays_out(tmp_path: Path) -> None:
    with node(tmp_path / "a") as one:
        peer = ("--peer", grpc_address(one))
        with node(tmp_path / "stranger", *peer) as stranger:
            eventually(lambda: "of this cluster" in stranger.log.read_text(), 15)
            assert sees(one, 1)
            assert sees(stranger, 1)
            assert one.chat("Who are you?")["choices"]


def test_a_lost_node_is_dead_within_seconds_and_the_rest_goes_on(tmp_path: Path) -> None:
    flags = ("--no-mdns", "--dtype", "float32")
    with (
        node(tmp_path / "a", *flags) as one,
        node(join(one, tmp_path / "b"), *flags, "--peer", grpc_address(one)) as two,
    ):
        eventually(lambda: sees(one, 2) and sees(two, 2), 10)
        two.process.kill()
        eventually(lambda: "dead" in statuses(one), 8)
        body = one.chat("Tell me a story.", return_token_ids=True)
        assert body["choices"][0]["token_ids"] == STORY["greedy_ids"]
        assert body["generation_stats"]["drafter_kind"] == "native_mtp"


def _id(running: Node) -> str:
    return running.call("GET", "/v1/cluster").body["self"]


def test_a_node_that_stops_says_goodbye(tmp_path: Path) -> None:
    with node(tmp_path / "a", "--no-mdns") as one:
        peer = ("--no-mdns", "--peer", grpc_address(one))
        with node(join(one, tmp_path / "b"), *peer) as two:
            eventually(lambda: sees(one, 2), 10)
            assert two.stop() == 0
        # At once: a timeout would say dead after 3.5 s, and leave the node in the list.
        eventually(lambda: len(statuses(one)) == 1, 1)
        assert " left" in one.log.read_text()


def test_a_node_that_joins_does_not_replace_the_head_and_what_it_has_placed(
    tmp_path: Path,
) -> None:
    with node(tmp_path / "first", "--no-mdns") as first:
        _ = first.chat("Who are you?")
        pid = first.stages()[0]["pid"]
        # It led for more terms than the first node before they meet.
        joining = join(first, tmp_path / "joining")
        _ = (joining / "term").write_text("7\n")
        with node(joining, "--no-mdns", "--peer", grpc_address(first)) as other:
            eventually(lambda: sees(first, 2) and sees(other, 2), 10)
            eventually(lambda: other.call("GET", "/v1/cluster").body["head"] == _id(first), 10)
            assert first.call("GET", "/v1/cluster").body["term"] == 8
            assert other.chat("Who are you?")["generation_stats"]["drafter_kind"] == "native_mtp"
            assert alive(pid)


def test_a_head_that_leaves_ends_its_own_stages_and_the_next_one_adopts_the_others(
    tmp_path: Path,
) -> None:
    with node(tmp_path / "first", "--no-mdns") as first:
        peer = ("--no-mdns", "--peer", grpc_address(first))
        with node(join(first, tmp_path / "second"), *peer) as second:
            eventually(lambda: sees(first, 2) and sees(second, 2), 10)
            _ = second.chat("Who are you?")
            own, others = ([stage["pid"] for stage in n.stages()] for n in (first, second))
            assert own or others
            assert first.stop() == 0
            eventually(lambda: second.call("GET", "/v1/cluster").body["head"] == _id(second), 2)
            eventually(lambda: not any(map(alive, own)), 10)
            assert second.chat("Who are you?")["choices"]
            assert all(map(alive, others))


def test_a_node_that_stops_lets_answers_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    with node(tmp_path / "a", "--no-mdns") as one:
        with one.stream("Tell me a story.") as events:
            _ = next(events)
            one.process.terminate()

            def asked_in_vain() -> bool:
                reply = one.call("POST", "/v1/chat/completions", {"model": "demo"})
                return reply.status == 503 and "retry-after" in reply.headers

            eventually(asked_in_vain, 2)
            assert list(events)[-1] == "[DONE]"
        assert one.process.wait(15) == 0


def _news(response: HTTPResponse, kind: str) -> Iterator[Any]:
    """The events of a kind as they come."""
    for line in response:
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if event["kind"] == kind:
                yield event


def suspicions(running: Node) -> list[str]:
    return [e["text"] for e in events(running) if e["kind"] in ("suspected", "died")]


def test_many_forwarded_event_streams_each_get_the_news_and_nobody_is_suspected(
    pair: tuple[Node, Node],
) -> None:
    """M5: they share the connection to the head with everything else that is forwarded."""
    head, other = head_of(pair)
    before = [suspicions(running) for running in pair]
    with ExitStack() as stack:
        followed: list[HTTPResponse] = []
        for _ in range(70):
            connection = other.connect(other.port, 30)
            _ = stack.callback(connection.close)
            connection.request("GET", "/v1/events?limit=0")
            followed.append(connection.getresponse())
        assert [response.status for response in followed] == [200] * 70
        placed = other.call("POST", "/v1/placements", {"model": "demo", "max_nodes": 1})
        assert placed.status == 200, placed
        for response in followed:
            assert placed.body["id"] in next(_news(response, "placed"))["text"]
        assert other.chat("Who are you?", max_tokens=4)["choices"]
        throughout(lambda: sees(head, 2) and sees(other, 2), 3)
        assert [suspicions(running) for running in pair] == before
