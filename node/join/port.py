"""The join port: serves a bounded number of nodes that are not trusted yet."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from ...placement.errors import InvalidSettings, Untrusted
from ..machine.tasks import Loops, background, cancel
from .requests import largest_crowd
from .state import JoinState
from .wire import FRAME_BYTES, JoinConnection, Refusal, why_no_handshake

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64


@dataclass(eq=False, repr=False)
class JoinPort:
    """Listens from `start` and answers from `begin` until `close`."""

    _context: ssl.SSLContext
    _attend: Callable[[JoinConnection], Awaitable[None]]
    """Owns a connection until it returns."""
    _state: JoinState
    _loops: Loops

    def __post_init__(self) -> None:
        self._timing = self._state.timing
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._callers: dict[asyncio.Task[None], _Caller] = {}

    def start(self, hosts: Sequence[str], port: int) -> int:
        """Returns the port: `port`, or a free one where that is taken. Raises InvalidSettings."""
        try:
            try:
                self._listeners = _listeners(hosts, port)
            except OSError:
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
            self._loops.keep(
                partial(self._accept, each), f"the join port at {each.getsockname()[0]}"
            )
            for each in self._listeners
        ]

    async def close(self) -> None:
        """Ends all connections, by which the nodes that wait notice it."""
        await cancel([*self._accepting, *self._callers])
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listener)
            except OSError as fault:  # such as no file descriptor left: others are closed soon
                log.warning("the join port cannot accept now: %s", fault.strerror)
                await asyncio.sleep(self._timing.retry_s)
                continue
            # One that is being cancelled does not count, or it would be chosen for ever. Nor does
            # one that waits for a person: PendingRequests bounds those, and keeps the first ones.
            counted = [
                (task, caller.address)
                for task, caller in self._callers.items()
                if not task.cancelling() and not (caller.line and caller.line.waits)
            ]
            if len(counted) >= MAX_CONNECTIONS:
                # The oldest: it had the most time for its request.
                _ = counted[largest_crowd([source for _, source in counted])[0]][0].cancel()
            caller = _Caller(address)
            task = background(self._welcome(connection, caller), f"a caller from {address}")
            self._callers[task] = caller
            task.add_done_callback(self._callers.pop)
            await asyncio.sleep(0)  # an accept that succeeds at once lets nothing else run

    async def _welcome(self, connection: socket.socket, caller: "_Caller") -> None:
        """Serves one connection from its handshake to its end."""
        address, loop = caller.address, asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=FRAME_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._timing.reply_s,
            )
        except OSError as fault:  # ssl.SSLError is one
            self._report_failure(address, why_no_handshake(fault))
            return
        except asyncio.CancelledError:
            connection.close()
            raise
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            line = caller.line = JoinConnection(reader, writer, self._timing)
        except Untrusted as fault:
            transport.abort()
            self._report_failure(address, fault.message)
            return
        try:
            await self._attend(line)
        except BaseException:  # a defect, or its eviction: it gets no closing handshake
            transport.abort()
            raise
        await line.close()

    def _report_failure(self, address: str, why: str) -> None:
        self._state.report_refusal(f"a caller from {address}", Refusal("malformed", why))


@dataclass(slots=True)
class _Caller:
    address: str
    line: JoinConnection | None = None
    """None until the handshake is complete."""


def _listeners(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """A listener on each host, all on one port. Raises OSError and leaves none open."""
    listeners: list[socket.socket] = []
    with ExitStack() as undo:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
            port = listener.getsockname()[1]
        _ = undo.pop_all()
    return listeners
