"""Nodes in network namespaces that a switch joins: delay, jitter, loss, partitions, no multicast.

    with network("a", "b") as net, net.node("a", tmp_path / "a") as one:
        net.shape(delay_ms=100, loss=0.05)
        net.block("a", "b")
        net.heal()

The machine's own network is untouched, and nothing remains afterwards: see `switch.py`.
"""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from nodes import COMMAND, Connect, Node, node
from switch import NETWORK, Counts, Shape, enter

KEY = "a" * 32


class Network:
    """A running switch and its namespaces by name."""

    def __init__(self, switch: "subprocess.Popen[str]", namespaces: dict[str, int]) -> None:
        """`namespaces`: descriptors of the switch's process."""
        self._switch = switch
        self._folder = f"/proc/{switch.pid}/fd"
        self._namespaces = namespaces
        self._now = Shape()

    def address(self, name: str) -> str:
        return NETWORK.format(list(self._namespaces).index(name) + 1)

    def node(
        self,
        name: str,
        data_dir: Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        command: str = COMMAND,
    ) -> AbstractContextManager[Node]:
        """`exo-node start` in a namespace; peers reach it there, its HTTP is on its loopback."""
        inside = ["nsenter", f"--net={self._path(name)}", "--", command]
        flags = ("--interface", self.address(name), *flags)
        return node(data_dir, *flags, env=env, command=inside, connect=self.connect(name))

    def connect(self, name: str) -> Connect:
        """HTTP to a port of a namespace's loopback, from outside of it."""

        def connect(port: int, timeout_s: float) -> http.client.HTTPConnection:
            return _NamespaceConnection(self._path(name), port, timeout_s)

        return connect

    def shape(self, *, delay_ms: float = 0, jitter_ms: float = 0, loss: float = 0) -> Counts:
        """Sets the one-way delay, jitter and loss of all frames between namespaces."""
        return self._set(replace(self._now, delay_ms=delay_ms, jitter_ms=jitter_ms, loss=loss))

    def block(self, source: str, target: str) -> Counts:
        """Drops frames from `source` to `target`; the other direction stays open."""
        return self._block([(source, target)])

    def part(self, some: Iterable[str], others: Iterable[str]) -> Counts:
        """Drops frames between the two sides in both directions."""
        right = list(others)
        pairs = [(a, b) for a in some for b in right]
        return self._block([*pairs, *((b, a) for a, b in pairs)])

    def heal(self) -> Counts:
        """Removes all blocks; delay and loss stay."""
        return self._set(replace(self._now, blocked=()))

    def multicast(self, passes: bool) -> Counts:
        return self._set(replace(self._now, multicast=passes))

    def counts(self) -> Counts:
        return self._set(self._now)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{self._namespaces[name]}"

    def _block(self, pairs: Sequence[tuple[str, str]]) -> Counts:
        unknown = {name for pair in pairs for name in pair} - self._namespaces.keys()
        assert not unknown, f"no namespace {unknown}"
        return self._set(replace(self._now, blocked=(*self._now.blocked, *pairs)))

    def _set(self, shape: Shape) -> Counts:
        """Returns once the switch has applied the shape."""
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._now = shape
        _ = self._switch.stdin.write(json.dumps(asdict(shape)) + "\n")
        self._switch.stdin.flush()
        return Counts(**json.loads(self._switch.stdout.readline()))


class _NamespaceConnection(http.client.HTTPConnection):
    """A connection whose socket belongs to a namespace."""

    def __init__(self, namespace: str, port: int, timeout_s: float) -> None:
        super().__init__("127.0.0.1", port, timeout=timeout_s)
        self._namespace = namespace

    def connect(self) -> None:
        """A socket stays in the namespace of the thread that made it."""
        outcome: list[socket.socket | OSError] = []

        def make() -> None:
            try:
                with open(self._namespace) as namespace:
                    enter(namespace.fileno())
                outcome.append(socket.create_connection((self.host, self.port), self.timeout))
            except OSError as fault:
                outcome.append(fault)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if isinstance(outcome[0], OSError):
            raise outcome[0]
        self.sock = outcome[0]


def why_not() -> str | None:
    """The reason why there can be no namespaces here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "network namespaces are joined through /dev/net/tun, which is not here"
    missing = [command for command in ("ip", "nsenter") if shutil.which(command) is None]
    return f"network namespaces need the command {missing[0]}" if missing else None


@contextmanager
def network(*names: str) -> Generator[Network]:
    """Namespaces and a switch between them; skips the test, with the reason, if impossible."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    switch = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "switch.py"), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with switch:  # closes its standard input and waits for its end
        assert switch.stdout is not None
        first_line: dict[str, Any] = json.loads(switch.stdout.readline() or "{}")
        if "refused" in first_line:
            pytest.skip(first_line["refused"])
        yield Network(switch, first_line["namespaces"])


@contextmanager
def cluster(
    net: Network, root: Path, names: Iterable[str], *flags: str, command: str = COMMAND
) -> Generator[dict[str, Node]]:
    """A node in each namespace, all with one cluster key, by their names."""
    key = root / "key"
    _ = key.write_text(KEY)
    key.chmod(0o600)
    common = ("--cluster-key-file", str(key), "--dtype", "float32", *flags)
    with ExitStack() as stack:
        nodes = {
            name: stack.enter_context(net.node(name, root / name, *common, command=command))
            for name in names
        }
        yield nodes
        for running in nodes.values():  # all at once; leaving waits for each
            running.process.terminate()


def statuses(running: Node) -> dict[str, str]:
    """The status of each other node in this node's view, by name."""
    nodes = running.call("GET", "/v1/cluster", timeout_s=60).body["nodes"]
    return {node["name"]: node["status"] for node in nodes if not node["self"]}


def heads(nodes: Mapping[str, Node]) -> set[str]:
    """The ids of the heads in all nodes' views."""
    return {n.call("GET", "/v1/cluster", timeout_s=60).body["head"] for n in nodes.values()}


def is_whole(nodes: Mapping[str, Node]) -> bool:
    """Whether each node sees all others alive, and all name the same head."""
    views = [list(statuses(running).values()) for running in nodes.values()]
    return views == [["alive"] * (len(nodes) - 1)] * len(nodes) and len(heads(nodes)) == 1
