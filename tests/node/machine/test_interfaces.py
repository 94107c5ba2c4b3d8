"""A node announces the addresses that lead to other machines, and no others."""

# pyright: reportPrivateUsage=false

import psutil
import pytest

from exo_node.node.machine import interfaces
from exo_node.node.machine.interfaces import (
    MAX_ADDRESSES,
    Interface,
    advertised_host,
    announced_addresses,
    hardware_ports,
    own_interfaces,
    parse_hardware_ports,
    source_address,
)

MAC = [
    Interface("awdl0", "169.254.9.9"),
    Interface("bridge0", "169.254.1.2"),
    Interface("en0", "192.168.1.5"),
    Interface("en5", "10.0.0.7", up=False),
    Interface("lo0", "127.0.0.1"),
    Interface("utun3", "100.64.0.2"),
]
LINUX = [
    Interface("br-1f00ba", "172.18.0.1"),
    Interface("docker0", "172.17.0.1"),
    Interface("eth0", "192.168.1.6"),
    Interface("eth0", "8.8.4.4"),
    Interface("veth12", "169.254.3.3"),
    Interface("virbr0", "192.168.122.1"),
]


@pytest.mark.parametrize(
    ("usual", "fixed", "interfaces", "announced"),
    [
        # A cable between two Macs has link-local addresses only, and is the fastest there is.
        ("192.168.1.5", False, MAC, ["192.168.1.5", "169.254.1.2"]),
        ("192.168.1.6", False, LINUX, ["192.168.1.6"]),
        ("192.168.1.5", True, MAC, ["192.168.1.5"]),
        ("127.0.0.1", False, MAC, ["127.0.0.1"]),
    ],
)
def test_private_addresses_that_lead_outside_are_announced(
    usual: str, fixed: bool, interfaces: list[Interface], announced: list[str]
) -> None:
    assert announced_addresses(usual, fixed, interfaces) == announced


@pytest.mark.parametrize(
    ("setting", "interfaces", "host"),
    [
        ("10.0.0.9", MAC, "10.0.0.9"),
        (None, LINUX[2:], "192.168.1.6"),
        (None, [Interface("wlan0", "8.8.4.4"), Interface("lo", "127.0.0.1")], "127.0.0.1"),
        (None, [Interface("lo", "127.0.0.1"), Interface("wlan0", "10.1.2.3")], "10.1.2.3"),
        (None, [], "127.0.0.1"),
        # A cable's own address leads to one machine, the network's to all of them.
        (None, [Interface("bridge0", "169.254.1.2"), Interface("en0", "10.1.2.3")], "10.1.2.3"),
        (None, [Interface("bridge0", "169.254.1.2")], "169.254.1.2"),
    ],
)
def test_the_advertised_host_is_that_of_the_setting_or_the_first_private_one(
    setting: str | None, interfaces: list[Interface], host: str
) -> None:
    assert advertised_host(setting, interfaces) == host


# In the layout of networksetup(8) on a notebook and on a desktop, which number them differently.
NOTEBOOK = """
Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:00:00:00:00:40

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 36:00:00:00:00:41

VLAN Configurations
===================
"""
DESKTOP = NOTEBOOK.replace("en0", "en1").replace(
    "Thunderbolt Bridge\nDevice: bridge0", "Ethernet\nDevice: en0"
)


def test_kinds_of_interfaces_are_those_that_the_system_names() -> None:
    assert parse_hardware_ports(NOTEBOOK) == {"bridge0": "Thunderbolt Bridge", "en0": "Wi-Fi"}
    assert parse_hardware_ports(DESKTOP) == {"en0": "Ethernet", "en1": "Wi-Fi"}
    for nonsense in ("", "networksetup: not found", "Hardware Port: Wi-Fi\n", "Device: en0\n"):
        assert parse_hardware_ports(nonsense) == {}


def test_addresses_of_cables_come_first_and_bridges_to_virtual_machines_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loopback = next(iter(psutil.net_if_addrs().values()))
    names = ("bridge0", "bridge100", "en0", "en7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: dict.fromkeys(names, loopback))
    monkeypatch.setattr(interfaces, "hardware_ports", lambda: parse_hardware_ports(NOTEBOOK))
    assert [each.name for each in own_interfaces()] == ["bridge0", "en7", "en0"]


def test_a_mac_that_did_not_name_its_ports_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = [None, "", NOTEBOOK], list[str]()

    def output_of(*command: str) -> str | None:
        asked.append(command[0])
        return answers[len(asked) - 1]

    monkeypatch.setattr(interfaces, "output_of", output_of)
    monkeypatch.setattr(interfaces.sys, "platform", "darwin")
    interfaces._MAC_PORTS.clear()
    try:
        found = [hardware_ports() for _ in range(4)]
    finally:
        interfaces._MAC_PORTS.clear()
    assert found == [{}, {}, *[parse_hardware_ports(NOTEBOOK)] * 2]
    assert asked == ["networksetup"] * 3


def test_a_heartbeat_does_not_grow_without_bound() -> None:
    many = [Interface(f"en{i}", f"10.0.{i}.1") for i in range(40)]
    addresses = announced_addresses("10.0.7.1", False, many)
    assert len(addresses) == MAX_ADDRESSES
    assert addresses[0] == "10.0.7.1"


def test_this_machine_has_loopback_and_sends_to_it_from_there() -> None:
    assert "127.0.0.1" in {interface.address for interface in own_interfaces()}
    assert source_address("127.0.0.1") == "127.0.0.1"
