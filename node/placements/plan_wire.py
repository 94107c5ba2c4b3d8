"""A placement's plan on the wire: every runner carries it, and each head reads it there."""

from ...placement.cluster import StageAssignment
from ...placement.ids import ModelId, NodeId
from ...placement.kv_bits import KvBits, source_of
from ...placement.plan import Placement as NodePlan
from ...proto import peer_pb2 as pb
from ..cluster.desired import Desired, desired_from_wire, desired_to_wire
from .state import StagedPlan


def plan_to_wire(staged: StagedPlan) -> pb.PlacementPlan:
    """See `plan_from_wire`."""
    plan = staged.plan
    stages = [
        pb.PlannedStage(
            node=stage.node,
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
            memory_bytes=size,
        )
        for stage, size in zip(plan.stages, staged.memory, strict=True)
    ]
    return pb.PlacementPlan(
        stages=stages,
        desired=desired_to_wire(Desired(plan.model, staged.options), 0.0),
        reason=plan.reason,
        runner_up=plan.runner_up or "",
        score=plan.score,
        mtp_off_reason=plan.mtp_off_reason,
        frugal=staged.frugal,
        displaced=staged.displaced,
        reader=_reader_to_wire(staged),
    )


def _reader_to_wire(staged: StagedPlan) -> pb.PlannedStage | None:
    if staged.reader is None:
        return None
    layers, size = staged.reader
    return pb.PlannedStage(
        node=layers.node,
        first_layer=layers.first_layer,
        end_layer=layers.end_layer,
        memory_bytes=size,
    )


def plan_from_wire(spec: pb.StageSpec) -> StagedPlan | None:
    """The plan that a runner carries; None where its stages make no placement."""
    message = spec.plan
    stages = tuple(
        StageAssignment(NodeId(each.node), each.first_layer, each.end_layer)
        for each in message.stages
    )
    borders = [0, *(stage.end_layer for stage in stages[:-1])]
    if not stages or [stage.first_layer for stage in stages] != borders:
        return None
    reader = None
    if spec.stage >= len(stages):
        if not message.HasField("reader"):
            return None
        own = message.reader
        layers = StageAssignment(NodeId(own.node), own.first_layer, own.end_layer)
        reader = layers, own.memory_bytes
    desired = desired_from_wire(message.desired, 0.0)
    plan = NodePlan(
        model=ModelId(spec.model),
        stages=stages,
        reason=message.reason,
        score=message.score,
        runner_up=message.runner_up or None,
        context_length=spec.context_length,
        mtp_off_reason=message.mtp_off_reason,
        dtype=spec.dtype,
        dtype_reason=spec.dtype_reason,
        kv_bits=KvBits(spec.kv_bits, source_of(spec.kv_bits_source), spec.kv_bits_reason),
        prefill_chunk=spec.prefill_chunk,
    )
    memory = tuple(each.memory_bytes for each in message.stages)
    return StagedPlan(plan, desired.options, memory, message.frugal, message.displaced, reader)
