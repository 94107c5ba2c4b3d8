"""The checks of every HTTP request before the API, and the headers of every answer.

Pure ASGI. Loopback is no boundary (web pages reach it, DNS names can be rebound to it), so Host and
Origin are checked. Bodies are read here, whole and bounded, so that no endpoint can forget to.
"""

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....placement.errors import ExoNodeError
from ...machine.log import request_scope
from ...trust.api_tokens import ApiTokens
from ...trust.local_token import TOKEN_FILE, TOKEN_HEADER, LocalToken
from .content_encoding import BodyTooLarge, encoding_of, refused_encoding, unpacked
from .dialects import (
    ANSWERING,
    EVENT_STREAM,
    HEALTH_PATHS,
    NDJSON,
    OLLAMA_PREFIX,
    SEARCH_PATH,
    fault_response,
    wire_format,
)
from .errors import HttpFault, fault_of, internal_fault
from .origins import Origins
from .session_api import SESSION_PATH

_LOG: Final = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
BODY_TIMEOUT_S: Final = 30.0

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "style-src-attr 'unsafe-inline'",
        "font-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)

_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
METHODS_WITH_BODY: Final = ("POST", "PATCH", "PUT", "DELETE")
_OPEN_PATHS: Final = ("/", "/health/live", "/health/ready", *HEALTH_PATHS)
_STATIC_PREFIX: Final = "/static/"
_PUBLIC_POSTS: Final = (*ANSWERING, SESSION_PATH)
"""Paths that every user of the machine may POST to if there is no API key."""


@dataclass(frozen=True, slots=True)
class Access:
    """The names, origins and secrets with which clients may use the API.

    `hosts`: names beside loopback's and the address of the connection. `name` is allowed with any
    port or none, because a proxy may have its own; `name:port` only as it stands. `origins`: pages
    of other origins that may use the node, in lower case.

    `api_key` None leaves all paths open. Otherwise only the page, its files and the health paths
    are, and a client with the key may use any host name: a page that rebinds a name has no key.
    One of `tokens` counts as the key; tokens alone may require one as well. Without `api_key`,
    every request that changes anything except a chat needs `token` or one of `tokens`; without
    any of them nothing is required.
    """

    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    api_key: str | None = field(default=None, repr=False)
    token: LocalToken | None = field(default=None, repr=False)
    tokens: ApiTokens | None = field(default=None, repr=False)

    def allows_host(self, scope: Scope, host: str) -> bool:
        address, port = scope["server"]
        literal = f"[{address}]" if ":" in address else address
        own = (*_LOOPBACK_NAMES, literal)
        exact = {f"{name}:{port}" for name in own} | (set(own) if port == 80 else set[str]())
        allowed = {each.lower() for each in self.hosts}
        name, _, own_port = host.rpartition(":")
        return host in exact | allowed or (name in allowed and own_port.isdecimal())

    def requires_key(self) -> bool:
        return self.api_key is not None or (self.tokens is not None and self.tokens.is_required)

    def shows_key(self, headers: Headers) -> bool:
        # Headers are latin-1 to ASGI: this restores the bytes that the client sent.
        keys = [each.encode("latin-1") for each in _keys(headers)]
        if self.api_key is not None:
            expected = self.api_key.encode()
            if any([hmac.compare_digest(each, expected) for each in keys]):
                return True
        return self.tokens is not None and self.tokens.accepts(keys)

    def shows_token(self, headers: Headers) -> bool:
        tokens = (each.encode("latin-1") for each in headers.getlist(TOKEN_HEADER))
        return self.token is not None and self.token.accepts(tokens)

    def trusts(self, headers: Headers) -> bool:
        """Whether the request has the rights of the node's own user."""
        if self.token is None or self.api_key is not None:
            return True  # the request has the API key, or the path needs none and changes nothing
        return self.shows_token(headers) or self.shows_key(headers)

    def cache_salt(self, headers: Headers) -> bytes:
        """The salt of the request's API token; b"" for the node's own user and for `api_key`."""
        if self.tokens is None or (self.api_key is None and self.shows_token(headers)):
            return b""
        return self.tokens.cache_salt(each.encode("latin-1") for each in _keys(headers))


@dataclass(frozen=True, slots=True)
class Guard:
    """Wraps `app`."""

    app: ASGIApp
    access: Access = field(default_factory=Access)
    unserved: Callable[[Scope], HttpFault | None] = lambda _: None
    """The error for a path or method that is not served: no token or other body would help."""
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S

    @property
    def origins(self) -> Origins:
        return Origins(self.access.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                exchange = _GuardedRequest(self, scope, receive, send)
                with request_scope(exchange.id):
                    await exchange.run()
            case "lifespan":
                await self.app(scope, receive, send)
            case _:
                await send({"type": "websocket.close", "code": 1008})

    def refusal(self, scope: Scope) -> HttpFault | None:
        """The error of the request's head, or None."""
        headers = Headers(scope=scope)
        return (
            self._refused_host(scope, headers)
            or self.origins.refusal(scope, headers)
            or self._refused_key(scope["path"], headers)
            or self._refused_token(scope, headers)
            or _refused_framing(headers)
            or self._refused_body(scope, headers)
        )

    def _refused_host(self, scope: Scope, headers: Headers) -> HttpFault | None:
        if scope["server"] is None:
            return None  # a call from within the process, such as a peer's forwarded request
        hosts, access = headers.getlist("host"), self.access
        if len(hosts) == 1 and (
            access.allows_host(scope, hosts[0].lower()) or access.shows_key(headers)
        ):
            return None
        message = (
            "this node does not answer under that host name; use http://localhost with its port or "
            "the IP address that it listens on, name the host in EXO_ALLOWED_HOSTS, or set "
            "EXO_API_KEY and send the key"
        )
        return HttpFault(421, "misdirected_request", message, "Host")

    def _refused_key(self, path: str, headers: Headers) -> HttpFault | None:
        if path in _OPEN_PATHS or path.startswith(_STATIC_PREFIX) or not self.access.requires_key():
            return None
        # Without EXO_API_KEY the node's own user has the data folder's token, or a page with a
        # ticket, which it exchanges for a session.
        access = self.access
        own = access.api_key is None and (path == SESSION_PATH or access.shows_token(headers))
        if own or access.shows_key(headers):
            return None
        message = (
            "this node wants its API key or a token, as 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'"
        )
        challenge = (("WWW-Authenticate", "Bearer"),)
        return HttpFault(401, "invalid_api_key", message, headers=challenge)

    def _refused_token(self, scope: Scope, headers: Headers) -> HttpFault | None:
        """Other users of this machine reach its loopback; they may only chat and read."""
        trusted, cache_salt = self.access.trusts(headers), self.access.cache_salt(headers)
        scope.setdefault("state", {}).update(trusted=trusted, cache_salt=cache_salt)
        path: str = scope["path"]
        if trusted or (path != SEARCH_PATH and _is_public(scope["method"], path)):
            return None
        message = (
            "this is for the node's own user: use the `exo-node` command, open the dashboard by "
            f"the link that `exo-node dashboard` prints, or send the content of the data folder's "
            f"{TOKEN_FILE} as '{TOKEN_HEADER}'"
        )
        fault = HttpFault(403, "local_token_required", message, TOKEN_HEADER)
        unserved = self.unserved(scope)
        return unserved if unserved is not None and unserved.status == 404 else fault

    def _refused_body(self, scope: Scope, headers: Headers) -> HttpFault | None:
        if scope["method"] not in METHODS_WITH_BODY:
            return None
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        # Ollama's own clients send no type, or that of a form, and other clients none where there
        # is no body. Origin and Host are checked there too, and what changes more than a chat needs
        # a token.
        length = int(headers.get("content-length", "0"))  # the server has checked that it is one
        is_empty = length == 0 and "transfer-encoding" not in headers
        untyped = is_empty or scope["path"].startswith(OLLAMA_PREFIX)
        if media_type != "application/json" and not untyped:
            message = "send the body as JSON, with 'Content-Type: application/json'"
            fault = HttpFault(415, "unsupported_media_type", message, "Content-Type")
            return self.unserved(scope) or fault
        if (fault := refused_encoding(headers)) is not None:
            return fault
        if length > self.max_body_bytes:
            return self.too_large()
        return None

    def too_large(self) -> HttpFault:
        message = f"the body is longer than {self.max_body_bytes} bytes; send less at once"
        return HttpFault(413, "request_too_large", message, "body")


def _is_public(method: str, path: str) -> bool:
    """Whether every user of the machine may ask for it where there is no API key."""
    reads = method not in METHODS_WITH_BODY
    return reads or path in _PUBLIC_POSTS or path.startswith(OLLAMA_PREFIX)


def _refused_framing(headers: Headers) -> HttpFault | None:
    """Two lengths let two servers in a row disagree on where the next request begins."""
    if "content-length" in headers and "transfer-encoding" in headers:
        message = "send either Content-Length or Transfer-Encoding"
        close = (("Connection", "close"),)
        return HttpFault(400, "invalid_value", message, "Content-Length", close)
    return None


def _keys(headers: Headers) -> Iterable[str]:
    yield from headers.getlist("x-api-key")
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            yield key.strip()


class _GuardedRequest:
    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard = guard
        self._scope = scope
        self._headers = Headers(scope=scope)
        self._receive = receive
        self._send = send
        self.id = f"req_{secrets.token_hex(12)}"
        self._status = 0
        self._streams_events = False
        self._complete = False
        self._body: bytes | None = None
        scope.setdefault("state", {})["request_id"] = self.id

    async def run(self) -> None:
        began = time.monotonic()
        try:
            if (tokens := self._guard.access.tokens) is not None:
                await tokens.refresh()
            preflight = self._guard.origins.preflight(self._scope, self._headers)
            if preflight is not None:
                return await preflight(self._scope, self._receive, self._answer)
            fault = self._guard.refusal(self._scope) or await self._take_body()
            if fault is None:
                await self._guard.app(self._scope, self._next, self._answer)
            else:
                await self._refuse(fault)
        except ClientDisconnect:
            self._status = 499
        except ExoNodeError as error:
            # Without its frames: some of them refer to the task that failed with it.
            await self._end_with(fault_of(error.with_traceback(None)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The request itself was not cancelled, but something that it waited for.
            _LOG.exception("the request failed unexpectedly")
            await self._end_with(internal_fault(self.id))
        except Exception:  # the edge: a client must get an answer, without the defect's details
            _LOG.exception("the request failed unexpectedly")
            await self._end_with(internal_fault(self.id))
        finally:
            took = 1000 * (time.monotonic() - began)
            path = self._scope.get("raw_path", b"").decode("latin-1")
            method = self._scope["method"]
            # The dashboard polls every two seconds; requests that change something matter more.
            quiet = method == "GET" and self._status < 400
            level = logging.DEBUG if quiet else logging.INFO
            _LOG.log(level, "%s %s %d %.0f ms", method, path, self._status, took)

    async def _take_body(self) -> HttpFault | None:
        if self._scope["method"] not in METHODS_WITH_BODY:
            return None
        try:
            async with asyncio.timeout(self._guard.body_timeout_s):
                body = await self._read()
                if encoding_of(self._headers):
                    body = await asyncio.to_thread(unpacked, body, self._guard.max_body_bytes)
                self._body = body
        except TimeoutError:
            wait = self._guard.body_timeout_s
            message = f"the body did not arrive within {wait:g} s; send it without a pause"
            return HttpFault(
                408, "request_timeout", message, "body", headers=(("Connection", "close"),)
            )
        except BodyTooLarge:
            return self._guard.too_large()
        return None

    async def _read(self) -> bytes:
        body = bytearray()
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._guard.max_body_bytes:
                raise BodyTooLarge
            more = message.get("more_body", False)
        return bytes(body)

    async def _next(self) -> Message:
        """The body, once; afterwards the server's messages, which can only be a disconnect."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _answer(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._add_headers(MutableHeaders(scope=message))
        await self._send(message)
        is_body = message["type"] == "http.response.body"
        self._complete = is_body and not message.get("more_body", False)

    def _add_headers(self, headers: MutableHeaders) -> None:
        media_type = headers.get("content-type", "").partition(";")[0]
        self._streams_events = media_type in (EVENT_STREAM, NDJSON)
        headers["x-request-id"] = self.id
        headers["X-Content-Type-Options"] = "nosniff"
        headers["Cross-Origin-Resource-Policy"] = "same-origin"
        headers["Referrer-Policy"] = "no-referrer"
        if media_type == "text/html":
            headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
        self._guard.origins.mark(self._headers, headers)

    async def _refuse(self, fault: HttpFault) -> None:
        response = fault_response(fault, self._scope["path"], self._headers)
        await response(self._scope, self._receive, self._answer)

    async def _end_with(self, fault: HttpFault) -> None:
        """Ends the exchange with an error, in the form that its state still allows."""
        if self._status == 0:
            await self._refuse(fault)
        elif self._streams_events and not self._complete:
            body = wire_format(self._scope["path"]).frame(fault)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        elif not self._complete:
            raise ConnectionError(f"{self.id} ended in the middle of its answer")
