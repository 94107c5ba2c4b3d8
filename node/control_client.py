"""Calls to other nodes and to runners: heartbeats, loading, claims, generating, forwarding."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, TypeVar

import grpc
import grpc.aio

from ..placement.errors import ExoNodeError, HeadGone, PeerLost, PeerRefused, Untrusted, from_code
from ..placement.ids import NodeId, PlacementId
from ..proto import peer_pb2 as pb
from ..proto import peer_pb2_grpc
from .records import Endpoint
from .trust import Credentials, channel_credentials, clock_trouble, node_name, runner_name

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")

CHANNEL_OPTIONS = (
    # Both timeouts are needed: without the second a stopped peer is noticed only after a minute.
    # Three seconds hold three losses in a row of one segment on a way of 200 ms.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# What gRPC's text says of a certificate that one side does not accept; a process that ended during
# the handshake says "Handshake read failed", which is no matter of trust.
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "SSL_ERROR_SSL", "Peer name")
_EXPIRED = ("certificate has expired", "certificate is not yet valid")
_REFUSED = "Connection refused"
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
EXCHANGE_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 10.0
PARK_TIMEOUT_S = 1.0
REPORT_TIMEOUT_S = 2.0
DECIDE_TIMEOUT_S = 25.0


def from_status(fault: grpc.aio.AioRpcError, where: str) -> ExoNodeError:
    """The error of the tree that a call's status carries, or PeerLost."""
    metadata = {key: value for key, value in fault.trailing_metadata() or ()}
    if (code := metadata.get("exo-code")) is not None:
        param = metadata.get("exo-param") or None
        return from_code(str(code), fault.details() or "", str(param) if param else None)
    detail = (fault.details() or "").split("\n")[0]
    if any(sign in detail for sign in _UNTRUSTED):
        return Untrusted(_why_untrusted(where, detail))
    if fault.code() is grpc.StatusCode.UNAVAILABLE and _REFUSED in detail:
        return PeerRefused(f"nobody listens at {where}: its process ended ({detail})")
    if fault.code() in _GONE:
        return PeerLost(f"{where} is gone or does not answer ({fault.code().name}: {detail})")
    return ExoNodeError(f"{where} failed ({fault.code().name}: {detail}); see its log")


def _why_untrusted(where: str, detail: str) -> str:
    if clock := clock_trouble(datetime.now(UTC)):
        return f"{where} cannot be trusted: {clock}"
    if any(sign in detail for sign in _EXPIRED):
        return (
            f"{where} showed a certificate that is not valid today ({detail}): compare the clocks "
            "of both machines"
        )
    return (
        f"{where} is not of this cluster ({detail}); give both the same key, and compare their "
        "clocks if they have it"
    )


class Channels:
    """Open channels by address and expected name; closed together."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = channel_credentials(credentials)
        self._channels: dict[tuple[str, str, bool], grpc.aio.Channel] = {}

    def to(self, address: str, name: str, *, beats: bool = False) -> grpc.aio.Channel:
        """`address` is host:port; `name` is what the other side's certificate must carry.

        `beats`: a connection for heartbeats alone, which no number of other calls can hold up.
        """
        key = (address, name, beats)
        if key not in self._channels:
            options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)]
            if beats:  # else gRPC shares one connection between channels to the same target
                options.append(("grpc.use_local_subchannel_pool", 1))
                # A second refusal is told from the first one's echo.
                options.append(("grpc.initial_reconnect_backoff_ms", 200))
            self._channels[key] = grpc.aio.secure_channel(address, self._credentials, options)
        return self._channels[key]

    async def drop(self, address: str) -> None:
        """Closes what leads to an address that will not be used again."""
        for key in [key for key in self._channels if key[0] == address]:
            await self._channels.pop(key).close()

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        _ = await asyncio.gather(*(channel.close() for channel in channels))


class ControlClient:
    """The other nodes' Membership and Control services."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def exchange(self, address: str, node: NodeId | None, beat: pb.Heartbeat) -> pb.Heartbeat:
        """One heartbeat; `node` None where the peer's id is not known yet. Raises ExoNodeError."""
        channel = self._channels.to(address, node_name(node), beats=True)
        stub = peer_pb2_grpc.MembershipStub(channel)
        return await _reply(stub.Exchange(beat, timeout=EXCHANGE_TIMEOUT_S), address)

    async def load(
        self,
        address: str,
        node: NodeId,
        spec: pb.StageSpec,
        progress: Callable[[pb.LoadProgress], None],
    ) -> pb.LoadReady:
        """Raises what the other node's load raises, or PeerLost."""
        stub = peer_pb2_grpc.ControlStub(self._channels.to(address, node_name(node)))
        async with aclosing(_stream(stub.LoadStage(spec), address)) as events:
            async for event in events:
                if event.WhichOneof("event") == "ready":
                    return event.ready
                progress(event.progress)
        raise PeerLost(f"{address} ended the load without a result")

    async def unload(
        self, address: str, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        """Raises PeerLost."""
        stub = peer_pb2_grpc.ControlStub(self._channels.to(address, node_name(node)))
        request = pb.UnloadStageRequest(placement=placement, stage=stage, kill=kill)
        _ = await _reply(stub.UnloadStage(request, timeout=CALL_TIMEOUT_S), address)

    async def decide_join(
        self, address: str, node: NodeId, decision: pb.JoinDecision
    ) -> pb.JoinDecided:
        """On a node that waits there to be let in. Raises what the other node's decision raises."""
        stub = peer_pb2_grpc.ControlStub(self._channels.to(address, node_name(node)))
        return await _reply(stub.DecideJoin(decision, timeout=DECIDE_TIMEOUT_S), address)

    async def http(
        self, address: str, node: NodeId, request: pb.HttpRequest
    ) -> AsyncGenerator[pb.HttpChunk, None]:
        """One HTTP request answered by the head; closing the generator cancels it there."""
        stub = peer_pb2_grpc.ControlStub(self._channels.to(address, node_name(node)))
        async with aclosing(_stream(stub.Http(request), f"the head at {address}")) as chunks:
            async for chunk in chunks:
                yield chunk

    async def acquire(
        self, address: str, node: NodeId, asked: pb.AcquireRequest
    ) -> AsyncGenerator[pb.AcquireEvent, None]:
        """What the head raises, or HeadGone; closing the generator gives the claim up."""
        stub = peer_pb2_grpc.ControlStub(self._channels.to(address, node_name(node)))
        where = f"the head at {address}"
        async with aclosing(_stream(stub.Acquire(asked), where, lost=HeadGone)) as events:
            async for event in events:
                yield event

    async def report(self, address: str, node: NodeId, told: pb.AttemptReport) -> None:
        """Raises PeerLost."""
        stub = peer_pb2_grpc.ControlStub(self._channels.to(address, node_name(node)))
        _ = await _reply(stub.Report(told, timeout=REPORT_TIMEOUT_S), f"the head at {address}")


class RunnerClient:
    """Runners, on this node or another, by the endpoint that their load reported."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def connect(self, stage: Endpoint, following: Endpoint, placement: PlacementId) -> None:
        """Raises PeerLost."""
        request = pb.ConnectRequest(
            placement=placement,
            host=following.ready.host,
            port=following.ready.port,
            name=runner_name(following.node),
        )
        stub = peer_pb2_grpc.StageStub(self._channel(stage))
        call = stub.Connect(request, timeout=CALL_TIMEOUT_S)
        _ = await _reply(call, f"the runner on {stage.node}")

    async def follow(self, stage: Endpoint, spare: Endpoint, placement: PlacementId) -> str:
        """See `stages.Stages`. Raises PeerLost."""
        request = pb.FollowRequest(
            placement=placement,
            host=spare.ready.host,
            port=spare.ready.port,
            name=runner_name(spare.node),
        )
        stub = peer_pb2_grpc.StandbyStub(self._channel(stage))
        call = stub.Follow(request, timeout=CALL_TIMEOUT_S)
        return (await _reply(call, f"the runner on {stage.node}")).why_not

    async def ping(
        self, stage: Endpoint, placement: PlacementId, number: int, timeout_s: float
    ) -> pb.RunnerState:
        """Answered by the runner's event loop, however busy it is. Raises PeerLost."""
        stub = peer_pb2_grpc.RunnerStub(self._channel(stage))
        request = pb.PingRequest(placement=placement, stage=number)
        call = stub.Ping(request, timeout=timeout_s)
        return await _reply(call, f"the runner of stage {number} on {stage.node}")

    async def park(self, endpoint: Endpoint, request: str, attempt: int) -> None:
        """Before a lost attempt's call is cancelled: what it holds is kept. Raises PeerLost."""
        stub = peer_pb2_grpc.GeneratorStub(self._channel(endpoint))
        parked = pb.ParkRequest(request=request, attempt=attempt)
        call = stub.Park(parked, timeout=PARK_TIMEOUT_S)
        _ = await _reply(call, f"the generator's runner on {endpoint.node}")

    async def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """See `chat.Generators`."""
        stub = peer_pb2_grpc.GeneratorStub(self._channel(endpoint))
        where = f"the generator's runner on {endpoint.node}"
        async with aclosing(_stream(stub.Generate(request), where)) as events:
            async for event in events:
                yield event

    async def forget(self, endpoint: Endpoint) -> None:
        """Closes the channel to a runner that is gone; its port may be another's soon."""
        await self._channels.drop(f"{endpoint.ready.host}:{endpoint.ready.port}")

    def _channel(self, endpoint: Endpoint) -> grpc.aio.Channel:
        address = f"{endpoint.ready.host}:{endpoint.ready.port}"
        return self._channels.to(address, runner_name(endpoint.node))


async def _reply(call: Awaitable[Reply], where: str) -> Reply:
    """A unary call's, or an error of the tree."""
    try:
        return await call
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as fault:
        raise _error(fault, where) from fault


async def _stream(
    call: Any, where: str, *, lost: type[PeerLost] = PeerLost
) -> AsyncGenerator[Any, None]:
    """A server stream whose early end, from either side, leaves nothing running.

    `lost`: what is raised where the other side is gone.
    """
    try:
        async for message in call:
            yield message
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as fault:
        raise _error(fault, where, lost) from fault
    finally:
        call.cancel()


def _error(
    fault: grpc.aio.AioRpcError | asyncio.CancelledError,
    where: str,
    lost: type[PeerLost] = PeerLost,
) -> ExoNodeError:
    """Raises `fault` again where this task is cancelled."""
    if isinstance(fault, grpc.aio.AioRpcError):
        told = from_status(fault, where)
        here = not any(key == "exo-code" for key, _ in fault.trailing_metadata() or ())
        if here and type(told) in (PeerLost, PeerRefused) and lost is not PeerLost:
            return lost(told.message)
        return told
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise fault
    # gRPC's word for a channel that was closed here, because its runner is known to be gone.
    return lost(f"{where} is gone")
