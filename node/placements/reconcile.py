"""Decides what the head does next so that the observed state becomes the desired one. Pure.

`reconcile` is level-triggered: it compares two states and knows no events. A lost event costs
nothing, and a new head needs no handover beyond the desired models: runners say who they are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Literal

from ...placement.errors import ExoNodeError
from ...placement.ids import NodeId
from ..cluster.desired import Desired
from .readers import free_readers, keep_readers
from .replicas import add_replica, beside_replicas, replica_nodes, scale
from .room import make_room
from .situation import TRIES, ObservedPlacement, Situation, complete_epochs
from .state import (
    Action,
    Connect,
    Epoch,
    GiveUp,
    Load,
    Observed,
    PlanningView,
    Retry,
    RunnerKey,
    StagedPlan,
    StageRunner,
)

WORTHWHILE = 0.9
"""Share of the present seconds a token: a plan that is hardly faster is not worth a load."""

Permission = Literal["no", "yes", "again", "elsewhere"]
"""Whether a model may be loaded now; `again`: it was given up, its pause has ended; `elsewhere`:
on nodes that need no pause after they lost it."""


def reconcile(
    desired: Sequence[Desired], observed: Observed, view: PlanningView, now: float
) -> list[Action]:
    """The actions that are due now. The caller applies them to `observed` before the next call."""
    if any(node.heard_at < view.leads_since for node in observed.nodes):
        return []  # a new head: what looks missing may only be unheard
    here = Situation(desired, observed, view, now)
    for runner in observed.runners:
        if runner.silent and runner.key.node in here.live:
            here.unload(runner, "it does not answer", kill=True)
    needed = [each for each in here.desired if here.is_wanted(each)]
    for each in here.desired:
        if each in needed:
            _keep(here, each)
        elif (mark := observed.given_up.get(each.model)) is not None and mark.no_room:
            here.actions.append(Retry(each.model))
    for each in here.desired:
        _unload_rest(here, each, is_needed=each in needed)
    unplaced = [each for each in needed if here.current(each) is None and not each.removed]
    if unplaced and free_readers(here, f"{unplaced[0].model} needs the room"):
        return here.actions  # their memory decides where it goes
    for each in unplaced:
        _load(here, each, frugal=len(unplaced) > 1)
    for each in needed:
        scale(here, each)
        add_replica(here, each)
    keep_readers(here, needed)
    return here.actions


# ---------------------------------------------------------------------- what runs already


def _keep(here: Situation, desired: Desired) -> None:
    for placement in here.placements[desired.model]:
        generator = placement.owners.get(0)
        if here.is_stale(placement, desired):
            here.replan(placement, "other options were requested")
        elif generator is not None and here.view.lacks_head(placement.plan, generator):
            here.replan(placement, "drafting was switched on")
    for placement in here.replicas(desired):
        if placement.id in here.observed.busy:
            continue
        if placement.missing:
            _replace_stages(here, desired, placement)
        elif placement.ready:
            _connect(here, placement)
            _move_off(here, desired, placement)
            _spread(here, desired, placement)
            _settle(here, desired, placement)


def _connect(here: Situation, placement: ObservedPlacement) -> None:
    """Joins ready stages. Stages that all answer though an answer broke are joined again."""
    broken = here.observed.broken.get(placement.id) == placement.epoch and len(placement.plan) > 1
    if not placement.connected or broken:
        _connect_as(here, placement, placement.owners)


def _connect_as(
    here: Situation, placement: ObservedPlacement, owners: Mapping[int, StageRunner]
) -> None:
    here.serial += 1
    epoch = Epoch(here.view.term, here.serial, here.view.head)
    keys = tuple(owners[stage].key for stage in sorted(owners))
    here.actions.append(Connect(placement.id, epoch, keys))


def _replace_stages(here: Situation, desired: Desired, placement: ObservedPlacement) -> None:
    """Loads lost stages on nodes with room; without room the model is planned again."""
    permission = _permission(here, desired, placement.missing)
    if permission == "no":
        return
    before, loads = dict(here.free), list[Load]()
    for stage in placement.missing:
        able = here.free
        if permission == "elsewhere":  # at the cost of no other stage
            barred = {*here.paused(desired), *placement.nodes}
            able = {node: unused for node, unused in here.free.items() if node not in barred}
        node = _node_for(here, desired, placement, stage, able)
        if node is None and permission == "elsewhere":
            here.free = before
            return
        if node is None:
            later = here.without(here.free, here.ending())
            if _node_for(here, desired, placement, stage, later, ended=True) is None:
                here.replan(placement, f"no live node has room for its stage {stage}")
            here.free = before
            return
        here.free[node] -= placement.plan.memory[stage]
        loads.append(Load(RunnerKey(node, placement.id, stage), placement.plan))
    if desired.model in here.observed.given_up:
        here.actions.append(Retry(desired.model))
    here.actions += loads


def _node_for(
    here: Situation,
    desired: Desired,
    placement: ObservedPlacement,
    stage: int,
    free: Mapping[NodeId, int],
    *,
    ended: bool = False,
) -> NodeId | None:
    """The node for one more runner of a stage; None where no live node has room.

    Prefers a node that did not fail the model, then one without its stages, whose loss costs
    nothing else, then the one with the most unused memory. A node never holds one stage twice.
    `ended`: as it will be once the runners that are being ended are gone.
    """
    stopping = {runner.key for runner in here.ending()} if ended else set[RunnerKey]()
    holders = {
        runner.key.node
        for runner in here.observed.runners
        if runner.key[1:] == (placement.id, stage) and runner.key not in stopping
    }
    loads = (action.key for action in here.actions if isinstance(action, Load))
    holders |= {key.node for key in loads if key[1:] == (placement.id, stage)}
    busy, avoided = set(placement.nodes), here.avoided(desired)
    barred = holders | here.doubtful() | desired.options.exclude
    barred |= replica_nodes(here, desired, placement)
    barred |= here.view.short_of_chunk(placement.plan)
    able = [
        (node in avoided, node in busy, -unused, node)
        for node, unused in free.items()
        if unused >= placement.plan.memory[stage] and node not in barred
    ]
    return min(able)[-1] if able else None


def _move_off(here: Situation, desired: Desired, placement: ObservedPlacement) -> None:
    """Loads the stages of draining nodes elsewhere; Connect changes over to them."""
    for stage, owner in sorted(placement.owners.items()):
        node = owner.key.node
        if node not in here.draining or placement.successors(stage, here.draining):
            continue
        target = _node_for(here, desired, placement, stage, here.free)
        if target is not None:
            key = RunnerKey(target, placement.id, stage)
            here.load(Load(key, placement.plan, extra=True))


def _spread(here: Situation, desired: Desired, placement: ObservedPlacement) -> None:
    """Moves a stage that shares a node to one without, the planned one first; while it is idle.

    It is loaded beside the present one, and then connected in its place: no answer waits for that.
    """
    idle = here.idle_s(desired, placement) >= here.timing.refill_every_s
    if not (idle and placement.connected and _may_spread(here, desired, placement)):
        return
    stage = placement.crowded[0]
    barred = {*placement.nodes, *here.draining}
    if incoming := placement.successors(stage, barred):
        if incoming[0].state == "ready":
            _connect_as(here, placement, {**placement.owners, stage: incoming[0]})
        return
    free = {n: size for n, size in here.free.items() if n not in barred and here.is_steady(n)}
    planned = placement.plan.nodes[stage]
    for able in ({n: size for n, size in free.items() if n == planned}, free):
        node = _node_for(here, desired, placement, stage, able)
        if node is not None:
            here.load(Load(RunnerKey(node, placement.id, stage), placement.plan, extra=True))
            return


def _may_spread(here: Situation, desired: Desired, placement: ObservedPlacement) -> bool:
    """Whether stages share a node, and no other model waits for the memory of one more runner."""
    others = here.observed.waiting.keys() - {desired.model}
    leaving = not here.draining.isdisjoint(placement.nodes)
    return bool(placement.crowded) and not (desired.removed or others or leaving)


def _settle(here: Situation, desired: Desired, placement: ObservedPlacement) -> None:
    """Plans a displaced placement again: when it is idle and that pays, or on a request."""
    idle = here.idle_s(desired, placement) >= here.timing.settle_after_s
    requested = here.is_requested_since(desired, placement)
    if desired.removed or not (placement.connected and placement.displaced and (idle or requested)):
        return
    if placement.id in here.retiring or not here.draining.isdisjoint(placement.nodes):
        return
    free = here.without(beside_replicas(here, desired, placement), placement.runners)
    planned = here.view.plan(desired, free, frugal=placement.plan.frugal)
    if isinstance(planned, ExoNodeError):
        return
    present = here.view.seconds(placement.plan, placement.nodes)
    if present == inf or not (requested or all(map(here.is_steady, planned.nodes))):
        return  # inf: a node of it is suspected, and answers again or is lost
    bounds = desired.options
    if not bounds.allows(placement.nodes) and bounds.allows(planned.nodes):
        here.replan(placement, f"{', '.join(planned.nodes)} can hold it again, as was requested")
    elif planned.plan.score <= WORTHWHILE * present:
        score = planned.plan.score
        gain = f"{1000 * score:.3g} ms a token are expected there, {1000 * present:.3g} here"
        here.replan(placement, gain)


def _unload_rest(here: Situation, desired: Desired, *, is_needed: bool) -> None:
    """Unloads what is idle and not needed: old, surplus, or no longer wanted."""
    replicas = here.replicas(desired) if is_needed else []
    for placement in here.placements[desired.model]:
        hopeless = desired.model in here.observed.given_up and not placement.connected
        stays = placement in replicas and not hopeless
        retired_s = here.now - here.retiring.get(placement.id, inf)
        overdue = is_needed and not desired.removed and retired_s >= here.timing.drain_s
        if replicas and not any(each.connected for each in replicas):
            overdue = False  # its answers have nowhere to go yet
        complete = complete_epochs(placement.runners)
        for runner in placement.runners:
            if not _may_unload(here, runner):
                continue
            if stays:
                if runner.is_reader and placement.connected:
                    continue  # see `keep_readers`
                if runner is placement.owners.get(runner.key.stage):
                    continue
                if _is_next_owner(here, desired, placement, runner):
                    continue
            fenced = runner.epoch != Epoch() and runner.epoch not in complete
            if here.in_use(runner, placement) and not overdue:
                continue
            if stays and not placement.connected and runner.epoch in complete:
                continue  # until its successor is connected
            why = "nobody uses the model"
            if placement.id in here.retiring:
                why = "its placement is being replaced"
            elif stays:
                why = "another runner owns its stage"
            elif is_needed:
                why = "another placement serves the model"
            # The frames of a split placement's former stage lead nowhere.
            here.unload(runner, why, kill=stays and fenced and len(placement.plan) > 1)


def _may_unload(here: Situation, runner: StageRunner) -> bool:
    """False for runners of another head, whose answers may not be known here yet."""
    node = here.nodes[runner.key.node]
    known_since = max(here.view.leads_since, node.alive_since, runner.since)
    return not runner.adopted or (node.follows and here.now - known_since >= here.timing.takeover_s)


def _is_next_owner(
    here: Situation, desired: Desired, placement: ObservedPlacement, runner: StageRunner
) -> bool:
    """Whether it takes the place of a runner that is lost, or whose node leaves or is shared."""
    stage, barred = runner.key.stage, here.draining
    owner = placement.owners.get(stage)
    is_needed = owner is None or owner.key.node in here.draining
    if not is_needed and stage in placement.crowded[:1]:
        is_needed, barred = _may_spread(here, desired, placement), {*barred, *placement.nodes}
    successors = placement.successors(stage, barred)
    return is_needed and runner.key in [each.key for each in successors[:1]]


# ---------------------------------------------------------------------- what is missing


def _permission(
    here: Situation, desired: Desired, stages: Collection[int] | None = None
) -> Permission:
    """Whether a model may be loaded now. Gives it up after too many failures in a row."""
    mark = here.observed.given_up.get(desired.model)
    if mark is not None and not mark.no_room:
        requested = desired.requested_at > mark.at
        waits = requested or desired.model in here.observed.waiting
        proven = desired.model in here.observed.proven
        if not requested and (here.now < mark.until or not (waits or proven)):
            return "no"
        return "again"
    loads = here.failures(desired, "load", "files")
    unreached = here.failures(desired, "unreached")
    failures = here.failures(desired, "load", "files", "loss", "unreached")
    until = max((f.at for f in failures), default=-inf) + here.pause_s(desired, stages)
    files = [f for f in loads if f.kind == "files"]
    in_vain = next((f for f in (unreached, loads) if len(f) >= TRIES), None)
    if files or (in_vain and here.now < until):
        error = (files or in_vain or loads)[-1].error
        here.actions.append(GiveUp(desired.model, here.now, until, error))
        return "no"
    elsewhere = loads and desired.model not in here.observed.proven
    return "yes" if here.now >= until or elsewhere else "elsewhere"


def _load(here: Situation, desired: Desired, *, frugal: bool) -> None:
    """Plans and loads a placement that is missing."""
    model = desired.model
    if any(r.plan.model == model and r.key.node in here.live for r in here.ending()):
        return  # their memory decides where it goes next
    permission = _permission(here, desired)
    if permission == "no":
        return
    loads = here.failures(desired, "load", "files")
    barred = here.doubtful()
    if permission == "elsewhere":
        barred |= here.paused(desired)
    free = {n: unused for n, unused in here.free.items() if n not in barred}
    planned = _plan(here, desired, free, again=permission == "again", frugal=frugal)
    if isinstance(planned, StagedPlan):
        _load_stages(here, desired, planned)
    elif loads and permission == "yes" and model not in here.observed.proven:
        last = loads[-1]
        until = last.at + here.pause_s(desired)
        here.actions.append(GiveUp(model, here.now, until, last.error))
    elif permission != "elsewhere" and (shortened := make_room(here, desired, planned)):
        _load_stages(here, desired, shortened)


def _load_stages(here: Situation, desired: Desired, planned: StagedPlan) -> None:
    if desired.model in here.observed.given_up:
        here.actions.append(Retry(desired.model))
    here.place(planned)


def _plan(
    here: Situation, desired: Desired, free: Mapping[NodeId, int], *, again: bool, frugal: bool
) -> StagedPlan | ExoNodeError:
    """A plan, first without nodes that failed the model.

    Those are left out altogether while a model that was never ready is tried elsewhere.
    """
    avoided = here.avoided(desired)
    rest = {node: unused for node, unused in free.items() if node not in avoided}
    planned = here.view.plan(desired, rest, frugal=frugal)
    proven = desired.model in here.observed.proven
    again = again or proven or not here.failures(desired, "load", "files")
    if isinstance(planned, ExoNodeError) and avoided and again:
        planned = here.view.plan(desired, free, frugal=frugal)
    if isinstance(planned, StagedPlan) and here.failures(desired):
        planned = replace(planned, displaced=True)
    return planned
