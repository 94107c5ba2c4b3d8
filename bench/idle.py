"""Measures the costs of an idle cluster: CPU of each node, elections, head changes.

python bench/idle.py [--nodes 3] [--minutes 10] [--model demo]

Real nodes on loopback. --model loads one first, so that a runner idles as well.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

COMMAND = str(Path(sys.executable).parent / "exo-node")
AIM_PERCENT = 2.0
SETTLE_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description="What an idle cluster costs")
    _ = parser.add_argument("--nodes", type=int, default=3)
    _ = parser.add_argument("--minutes", type=float, default=10.0)
    _ = parser.add_argument("--model", help="place it before the measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        nodes: list[IdleNode] = []
        try:
            for number in range(options.nodes):
                nodes.append(IdleNode(Path(scratch) / f"n{number}", nodes[:1]))
            for node in nodes:
                _until(lambda node=node: len(node.cluster()["nodes"]) == len(nodes))
            if options.model:
                _ = nodes[0].ask("POST", "/v1/placements", {"model": options.model})
            time.sleep(SETTLE_S)
            status = _measure(nodes, 60 * options.minutes)
        finally:
            for node in nodes:
                node.process.terminate()
            for node in nodes:
                _ = node.process.wait()
    raise SystemExit(status)


class IdleNode:
    """A node process with a data folder of its own; the first one founds the cluster."""

    def __init__(self, folder: Path, peers: list["IdleNode"]) -> None:
        self.folder = folder
        folder.mkdir()
        flags = ["--interface", "127.0.0.1", "--no-mdns", "--port", "0", "--grpc-port", "0"]
        for peer in peers:
            _ = shutil.copy(peer.folder / "cluster.key", folder / "cluster.key")
            own = next(n for n in peer.cluster()["nodes"] if n["self"])
            flags += ["--peer", f"{own['host']}:{own['port']}"]
        self.process = subprocess.Popen(
            [COMMAND, "start", "--data-dir", str(folder), "--name", folder.name, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _until((folder / "node.json").exists)
        self._port = json.loads((folder / "node.json").read_text())["http_port"]

    def cluster(self) -> dict[str, Any]:
        return self.ask("GET", "/v1/cluster")

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise SystemExit(f"{path}: {answer.status} {text.decode()}")
            return json.loads(text)
        finally:
            connection.close()

    def cpu_s(self) -> dict[str, float]:
        """Seconds of processor time so far, of the node and of its runners together."""
        node = psutil.Process(self.process.pid)
        runners = sum(sum(child.cpu_times()[:2]) for child in node.children())
        return {"node": sum(node.cpu_times()[:2]), "runners": runners}


def _measure(nodes: list[IdleNode], seconds: float) -> int:
    """Prints a line for each node; returns 1 if one is above the aim or the head changed."""
    before, leases = [node.cpu_s() for node in nodes], [node.cluster() for node in nodes]
    start = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - start
    after, now = [node.cpu_s() for node in nodes], [node.cluster() for node in nodes]
    worst = 0.0
    for node, old, new, cluster in zip(nodes, before, after, now, strict=True):
        used = {name: 100 * (new[name] - old[name]) / took for name in new}
        worst = max(worst, used["node"])
        lease = cluster["lease"]
        print(
            f"{node.folder.name}: CPU {used['node']:.2f} %, runners {used['runners']:.2f} %; "
            f"term {cluster['term']}, elections {lease['elections']}, "
            f"head changes {lease['head_changes']}"
        )
    elections = sum(c["lease"]["elections"] for c in now)
    changed = [c["term"] for c in now] != [c["term"] for c in leases]
    print(f"{took / 60:.1f} minutes: {elections} elections since the start, ", end="")
    print("the head changed" if changed else "no head change", end="; ")
    print(f"highest CPU {worst:.2f} % (aim: under {AIM_PERCENT:g} %)")
    return int(changed or worst > AIM_PERCENT)


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the nodes did not find each other within 60 s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
