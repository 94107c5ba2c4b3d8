"""The way to whichever node is the head."""

from collections.abc import AsyncGenerator

from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb
from .cluster import Cluster
from .control_client import ControlClient


class ClusterHead:
    """`forward.HeadClient` over the cluster."""

    def __init__(self, cluster: Cluster, client: ControlClient) -> None:
        self._cluster = cluster
        self._client = client

    async def head_elsewhere(self, other_than: NodeId | None = None) -> NodeId | None:
        head = await self._cluster.wait_for_head(other_than)
        return None if head == self._cluster.self_id else head

    async def until_gone(self, node: NodeId) -> None:
        await self._cluster.until_gone(node)

    def http(self, head: NodeId, request: pb.HttpRequest) -> AsyncGenerator[pb.HttpChunk, None]:
        return self._client.http(self._cluster.address(head), head, request)
