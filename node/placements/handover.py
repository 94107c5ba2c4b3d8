"""Placements as their next head knows them: told with heartbeats, and made records again."""

from collections.abc import Callable, Iterable

from ...placement.card import ModelCard
from ...placement.cluster import StageAssignment
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.plan import Placement
from ...proto import peer_pb2 as pb
from ...proto.bounds import MAX_REAL
from ..cluster.desired import DesiredPlacement, desired_from_wire, desired_to_wire
from ..runners.runner_client import Endpoint
from .load_state import Load, Ready
from .loaded_placement import LoadedPlacement, Spare

Near = Callable[[Endpoint], Endpoint]
"""A runner that another node was told of, at the address that is quickest from here."""


def held_of(records: Iterable[LoadedPlacement]) -> list[pb.HeldPlacement]:
    """What another head needs to go on with placements that are loaded."""
    return [_held(record) for record in records if record.status in ("ready", "restoring")]


def record_of(held: pb.HeldPlacement, card: ModelCard, near: Near) -> LoadedPlacement | None:
    """The placement on its next head; None where what was told makes none."""
    stages = tuple(
        StageAssignment(NodeId(each.node), each.spec.first_layer, each.spec.end_layer)
        for each in held.stages
    )
    if not stages or [stage.first_layer for stage in stages] != [
        0,
        *(stage.end_layer for stage in stages[:-1]),
    ]:
        return None
    plan = Placement(
        model=ModelId(held.model),
        stages=stages,
        reason=held.reason,
        score=held.score,
        runner_up=held.runner_up or None,
        context_length=held.stages[0].spec.context_length,
        mtp_off_reason=held.mtp_off_reason,
        dtype=held.stages[0].spec.dtype,
        dtype_reason=held.stages[0].spec.dtype_reason,
        prefill_chunk=held.stages[0].spec.prefill_chunk,
    )
    desired = desired_from_wire(held.desired)
    record = LoadedPlacement(
        PlacementId(held.placement),
        card,
        plan,
        desired.options,
        spares_wanted=desired.spares,
        load=Load(Ready()),
        proven=True,
    )
    record.specs = [each.spec for each in held.stages]
    record.head_asked_for = record.specs[0].native_mtp
    record.endpoints = [near(Endpoint(NodeId(each.node), each.ready)) for each in held.stages]
    record.spares = [_spare(each, near) for each in held.spares if each.stage < len(stages)]
    record.connections = held.connections
    record.chips = {NodeId(node): chip for node, chip in held.chips.items()}
    record.moved = held.moved
    if held.HasField("keep_alive_s"):
        record.activity.keep_alive_s = held.keep_alive_s
    record.take_over()
    return record


def _spare(held: pb.HeldSpare, near: Near) -> Spare:
    node = NodeId(held.node)
    return Spare(held.stage, node, near(Endpoint(node, held.ready)))


def _held(record: LoadedPlacement) -> pb.HeldPlacement:
    return pb.HeldPlacement(
        placement=record.id,
        model=record.card.id,
        stages=[
            pb.HeldStage(node=endpoint.node, spec=spec, ready=endpoint.ready)
            for spec, endpoint in zip(record.specs, record.endpoints, strict=True)
        ],
        spares=[
            pb.HeldSpare(stage=spare.stage, node=spare.node, ready=spare.endpoint.ready)
            for spare in record.spares
            if spare.endpoint is not None
        ],
        desired=desired_to_wire(
            record.card.id, DesiredPlacement(record.options, record.spares_wanted)
        ),
        connections=record.connections,
        chips={str(node): chip for node, chip in record.chips.items()},
        reason=record.plan.reason,
        runner_up=record.plan.runner_up or "",
        moved=record.moved,
        score=record.plan.score,
        mtp_off_reason=record.plan.mtp_off_reason,
        keep_alive_s=_bounded(record.activity.keep_alive_s),
    )


def _bounded(seconds: float | None) -> float | None:
    """The wire has no infinity; its greatest number is as good."""
    return None if seconds is None else min(seconds, MAX_REAL)
