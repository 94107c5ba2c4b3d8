"""The gRPC service of any runner: reports its state, and keeps its epoch."""

from collections.abc import Callable

from ...placement.errors import InvalidRequest, PeerLost
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from .refusal import Context, refuse


class RunnerService(peer_pb2_grpc.RunnerServicer):
    """Answers pings with the runner's last state, and keeps the epoch that heads connect it in."""

    def __init__(self, spec: pb.StageSpec, state: Callable[[], pb.RunnerState]) -> None:
        """`state` must not wait for the compute thread."""
        self._spec = spec
        self._state = state
        self.epoch: pb.Epoch | None = None
        """None until a head connected this runner."""

    async def Ping(self, request: pb.PingRequest, context: "Context") -> pb.RunnerState:
        await self._require_stage(request, context)
        return self._state()

    async def Enter(self, request: pb.EnterRequest, context: "Context") -> pb.EnterReply:
        """Fences the head of a lower epoch, which may not know yet that another one leads."""
        await self._require_stage(request, context)
        if self.epoch is not None and _order(request.epoch) <= _order(self.epoch):
            text = f"stage {self._spec.stage} is connected in a later epoch, of {self.epoch.head}"
            await refuse(context, InvalidRequest(text, param="epoch"))
        self.epoch = request.epoch
        return pb.EnterReply()

    async def _require_stage(
        self, request: pb.PingRequest | pb.EnterRequest, context: "Context"
    ) -> None:
        if (request.placement, request.stage) != (self._spec.placement, self._spec.stage):
            # The port of a runner that is gone may be another's by now.
            await refuse(context, PeerLost("another stage listens here now"))


def _order(epoch: pb.Epoch) -> tuple[int, int, str]:
    return epoch.term, epoch.number, epoch.head
