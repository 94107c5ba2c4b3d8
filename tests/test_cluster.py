"""Two nodes as two processes with their own data folders: found, trusted, split, the same ids."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ORACLE
from nodes import Node, alive, eventually, node

from exo_node.node.trust import load_or_create_identity

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
    assert views[0]["head"] == views[1]["head"] == min(v["self"] for v in views)
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
    for row in ORACLE:
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


def _identity(data_dir: Path, wanted: str) -> str:
    """Makes node keys until the id begins with one of the letters; returns the id."""
    while True:
        identity = load_or_create_identity(data_dir)
        if identity.node[0] in wanted:
            return identity.node
        (data_dir / "node.key").unlink()


def test_a_head_that_is_replaced_unloads_what_it_had_placed(tmp_path: Path) -> None:
    (tmp_path / "high").mkdir()
    _ = _identity(tmp_path / "high", "wxyz")
    with node(tmp_path / "high", "--no-mdns") as high:
        _ = high.chat("Who are you?")
        pid = high.stages()[0]["pid"]
        lower = join(high, tmp_path / "low")
        expected = _identity(lower, "abcd")
        with node(lower, "--no-mdns", "--peer", grpc_address(high)) as low:
            eventually(lambda: high.call("GET", "/v1/cluster").body["head"] == expected, 10)
            eventually(lambda: not alive(pid), 10)
            stats = high.chat("Who are you?")["generation_stats"]
            assert stats["drafter_kind"] == "native_mtp"
            listed = low.call("GET", "/v1/placements").body["data"]
            assert [p["status"] for p in listed] == ["ready"]
