"""The epoch of a runner: two heads that connect the same runners cannot mix their connections."""

from ...placement.errors import InvalidRequest
from ...proto import peer_pb2 as pb


class EpochFence:
    """The highest epoch that a head took this runner into."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.epoch: pb.Epoch | None = None
        """None until a head connected this runner."""

    def enter(self, epoch: pb.Epoch) -> None:
        """Raises InvalidRequest unless `epoch` is higher than the present one."""
        if self.epoch is not None and _order(epoch) <= _order(self.epoch):
            raise self._refusal()
        self.epoch = epoch

    def require(self, epoch: pb.Epoch) -> None:
        """Raises InvalidRequest unless `epoch` is the present one."""
        if self.epoch is None or _order(epoch) != _order(self.epoch):
            raise self._refusal()

    def _refusal(self) -> InvalidRequest:
        if self.epoch is None:
            return InvalidRequest(f"stage {self._stage} is in no epoch yet", param="epoch")
        text = f"stage {self._stage} is connected in another epoch, of {self.epoch.head}"
        return InvalidRequest(text, param="epoch")


def _order(epoch: pb.Epoch) -> tuple[int, int, str]:
    return epoch.term, epoch.number, epoch.head
