"""The gRPC service of any runner: reports its state, and enters epochs, so that two heads which
connect the same runners cannot mix their connections."""

from collections.abc import Callable

from ...placement.errors import InvalidRequest, PeerLost
from ...proto import peer_pb2 as pb
from ...proto import peer_pb2_grpc
from .refusal import Context, refuse


class EpochFence:
    """The highest epoch that a head took this runner into."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.epoch: pb.Epoch | None = None
        """None until a head connected this runner."""

    def enter(self, epoch: pb.Epoch) -> None:
        """Enters a higher epoch. Raises InvalidRequest if it is not."""
        if self.epoch is not None and _order(epoch) <= _order(self.epoch):
            raise self._refusal()
        self.epoch = epoch

    def require(self, epoch: pb.Epoch) -> None:
        """Checks that `epoch` is the present one. Raises InvalidRequest."""
        if self.epoch is None or _order(epoch) != _order(self.epoch):
            raise self._refusal()

    def _refusal(self) -> InvalidRequest:
        if self.epoch is None:
            return InvalidRequest(f"stage {self._stage} is in no epoch yet", param="epoch")
        text = f"stage {self._stage} is connected in another epoch, of {self.epoch.head}"
        return InvalidRequest(text, param="epoch")


class RunnerService(peer_pb2_grpc.RunnerServicer):
    """Answers pings with the runner's last state, and enters the epochs of heads."""

    def __init__(
        self, spec: pb.StageSpec, state: Callable[[], pb.RunnerState], fence: EpochFence
    ) -> None:
        """`state` must not wait for the compute thread."""
        self._spec = spec
        self._state = state
        self._fence = fence

    async def Ping(self, request: pb.PingRequest, context: "Context") -> pb.RunnerState:
        await self._require_stage(request, context)
        return self._state()

    async def Enter(self, request: pb.EnterRequest, context: "Context") -> pb.EnterReply:
        """Fences the head of a lower epoch, which may not know yet that another one leads."""
        await self._require_stage(request, context)
        try:
            self._fence.enter(request.epoch)
        except InvalidRequest as fault:
            await refuse(context, fault)
        return pb.EnterReply()

    async def _require_stage(
        self, request: pb.PingRequest | pb.EnterRequest, context: "Context"
    ) -> None:
        if (request.placement, request.stage) != (self._spec.placement, self._spec.stage):
            # The port of a runner that is gone may be another's by now.
            await refuse(context, PeerLost("another stage listens here now"))


def _order(epoch: pb.Epoch) -> tuple[int, int, str]:
    return epoch.term, epoch.number, epoch.head
