"""What macOS forbids is told from a firewall and from no network, by the errors of TN3179."""

import asyncio
import errno
import sys

import pytest

from exo_node.node.machine import local_network
from exo_node.node.machine.interfaces import Interface
from exo_node.node.machine.local_network import REMEDY, LocalNetwork, neighbour, refusal

WIFI = Interface("en0", "192.168.1.5")
CABLE = Interface("bridge0", "169.254.1.2")
INWARD = (Interface("lo0", "127.0.0.1"), Interface("docker0", "172.17.0.1"))


class Network:
    """What a send to an address does: the error of a number, or nothing."""

    def __init__(self, **faults: int) -> None:
        self.faults = {name.strip("_").replace("_", "."): fault for name, fault in faults.items()}
        self.sent = list[str]()

    def send(self, address: str) -> None:
        self.sent.append(address)
        if fault := self.faults.get(address, self.faults.get("all")):
            raise OSError(fault, "no route to host")


@pytest.fixture(autouse=True)
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


def test_a_program_without_the_permission_is_told_what_to_press() -> None:
    network = Network(all=errno.EHOSTUNREACH)
    assert "macOS does not let" in refusal((*INWARD, WIFI, CABLE), network.send)
    assert "System Settings > Privacy & Security > Local Network" in REMEDY
    assert network.sent == ["192.168.1.4", "169.254.1.3"], "nothing goes inwards"


@pytest.mark.parametrize(
    ("interfaces", "network"),
    [
        ((WIFI,), Network()),  # a firewall keeps out what comes in
        ((WIFI, CABLE), Network(_192_168_1_4=errno.EHOSTUNREACH)),  # one way is enough
        ((WIFI,), Network(all=errno.ENETDOWN)),
        ((WIFI,), Network(all=errno.EACCES)),
        (INWARD, Network(all=errno.EHOSTUNREACH)),
        ((), Network(all=errno.EHOSTUNREACH)),
    ],
)
def test_anything_else_is_no_refusal(interfaces: tuple[Interface, ...], network: Network) -> None:
    assert refusal(interfaces, network.send) == ""


def test_other_systems_have_no_such_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    network = Network(all=errno.EHOSTUNREACH)
    assert refusal((WIFI,), network.send) == "" and not network.sent


@pytest.mark.parametrize("last", range(1, 255))
def test_a_neighbour_is_another_machines_address(last: int) -> None:
    other = neighbour(f"10.0.0.{last}")
    assert other.startswith("10.0.0.") and other not in {f"10.0.0.{n}" for n in (0, last, 255)}


async def test_the_log_says_it_once_and_the_node_as_long_as_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = Network(all=errno.EHOSTUNREACH)
    monkeypatch.setattr(local_network, "_send", network.send)
    monkeypatch.setattr(local_network, "own_interfaces", lambda: [WIFI])
    monkeypatch.setattr(local_network, "_LOOK_EVERY_S", 0.01)
    permission = LocalNetwork()
    task = asyncio.create_task(permission.run())
    async with asyncio.timeout(20):
        while len(network.sent) < 3:
            await asyncio.sleep(0.01)
        assert "Local Network" in permission.trouble and len(caplog.records) == 1
        network.faults.clear()
        while permission.trouble:
            await asyncio.sleep(0.01)
    _ = task.cancel()
