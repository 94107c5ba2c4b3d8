"""macOS's permission for the local network, without which nodes never find each other.

From macOS 15 on a program that has no permission gets EHOSTUNREACH ("no route to host") for what it
sends to the local network, and receives no multicast. Programs of Terminal and of ssh, root's, and
daemons of launchd need none; LaunchAgents and other terminals do (Apple, TN3179: Understanding
local network privacy).
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Final

from .interfaces import Interface, leads_outside, own_interfaces

log = logging.getLogger(__name__)

REMEDY: Final = (
    "open System Settings > Privacy & Security > Local Network, turn on the entry of the program "
    "that started exo-node (your terminal, or python), and start exo-node again; where no entry "
    "is shown start it from Terminal, or install it with `exo-node service install --system`"
)
_DISCARD: Final = 9
"""The port whose datagrams are not answered (RFC 863)."""
_LOOK_EVERY_S: Final = 60.0


class LocalNetwork:
    """Looks once a minute whether macOS lets this node reach others; `trouble`: why it does
    not, or is empty."""

    trouble: str = ""

    async def run(self) -> None:
        while sys.platform == "darwin":
            new = await asyncio.to_thread(refusal, own_interfaces())
            if new and not self.trouble:
                log.warning("%s: %s", new, REMEDY)
            self.trouble = new and f"{new}: {REMEDY}"
            await asyncio.sleep(_LOOK_EVERY_S)


def refusal(interfaces: Iterable[Interface], send: Callable[[str], None] | None = None) -> str:
    """Why no other machine can be reached, or "" where one can, or it is unknown.

    A firewall lets a datagram out, and without a network there is no address to send from: what
    fails with "no route to host" although an interface is up was refused by macOS. `send`: sends
    a datagram to an address.
    """
    if sys.platform != "darwin":
        return ""
    refused = False
    for each in interfaces:
        if not leads_outside(each):
            continue
        try:
            (send or _send)(neighbour(each.address))
        except OSError as fault:
            refused = refused or fault.errno == errno.EHOSTUNREACH
        else:
            return ""
    if not refused:
        return ""
    return "macOS does not let exo-node use the local network, so it finds no other node"


def neighbour(address: str) -> str:
    """Another address of the same network, whatever its mask, that is not everybody's."""
    number = int(ipaddress.IPv4Address(address))
    near = (ipaddress.IPv4Address(number ^ bit) for bit in (1, 2))
    return next(str(each) for each in near if int(each) % 256 not in (0, 255))


def _send(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        _ = probe.sendto(b"", (address, _DISCARD))
