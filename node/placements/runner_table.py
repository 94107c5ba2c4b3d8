"""The head's knowledge of runners: its own actions, corrected by what nodes report of theirs."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from ...placement.cluster import StageAssignment
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.plan import Placement as NodePlan
from ...proto import peer_pb2 as pb
from ..cluster.desired import DesiredPlacement, desired_from_wire, desired_to_wire
from ..cluster.member import MemberReport
from .loaded_placement import epoch_from_wire
from .state import Node, Runner, RunnerKey, StagedPlan

log = logging.getLogger(__name__)

STAGE_HEADROOM = 1.2
"""A runner's memory over the weights and caches that it reports."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node and the runners that it reports; `stages` None: it was not asked."""

    node: Node
    stages: Sequence[pb.StageState] | None = None
    heard_at: float = inf
    """When that was reported, by the monotonic clock; inf: it is as it is now."""

    @property
    def is_self(self) -> bool:
        return self.heard_at == inf


def reports_of(members: Iterable[MemberReport], self_id: NodeId) -> list[NodeReport]:
    """The nodes of a cluster as `self_id` sees them, which may be their head."""
    return [
        NodeReport(
            Node(
                each.member.id,
                each.member.facts.memory_bytes,
                draining=each.draining,
                follows=each.head == self_id,
                alive_since=each.alive_since,
            ),
            each.member.stages,
            inf if each.member.id == self_id else each.heard_at,
        )
        for each in members
    ]


class RunnerTable:
    """Runners by node, placement and stage, from the request to load one until it is gone.

    An own action counts until a report can know of it: what a node has just loaded or unloaded is
    not undone by a heartbeat that it sent before.
    """

    def __init__(self, grace_s: float) -> None:
        """`grace_s`: a ready runner that reports of its node leave out for so long is gone."""
        self._grace_s = grace_s
        self._runners: dict[RunnerKey, Runner] = {}
        self._missing_since: dict[RunnerKey, float] = {}

    @property
    def all(self) -> tuple[Runner, ...]:
        return tuple(self._runners.values())

    def get(self, key: RunnerKey) -> Runner | None:
        return self._runners.get(key)

    def add(self, runner: Runner) -> None:
        self._runners[runner.key] = runner
        _ = self._missing_since.pop(runner.key, None)

    def change(self, key: RunnerKey, **fields: object) -> None:
        """Does nothing where there is no such runner."""
        if (runner := self._runners.get(key)) is not None:
            self._runners[key] = replace(runner, **fields)  # pyright: ignore[reportArgumentType]

    def remove(self, key: RunnerKey) -> Runner | None:
        _ = self._missing_since.pop(key, None)
        return self._runners.pop(key, None)

    def remove_node(self, node: NodeId) -> list[Runner]:
        """The runners that went with a node."""
        lost = [runner for runner in self._runners.values() if runner.key.node == node]
        for runner in lost:
            _ = self.remove(runner.key)
        return lost

    def clear(self) -> None:
        self._runners.clear()
        self._missing_since.clear()

    def merge(self, reports: Iterable[NodeReport], now: float) -> list[Runner]:
        """Takes over what nodes report; the ready runners that are gone."""
        ended: list[Runner] = []
        for report in reports:
            if report.stages is None or not report.node.alive:
                continue
            keys: set[RunnerKey] = set()
            for state in report.stages:
                key = RunnerKey(report.node.id, PlacementId(state.placement), state.stage)
                keys.add(key)
                self._take(key, state, now)
            grace_s = 0.0 if report.is_self else self._grace_s
            ended += self._missing(report.node.id, keys, grace_s, now)
        return ended

    def _take(self, key: RunnerKey, state: pb.StageState, now: float) -> None:
        _ = self._missing_since.pop(key, None)
        runner = self._runners.get(key)
        if runner is None:
            runner = _adopted(key, state, now)
        if runner is None:
            return
        used = int((state.weight_bytes + state.cache_bytes) * STAGE_HEADROOM)
        if runner.adopted and runner.state == "loading" and state.HasField("ready"):
            runner = replace(runner, state="ready", ready=state.ready)
        epoch = runner.epoch
        same = runner.ready is not None and runner.ready.pid == state.ready.pid
        if same and state.HasField("epoch"):  # else it is of a runner that was ended
            epoch = max(epoch, epoch_from_wire(state.epoch))
        self._runners[key] = replace(
            runner, epoch=epoch, requests=state.live_requests, used_memory=used
        )

    def _missing(
        self, node: NodeId, keys: set[RunnerKey], grace_s: float, now: float
    ) -> list[Runner]:
        ended: list[Runner] = []
        for runner in list(self._runners.values()):
            expected = runner.state == "ready" or (runner.adopted and runner.state == "loading")
            if runner.key.node != node or runner.key in keys or not expected:
                continue
            if now - self._missing_since.setdefault(runner.key, now) >= grace_s:
                _ = self.remove(runner.key)
                ended += [runner] if runner.state == "ready" else []
        return ended


def promised(runners: Iterable[Runner]) -> Mapping[NodeId, Mapping[ModelId, int]]:
    """Bytes that runners may take, by node and model, wherever they are or are being loaded."""
    promises: dict[NodeId, dict[ModelId, int]] = {}
    for runner in runners:
        of_node = promises.setdefault(runner.key.node, {})
        size = runner.plan.memory[runner.key.stage]
        of_node[runner.plan.model] = of_node.get(runner.plan.model, 0) + size
    return promises


# ---------------------------------------------------------------------- plans on the wire


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
    desired = DesiredPlacement(staged.options, int(staged.spares))
    return pb.PlacementPlan(
        stages=stages,
        desired=desired_to_wire(plan.model, desired, 0.0),
        reason=plan.reason,
        runner_up=plan.runner_up or "",
        score=plan.score,
        mtp_off_reason=plan.mtp_off_reason,
        frugal=staged.frugal,
        displaced=staged.displaced,
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
    if spec.stage >= len(stages):
        return None
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
        prefill_chunk=spec.prefill_chunk,
    )
    memory = tuple(each.memory_bytes for each in message.stages)
    return StagedPlan(
        plan, desired.options, memory, bool(desired.spares), message.frugal, message.displaced
    )


def _adopted(key: RunnerKey, state: pb.StageState, now: float) -> Runner | None:
    """A runner that another head loaded; None where it says too little of its placement."""
    if state.status == "failed" or (plan := plan_from_wire(state.spec)) is None:
        return None
    ready = state.ready if state.HasField("ready") else None
    return Runner(
        key,
        plan,
        "loading" if ready is None else "ready",
        now,
        adopted=True,
        ready=ready,
        spec=state.spec,
    )
