"""The clients that the limit for one address applies to, with connections without sockets."""

import asyncio
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from exo_node.node.api.http.connection_limits import ConnectionLimits, LimitedConnection


class Wire(asyncio.Transport):
    """A client at an address, with the bytes that it got."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 50_000), "sockname": ("10.0.0.1", 52415)})
        self.received = b""

    def write(self, data: Any) -> None:
        self.received += bytes(data)

    def write_eof(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


async def nobody(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody asks")


def refused(address: str, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The first lines of the answers to five clients of an address that may have two."""
    monkeypatch.setattr(
        LimitedConnection, "limits", ConnectionLimits(per_address=2, spare_s=60, refusals=5)
    )

    async def connect() -> list[bytes]:
        config, state = Config(nobody, lifespan="off"), ServerState()
        config.load()
        wires = [Wire(address) for _ in range(5)]
        for wire in wires:
            connection = LimitedConnection(config, state, {})
            connection.connection_made(wire)
        return [wire.received.partition(b"\r\n")[0] for wire in wires if wire.received]

    return asyncio.run(connect())


@pytest.mark.parametrize(
    ("address", "surplus"),
    [
        ("192.168.1.20", 3),
        ("10.0.0.20", 3),
        ("100.64.0.20", 3),
        ("fd00::20", 3),
        ("203.0.113.20", 3),
        ("127.0.0.1", 0),
        ("::1", 0),
    ],
)
def test_every_machine_but_this_one_has_a_bound_of_its_own(
    address: str, surplus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(address, monkeypatch) == [b"HTTP/1.1 503 Service Unavailable"] * surplus
