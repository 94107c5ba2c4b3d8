"""This machine's addresses that peers may use, and the one that a route starts from."""

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import psutil

LOOPBACK: Final = "127.0.0.1"
MAX_ADDRESSES: Final = 8

# Bridges of containers and virtual machines lead to no other machine, and macOS's awdl and llw
# (AirDrop, low-latency WLAN) take no servers. A Thunderbolt bridge is called bridge0 and stays.
_INWARD: Final = ("docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "awdl", "llw")


@dataclass(frozen=True, slots=True)
class Interface:
    """One IPv4 address of a network interface."""

    name: str
    address: str
    up: bool = True


def own_interfaces() -> list[Interface]:
    """The system's current IPv4 addresses, sorted by interface name."""
    states = psutil.net_if_stats()
    return [
        Interface(name, each.address, name not in states or states[name].isup)
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for each in addresses
        if each.family == socket.AF_INET
    ]


def advertised_host(setting: str | None, interfaces: Iterable[Interface]) -> str:
    """The address that peers reach this node at: the setting, else a private one, else loopback.

    Wired names sort before wireless ones on both systems (en0, eth0 before wlan0).
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
    near = [each.address for each in interfaces if _leads_outside(each)]
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


def _leads_outside(interface: Interface) -> bool:
    if not interface.up or interface.name.startswith(_INWARD):
        return False
    address = ipaddress.ip_address(interface.address)
    return address.is_private and not address.is_loopback
