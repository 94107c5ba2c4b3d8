"""uvicorn's HTTP/1.1 connection with the time and number limits that it lacks."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from .http_errors import HttpFault, error_object
from .strict_json import encode

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds on what one client can hold; times in seconds."""

    head_s: float = 10.0
    """For a request's head, from the connection's start or the last answer's end. What is left of
    a refused body counts as well, so that it cannot trickle in for ever."""
    blocked_s: float = 30.0
    """How long a client may leave an answer unread before it is cut off."""
    idle_s: int = 5
    connections: int = 256
    head_bytes: int = 32 * 1024


class _OfClient(logging.LoggerAdapter[logging.Logger]):
    """uvicorn's lines with the address that caused them, which they leave out."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        client = (self.extra or {}).get("client") or "a local socket"
        return f"{msg} (from {client})", kwargs


class LimitedConnection(H11Protocol):
    """Closes clients that send no request, that do not read their answer, or that are too many."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    _head_timer: asyncio.TimerHandle | None = None
    _blocked_timer: asyncio.TimerHandle | None = None
    _surplus = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        named = {"client": self.client and self.client[0]}
        self.logger = _OfClient(logging.getLogger("uvicorn.error"), named)  # type: ignore[assignment]
        self._surplus = len(self.connections) > self.limits.connections
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _stopped(self._head_timer)
        self._blocked_timer = _stopped(self._blocked_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._surplus:
            message = f"{self.limits.connections} connections are open, try again later"
            self._refuse(HttpFault(503, "too_many_connections", message))
            return
        super().data_received(data)
        if self._answers:
            self._head_timer = _stopped(self._head_timer)

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
        """Called for what is no HTTP; once an answer has begun there is no room for another."""
        if self._answers and self.cycle.response_started:
            self.transport.close()
            return
        message = "this is no valid HTTP/1.1 request, or its head is too long"
        self._refuse(HttpFault(400, "invalid_http", message))

    @property
    def _answers(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _await_head(self) -> None:
        _stopped(self._head_timer)
        self._head_timer = self.loop.call_later(self.limits.head_s, self.transport.close)

    def _cut_off(self) -> None:
        _LOG.info("a client left its answer unread for %g s: cut off", self.limits.blocked_s)
        self.transport.abort()

    def _refuse(self, fault: HttpFault) -> None:
        """Writes past h11, whose state has no room for a further answer here."""
        body = encode(error_object(fault))
        reason = {400: "Bad Request", 503: "Service Unavailable"}[fault.status]
        head = (
            f"HTTP/1.1 {fault.status} {reason}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
