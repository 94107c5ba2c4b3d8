"""This machine's addresses that peers may use, and the one that a route starts from."""

import ipaddress
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from .hardware import output_of

LOOPBACK: Final = "127.0.0.1"
MAX_ADDRESSES: Final = 8
WIFI: Final = ("Wi-Fi", "AirPort")

# Bridges of containers and virtual machines lead to no other machine, and macOS's awdl and llw
# (AirDrop, low-latency WLAN) take no servers.
_MAC_PORTS: Final[dict[str, str]] = {}
_INWARD: Final = ("docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "awdl", "llw")


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    address: str
    up: bool = True


def own_interfaces() -> list[Interface]:
    """The system's current IPv4 addresses, those of cables first, then sorted by interface name."""
    states, ports = psutil.net_if_stats(), hardware_ports()
    named = psutil.net_if_addrs().items()
    return [
        Interface(name, each.address, name not in states or states[name].isup)
        for name, addresses in sorted(named, key=lambda each: (ports.get(each[0]) in WIFI, each[0]))
        for each in addresses
        if each.family == socket.AF_INET and not is_virtual_bridge(name, ports)
    ]


def is_virtual_bridge(name: str, ports: Mapping[str, str]) -> bool:
    """Whether it is one of a Mac's bridges to its own virtual machines, which have the same address
    on every Mac. Thunderbolt's is a hardware port."""
    return "bridge0" in ports and name.startswith("bridge") and name not in ports


def hardware_ports() -> Mapping[str, str]:
    """The kinds of interfaces that the system names, by device: en0 is Wi-Fi on a MacBook and a
    cable on a Mac Studio. Empty where it does not answer; it is asked again then."""
    if sys.platform != "darwin":
        return {path.parent.name: "Wi-Fi" for path in Path("/sys/class/net").glob("*/phy80211")}
    if not _MAC_PORTS:
        text = output_of("networksetup", "-listallhardwareports") or ""
        _MAC_PORTS.update(parse_hardware_ports(text))
    return dict(_MAC_PORTS)


def parse_hardware_ports(text: str) -> Mapping[str, str]:
    """The ports in the output of `networksetup -listallhardwareports`, by device."""
    ports = re.findall(r"^Hardware Port: (.*)\nDevice: (\S+)$", text, re.MULTILINE)
    return {device: port.strip() for port, device in ports}


def advertised_host(setting: str | None, interfaces: Iterable[Interface]) -> str:
    """The address that peers reach this node at: the setting, else a private one, else loopback.

    Of several private ones the first: a cable's, if they come from `own_interfaces`.
    """
    if setting is not None:
        return setting
    parsed = [ipaddress.ip_address(each.address) for each in interfaces]
    near = [address for address in parsed if address.is_private and not address.is_loopback]
    # A cable between two Macs has link-local addresses only: better than none, worse than others.
    near.sort(key=lambda address: address.is_link_local)
    return str(near[0]) if near else LOOPBACK


def announced_addresses(usual: str, fixed: bool, interfaces: Iterable[Interface]) -> list[str]:
    """Addresses at which peers may reach this node, the `usual` one first; MAX_ADDRESSES at most.

    Besides it every private and link-local address of an interface that is up; none where a
    setting has `fixed` the address, or where it is loopback, which reaches this machine only.
    """
    if fixed or ipaddress.ip_address(usual).is_loopback:
        return [usual]
    near = [each.address for each in interfaces if leads_outside(each)]
    return list(dict.fromkeys([usual, *near]))[:MAX_ADDRESSES]


def source_address(destination: str) -> str | None:
    """The own address from which the system would send to an IPv4 address, or None without a route.

    Connecting a datagram socket looks the route up and sends nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def leads_outside(interface: Interface) -> bool:
    """Whether other machines may be reached by the address."""
    if not interface.up or interface.name.startswith(_INWARD):
        return False
    address = ipaddress.ip_address(interface.address)
    return address.is_private and not address.is_loopback
