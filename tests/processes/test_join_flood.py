"""The join port of a real node under a flood: it survives, and lets an honest node in later."""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from joiners import Impostor
from nodes import Node, eventually, free_ports, node
from test_join_nodes import (
    QUIET,
    WITHIN_S,
    approve,
    asks_at,
    cluster,
    joining,
    together,
)

from exo_node.node.join.port import MAX_CONNECTIONS
from exo_node.node.join.wire import FRAME_BYTES, ask_for_hint
from exo_node.node.machine.timing import LOCAL
from exo_node.proto import peer_pb2 as pb

HALF_OPEN = 300
"""Several times the connections that a join port serves at once."""


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    [port] = free_ports(1)
    folder = tmp_path_factory.mktemp("flooded") / "member"
    with node(folder, QUIET, "--grpc-port", str(port)) as running:
        yield running


@pytest.fixture(scope="module")
def port(member: Node) -> int:
    hint = asyncio.run(ask_for_hint(f"127.0.0.1:{member.itself()['port']}", LOCAL))
    assert hint is not None
    return hint.join_port


def lives(running: Node) -> bool:
    """Whether it answers, and is still the head of its cluster."""
    body = cluster(running)
    return running.process.poll() is None and body["head"] == body["self"]


def files(running: Node) -> int:
    return psutil.Process(running.process.pid).num_fds()


def call(port: int, raw: bytes) -> bytes:
    """The bytes that come back before the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(4096), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""


def test_random_bytes_get_no_answer_but_an_alert(member: Node, port: int) -> None:
    chance = random.Random(1)
    hello = bytes.fromhex("160301") + struct.pack(">H", 512) + b"\x01\x00\x01\xfc\x03\x03"
    for number in range(40):
        start = hello if number % 3 == 0 else b"GET / HTTP/1.1\r\n" if number % 3 == 1 else b""
        reply = call(port, start + chance.randbytes(chance.randrange(1, 4096)))
        assert reply == b"" or (reply[0] == 0x15 and len(reply) < 32), reply[:64]
    assert lives(member)
    log = member.log.read_text()
    assert "Traceback" not in log
    assert log.count("\n") < 100, "nonsense is logged once, not for each call"


def test_half_open_connections_are_bounded_and_let_go(member: Node, port: int) -> None:
    before = files(member)
    with ExitStack() as stack:
        for number in range(HALF_OPEN):
            each = stack.enter_context(socket.socket())
            each.setblocking(False)
            _ = each.connect_ex(("127.0.0.1", port))
            if number % 50 == 0:
                assert lives(member)
        # The served ones, and as many that wait in the backlog or are just being closed.
        assert files(member) <= before + 2 * MAX_CONNECTIONS + 22
        assert lives(member)
    eventually(lambda: files(member) <= before + 5, WITHIN_S)
    assert "Traceback" not in member.log.read_text()


LOGGED = {
    "oversized": f"a frame of {FRAME_BYTES + 1} bytes",
    "endless": f"a frame of {2**32 - 1} bytes",
    "empty": "nothing instead of",
    "no message": "bytes that are no frame",
    "cut": "",
    "out of turn": "stored instead of ask",
}
"""A part of the log line for each kind; a connection that ends early has none."""


def raw_frames() -> dict[str, bytes]:
    """Bytes that a node with a certificate may send in the place of a frame."""
    chance = random.Random(2)
    body = pb.JoinFrame(stored=pb.JoinStored()).SerializeToString()
    return {
        "oversized": (FRAME_BYTES + 1).to_bytes(4, "big") + chance.randbytes(FRAME_BYTES + 1),
        "endless": b"\xff\xff\xff\xff" + chance.randbytes(1 << 18),
        "empty": b"\x00\x00\x00\x00" * 64,
        "no message": (64).to_bytes(4, "big") + b"\xff" * 64,
        "cut": (100).to_bytes(4, "big") + b"\x00" * 10,
        "out of turn": (len(body).to_bytes(4, "big") + body) * 1000,
    }


@pytest.mark.parametrize("kind", raw_frames())
def test_frames_that_are_none_end_their_connection_alone(
    member: Node, port: int, kind: str
) -> None:
    async def scenario() -> None:
        evil = Impostor(fresh=True)
        async with asyncio.timeout(WITHIN_S), evil.calling(f"127.0.0.1:{port}") as (line, _, _):
            writer = line._writer  # pyright: ignore[reportPrivateUsage]
            writer.write(raw_frames()[kind])
            if kind == "cut":
                return
            while await line._reader.read(4096):  # pyright: ignore[reportPrivateUsage]
                pass

    with contextlib.suppress(OSError):  # the other side may not even read it to its end
        asyncio.run(scenario())
    assert lives(member)
    assert joining(member)["data"] == []
    eventually(lambda: LOGGED[kind] in member.log.read_text(), WITHIN_S)
    assert "Traceback" not in member.log.read_text()


def test_an_honest_node_joins_during_and_after_a_flood(
    member: Node, port: int, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        for _ in range(100):
            each = stack.enter_context(socket.socket())
            each.setblocking(False)
            _ = each.connect_ex(("127.0.0.1", port))
        peer = ("--peer", f"127.0.0.1:{member.itself()['port']}")
        new = stack.enter_context(node(tmp_path / "honest", QUIET, *peer))
        eventually(lambda: asks_at(new, member), WITHIN_S)
        approval = approve(member, new)
        assert approval.returncode == 0, approval.stderr
        eventually(lambda: together([member, new]), WITHIN_S)
