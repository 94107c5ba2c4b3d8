"""This node's facts, and what placing asks: views, cards, switches, dtypes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..placement.card import ModelCard
from ..placement.cluster import ClusterView, NodeFacts
from ..placement.drafting import EnabledState
from ..placement.ids import ModelId, NodeId
from ..proto import peer_pb2 as pb
from .models import ModelLibrary
from .placements import StageSettings
from .switches import Switches

STAGE_HEADROOM = 1.2


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One live node as heartbeats tell of it."""

    facts: pb.NodeFacts
    stages: Sequence[pb.PlacementState] = ()

    @property
    def id(self) -> NodeId:
        return NodeId(self.facts.id)

    def for_planner(self, placing: ModelId) -> NodeFacts:
        """Memory is what other models' stages leave, with the planner's headroom on theirs."""
        f = self.facts
        others = sum(s.weight_bytes + s.cache_bytes for s in self.stages if s.model != placing)
        return NodeFacts(
            id=self.id,
            name=f.name,
            memory_bytes=max(0, f.memory_bytes - int(others * STAGE_HEADROOM)),
            memory_bandwidth=f.memory_bandwidth,
            backend=f.backend,
            chip=f.chip,
            models=frozenset(ModelId(model) for model in f.models),
        )


class NodeFactsSource:
    """`placements.Facts` over the live members."""

    def __init__(
        self,
        self_id: NodeId,
        members: Callable[[], list[MemberFacts]],
        head: Callable[[], NodeId],
        library: ModelLibrary,
        switches: Switches,
    ) -> None:
        """`members` gives the nodes that may take work: alive, this one among them."""
        self._self = self_id
        self._members = members
        self._head = head
        self._library = library
        self._switches = switches

    def view(self, placing: ModelId) -> ClusterView:
        nodes = tuple(member.for_planner(placing) for member in self._members())
        return ClusterView(nodes=nodes, head=self._head())

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        """Raises ModelNotFound, InvalidCard and InvalidCheckpoint."""
        known = await asyncio.to_thread(self._library.get, model)
        if known.folder is None:
            return known.card, ""
        checkpoint = await asyncio.to_thread(self._library.checkpoint, known.folder)
        return known.card, checkpoint.fingerprint

    def mtp_switch(self, generator: NodeId) -> EnabledState:
        """The generator's variable wins; where it has none, this node's page or default holds."""
        if generator != self._self:
            facts = self._facts_of(generator)
            if facts is not None and facts.native_mtp_variable:
                on = facts.native_mtp_variable == "1"
                source = f"EXO_NATIVE_MTP_ENABLED={int(on)} on {facts.name}"
                return EnabledState(on, source)
            if self._switches.fixed("native_mtp_enabled") is not None:
                return EnabledState(True)
        return self._switches.mtp()

    def stage_settings(self, generator: NodeId, card: ModelCard) -> StageSettings:
        facts = self._facts_of(generator)
        if facts is None:
            return StageSettings(resolve_dtype("auto", card, "cpu", ""))
        async_eval, adaptive = facts.async_draft_eval, facts.adaptive_draft
        if generator == self._self:
            async_eval = self._switches.value("native_mtp_async_draft_eval")
            adaptive = self._switches.value("native_mtp_adaptive")
        dtype = resolve_dtype(facts.dtype or "auto", card, facts.backend, facts.chip)
        return StageSettings(dtype, async_eval, adaptive, facts.strict_rows)

    def _facts_of(self, node: NodeId) -> pb.NodeFacts | None:
        return next((m.facts for m in self._members() if m.id == node), None)


def resolve_dtype(requested: str, card: ModelCard, backend: str, chip: str) -> str:
    """`auto` is the checkpoint's dtype, but for what the backend cannot run, or runs far slower.

    On CPUs MLX multiplies gathered experts in float32 only, and 4- and 8-bit weights with 16-bit
    scales at a tenth of the speed of float32 scales. The GPUs of M1 and M2 have no bfloat16.
    """
    if requested != "auto":
        return requested
    if backend == "cpu" and (card.num_experts or card.quantization):
        return "float32"
    if card.dtype == "bfloat16" and chip.startswith(("Apple M1", "Apple M2")):
        return "float16"
    return card.dtype
