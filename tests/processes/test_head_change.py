"""Three nodes as processes whose head is killed, stopped and restarted."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from nodes import Node, copy_key, eventually, grpc_address, node, sees
from slow_motion import runners_of

from exo_node.node.machine.timing import LAN

WITHIN_S = 120.0
"""Long, so that a loaded machine fails no test; the bounds themselves are test_election's."""

pytestmark = pytest.mark.timeout(600)


class Trio:
    """Three nodes of one cluster that know each other by --peer."""

    def __init__(self, root: Path, stack: ExitStack, *flags: str) -> None:
        self.root = root
        self._stack = stack
        self.nodes: dict[str, Node] = {}
        self._flags = ("--no-mdns", "--dtype", "float32", *flags)

    def start(self, name: str) -> Node:
        folder = self.root / name
        peers = [f for n in self.nodes.values() for f in ("--peer", grpc_address(n))]
        if self.nodes and not folder.exists():
            _ = copy_key(next(iter(self.nodes.values())), folder)
        (folder / "node.json").unlink(missing_ok=True)  # of a process that was killed
        started = self._stack.enter_context(node(folder, *self._flags, *peers, sound=True))
        self.nodes[name] = started
        return started

    def complete(self) -> None:
        """Starts the nodes that a test has killed, and waits until all agree."""
        for name in ("one", "two", "three"):
            if name not in self.nodes:
                _ = self.start(name)
        nodes = list(self.nodes.values())
        eventually(lambda: all(sees(n, 3) for n in nodes) and agree(nodes), WITHIN_S)

    def kill(self, running: Node) -> None:
        """SIGKILL."""
        running.process.kill()
        _ = running.process.wait()
        del self.nodes[running.data_dir.name]

    def by_id(self, node_id: str) -> Node:
        return next(n for n in self.nodes.values() if cluster(n)["self"] == node_id)

    def head(self) -> Node:
        return self.by_id(cluster(next(iter(self.nodes.values())))["head"])

    def roles(self) -> tuple[Node, list[Node]]:
        """The head and the others, by one look."""
        head = self.head()
        return head, [n for n in self.nodes.values() if n is not head]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with ExitStack() as stack:
        yield Trio(tmp_path_factory.mktemp("trio"), stack)


@pytest.fixture
def trio(nodes: Trio) -> Trio:
    nodes.complete()
    return nodes


def cluster(running: Node) -> Any:
    return running.call("GET", "/v1/cluster").body


def agree(nodes: list[Node]) -> bool:
    """Whether all name the same head and term, and that head is one of them."""
    views = [cluster(n) for n in nodes]
    heads = {(v["head"], v["term"]) for v in views}
    return len(heads) == 1 and sum(v["head"] == v["self"] for v in views) == 1


def stored_term(running: Node) -> int:
    return int((running.data_dir / "term").read_text())


def event_kinds(running: Node) -> list[str]:
    """The kinds of the node's own events, oldest first."""
    connection = running.connect(running.port, 10)
    try:
        connection.request("GET", "/v1/events?scope=node&follow=0")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]


def test_a_killed_head_is_replaced_and_comes_back_as_a_follower(trio: Trio) -> None:
    old = trio.head()
    name, term = old.data_dir.name, cluster(old)["term"]
    placement = {"model": "demo", "min_nodes": 2, "max_nodes": 2}
    assert old.call("POST", "/v1/placements", placement).status == 200
    time.sleep(3 * LAN.heartbeat_s)  # its heartbeats carry the desired placement
    trio.kill(old)
    survivors = list(trio.nodes.values())
    eventually(lambda: agree(survivors), WITHIN_S)
    now = cluster(survivors[0])["term"]
    assert now > term
    eventually(lambda: [stored_term(n) for n in survivors] == [now, now], WITHIN_S)
    _, [follower] = trio.roles()
    assert follower.call("GET", "/v1/placements").status == 200
    assert follower.chat("Who are you?")["choices"]  # after the model's load on the new head
    [placed] = follower.call("GET", "/v1/placements").body["data"]
    assert len(placed["stages"]) == 2, "as requested from the old head"
    assert {"died", "election", "head_changed"} <= set(event_kinds(follower))

    new_head = cluster(follower)["head"]
    back = trio.start(name)
    eventually(lambda: agree(list(trio.nodes.values())), WITHIN_S)
    assert cluster(back)["head"] == new_head
    assert stored_term(back) == cluster(back)["term"] >= term + 1


def test_a_request_during_the_election_waits_for_it(trio: Trio) -> None:
    head, others = trio.roles()
    trio.kill(head)
    reply = others[0].call("GET", "/v1/placements", timeout_s=WITHIN_S)
    assert reply.status == 200


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_placement_under_way_is_made_by_the_next_head(trio: Trio, is_killed: bool) -> None:
    """Asked of the head itself, which follows after a pause, or of a node that outlives it."""
    head, [door, other] = trio.roles()
    on = [cluster(other)["self"]]
    body = {"model": "demo", "nodes": on, "context": 1024 + is_killed}
    before, loading = set(runners_of([other])), set[psutil.Process]()

    def loads() -> bool:
        loading.update(set(runners_of([other])) - before)
        return bool(loading)

    with ThreadPoolExecutor(1) as pool:
        entry = door if is_killed else head
        placing = pool.submit(entry.call, "POST", "/v1/placements", body)
        eventually(loads, WITHIN_S)
        for runner in loading:
            runner.suspend()  # so that the placement is not ready before the head is lost
        if is_killed:
            trio.kill(head)
        else:
            head.process.send_signal(signal.SIGSTOP)
            eventually(lambda: agree([door, other]), WITHIN_S)
            head.process.send_signal(signal.SIGCONT)
        eventually(lambda: agree(list(trio.nodes.values())), WITHIN_S)
        for runner in loading:
            with suppress(psutil.NoSuchProcess):
                runner.resume()
        reply = placing.result()
    assert reply.status == 200, reply
    assert [stage["node"] for stage in reply.body["stages"]] == on
