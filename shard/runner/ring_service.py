"""The Stage service of the first stage: takes the frames that the last stage sends."""

from ...placement.errors import PeerLost
from ...proto import peer_pb2 as pb
from ..model.stage_limits import StageLimits
from ..pipeline.ring import Ring
from ..pipeline.streams import OutgoingStream
from .next_stage import NextStage
from .stage_service import Incoming, StageService, unknown_kind


class RingService(StageService):
    """The Stage service of the first stage: passes frames of the last stage to its `Ring`."""

    def __init__(
        self, spec: pb.StageSpec, limits: StageLimits, following: NextStage, ring: Ring
    ) -> None:
        super().__init__(spec, limits, following)
        self._ring = ring

    async def take(self, frame: pb.Frame, incoming: Incoming) -> None:
        match frame.WhichOneof("kind"):
            case "hidden":
                if (block := incoming.assembler.add(frame)) is not None:
                    self._ring.answer(block)
            case "release" | "renew":
                pass  # every stage has processed it
            case "prefix":
                self._ring.prefix(frame)
            case "computed":
                self._ring.computed(frame)
            case "failure":
                self._ring.fail(frame)
            case kind:
                raise unknown_kind(kind)

    def connected(self, stream: OutgoingStream) -> None:
        self._ring.connect(stream)

    def from_below(self, frame: pb.Frame) -> None:
        if frame.HasField("failure"):  # the next stage sends nothing else back
            self._ring.fail(frame)

    def lost_below(self, fault: PeerLost) -> None:
        self._ring.lose(fault)
