"""The HTTP side of a node: its routes put together, and the server that runs them."""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from ...placement.errors import InvalidSettings
from ..chat.requests import Chat
from ..machine.events import EventLog
from ..machine.timing import Timing
from ..trust.local_token import LocalToken
from .forward import naming_profiles
from .http.connection_limits import ConnectionLimits, LimitedConnection
from .http.dialects import fault_response
from .http.errors import HttpFault, unnamed_fault
from .http.guard import Access, Guard
from .http.routes import ApiRoute
from .http.session_api import session_routes
from .http.static_files import StaticFiles, static_routes
from .messages.messages_api import MESSAGES, count_route
from .ollama.embeddings_api import EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from .ollama.ollama_api import Ollama
from .openai.completions_api import COMPLETIONS, TokenizerApi
from .openai.openai_api import CHAT
from .operations.events_api import EventsApi
from .operations.join_api import join_routes
from .operations.models_api import ModelFiles, ModelsApi
from .operations.operations_api import Operations, OperationsApi
from .responses.responses_api import ResponsesApi
from .shared.answering import Answering
from .shared.profile_file import ProfileFile

if TYPE_CHECKING:
    from ..join.operations import JoinOperations

_PORTS_TO_TRY: Final = 100
_BACKLOG: Final = 64
"""Connections that wait to be accepted; asyncio accepts up to this number in one iteration."""


@dataclass(frozen=True, slots=True)
class Services:
    """The services behind the API. One that is None has no endpoints."""

    chat: Chat
    operations: Operations
    events: EventLog | None = None
    joining: "JoinOperations | None" = None
    profiles: ProfileFile | None = None
    files: ModelFiles | None = None


def build_app(
    services: Services,
    static: StaticFiles,
    timing: Timing,
    access: Access | None = None,
    *,
    between: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    clock: Callable[[], float] = time.monotonic,
) -> ASGIApp:
    """The whole API and the dashboard behind the guard.

    `between` wraps the API inside the guard: only allowed requests reach it.
    """
    access, profiles = access or Access(), services.profiles
    answering = Answering(services.chat, timing.keep_alive_s, clock, profiles)
    api = api_routes(answering, services, timing, access.token)
    routes = [*api, *static_routes(static)]
    paths = sorted({route.path for route in routes})

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == 405 and request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": allowed_methods(request.scope)})
        # The router names the methods of one route only.
        fault = unserved(request.scope) or unnamed_fault(error.status_code, path[:256], paths)
        return fault_response(fault, path, request.headers)

    def allowed_methods(scope: Scope) -> str:
        served = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
        return ", ".join(sorted({"OPTIONS"}.union(*(route.methods or () for route in served))))

    def unserved(scope: Scope) -> HttpFault | None:
        matches = [route.matches(scope)[0] for route in routes]
        if Match.FULL in matches:
            return None
        if Match.PARTIAL in matches:
            fault = unnamed_fault(405, scope["path"][:256])
            return replace(fault, headers=(("Allow", allowed_methods(scope)),))
        return unnamed_fault(404, scope["path"][:256], paths)

    app = _Router(routes=routes, exception_handlers={HTTPException: on_http_exception})
    # A redirect to another spelling of the path would lose a POST's body in many clients.
    app.router.redirect_slashes = False
    inner = between(app)
    return Guard(inner if profiles is None else naming_profiles(inner, profiles), access, unserved)


def api_routes(
    answering: Answering, services: Services, timing: Timing, token: LocalToken | None = None
) -> list[ApiRoute]:
    """The routes of clients and of commands, without the page."""
    events, joining, files = services.events, services.joining, services.files
    silence_s = timing.keep_alive_s
    return [
        answering.route(CHAT),
        answering.route(COMPLETIONS),
        answering.route(EMBEDDINGS),
        *TokenizerApi(answering).routes(),
        answering.route(MESSAGES),
        count_route(answering),
        *ResponsesApi(answering).routes(),
        answering.route(OLLAMA_EMBED),
        answering.route(OLLAMA_EMBEDDINGS),
        *Ollama(answering, services.operations).routes(),
        *(ModelsApi(files, silence_s).routes() if files is not None else ()),
        # After these: their route of any model, which `search` and `pull` are not.
        *OperationsApi(services.operations).routes(),
        *(EventsApi(events, timing.events_keep_alive_s).routes() if events is not None else ()),
        *(join_routes(joining) if joining is not None else ()),
        *(session_routes(token) if token is not None else ()),
    ]


class _Router(Starlette):
    """Answers what the router refuses. Every other error is raised: `HeadForwarder` asks the next
    head where this node is the head no longer, and the guard answers with the rest."""

    def build_middleware_stack(self) -> ASGIApp:
        return ExceptionMiddleware(self.router, self.exception_handlers)


class _Server(uvicorn.Server):
    """uvicorn inside the node's loop: the node handles signals; `is_up` is set once it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class HttpServer:
    """Serves an ASGI app in the running loop from `start` to `close`.

    `grace_s`: how long `close` waits for answers in progress before it cancels them.
    """

    def __init__(
        self, app: ASGIApp, *, limits: ConnectionLimits | None = None, grace_s: int = 30
    ) -> None:
        self._app = app
        self._limits = limits or ConnectionLimits()
        self._grace_s = grace_s
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Returns when connections are accepted; `port` 0 takes a free one, then in `self.port`.

        Raises InvalidSettings if it cannot listen on the address; for a port in use the message
        names the next free one.
        """
        listener = await _listener(host, port)
        self.port = listener.getsockname()[1]
        self._server = _Server(self._config())
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http server")
        up = asyncio.create_task(self._server.is_up.wait())
        await asyncio.wait((up, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            up.cancel()
            listener.close()
            await self._serving

    async def close(self) -> None:
        """Refuses new connections, waits `grace_s` for answers and cancels the rest."""
        server, serving = self._server, self._serving
        if server is None or serving is None:
            return
        server.should_exit = True
        await serving
        # Cancelled answers still close their events.
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)

    def _config(self) -> uvicorn.Config:
        bounds = self._limits

        class Connection(LimitedConnection):
            limits = bounds

        return uvicorn.Config(
            self._app,
            http=Connection,
            interface="asgi3",
            ws="none",
            lifespan="off",
            backlog=_BACKLOG,
            log_config=None,
            # The guard logs each request with its id.
            access_log=False,
            # Any client on loopback could otherwise claim another address or scheme.
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=bounds.head_bytes,
            timeout_keep_alive=bounds.idle_s,
            timeout_graceful_shutdown=self._grace_s,
        )


async def _listener(host: str, port: int) -> socket.socket:
    try:
        return await _bound(host, port)
    except socket.gaierror as fault:
        message = f"--host {host} is no address of this machine: {fault.strerror}"
        raise InvalidSettings(message, param="--host") from None
    except OSError as fault:
        raise await _refused_address(host, port, fault) from None


async def _bound(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = addresses[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


async def _refused_address(host: str, port: int, fault: OSError) -> InvalidSettings:
    if fault.errno == errno.EADDRINUSE:
        free = await _next_free(host, port)
        remedy = f"use --port {free}, which is free" if free else "choose another with --port"
        return InvalidSettings(f"port {port} on {host} is in use; {remedy}", param="--port")
    if fault.errno == errno.EACCES:
        message = f"port {port} needs privileges; choose one from 1024 up with --port"
        return InvalidSettings(message, param="--port")
    message = f"--host {host} cannot be listened on: {fault.strerror}"
    return InvalidSettings(message, param="--host")


async def _next_free(host: str, port: int) -> int | None:
    for candidate in range(port + 1, min(port + _PORTS_TO_TRY, 65535) + 1):
        try:
            (await _bound(host, candidate)).close()
        except OSError:
            continue
        return candidate
    return None
