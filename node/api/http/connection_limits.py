"""uvicorn's HTTP/1.1 connection with the limits of time and number that uvicorn lacks."""

import asyncio
import logging
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import HttpFault, error_object
from .strict_json import encode

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on connections; times in seconds."""

    head_s: float = 10.0
    """The time for a request's head, from the connection's start or the last answer's end. The rest
    of a refused body counts as well, so that it cannot trickle in for ever."""
    blocked_s: float = 30.0
    """The time that a client may leave an answer unread before its connection is closed."""
    idle_s: int = 5
    connections: int = 256
    per_address: int = 64
    """Connections from one address that is not loopback."""
    spare_s: float = 1.0
    """A connection that has waited this long for a request may be closed for a new one."""
    refusals: int = 16
    """Surplus connections that get an answer before they are closed; more are closed unanswered."""
    refusal_s: float = 1.0
    head_bytes: int = 32 * 1024


class _ClientLog(logging.LoggerAdapter[logging.Logger]):
    """uvicorn's log lines with the client's address, which uvicorn leaves out."""

    @property
    def level(self) -> int:
        """uvicorn reads it when a connection ends."""
        return self.logger.level

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        client = (self.extra or {}).get("client") or "a local socket"
        return f"{msg} (from {client})", kwargs


class _BoundedHead(h11.Connection):
    """h11 with a limit on complete heads; its own limit is for incomplete ones only."""

    def __init__(self, head_bytes: int) -> None:
        super().__init__(h11.SERVER, head_bytes)
        self._head_bytes = head_bytes

    def next_event(self) -> Any:
        event = super().next_event()
        match event:
            case h11.Request():
                size = len(event.method) + len(event.target) + _size(event.headers)
            case h11.EndOfMessage():
                size = _size(event.headers)
            case _:
                return event
        if size > self._head_bytes:
            raise h11.RemoteProtocolError("the head is too long")
        return event


def _size(headers: Any) -> int:
    """Bytes on the wire: names, values, and four for the colon, the space and the line's end."""
    return sum(len(name) + len(value) + 4 for name, value in headers)


class LimitedConnection(H11Protocol):
    """Closes clients that send no request, that do not read their answer, or that are too many."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    _head_timer: asyncio.TimerHandle | None = None
    _blocked_timer: asyncio.TimerHandle | None = None
    _surplus: bool = False
    _idle_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        extra = {"client": self.client and self.client[0]}
        self.logger = _ClientLog(logging.getLogger("uvicorn.error"), extra)  # type: ignore[assignment]
        self.conn = _BoundedHead(self.limits.head_bytes)
        fault = self._too_many()
        if fault is not None and self._displaces_idle():
            fault = None
        if fault is None:
            self._await_head()
        else:
            self._turn_away(fault)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _stopped(self._head_timer)
        self._blocked_timer = _stopped(self._blocked_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._surplus:
            self.transport.close()
            return
        super().data_received(data)
        if self._answers:
            self._head_timer = _stopped(self._head_timer)
            self._idle_since = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answers and not self.transport.is_closing():
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._blocked_timer = self.loop.call_later(self.limits.blocked_s, self._cut_off)

    def resume_writing(self) -> None:
        self._blocked_timer = _stopped(self._blocked_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it for invalid HTTP. After an answer has begun, this only closes."""
        if self._answers and self.cycle.response_started:
            self.transport.close()
            return
        message = "this is no valid HTTP/1.1 request, or its head is too long"
        self._reply(HttpFault(400, "invalid_http", message))
        self.transport.close()

    @property
    def _answers(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _too_many(self) -> HttpFault | None:
        """The error if this connection is beyond a limit, or None."""
        limits = self.limits
        accepted = [other for other in self._peers() if not other._surplus]
        if len(accepted) > limits.connections:
            message = f"{limits.connections} connections are open, try again later"
        elif self._is_remote and self._of_my_address(accepted) > limits.per_address:
            message = f"{limits.per_address} connections of this address are open, close some first"
        else:
            return None
        return HttpFault(503, "too_many_connections", message)

    def _peers(self) -> "list[LimitedConnection]":
        return [other for other in self.connections if isinstance(other, LimitedConnection)]

    @property
    def _is_remote(self) -> bool:
        """Whether the client is not on loopback, where all clients share one address."""
        return self.client is not None and not ip_address(self.client[0]).is_loopback

    def _of_my_address(self, connections: "list[LimitedConnection]") -> int:
        mine = self.client
        return sum(
            c.client is not None and mine is not None and c.client[0] == mine[0]
            for c in connections
        )

    def _displaces_idle(self) -> bool:
        """Closes the connection that has waited longest for a request, if longer than `spare_s`.

        Clients that connect and send nothing would otherwise keep all others out.
        """
        peers = self._peers()
        if self._is_remote and self._of_my_address(peers) > self.limits.per_address:
            return False
        waiting = [(c._idle_since, c) for c in peers if c._idle_since is not None and c is not self]
        since, idlest = min(waiting, key=lambda one: one[0], default=(self.loop.time(), self))
        if self.loop.time() - since < self.limits.spare_s or idlest is self:
            return False
        idlest._idle_since = None
        idlest._surplus = True
        idlest.transport.abort()
        return True

    def _turn_away(self, fault: HttpFault) -> None:
        """Answers before reading. Each takes a file descriptor: only a few, and not for long."""
        self._surplus = True
        if sum(other._surplus for other in self._peers()) > self.limits.refusals:
            self.transport.abort()
            return
        self._reply(fault)
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(self.limits.refusal_s, self.transport.close)

    def _await_head(self) -> None:
        _stopped(self._head_timer)
        self._idle_since = self.loop.time()
        self._head_timer = self.loop.call_later(self.limits.head_s, self.transport.close)

    def _cut_off(self) -> None:
        _LOG.info("a client left its answer unread for %g s: cut off", self.limits.blocked_s)
        self.transport.abort()

    def _reply(self, fault: HttpFault) -> None:
        """Writes without h11, whose state allows no further answer here."""
        body = encode(error_object(fault))
        reason = {400: "Bad Request", 503: "Service Unavailable"}[fault.status]
        head = (
            f"HTTP/1.1 {fault.status} {reason}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
