"""The one builder of stage specifications, for nodes and for the commands that examine a model.

A specification is sent to a runner; all that can change an answer is in it. So `exo-node
bench` and `exo-node verify` see what a node runs only as long as both are built here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...placement.card import ModelCard
from ...placement.cluster import StageAssignment
from ...placement.cost import HEADROOM, ModelSizes
from ...placement.drafting import EnabledState, HeadState, choose_drafting
from ...placement.ids import ModelId, PlacementId
from ...placement.plan import Placement, loaded_card
from ...proto import peer_pb2 as pb
from ...shard.checkpoint.drafters import DrafterUnusable
from ..machine.settings import Settings
from ..runners.supervisor import promised_bytes

LEAST_MARGIN: Final = 1 << 29
"""Bytes beyond the plan of a small model, whose forwards take more than their share of headroom."""


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Decisions of a generator's node about the models that it generates with."""

    async_draft_eval: bool = True
    adaptive_draft: bool = True
    default_k: int = 0
    """EXO_NATIVE_MTP_DEFAULT_K, or 0 for each card's own."""


def build_specs(
    placement: PlacementId,
    card: ModelCard,
    plan: Placement,
    settings: StageSettings,
    switch: EnabledState,
    *,
    fingerprint: str,
    lease_s: int,
) -> list[pb.StageSpec]:
    """The specification of each stage, on whichever node. One that takes a stage's place gets the
    same. `settings` and `switch` are those of the generator's node."""
    stages, mtp, native = plan.stages, card.drafts, card.native_mtp
    drafting = choose_drafting(card, len(stages), HeadState(True), switch, None)
    off = plan.mtp_off_reason or (drafting.reason if drafting.k == 0 else "")
    loaded = loaded_card(card, plan)
    sizes = ModelSizes.of(loaded, plan.context_length)
    return [
        pb.StageSpec(
            placement=placement,
            model=card.id,
            stage=number,
            num_stages=len(stages),
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
            num_layers=card.num_layers,
            hidden_size=card.hidden_width,
            vocabulary=card.vocab_size,
            checkpoint_sha256=fingerprint,
            dtype=plan.dtype,
            dtype_reason=plan.dtype_reason,
            prefill_chunk=plan.prefill_chunk,
            kv_bits=loaded.kv_bits or 0,
            kv_group_size=loaded.kv_group_size if loaded.kv_bits else 0,
            kv_bits_source=plan.kv_bits.source,
            kv_bits_reason=plan.kv_bits.reason,
            context_length=plan.context_length,
            native_mtp=not off,
            max_draft_tokens=mtp.max_k if mtp else 0,
            async_draft_eval=settings.async_draft_eval,
            draft_vocabulary=native.draft_vocabulary if native else 0,
            mtp_hidden=native.hidden if native else "",
            drafter=card.drafter.model if card.drafter else "",
            drafter_bytes=card.drafter.weight_bytes if card.drafter else 0,
            lease_s=lease_s,
            mtp_off_reason=off,
            prefix_cache_bytes=0 if card.embeds else _prefix_room(sizes, stage, mtp=not off),
            pooling=card.embeds_by,
            layer_bytes=loaded.active_layer_bytes,
        )
        for number, stage in enumerate(stages)
    ]


def spec_like(other: pb.StageSpec, card: ModelCard, plan: Placement, number: int) -> pb.StageSpec:
    """The specification of stage `number`, after that of another stage of the placement."""
    stage = plan.stages[number]
    spec = pb.StageSpec()
    spec.CopyFrom(other)
    spec.stage, spec.first_layer, spec.end_layer = number, stage.first_layer, stage.end_layer
    sizes = ModelSizes.of(loaded_card(card, plan), plan.context_length)
    spec.prefix_cache_bytes = _prefix_room(sizes, stage, mtp=spec.native_mtp)
    return spec


def reader_spec(
    generator: pb.StageSpec, card: ModelCard, plan: Placement, layers: StageAssignment, number: int
) -> pb.StageSpec:
    """The specification of a reader, after that of its placement's generator. `number`: its own,
    behind those of the stages."""
    spec = pb.StageSpec()
    spec.CopyFrom(generator)
    spec.stage, spec.first_layer, spec.end_layer = number, layers.first_layer, layers.end_layer
    sizes = ModelSizes.of(loaded_card(card, plan), plan.context_length)
    spec.prefix_cache_bytes = _prefix_room(sizes, layers, mtp=False)
    spec.measure_layers = False
    return spec


def _prefix_room(sizes: ModelSizes, stage: StageAssignment, *, mtp: bool) -> int:
    """Bytes for prompts that were read and requests in progress: a whole context, and half of the
    headroom for the recurrent states at their borders. A chunk has the other half."""
    part, (over, under) = (stage.first_layer, stage.end_layer), HEADROOM
    need = sizes.need(*part, generator=stage.first_layer == 0, mtp=mtp)
    return sizes.caches(*part, mtp=mtp) + need * (over - under) // over // 2


def _lookup_refusal(settings: Settings) -> str:
    """Why this machine copies no drafts from a request's own tokens; empty if it does."""
    if not settings.prompt_lookup_enabled:
        return (
            "prompt lookup is off by EXO_PROMPT_LOOKUP_ENABLED=0; set it to 1 and start the node "
            "again"
        )
    return ""


def memory_limit(planned: int, allowed: int) -> int:
    """Bytes that a runner may take: a twentieth more than planned, or LEAST_MARGIN more, and no
    more than `allowed`; 0 stands for no limit in each.

    MLX raises nothing beyond it. It keeps freed buffers only as far as they fit below, and waits
    for the device before it computes more of a graph.
    """
    limit = planned and planned + max(planned // 20, LEAST_MARGIN)
    return min(limit or allowed, allowed or limit)


def on_this_machine(
    spec: pb.StageSpec,
    folder: Path,
    settings: Settings,
    drafter_folder: Callable[[ModelId], Path],
) -> pb.StageSpec:
    """`spec` with what the machine that runs it fills in itself: a peer does not say where a
    runner listens or reads, or how much memory it takes. Blocks.

    `drafter_folder`: the folder of a drafter. May raise DrafterUnusable.
    """
    own = pb.StageSpec()
    own.CopyFrom(spec)
    own.path = str(folder)
    own.drafter_path = own.drafter_fault = ""
    if spec.drafter:
        try:
            own.drafter_path = str(drafter_folder(ModelId(spec.drafter)))
        except DrafterUnusable as fault:
            own.drafter_fault = f"{settings.name}: {fault}"
    own.ClearField("listen")
    own.ClearField("profile_folder")
    own.ClearField("prefix_folder")
    own.ClearField("prefix_disk_bytes")
    own.memory_limit_bytes = memory_limit(promised_bytes(spec), settings.memory_limit or 0)
    own.kernels = settings.kernels
    own.batching = settings.batching_enabled
    own.lookup_off_reason = _lookup_refusal(settings)
    own.prompt_lookup = not own.lookup_off_reason
    own.measure_at_load = settings.measure_at_load
    own.reads_any = settings.readers == "any"
    if not settings.prefix_cache_enabled:
        own.prefix_cache_bytes = 0
    return own
