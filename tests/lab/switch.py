"""An Ethernet switch in user space between network namespaces that it makes; see `namespaces.py`.

    python switch.py a b c

It makes a namespace for each name, with one interface on a network that leads nowhere else, prints
one JSON line about them, and forwards frames until its standard input ends. Each line there sets
how: a `Shape` as a JSON object. The answer is one line of `Counts` so far. The namespaces have no
names and no files: they end with this process and those that were started in them.

It delays and drops where the kernel may not (sch_netem is a module that many kernels lack).
"""

import ctypes
import errno
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

NETWORK: Final = "10.83.0.{}"
CLONE_NEWNET: Final = 0x40000000
MAX_WAITING: Final = 20_000
"""The most frames in flight; more are dropped, as by a full queue."""

_TUNSETIFF: Final = 0x400454CA
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_BROADCAST: Final = b"\xff" * 6
_REFUSED: Final = (errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENODEV, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Shape:
    """The delay, loss and blocks of frames between interfaces; traffic inside one is untouched.

    `delay_ms` and `jitter_ms` are one way: a round trip has twice the delay. `blocked` holds
    directed pairs of names. `multicast` false drops what is for a group; ARP's broadcasts pass.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    blocked: tuple[tuple[str, str], ...] = ()
    multicast: bool = True


@dataclass(slots=True)
class Counts:
    """Frames since the start, `groups` for multicast; `late_ms`: the most that one was late."""

    forwarded: int = 0
    lost: int = 0
    blocked: int = 0
    groups: int = 0
    overflowed: int = 0
    late_ms: float = 0.0


@dataclass(slots=True)
class Switch:
    """Decides when each frame leaves, if at all. No I/O: `now` in seconds, frames as bytes."""

    names: Sequence[str]
    chance: random.Random
    shape: Shape = field(default_factory=Shape)
    counts: Counts = field(default_factory=Counts)
    _waiting: list[tuple[float, int, int, bytes]] = field(
        default_factory=list[tuple[float, int, int, bytes]]
    )
    _last: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    _number: int = 0

    def take(self, source: int, frame: bytes, now: float) -> None:
        """Accepts a frame from a port."""
        for target in self._targets(source, frame[:6]):
            if (self.names[source], self.names[target]) in self.shape.blocked:
                self.counts.blocked += 1
            elif self.chance.random() < self.shape.loss:
                self.counts.lost += 1
            elif len(self._waiting) >= MAX_WAITING:
                self.counts.overflowed += 1
            else:
                self._hold(source, target, frame, now)

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Removes and returns (port, frame) of the frames that leave by `now`."""
        leaving: list[tuple[int, bytes]] = []
        while self._waiting and self._waiting[0][0] <= now:
            at, _, target, frame = heapq.heappop(self._waiting)
            self.counts.late_ms = max(self.counts.late_ms, (now - at) * 1000)
            leaving.append((target, frame))
        self.counts.forwarded += len(leaving)
        return leaving

    def next_due(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def _targets(self, source: int, address: bytes) -> list[int]:
        others = [port for port in range(len(self.names)) if port != source]
        if not address[0] & 1:
            return [port for port in others if mac(port) == address]
        if self.shape.multicast or address == _BROADCAST:
            return others
        self.counts.groups += 1
        return []

    def _hold(self, source: int, target: int, frame: bytes, now: float) -> None:
        """Jitter keeps the order: a frame leaves no earlier than the one before it."""
        jitter = self.chance.uniform(0, self.shape.jitter_ms)
        pair = (source, target)
        at = max(now + (self.shape.delay_ms + jitter) / 1000, self._last.get(pair, 0.0))
        self._last[pair] = at
        self._number += 1
        heapq.heappush(self._waiting, (at, self._number, target, frame))


def mac(port: int) -> bytes:
    """A port's locally administered address, fixed so that the switch need not learn it."""
    return struct.pack("!BBI", 0x02, 0x83, port + 1)


def enter(namespace: int) -> None:
    """Moves the calling thread, and no other, into a namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def main(names: Sequence[str]) -> None:
    try:
        ports = [_namespace(port) for port in range(len(names))]
    except OSError as fault:
        if fault.errno not in _REFUSED:
            raise
        print(json.dumps({"refused": f"network namespaces cannot be made here: {fault}"}))
        return
    namespaces = {name: namespace for name, (namespace, _) in zip(names, ports, strict=True)}
    print(json.dumps({"namespaces": namespaces}), flush=True)
    _forward(Switch(names, random.Random(1)), [tap for _, tap in ports])


def _namespace(port: int) -> tuple[int, int]:
    """(namespace, tap), both as descriptors. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    _ = fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    commands = (
        f"link set dev eth0 address {mac(port).hex(':')}",
        f"address add {NETWORK.format(port + 1)}/24 dev eth0",
        "link set dev lo up",
        "link set dev eth0 up",
        "route add default dev eth0",
    )
    text = "\n".join(commands)
    _ = subprocess.run(["ip", "-batch", "-"], input=text, text=True, check=True)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC), tap


def _forward(switch: Switch, taps: Sequence[int]) -> None:
    with selectors.DefaultSelector() as selector:
        for port, tap in enumerate(taps):
            _ = selector.register(tap, selectors.EVENT_READ, _reader(switch, port, tap))
        _ = selector.register(sys.stdin.fileno(), selectors.EVENT_READ, _controller(switch))
        while True:
            due = switch.next_due()
            timeout = None if due is None else max(0.0, due - time.monotonic())
            for key, _ in selector.select(timeout):
                if not key.data():
                    return
            for port, frame in switch.due(time.monotonic()):
                try:
                    _ = os.write(taps[port], frame)
                except BlockingIOError:  # the interface's own queue is full
                    switch.counts.overflowed += 1


def _reader(switch: Switch, port: int, tap: int) -> Callable[[], bool]:
    def read() -> bool:
        for _ in range(64):  # then the other ports follow
            try:
                frame = os.read(tap, 65536)
            except BlockingIOError:
                break
            switch.take(port, frame, time.monotonic())
        return True

    return read


def _controller(switch: Switch) -> Callable[[], bool]:
    """Sets the shape of each line; returns False once standard input has ended."""
    received = bytearray()

    def read() -> bool:
        data = os.read(sys.stdin.fileno(), 65536)
        received.extend(data)
        while b"\n" in received:
            line, _, rest = bytes(received).partition(b"\n")
            received[:] = rest
            switch.shape = _shape(json.loads(line))
            print(json.dumps(asdict(switch.counts)), flush=True)
        return bool(data)

    return read


def _shape(fields: dict[str, Any]) -> Shape:
    blocked = tuple((source, target) for source, target in fields.pop("blocked"))
    return Shape(**fields, blocked=blocked)


if __name__ == "__main__":
    main(sys.argv[1:])
