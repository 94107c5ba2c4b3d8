"""Calls to other nodes and to runners: heartbeats, loading, claims, generating, forwarding."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ...placement.errors import HeadGone, PeerLost
from ...placement.ids import NodeId, PlacementId
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ..machine.timing import Timing
from ..trust.certificates import node_name
from .channels import Channels, reply, stream

DECIDE_TIMEOUT_S = 25.0
"""Less than the timeout of the command that waits for it."""


class ControlClient:
    """The other nodes' Membership and Control services."""

    def __init__(self, channels: Channels, timing: Timing) -> None:
        self._channels = channels
        self._timing = timing

    async def exchange(self, address: str, node: NodeId | None, beat: pb.Heartbeat) -> pb.Heartbeat:
        """Exchanges heartbeats; `node` is None for an unknown peer id. Raises ExoNodeError."""
        channel = self._channels.to(address, node_name(node), beats=True)
        stub = peer_pb2_grpc.MembershipStub(channel)
        return await reply(stub.Exchange(beat, timeout=self._timing.heartbeat_s), address)

    async def load(
        self,
        address: str,
        node: NodeId,
        spec: pb.StageSpec,
        progress: Callable[[pb.LoadProgress], None],
    ) -> pb.LoadReady:
        """Loads a stage there. Raises the other node's error, or PeerLost."""
        async with aclosing(
            stream(self._control(address, node).LoadStage, spec, address)
        ) as events:
            async for event in events:
                if event.WhichOneof("event") == "ready":
                    return event.ready
                progress(event.progress)
        raise PeerLost(f"{address} ended the load without a result")

    async def unload(
        self, address: str, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        """Unloads a stage there. Raises PeerLost."""
        request = pb.UnloadStageRequest(placement=placement, stage=stage, kill=kill)
        call = self._control(address, node).UnloadStage(request, timeout=self._timing.slow_reply_s)
        _ = await reply(call, address)

    async def decide_join(
        self, address: str, node: NodeId, decision: pb.JoinDecision
    ) -> pb.JoinDecided:
        """Decides on a node that waits there to be let in. Raises the other node's error."""
        call = self._control(address, node).DecideJoin(decision, timeout=DECIDE_TIMEOUT_S)
        return await reply(call, address)

    def http(
        self, address: str, node: NodeId, request: pb.HttpRequest
    ) -> AsyncGenerator[pb.HttpChunk, None]:
        """Forwards an HTTP request to another node; closing the generator cancels it there."""
        return stream(self._control(address, node).Http, request, f"the node at {address}")

    def acquire(
        self, address: str, node: NodeId, request: pb.AcquireRequest
    ) -> AsyncGenerator[pb.AcquireEvent, None]:
        """Claims a placement of the head until the generator is closed.

        Raises the head's error, or HeadGone.
        """
        acquire = self._control(address, node).Acquire
        return stream(acquire, request, f"the head at {address}", lost=HeadGone)

    async def report(self, address: str, node: NodeId, report: pb.AttemptReport) -> None:
        """Reports the end of an attempt to the head. Raises PeerLost."""
        call = self._control(address, node).Report(report, timeout=self._timing.report_timeout_s)
        _ = await reply(call, f"the head at {address}")

    def _control(self, address: str, node: NodeId) -> peer_pb2_grpc.ControlStub:
        return peer_pb2_grpc.ControlStub(self._channels.to(address, node_name(node)))
