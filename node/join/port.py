"""The join port: listens to nodes that are not trusted yet, and bounds how many it listens to."""

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ...placement.errors import InvalidSettings, Untrusted
from ..machine.tasks import Loops, background
from ..machine.timing import JoinTiming
from .wire import FRAME_BYTES, JoinConnection, why_no_handshake

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64


class JoinPort:
    """Listens from `start`, answers from `begin`, until `close`."""

    def __init__(
        self,
        context: ssl.SSLContext,
        attend: Callable[[JoinConnection], Awaitable[None]],
        complain: Callable[[str, str], None],
        loops: Loops,
        timing: JoinTiming,
    ) -> None:
        """`attend` has a connection until it returns; `complain` hears who failed to make one."""
        self._context = context
        self._attend = attend
        self._complain = complain
        self._loops = loops
        self._timing = timing
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._callers: dict[asyncio.Task[None], _Caller] = {}

    def start(self, hosts: Sequence[str], port: int) -> int:
        """Returns the port: `port`, or a free one where that is taken. Raises InvalidSettings."""
        try:
            self._listeners = _listeners(hosts, port)
        except OSError:
            try:
                self._listeners = _listeners(hosts, 0)
            except OSError as fault:
                raise InvalidSettings(
                    f"no port can be had on {' and '.join(hosts)} for nodes that ask to join: "
                    f"{fault.strerror}; give an address of this machine with --interface",
                    param="--interface",
                ) from fault
        return self._listeners[0].getsockname()[1]

    def begin(self) -> None:
        self._accepting = [
            self._loops.keep(partial(self._accept, each), f"the join port at {_where(each)}")
            for each in self._listeners
        ]

    async def close(self) -> None:
        """Whoever waits is told so by the end of the connection."""
        tasks = [*self._accepting, *self._callers]
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listener)
            except OSError as fault:  # such as no file descriptor left: others are let go of soon
                log.warning("the join port cannot accept now: %s", fault.strerror)
                await asyncio.sleep(1)
                continue
            # One that is being let go counts no more: else it would be chosen for ever. Nor does
            # one that waits for a person: the desk bounds those, and keeps who came first.
            kept = [
                (task, caller.address)
                for task, caller in self._callers.items()
                if not task.cancelling() and not (caller.line and caller.line.waits)
            ]
            if len(kept) >= MAX_CONNECTIONS:
                _ = kept[_longest_of_a_crowd([source for _, source in kept])][0].cancel()
            caller = _Caller(address)
            task = background(self._welcome(connection, caller), f"a caller from {address}")
            self._callers[task] = caller
            task.add_done_callback(self._callers.pop)
            await asyncio.sleep(0)  # an accept that succeeds at once lets nothing else run

    async def _welcome(self, connection: socket.socket, caller: "_Caller") -> None:
        """One connection from its handshake to its end."""
        address, loop = caller.address, asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=FRAME_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._timing.connect_s,
            )
        except OSError as fault:  # ssl.SSLError is one
            self._complain(f"a caller from {address}", why_no_handshake(fault))
            return
        except asyncio.CancelledError:
            connection.close()
            raise
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            line = caller.line = JoinConnection(reader, writer, self._timing)
        except Untrusted as fault:
            transport.abort()
            self._complain(f"a caller from {address}", fault.message)
            return
        try:
            await self._attend(line)
        except asyncio.CancelledError:
            transport.abort()  # the one who crowds gets no further say
            raise
        await line.close()


@dataclass(slots=True)
class _Caller:
    address: str
    line: JoinConnection | None = None
    """Once its handshake is done."""


def _longest_of_a_crowd(sources: Sequence[str]) -> int:
    """Which of the callers from `sources` goes for another one: the one that has had most time to
    say what it wants, of those from the address with the most."""
    counts = Counter(sources)
    most = max(counts.values())
    return next(index for index, source in enumerate(sources) if counts[source] == most)


def _where(listener: socket.socket) -> str:
    return str(listener.getsockname()[0])


def _listeners(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """One on each host, all on the same port. Raises OSError and leaves none open."""
    found: list[socket.socket] = []
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            found.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
            port = listener.getsockname()[1]
    except OSError:
        for listener in found:
            listener.close()
        raise
    return found
