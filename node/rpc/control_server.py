"""The node's own gRPC services: Membership and Control, over mutual TLS."""

import asyncio
import errno
import logging
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from ...placement.dtype_bytes import BYTES
from ...placement.errors import (
    DuplicateIdentity,
    ExoNodeError,
    InvalidRequest,
    InvalidSettings,
    PeerLost,
    Untrusted,
)
from ...placement.ids import NodeId, PlacementId
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ...proto.checked_calls import BoundNumbers, CheckedCalls
from ...proto.grpc_options import SERVER_OPTIONS
from ..trust.certificates import Credentials, authenticated_node, server_credentials
from .link_rpc import LinkService
from .model_files import ModelFilesService

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

PROTOCOL = 5
"""Grows with each change of the messages of nodes or runners: both ends must have the same."""
_MAX_LOGGED = 256

NODE_SERVER_OPTIONS = (
    *SERVER_OPTIONS,
    # More than HTTP connections, each of which may be one forwarded stream.
    ("grpc.max_concurrent_streams", 512),
    # gRPC's default is two minutes, for which a silent connection holds a file descriptor.
    ("grpc.server_handshake_timeout_ms", 10_000),
)


class PeersOnly(CheckedCalls):
    """Admits nodes only, and makes a method's error the call's status. A runner parses hostile
    files: under an attacker's control it must not reach these services with its certificate."""

    @asynccontextmanager
    async def around(self, request: Any, context: Any, method: str) -> AsyncGenerator[None]:
        try:
            _ = authenticated_node(context.auth_context())
            yield
        except ExoNodeError as fault:
            status = grpc.StatusCode.UNAVAILABLE
            if isinstance(fault, InvalidRequest):
                status = grpc.StatusCode.INVALID_ARGUMENT
            elif isinstance(fault, Untrusted):
                status = grpc.StatusCode.UNAUTHENTICATED
            metadata = (("exo-code", fault.code), ("exo-param", fault.param or ""))
            await context.abort(status, fault.message, metadata)


_PLACEMENT: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class NodeCalls:
    """The node's methods that its peers call."""

    answer_heartbeat: Callable[[NodeId, pb.Heartbeat], pb.Heartbeat]
    """Merges a peer's heartbeat and returns this node's. Raises if the sender may not join."""
    load_stage: Callable[[pb.StageSpec, Callable[[pb.LoadProgress], None]], Awaitable[pb.LoadReady]]
    unload_stage: Callable[[PlacementId, int, bool], Awaitable[None]]
    """The last argument: whether the runner is killed without asking it first."""
    decide_join: Callable[[pb.JoinDecision], Awaitable[pb.JoinDecided]]
    """Decides on a node that waits here, as a person did at another node."""
    answer_http: Callable[[pb.HttpRequest], AsyncIterator[pb.HttpChunk]]
    """Answers a request that another node forwarded to this head, by this node's own API."""
    acquire: Callable[[pb.AcquireRequest], AsyncGenerator[pb.AcquireEvent]]
    """Claims a placement of this head for an answer; see `claims.Claims`."""
    report: Callable[[pb.AttemptReport], None]


class _MembershipService(peer_pb2_grpc.MembershipServicer):
    def __init__(self, node: NodeCalls) -> None:
        self._node = node
        self._logged: set[tuple[str, str]] = set()

    async def Exchange(self, request: pb.Heartbeat, context: "Context") -> pb.Heartbeat:
        try:
            sender = authenticated_node(context.auth_context())
            if sender != request.sender.id:
                raise Untrusted(f"{sender} speaks for {request.sender.id}")
            if request.protocol != PROTOCOL:
                raise InvalidRequest(
                    f"this node speaks protocol {PROTOCOL} and the other {request.protocol}; "
                    "install the same version of exo-node on both",
                    param="protocol",
                )
            return self._node.answer_heartbeat(sender, request)
        except ExoNodeError as fault:
            self._log_once(request.sender.id, fault)
            raise

    def _log_once(self, sender: str, fault: ExoNodeError) -> None:
        """Logs a refusal once for each sender: a refused node tries again every second."""
        if isinstance(fault, PeerLost | DuplicateIdentity):  # joining logs these
            return
        if (sender, fault.code) not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add((sender, fault.code))
            log.warning("refused node %s: %s", sender[:20], fault.message)


def _check_stage(spec: pb.StageSpec) -> None:
    """Refuses names that no head uses, as they are written to logs. Raises InvalidRequest."""
    upper = spec.first_layer > 0 and spec.end_layer == spec.num_layers
    reads = upper and spec.num_stages == 1 and spec.plan.HasField("reader")
    checks = (
        ("placement", _PLACEMENT.fullmatch(spec.placement), "1 to 64 letters, digits, - or _"),
        ("model", 0 < len(spec.model) <= 256 and spec.model.isprintable(), "a model's id"),
        ("dtype", spec.dtype in BYTES, f"one of {', '.join(BYTES)}"),
        ("stage", spec.stage < spec.num_stages or reads, "less than num_stages, but of a reader"),
        ("end_layer", spec.first_layer < spec.end_layer <= spec.num_layers, "within num_layers"),
    )
    for field, good, expected in checks:
        if not good:
            raise InvalidRequest(f"{field} must be {expected}", param=field)


class ControlService(peer_pb2_grpc.ControlServicer):
    def __init__(self, node: NodeCalls) -> None:
        self._node = node

    async def LoadStage(
        self, request: pb.StageSpec, context: "Context"
    ) -> AsyncIterator[pb.LoadEvent]:
        _check_stage(request)
        events: asyncio.Queue[pb.LoadEvent | None] = asyncio.Queue()

        def progress(report: pb.LoadProgress) -> None:
            events.put_nowait(pb.LoadEvent(progress=report))

        async def load() -> None:
            ready = await self._node.load_stage(request, progress)
            events.put_nowait(pb.LoadEvent(ready=ready))

        task = asyncio.create_task(load())
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await task
        finally:
            _ = task.cancel()

    async def UnloadStage(
        self, request: pb.UnloadStageRequest, context: "Context"
    ) -> pb.UnloadStageReply:
        placement = PlacementId(request.placement)
        await self._node.unload_stage(placement, request.stage, request.kill)
        return pb.UnloadStageReply()

    def Http(self, request: pb.HttpRequest, context: "Context") -> AsyncIterator[pb.HttpChunk]:
        return self._node.answer_http(request)

    def Acquire(
        self, request: pb.AcquireRequest, context: "Context"
    ) -> AsyncIterator[pb.AcquireEvent]:
        return self._node.acquire(request)

    async def Report(self, request: pb.AttemptReport, context: "Context") -> pb.ReportReply:
        self._node.report(request)
        return pb.ReportReply()

    async def DecideJoin(self, request: pb.JoinDecision, context: "Context") -> pb.JoinDecided:
        return await self._node.decide_join(request)


class ControlServer:
    """Listens on the addresses that peers may use."""

    def __init__(
        self,
        node: NodeCalls,
        credentials: Credentials,
        links: LinkService,
        files: ModelFilesService,
    ) -> None:
        # In this order: the numbers of a caller without a certificate are not read.
        first = (PeersOnly(), BoundNumbers())
        self._server = grpc.aio.server(interceptors=first, options=NODE_SERVER_OPTIONS)
        peer_pb2_grpc.add_MembershipServicer_to_server(_MembershipService(node), self._server)
        peer_pb2_grpc.add_ControlServicer_to_server(ControlService(node), self._server)
        peer_pb2_grpc.add_LinkServicer_to_server(links, self._server)
        peer_pb2_grpc.add_ModelFilesServicer_to_server(files, self._server)
        self._credentials = server_credentials(credentials)

    async def start(self, hosts: list[str], port: int) -> int:
        """Returns the port. Raises InvalidSettings, naming a free port, where it is in use."""
        for host in hosts:
            try:
                _require_free(host, port)  # gRPC would log a line of its own
                port = self._server.add_secure_port(f"{host}:{port}", self._credentials)
            except (OSError, RuntimeError) as fault:
                raise InvalidSettings(
                    f"port {port} on {host} is in use; choose another with --grpc-port "
                    f"(EXO_GRPC_PORT), such as {_free_port(host, port)}",
                    param="--grpc-port",
                ) from fault
        await self._server.start()
        return port

    async def close(self) -> None:
        await self._server.stop(grace=0.5)


def _require_free(host: str, port: int) -> None:
    """Checks that the port is free. Raises OSError if not; other faults are gRPC's to find."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as fault:
            if fault.errno == errno.EADDRINUSE:
                raise


def _free_port(host: str, after: int) -> int:
    for port in range(after + 1, min(after + 100, 65536)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    return 0
