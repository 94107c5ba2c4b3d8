"""Calls to runners, on this node or another: connect, ping, generate."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import grpc
import grpc.aio

from ...placement.ids import NodeId, PlacementId, runner_name
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from ..machine.timing import Timing
from ..rpc.channels import Channels, reply, stream


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A loaded stage that can be called."""

    node: NodeId
    ready: pb.LoadReady


def endpoints_of(placed: pb.Placed) -> list[Endpoint]:
    """The stages of a placement that another node holds."""
    return [Endpoint(NodeId(stage.node), stage.ready) for stage in placed.stages]


class RunnerClient:
    """`chat.claim.Runners`, on this node or another, by the endpoint that their load reported."""

    def __init__(self, channels: Channels, timing: Timing) -> None:
        self._channels = channels
        self._timing = timing

    async def connect(
        self, stage: Endpoint, following: Endpoint, placement: PlacementId, epoch: pb.Epoch
    ) -> None:
        """Connects a stage to the following one. Raises PeerLost, and InvalidRequest where the
        runner is in another epoch."""
        request = pb.ConnectRequest(
            placement=placement,
            host=following.ready.host,
            port=following.ready.port,
            name=runner_name(following.node),
            epoch=epoch,
        )
        stub = peer_pb2_grpc.StageStub(self._channel(stage))
        call = stub.Connect(request, timeout=self._timing.slow_reply_s)
        _ = await reply(call, f"the runner on {stage.node}")

    async def read_state(
        self, stage: Endpoint, placement: PlacementId, number: int, timeout_s: float
    ) -> pb.RunnerState:
        """The state of a runner, whose event loop is never busy. Raises PeerLost."""
        stub = peer_pb2_grpc.RunnerStub(self._channel(stage))
        request = pb.PingRequest(placement=placement, stage=number)
        call = stub.Ping(request, timeout=timeout_s)
        return await reply(call, f"the runner of stage {number} on {stage.node}")

    async def enter(
        self, stage: Endpoint, placement: PlacementId, number: int, epoch: pb.Epoch
    ) -> None:
        """Takes a runner into a later epoch. Raises PeerLost, and InvalidRequest for another."""
        stub = peer_pb2_grpc.RunnerStub(self._channel(stage))
        request = pb.EnterRequest(placement=placement, stage=number, epoch=epoch)
        call = stub.Enter(request, timeout=self._timing.slow_reply_s)
        _ = await reply(call, f"the runner of stage {number} on {stage.node}")

    def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        stub = peer_pb2_grpc.GeneratorStub(self._channel(endpoint))
        return stream(stub.Generate, request, f"the generator's runner on {endpoint.node}")

    async def encode(self, endpoint: Endpoint, request: pb.EncodeRequest) -> pb.EncodeReply:
        stub = peer_pb2_grpc.GeneratorStub(self._channel(endpoint))
        call = stub.Encode(request, timeout=self._timing.long_reply_s)
        return await reply(call, f"the generator's runner on {endpoint.node}")

    async def find_prefix(self, endpoint: Endpoint, request: pb.GenerateRequest) -> pb.CachedPrefix:
        stub = peer_pb2_grpc.GeneratorStub(self._channel(endpoint))
        call = stub.FindPrefix(request, timeout=self._timing.reply_s)
        return await reply(call, f"the generator's runner on {endpoint.node}")

    async def forget(self, stage: Endpoint) -> None:
        """Closes the channel to a runner that ended: another process may get its port."""
        await self._channels.drop(f"{stage.ready.host}:{stage.ready.port}")

    def _channel(self, endpoint: Endpoint) -> grpc.aio.Channel:
        address = f"{endpoint.ready.host}:{endpoint.ready.port}"
        return self._channels.to(address, runner_name(endpoint.node))
