"""The calls that peers may make to this node."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from ..placement.ids import NodeId, PlacementId
from ..proto import peer_pb2 as pb
from .cluster.cluster import Cluster
from .join.joining import Joining
from .join.operations import JoinOperations
from .placements.claims import Claims
from .placements.stage_runners import LocalStages
from .placements.stages import Progress

Answer = Callable[[pb.HttpRequest], AsyncIterator[pb.HttpChunk]]
"""Runs a request that another node forwarded through this node's own API."""


class PeerService:
    """`control_server.NodeSide`: heartbeats, stages, claims, and requests that peers forward."""

    def __init__(
        self,
        joining: Joining,
        cluster: Cluster,
        stages: LocalStages,
        claims: Claims,
        answer: Answer,
    ) -> None:
        self._joining = joining
        self._cluster = cluster
        self._stages = stages
        self._claims = claims
        self._answer = answer

    def answer_heartbeat(self, sender: NodeId, beat: pb.Heartbeat) -> pb.Heartbeat:
        """Raises what `Joining.check_heartbeat` raises, and ignores the heartbeat then."""
        self._joining.check_heartbeat(beat)
        return self._cluster.answer(sender, beat)

    async def load_stage(self, spec: pb.StageSpec, progress: Progress) -> pb.LoadReady:
        return await self._stages.load(spec, progress)

    async def unload_stage(self, placement: PlacementId, stage: int, *, kill: bool) -> None:
        await self._stages.unload(placement, stage, kill=kill)

    async def decide_join(self, decision: pb.JoinDecision) -> pb.JoinDecided:
        return await JoinOperations(self._joining).decide(decision)

    def answer_http(self, request: pb.HttpRequest) -> AsyncIterator[pb.HttpChunk]:
        return self._answer(request)

    def acquire(self, request: pb.AcquireRequest) -> AsyncGenerator[pb.AcquireEvent, None]:
        return self._claims.acquire(request)

    def report(self, report: pb.AttemptReport) -> None:
        self._claims.report(report)
