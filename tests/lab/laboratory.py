"""A cluster of real nodes on loopback whose nodes and runners tests kill and restart."""

import time
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from nodes import Node, eventually, free_ports, node

KEY = "b" * 32
WHOLE_WITHIN_S = 180.0
"""Long, so that a loaded machine fails no test."""


@dataclass(frozen=True, slots=True)
class Place:
    """One runner: its stage, its node's id and its process id."""

    stage: int
    node: str
    pid: int


@dataclass(slots=True)
class _LabNode:
    """A node that can be started again with the same data folder and address."""

    folder: Path
    opened: AbstractContextManager[Node]
    running: Node
    id: str
    address: str


@dataclass(slots=True)
class Laboratory:
    """The nodes by id, and one placement of the demo model over some of them."""

    root: Path
    stages: int
    memory: Mapping[str, str] = field(default_factory=dict[str, str])
    """--memory-limit by folder: n0, n1, …"""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    load_s: float = 0.0
    """Seconds of the first placement: the most that the load of a lost stage costs."""
    collapsed: int = 0
    """How often stages were left on fewer nodes than there are stages, and placed again."""
    _nodes: dict[str, _LabNode] = field(default_factory=dict[str, _LabNode])

    @property
    def ids(self) -> list[str]:
        return list(self._nodes)

    def node(self, node_id: str) -> Node:
        return self._nodes[node_id].running

    def head(self) -> str:
        """The head's id in the view of any running node."""
        return str(self._any().call("GET", "/v1/cluster", timeout_s=WHOLE_WITHIN_S).body["head"])

    def place(self, **options: Any) -> Any:
        """Places the demo model in place of the current placement."""
        sizes = {"min_nodes": self.stages, "max_nodes": self.stages}
        started_at = time.monotonic()
        reply = self._any().call("POST", "/v1/placements", {"model": "demo", **sizes, **options})
        assert reply.status == 200, reply
        self.load_s = self.load_s or time.monotonic() - started_at
        return reply.body

    def placement(self) -> Any:
        """The only entry of `GET /v1/placements`, or None."""
        placements = (
            self._any().call("GET", "/v1/placements", timeout_s=WHOLE_WITHIN_S).body["data"]
        )
        return placements[0] if placements else None

    def places(self) -> list[Place]:
        """The runners that compute, by stage."""
        stages = self.placement()["stages"]
        return [Place(i, s["node"], s["pid"]) for i, s in enumerate(stages) if s.get("pid")]

    def is_whole(self) -> bool:
        """Whether all nodes are alive, and every stage runs."""
        statuses = [n["status"] for n in self._any().call("GET", "/v1/cluster").body["nodes"]]
        placement = self.placement()
        if statuses != ["alive"] * len(self._nodes):
            return False
        if placement is None or placement["status"] != "ready":
            return False
        return all(psutil.pid_exists(place.pid) for place in self.places())

    def nodes(self) -> list[Any]:
        """The entries of `GET /v1/cluster` of any running node."""
        return list(self._any().call("GET", "/v1/cluster", timeout_s=WHOLE_WITHIN_S).body["nodes"])

    def until_alive(self) -> None:
        """Waits until every node sees every node alive."""

        def all_see_all() -> bool:
            counts = [self._alive(entry.running) for entry in self._nodes.values()]
            return counts == [len(counts)] * len(counts)

        eventually(all_see_all, WHOLE_WITHIN_S)

    def until_ended(self, node_id: str) -> None:
        """Waits for the end of a node that was killed or asked to stop; else returns at once."""
        process = self.node(node_id).process
        deadline = time.monotonic() + WHOLE_WITHIN_S
        while process.poll() is None and self._stops(node_id) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _stops(self, node_id: str) -> bool:
        door = self._any(but=node_id)  # its own port may close before its process ends
        nodes = door.call("GET", "/v1/cluster", timeout_s=WHOLE_WITHIN_S).body["nodes"]
        statuses = {node["id"]: node["status"] for node in nodes}
        return statuses.get(node_id) != "alive"

    def until_whole(self, *, together: bool = False) -> float:
        """Restarts the nodes that ended; returns the seconds until every stage was ready.

        Stages that have moved to one node are then placed again, each on a node of its own, unless
        they may stay `together`.
        """
        started_at = time.monotonic()
        self.restart()
        eventually(self.is_whole, WHOLE_WITHIN_S)
        seconds = time.monotonic() - started_at
        if not together and len({place.node for place in self.places()}) < self.stages:
            self.collapsed += 1
            _ = self.place()
            eventually(self.is_whole, WHOLE_WITHIN_S)
        return seconds

    def restart(self) -> None:
        """Starts the nodes whose processes have ended, with the same folders and addresses."""
        for entry in list(self._nodes.values()):
            if entry.running.process.poll() is not None:
                _ = entry.opened.__exit__(None, None, None)
                (entry.folder / "node.json").unlink(missing_ok=True)
                log = entry.folder / "log"
                _ = log.rename(entry.folder / f"log-{time.monotonic_ns()}")
                peers = (each.address for each in self._nodes.values() if each is not entry)
                self._start(entry.folder, peers, port=entry.address.rpartition(":")[2])

    def live_state(self) -> dict[str, int]:
        """Live requests or bytes of KV cache that live nodes report, by `node stage`; no zeros.

        Last reports of dead nodes are left out.
        """
        nodes = self._any().call("GET", "/v1/cluster", timeout_s=WHOLE_WITHIN_S).body["nodes"]
        return {
            f"{node['name']} {stage['stage']}": stage["live_requests"] or stage["cache_bytes"]
            for node in nodes
            if node["status"] != "dead"
            for stage in node["stages"]
            if stage["live_requests"] or stage["cache_bytes"]
        }

    def processes(self, node_id: str) -> list[psutil.Process]:
        """The processes of a node and its runners."""
        process = psutil.Process(self.node(node_id).process.pid)
        return [process, *process.children(recursive=True)]

    def close(self) -> None:
        with ExitStack() as stack:
            for entry in self._nodes.values():
                stack.push(entry.opened)
                # All at once, or the others would restore the lost stages.
                entry.running.process.kill()

    def start(self, count: int) -> None:
        self._start(self.root / "n0", [])
        [first] = [entry.address for entry in self._nodes.values()]
        with ThreadPoolExecutor() as pool:
            rest = [self.root / f"n{number}" for number in range(1, count)]
            _ = list(pool.map(self._start, rest, [[first]] * len(rest)))
        eventually(lambda: self._alive(self._any()) == count, WHOLE_WITHIN_S)

    def _start(self, folder: Path, peers: Iterable[str], *, port: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        key = folder / "key"
        _ = key.write_text(KEY)
        key.chmod(0o600)
        dialled = [flag for peer in peers for flag in ("--peer", peer)]
        flags = (
            "--no-mdns",
            "--dtype",
            "float32",
            "--grpc-port",
            port or str(*free_ports(1)),
            "--log-format",
            "human",
        )
        if limit := self.memory.get(folder.name):
            flags += ("--memory-limit", limit)
        opened = node(folder, *flags, "--cluster-key-file", str(key), *dialled, env=self.env)
        running = opened.__enter__()
        own = running.itself()
        address = f"{own['host']}:{own['port']}"
        self._nodes[own["id"]] = _LabNode(folder, opened, running, own["id"], address)

    def _alive(self, running: Node) -> int:
        nodes = running.call("GET", "/v1/cluster", timeout_s=WHOLE_WITHIN_S).body["nodes"]
        return [node["status"] for node in nodes].count("alive")

    def _any(self, but: str = "") -> Node:
        """A node whose process runs, and is not stopped; not `but`."""
        for node_id, entry in self._nodes.items():
            process = entry.running.process
            if node_id == but or process.poll() is not None:
                continue
            if psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                return entry.running
        raise AssertionError("no node runs")


@contextmanager
def laboratory(
    root: Path,
    *,
    nodes: int = 4,
    stages: int = 3,
    memory: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Generator[Laboratory]:
    """Nodes with the demo model placed."""
    lab = Laboratory(root, stages, memory or {}, env or {})
    try:
        lab.start(nodes)
        _ = lab.place()
        _ = lab.until_whole()
        yield lab
    finally:
        lab.close()
