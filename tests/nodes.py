"""Real nodes: `exo-node start` as processes with data folders of their own, on loopback."""

import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import kept_profiles

COMMAND = str(Path(sys.executable).parent / "exo-node")
READY_WITHIN_S = 180.0
"""Long, so that a loaded machine fails no test; how fast a node is ready is measured in bench/."""
CALL_S = 300.0
"""A call's timeout: a load of the demo took 69 s on two cores with a dozen busy processes."""
_TOLD = 40
"""Lines of a node's log that a failed test shows."""
_KEPT = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LANG",
    "XDG_CONFIG_HOME",
    "EXO_TIMING",
    "PYTHONPATH",
    "EXO_MEASURE_AT_LOAD",
)

T = TypeVar("T")
Connect = Callable[[int, float], http.client.HTTPConnection]
"""A connection to a node's HTTP port, with a timeout in seconds."""


def on_loopback(port: int, timeout_s: float) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP response."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Node:
    """A running node."""

    process: "subprocess.Popen[bytes]"
    data_dir: Path
    port: int
    log: Path
    connect: Connect = on_loopback

    def call(
        self, method: str, path: str, body: object = None, *, timeout_s: float = CALL_S
    ) -> Reply:
        """One request; `bytes` are sent as they are."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = self.connect(self.port, timeout_s)
        try:
            headers = {"Content-Type": "application/json"} if raw is not None else {}
            if (self.data_dir / "local.token").exists():
                headers["X-Exo-Token"] = (self.data_dir / "local.token").read_text().strip()
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            text = response.read()
            return Reply(
                response.status,
                json.loads(text) if text else None,
                {name.lower(): value for name, value in response.getheaders()},
            )
        finally:
            connection.close()

    def chat(self, prompt: str, **fields: Any) -> Any:
        """A greedy answer's body. Fails the test on anything but 200."""
        reply = self.call("POST", "/v1/chat/completions", chat_body(prompt, **fields))
        assert reply.status == 200, reply
        return reply.body

    @contextmanager
    def stream(self, prompt: str, **fields: Any) -> "Generator[Iterator[Any]]":
        """The `data:` objects of a streamed answer; leaving the block closes the connection."""
        connection = self.connect(self.port, CALL_S)
        body = json.dumps(chat_body(prompt, stream=True, **fields))
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        assert response.status == 200, response.read()

        def events() -> Iterator[Any]:
            for line in response:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").strip()
                    yield "[DONE]" if data == b"[DONE]" else json.loads(data)

        try:
            yield events()
        finally:
            response.close()
            connection.close()

    def itself(self) -> Any:
        """Its own entry in `GET /v1/cluster`."""
        cluster = self.call("GET", "/v1/cluster").body
        return next(node for node in cluster["nodes"] if node["self"])

    def stages(self) -> list[Any]:
        """This node's own loaded stages."""
        return self.itself()["stages"]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(CALL_S)


def chat_body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        **fields,
    }


def environment() -> dict[str, str]:
    """The variables of this process that its nodes inherit. Their loads measure at once, so that
    no test depends on what was measured before it; tests of measuring set 0."""
    inherited = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {"EXO_MEASURE_AT_LOAD": "1", **inherited}


def python_path(folder: Path) -> str:
    """PYTHONPATH with a folder first, and after it a copy in which a fault is seeded."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def start_process(
    data_dir: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    terminal: int | None = None,
    command: Sequence[str] = (COMMAND,),
) -> "subprocess.Popen[bytes]":
    """`exo-node start` on loopback and free ports, whatever this process's environment says.

    `terminal`: the file descriptor that stands in for the log and for the input. `command` stands
    for `exo-node`; its process must become the node's, as nsenter's does.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    output = (log or data_dir / "log").open("wb")
    base = ["--data-dir", str(data_dir), "--interface", "127.0.0.1", "--name", data_dir.name]
    ports = ["--port", "0", "--grpc-port", "0"]
    with output:
        return subprocess.Popen(
            [*command, "start", *base, *ports, *flags],
            env={**environment(), **(env or {})},
            stdout=output if terminal is None else terminal,
            stderr=output if terminal is None else terminal,
            stdin=subprocess.DEVNULL if terminal is None else terminal,
        )


@contextmanager
def node(
    data_dir: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = (COMMAND,),
    connect: Connect = on_loopback,
    log: Path | None = None,
    measures: bool = False,
    sound: bool | None = None,
) -> Generator[Node]:
    """A ready node that is killed at the end; tests of an orderly end call `stop`.

    A node that `measures` neither receives nor shares measurements of the session's loads. With
    --models-dir a node shares its own only if the models are `sound`: others may be broken. False:
    its own disk may be.
    """
    if not measures:
        kept_profiles.seed(data_dir, source="--models-dir" not in flags if sound is None else sound)
    log = log or data_dir / "log"
    process = start_process(data_dir, *flags, env=env, log=log, command=command)
    try:
        record = data_dir / "node.json"
        eventually(lambda: record.exists() or process.poll() is not None, READY_WITHIN_S)
        assert process.poll() is None, log.read_text()
        port = json.loads(record.read_text())["http_port"]
        yield Node(process, data_dir, port, log, connect)
    except BaseException:
        end = log.read_text(errors="replace").splitlines()[-_TOLD:]
        print(f"--- the end of {log}:", *end, sep="\n")
        raise
    finally:
        process.kill()  # an orderly end would make other nodes restore its stages
        _ = process.wait()
        kept_profiles.take(data_dir)


_FIRST = 20_000 + os.getpid() * 194 % 12_000
_PORTS = itertools.cycle((*range(_FIRST, 32_000, 2), *range(20_000, _FIRST, 2)))
"""Ports below the ephemeral ones (Linux from 32,768, macOS from 49,152): another process may get
an ephemeral port before a node binds it, or binds it again."""


def copy_key(first: Node, data_dir: Path) -> Path:
    """Makes a data folder with the cluster key of the first node, and returns it."""
    data_dir.mkdir(parents=True)
    _ = shutil.copy(first.data_dir / "cluster.key", data_dir / "cluster.key")
    return data_dir


def statuses(running: Node) -> list[str]:
    """The status of every node in this node's view, its own included."""
    return [n["status"] for n in running.call("GET", "/v1/cluster").body["nodes"]]


def sees(running: Node, count: int) -> bool:
    """Whether exactly `count` nodes are alive in this node's view."""
    return statuses(running).count("alive") == count


def grpc_address(running: Node) -> str:
    """HOST:PORT for another node's --peer."""
    own = running.itself()
    return f"{own['host']}:{own['port']}"


def free_ports(count: int) -> list[int]:
    """Free ports whose successors are free as well, for the join ports."""
    return list(itertools.islice(filter(_is_free, _PORTS), count))


def _is_free(port: int) -> bool:
    with socket.socket() as first, socket.socket() as second:
        try:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
        except OSError:
            return False
    return True


def eventually(condition: Callable[[], object], within_s: float) -> None:
    """Polls until the condition holds; fails the test if it does not within `within_s`.

    The interval grows, since each poll of a node is an HTTP request that slows it down.
    """
    started_at = time.monotonic()
    while not condition():
        seconds = time.monotonic() - started_at
        assert seconds < within_s, f"not within {within_s} s"
        time.sleep(min(0.02 + seconds / 20, 0.2))


def struck(attempt: Callable[[], T | None]) -> T:
    """Returns the outcome of the first of ten attempts that is not None.

    On a busy machine a blow may come after an answer's end and show nothing, which is None.
    """
    for _ in range(10):
        if (outcome := attempt()) is not None:
            return outcome
    raise AssertionError("no attempt came in time to show anything")


def alive(pid: int) -> bool:
    """Whether a process that is no child of this one still runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
        return subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode == 0
    return state != "Z"
