"""The gRPC service of any runner: reports its state."""

from collections.abc import Callable

from ...placement.errors import PeerLost
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from .refusal import Context, refuse


class RunnerService(peer_pb2_grpc.RunnerServicer):
    """Answers pings with the runner's last state."""

    def __init__(self, spec: pb.StageSpec, state: Callable[[], pb.RunnerState]) -> None:
        """`state` must not wait for the compute thread."""
        self._spec = spec
        self._state = state

    async def Ping(self, request: pb.PingRequest, context: "Context") -> pb.RunnerState:
        if (request.placement, request.stage) != (self._spec.placement, self._spec.stage):
            # The port of a runner that is gone may be another's by now.
            await refuse(context, PeerLost("another stage listens here now"))
        return self._state()
