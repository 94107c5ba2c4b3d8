"""A cluster of real nodes on loopback to be broken: nodes and runners that end and come back."""

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
    """A runner's place: the stage, the node that has it, and the process."""

    stage: int
    node: str
    pid: int


@dataclass(slots=True)
class _Kept:
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
    spares: int
    """Warm runners of each stage beside the one that works."""
    stages: int
    memory: Mapping[str, str] = field(default_factory=dict[str, str])
    """--memory-limit by folder: n0, n1, …"""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    load_s: float = 0.0
    """How long the first placement took: what a stage without a spare costs, at most."""
    collapsed: int = 0
    """How often stages were left on fewer nodes than there are stages, and placed anew."""
    _kept: dict[str, _Kept] = field(default_factory=dict[str, _Kept])

    @property
    def ids(self) -> list[str]:
        return list(self._kept)

    def node(self, node_id: str) -> Node:
        return self._kept[node_id].running

    def head(self) -> str:
        """As a node that answers names it."""
        return str(self._any().call("GET", "/v1/cluster", timeout_s=WHOLE_WITHIN_S).body["head"])

    def place(self, **options: Any) -> Any:
        """Places the demo model, replacing what there was."""
        wanted = {"min_nodes": self.stages, "max_nodes": self.stages, "spares": self.spares}
        begun = time.monotonic()
        reply = self._any().call("POST", "/v1/placements", {"model": "demo", **wanted, **options})
        assert reply.status == 200, reply
        self.load_s = self.load_s or time.monotonic() - begun
        return reply.body

    def placement(self) -> Any:
        """The entry in `GET /v1/placements`; None where there is none."""
        found = self._any().call("GET", "/v1/placements", timeout_s=WHOLE_WITHIN_S).body["data"]
        return found[0] if found else None

    def places(self) -> list[Place]:
        """The working runners, by stage."""
        stages = self.placement()["stages"]
        return [Place(i, s["node"], s["pid"]) for i, s in enumerate(stages) if s.get("pid")]

    def ready_spares(self) -> list[Place]:
        spares = self.placement()["spares"]
        return [Place(s["stage"], s["node"], s["pid"]) for s in spares if s["status"] == "ready"]

    def is_whole(self) -> bool:
        """All nodes see all alive, every stage works, and every spare that was asked for waits."""
        seen = [n["status"] for n in self._any().call("GET", "/v1/cluster").body["nodes"]]
        placed = self.placement()
        if seen != ["alive"] * len(self._kept) or placed is None or placed["status"] != "ready":
            return False
        spared = sorted(place.stage for place in self.ready_spares())
        expected = sorted(list(range(len(placed["stages"]))) * self.spares)
        running = [*self.places(), *self.ready_spares()]
        return spared == expected and all(psutil.pid_exists(place.pid) for place in running)

    def nodes(self) -> list[Any]:
        """As a node that answers shows them."""
        return list(self._any().call("GET", "/v1/cluster", timeout_s=WHOLE_WITHIN_S).body["nodes"])

    def until_spared(self) -> None:
        eventually(self.is_whole, WHOLE_WITHIN_S)

    def until_alive(self) -> None:
        """Every node sees that every node is there."""

        def all_see_all() -> bool:
            return all(self._alive(kept.running) == len(self._kept) for kept in self._kept.values())

        eventually(all_see_all, WHOLE_WITHIN_S)

    def until_ended(self, node_id: str) -> None:
        """A node that was killed or told to stop; returns at once for one that goes on."""
        process = self.node(node_id).process
        deadline = time.monotonic() + WHOLE_WITHIN_S
        while process.poll() is None and self._stops(node_id) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _stops(self, node_id: str) -> bool:
        asked = self._any(but=node_id)  # its own port may close before its process ends
        nodes = asked.call("GET", "/v1/cluster", timeout_s=WHOLE_WITHIN_S).body["nodes"]
        shown = {node["id"]: node["status"] for node in nodes}
        return shown.get(node_id) != "alive"

    def until_whole(self, *, together: bool = False) -> float:
        """Restarts the nodes that ended; the seconds until every stage and spare was there.

        Where stages have moved together, they are then placed anew, each on a node of its own,
        unless they may stay `together`.
        """
        begun = time.monotonic()
        self.restart()
        eventually(self.is_whole, WHOLE_WITHIN_S)
        took = time.monotonic() - begun
        if not together and len({place.node for place in self.places()}) < self.stages:
            self.collapsed += 1
            _ = self.place()
            eventually(self.is_whole, WHOLE_WITHIN_S)
        return took

    def restart(self) -> None:
        """The nodes whose processes have ended."""
        for kept in list(self._kept.values()):
            if kept.running.process.poll() is not None:
                _ = kept.opened.__exit__(None, None, None)
                (kept.folder / "node.json").unlink(missing_ok=True)
                log = kept.folder / "log"
                _ = log.rename(kept.folder / f"log-{time.monotonic_ns()}")
                peers = (each.address for each in self._kept.values() if each is not kept)
                self._start(kept.folder, peers, port=kept.address.rpartition(":")[2])

    def held(self) -> dict[str, int]:
        """Requests and bytes of KV that live nodes still report, by `node stage`; zeros left out.

        A node that has died still shows its last report, which counts for nothing.
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
        """The node's and its runners'."""
        process = psutil.Process(self.node(node_id).process.pid)
        return [process, *process.children(recursive=True)]

    def close(self) -> None:
        with ExitStack() as stack:
            for kept in self._kept.values():
                stack.push(kept.opened)
                # All together, or those that are left would restore what goes.
                kept.running.process.kill()

    def start(self, count: int) -> None:
        self._start(self.root / "n0", [])
        [first] = [kept.address for kept in self._kept.values()]
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
        self._kept[own["id"]] = _Kept(folder, opened, running, own["id"], address)

    def _alive(self, running: Node) -> int:
        nodes = running.call("GET", "/v1/cluster", timeout_s=WHOLE_WITHIN_S).body["nodes"]
        return [node["status"] for node in nodes].count("alive")

    def _any(self, but: str = "") -> Node:
        """A node whose process runs, and is not stopped; not `but`."""
        for node_id, kept in self._kept.items():
            process = kept.running.process
            if node_id == but or process.poll() is not None:
                continue
            if psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                return kept.running
        raise AssertionError("no node runs")


@contextmanager
def laboratory(
    root: Path,
    *,
    nodes: int = 4,
    stages: int = 3,
    spares: int = 1,
    memory: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Generator[Laboratory]:
    """Nodes with the demo model placed and its spares ready."""
    lab = Laboratory(root, spares, stages, memory or {}, env or {})
    try:
        lab.start(nodes)
        _ = lab.place()
        _ = lab.until_whole()
        yield lab
    finally:
        lab.close()
