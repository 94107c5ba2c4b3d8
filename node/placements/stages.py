"""How stages are started, reached and asked after, and what placing them asks of the node."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView
from ...placement.drafting import EnabledState, HeadState, choose_drafting
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.split_refusal import SplitRefusal
from ...proto import peer_pb2 as pb
from ..runners.runner_client import Endpoint
from .loaded_placement import LoadedPlacement

PREFILL_CHUNK = 512

Progress = Callable[[pb.LoadProgress], None]


class Stages(Protocol):
    """Runners of stages, here or on another node."""

    async def load(self, node: NodeId, spec: pb.StageSpec, progress: Progress) -> pb.LoadReady: ...

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        """`kill`: without asking it first, as it does not answer. Raises PeerLost."""
        ...

    async def connect(self, stage: Endpoint, following: Endpoint, placement: PlacementId) -> None:
        """Tells a stage's runner where the next one is. Raises PeerLost."""
        ...

    async def follow(self, stage: Endpoint, spare: Endpoint, placement: PlacementId) -> str:
        """Has a stage's runner send its spare copies of what it holds; why it cannot, or "".

        Raises PeerLost.
        """
        ...

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        """The runner's state, within a second. Raises PeerLost."""
        ...

    async def forget(self, stage: Endpoint) -> None:
        """Closes what leads to a runner that is gone."""
        ...

    def near(self, stage: Endpoint) -> Endpoint:
        """A runner that another node was told of, at the address that is quickest from here."""
        ...


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What a generator's node decides about the models it generates with."""

    dtype: str
    async_draft_eval: bool = True
    adaptive_draft: bool = True
    strict_rows: int = 0
    """Strict mode: 0 off; else every decode forward has as many rows, at least max_k + 1."""

    def rows_for(self, max_k: int) -> int:
        """Rows of every decode forward of a model that may draft `max_k` tokens; 0: as needed."""
        return max(max_k + 1, self.strict_rows) if self.strict_rows else 0


class Facts(Protocol):
    """What placing asks of the node."""

    def view(self, placing: ModelId) -> ClusterView:
        """The live nodes, with the memory that other models than `placing` leave."""
        ...

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        """The card, and the fingerprint of this node's files ("" where it has none)."""
        ...

    def split_refusal(self, model: ModelId) -> SplitRefusal:
        """Where the model must not be split: a stage of its class failed its check there."""
        ...

    def mtp_switch(self, generator: NodeId) -> EnabledState:
        """The native-MTP switch as it holds for a generator on that node."""
        ...

    def stage_settings(self, generator: NodeId, card: ModelCard) -> StageSettings:
        """What the generator's node decides."""
        ...


def specs_of(
    record: LoadedPlacement, facts: Facts, fingerprint: str, lease_s: int
) -> list[pb.StageSpec]:
    """What each stage's runner is told. A runner that takes a stage's place is told the same."""
    card, stages = record.card, record.plan.stages
    settings = facts.stage_settings(stages[0].node, card)
    mtp = card.native_mtp
    switch = facts.mtp_switch(stages[0].node)
    drafting = choose_drafting(card, len(stages), HeadState(True), switch, None)
    off = record.plan.mtp_off_reason or (drafting.reason if drafting.k == 0 else "")
    return [
        pb.StageSpec(
            placement=record.id,
            model=card.id,
            stage=number,
            num_stages=len(stages),
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
            num_layers=card.num_layers,
            hidden_size=card.hidden_size,
            vocabulary=card.vocab_size,
            checkpoint_sha256=fingerprint,
            dtype=settings.dtype,
            prefill_chunk=PREFILL_CHUNK,
            context_length=record.plan.context_length,
            native_mtp=not off,
            max_draft_tokens=mtp.max_k if mtp else 0,
            async_draft_eval=settings.async_draft_eval,
            fixed_rows=settings.rows_for(mtp.max_k) if mtp else 0,
            draft_vocabulary=mtp.draft_vocabulary if mtp else 0,
            mtp_hidden=mtp.hidden if mtp else "",
            lease_s=lease_s,
            mtp_off_reason=off,
        )
        for number, stage in enumerate(stages)
    ]
