"""The way to whichever node is the head, this one included."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from ..placement.errors import HeadGone, PeerLost
from ..placement.ids import ModelId, NodeId, PlacementId
from ..proto import peer_pb2 as pb
from .api.operations.plan_request import live_node
from .cluster.cluster import Cluster
from .machine.tasks import unless
from .placements.claims import Claims
from .rpc.control_client import ControlClient
from .runners.runner_client import Endpoint


class ClusterHead:
    """`forward.HeadClient` and `claim.Heads` over the cluster."""

    def __init__(self, cluster: Cluster, client: ControlClient, claims: Claims) -> None:
        """`claims` are this node's, for the time in which it is the head itself."""
        self._cluster = cluster
        self._client = client
        self._claims = claims

    async def head_elsewhere(self) -> NodeId | None:
        head = await self._cluster.wait_for_head()
        return None if head == self._cluster.self_id else head

    def node_elsewhere(self, name: str) -> NodeId | None:
        members = {member.id: member.facts.name for member in self._cluster.members()}
        node = live_node("node", name, members)
        return None if node == self._cluster.self_id else node

    async def until_gone(self, node: NodeId) -> None:
        await self._cluster.until_gone(node)

    def http(self, head: NodeId, request: pb.HttpRequest) -> AsyncGenerator[pb.HttpChunk, None]:
        return self._client.http(self._cluster.address(head), head, request)

    async def head(self) -> NodeId:
        """The head, for which it waits during an election. Raises HeadGone."""
        try:
            return await self._cluster.wait_for_head()
        except PeerLost as fault:
            raise HeadGone("none was elected in time") from fault

    async def acquire(
        self, head: NodeId, request: pb.AcquireRequest
    ) -> AsyncGenerator[pb.AcquireEvent, None]:
        """See `claim.Heads`. The membership may know earlier than gRPC that a head is dead."""
        if head == self._cluster.self_id:
            async with aclosing(self._claims.acquire(request)) as events:
                async for event in events:
                    yield event
            return
        head_lost = asyncio.ensure_future(self._cluster.until_gone(head))
        try:
            answer = self._client.acquire(self._address(head), head, request)
            async with aclosing(answer) as events:
                while True:
                    event = await unless(
                        asyncio.shield(head_lost),
                        anext(events, None),
                        lambda: HeadGone("the head was lost"),
                    )
                    if event is None:
                        return
                    yield event
        except HeadGone:
            self._cluster.send_heartbeats()  # so that its loss, if it is lost, is known sooner
            raise
        finally:
            _ = head_lost.cancel()

    async def report(self, head: NodeId, report: pb.AttemptReport) -> None:
        if head == self._cluster.self_id:
            self._claims.report(report)
        else:
            await self._client.report(self._address(head), head, report)

    def generators(self, model: ModelId) -> Mapping[PlacementId, Endpoint]:
        return {
            PlacementId(stage.placement): Endpoint(member.id, stage.ready)
            for member in self._cluster.members()
            for stage in member.stages
            if stage.model == model and stage.stage == 0 and stage.HasField("epoch")
        }

    def has_readers(self, model: ModelId) -> bool:
        return any(
            stage.model == model and stage.ready.read_key
            for member in self._cluster.members()
            for stage in member.stages
        )

    def _address(self, head: NodeId) -> str:
        try:
            return self._cluster.address(head)
        except PeerLost as fault:
            raise HeadGone(fault.message) from fault
