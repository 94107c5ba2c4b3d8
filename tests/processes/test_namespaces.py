"""Nodes on faulty networks: discovery, named peers, partitions, one-way loss, delay and loss."""

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import pytest
from engines import STORY
from listening import ask, events
from namespaces import Network, cluster, heads, is_whole, network, statuses
from nodes import Node, eventually, struck
from slow_motion import runners_of, slowed
from trials import NEVER_END

from exo_node.node.machine.timing import LAN

NAMES = ("a", "b", "c")
WITHIN_S = 400.0
"""Long, so that a loaded machine fails no test."""

pytestmark = pytest.mark.timeout(1800)


def sees(running: Node, **expected: str) -> bool:
    return statuses(running) == expected


def short_answer(running: Node) -> Any:
    """The text of a short answer to one fixed prompt."""
    body = running.chat("What is 34 + 58?", max_tokens=8)
    return body["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Network, dict[str, Node]]]:
    with network(*NAMES) as net, cluster(net, tmp_path_factory.mktemp("lab"), NAMES) as nodes:
        yield net, nodes


@pytest.fixture
def lab(shared: tuple[Network, dict[str, Node]]) -> Generator[tuple[Network, dict[str, Node]]]:
    """The shared cluster, whole at the start of each test; heals the network at its end."""
    net, nodes = shared
    eventually(lambda: is_whole(nodes), WITHIN_S)
    yield shared
    _ = net.shape()
    _ = net.heal()


def test_nodes_find_each_other_by_mdns_across_namespaces(
    lab: tuple[Network, dict[str, Node]],
) -> None:
    net, nodes = lab
    assert all(set(statuses(n).values()) == {"alive"} for n in nodes.values())
    assert {n.itself()["host"] for n in nodes.values()} == {net.address(name) for name in NAMES}
    assert len(heads(nodes)) == 1


def test_a_named_peer_is_found_where_multicast_is_blocked(tmp_path: Path) -> None:
    with network("a", "b") as net:
        _ = net.multicast(False)
        with cluster(net, tmp_path, ["a"]) as first:
            peer = ("--peer", f"{net.address('a')}:{first['a'].itself()['port']}")
            with cluster(net, tmp_path, ["b"], *peer) as second:
                nodes = {**first, **second}
                eventually(lambda: is_whole(nodes), WITHIN_S)
                assert net.counts().groups > 0


def test_an_answer_on_the_losing_side_ends_and_its_placement_is_reported_superseded(
    lab: tuple[Network, dict[str, Node]],
) -> None:
    """The side without followers loses: its answer ends well and an event names its placement."""
    net, nodes = lab
    alone, other = nodes["a"], nodes["b"]
    _ = net.part(["a"], ["b", "c"])
    eventually(
        lambda: sees(alone, b="dead", c="dead") and sees(other, a="dead", c="alive"), WITHIN_S
    )
    placed = {n.data_dir.name: placed_on(n, n) for n in (alone, other)}
    fields = {"max_tokens": 1440, **NEVER_END}
    answers = [ask(running, STORY["prompt"], **fields) for running in (alone, other)]
    for answer in answers:
        assert answer.until(lambda a: len(a.ids) >= 10, WITHIN_S), answer.error
    with slowed(runners_of([alone, other])):
        assert net.heal().blocked > 0
        eventually(lambda: is_whole(nodes), WITHIN_S)
        time.sleep(LAN.takeover_s + 1)  # longer than orphaned stages are kept
        assert answers[0].ended_at is None, "it must outlive the partition"
    for answer in answers:
        assert answer.ended(WITHIN_S)
        assert answer.error == ""
        assert answer.ids[:76] == STORY["greedy_ids"][:76]
    assert answers[0].ids == answers[1].ids and len(answers[0].ids) == 1440
    assert heads(nodes) != {alone.itself()["id"]}
    eventually(lambda: len(events_of_kind(alone, "superseded")) >= 2, WITHIN_S)
    superseded = events_of_kind(alone, "superseded")
    assert [placed["a"]] == [
        e["facts"]["placement"] for e in superseded if "placement" in e["facts"]
    ]
    assert any("ask again" in e["text"] for e in superseded)
    placements = alone.call("GET", "/v1/placements").body["data"]
    assert [each["id"] for each in placements] == [placed["b"]]
    assert short_answer(alone)


def placed_on(door: Node, on: Node) -> str:
    body = {"model": "demo", "nodes": [on.itself()["id"]], "max_nodes": 1}
    reply = door.call("POST", "/v1/placements", body)
    assert reply.status == 200, reply
    return str(reply.body["id"])


def events_of_kind(door: Node, kind: str) -> list[Any]:
    """The cluster's events of this kind, as this node's API forwards them from the head."""
    return [e for e in events(door, scope="cluster") if e["kind"] == kind]


def test_a_node_that_sends_but_receives_nothing_hangs_no_client(
    lab: tuple[Network, dict[str, Node]],
) -> None:
    net, nodes = lab
    _ = net.block("a", "b")
    _ = net.block("c", "b")
    eventually(lambda: sees(nodes["b"], a="dead", c="dead"), WITHIN_S)
    # It may serve alone or refuse; neither it nor the others leave a client waiting.
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}]}
    reply = nodes["b"].call("POST", "/v1/chat/completions", body, timeout_s=WITHIN_S)
    assert reply.status in (200, 503), reply
    for running in nodes.values():
        assert running.call("GET", "/v1/placements", timeout_s=WITHIN_S).status == 200
    assert net.heal().blocked > 0
    eventually(lambda: is_whole(nodes), WITHIN_S)
    assert short_answer(nodes["b"])


def test_no_node_is_declared_dead_at_200_ms_and_5_percent_loss(
    lab: tuple[Network, dict[str, Node]],
) -> None:
    net, nodes = lab

    def none_dead() -> Literal[True] | None:
        logs = {name: running.log.read_text() for name, running in nodes.items()}
        before = net.shape(delay_ms=100, loss=0.05)
        time.sleep(8)  # many times the silence after which a node is declared dead
        after = net.shape()
        assert after.lost > before.lost
        assert after.forwarded - before.forwarded > 200
        for name, running in nodes.items():
            if " is dead" in running.log.read_text().removeprefix(logs[name]):
                return None
        return True

    # A machine that stalls for seconds causes a death without loss too, though not each time.
    assert struck(none_dead)
