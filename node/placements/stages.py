"""How stages are started, reached and asked after, and what placing them asks of the node."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView
from ...placement.drafting import EnabledState
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.split_refusal import SplitRefusal
from ...proto import peer_pb2 as pb
from ..runners.runner_client import Endpoint
from .stage_specs import StageSettings
from .state import LiveNode

Progress = Callable[[pb.LoadProgress], None]


class Stages(Protocol):
    """Runners of stages, here or on another node."""

    async def load(self, node: NodeId, spec: pb.StageSpec, progress: Progress) -> pb.LoadReady: ...

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        """`kill`: without asking it first, as it does not answer. Raises PeerLost."""
        ...

    async def connect(
        self, stage: Endpoint, following: Endpoint, placement: PlacementId, epoch: pb.Epoch
    ) -> None:
        """Connects a stage's runner to the next one. Raises PeerLost, and InvalidRequest for an
        epoch that is not the runner's own."""
        ...

    async def enter(
        self, stage: Endpoint, placement: PlacementId, number: int, epoch: pb.Epoch
    ) -> None:
        """Takes a runner into an epoch. Raises PeerLost, and InvalidRequest for one that is not
        above the runner's own."""
        ...

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        """The runner's state, within a second. Raises PeerLost."""
        ...

    async def forget(self, stage: Endpoint) -> None:
        """Closes what leads to a runner that is gone."""
        ...


class Facts(Protocol):
    """Facts of the node that placing needs."""

    def nodes(self) -> Sequence[LiveNode]:
        """Every live node, with the runners that it reports."""
        ...

    def name(self, node: NodeId) -> str:
        """The node's name, also of a dead one; its id where none is known."""
        ...

    def view(self, placing: ModelId) -> ClusterView:
        """The live nodes, with the memory that other models than `placing` use there."""
        ...

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        """The card, and the fingerprint of this node's files ("" where it has none)."""
        ...

    async def require_files(self, model: ModelId) -> None:
        """Requires the files, or leave to download them. Raises ModelNotFound."""
        ...

    def split_refusal(self, model: ModelId) -> SplitRefusal:
        """Borders at which a stage of the model failed its check, so that it must not be split."""
        ...

    def mtp_switch(self, generator: NodeId) -> EnabledState:
        """The native-MTP switch as it holds for a generator on that node."""
        ...

    def stage_settings(self, generator: NodeId) -> StageSettings:
        """The decisions of the generator's node."""
        ...
