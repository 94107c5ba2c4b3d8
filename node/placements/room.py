"""Room for one more model: idle models with a limited stay go, others are loaded again in less.

A lengthened context, and float32 where 16 bits would do, are given while there is memory: what
nobody requested is no reason to refuse another model. Pure.
"""

from collections.abc import Iterable, Mapping
from math import inf

from ...placement.errors import ExoNodeError
from ...placement.ids import NodeId
from ..cluster.desired import Desired
from .readers import readers_of
from .situation import ObservedPlacement, Situation
from .state import GiveUp, Release, StagedPlan

Holder = tuple[Desired, ObservedPlacement]


def make_room(here: Situation, desired: Desired, error: ExoNodeError) -> StagedPlan | None:
    """Waits for memory that is about to be free, unloads idle models, or shrinks them.

    Where nothing that may give way is enough, returns a plan with a shortened context, which may
    be loaded now. Gives up with `error` where that does not fit either.
    """
    replaced = [
        runner
        for placement in here.placements[desired.model]
        if placement.id in here.retiring
        for runner in placement.runners
        if runner.key not in here.unloaded
    ]
    free = here.without(here.free, [*here.ending(), *replaced])
    planned = here.view.plan(desired, free, frugal=True)
    if isinstance(planned, StagedPlan):
        here.reserve(planned)  # no other model takes what it waits for
        return None
    waits = desired.model in here.observed.waiting
    requested = desired.requested and not here.placements[desired.model]
    if waits or requested:
        if _evict(here, desired, free) or _shrink(here, desired, free):
            return None
        free = {node: size for node, size in free.items() if node not in here.doubtful()}
        planned = here.view.plan(desired, free, frugal=True, shorten=True)
        if isinstance(planned, StagedPlan):
            return _if_free(here, planned)
        error = planned
    if waits or desired.model not in here.observed.given_up:
        here.actions.append(GiveUp(desired.model, here.now, inf, error, no_room=True))
    return None


def _if_free(here: Situation, planned: StagedPlan) -> StagedPlan | None:
    """The plan, if its memory is free by now; else none, and its memory is reserved."""
    parts = zip(planned.nodes, planned.memory, strict=True)
    if all(size <= here.free.get(node, 0) for node, size in parts):
        return planned
    here.reserve(planned)
    return None


def free_with_evictions(here: Situation, desired: Desired) -> dict[NodeId, int]:
    """Bytes by node that `desired` may have in place of its own placements and of idle models."""
    own = [r for placement in here.placements[desired.model] for r in placement.runners]
    idle = (runner for _, placement in _idle(here, desired) for runner in placement.runners)
    return here.without(here.free, {*here.ending(), *own, *idle, *readers_of(here)})


def _idle(here: Situation, placing: Desired) -> list[Holder]:
    """Placements of other models that may give way, the least recently used first."""
    idle = [
        (each, placement)
        for each in here.desired
        if each.model != placing.model
        and each.model not in here.observed.waiting
        and here.now - each.used_at >= here.timing.claim_grace_s
        for placement in here.replicas(each)
        if placement.connected and not here.is_used(placement)
    ]
    return sorted(idle, key=lambda pair: (pair[0].used_at, _is_last(here, *pair), pair[1].id))


def _is_last(here: Situation, desired: Desired, placement: ObservedPlacement) -> bool:
    """Whether the model would not answer without this placement. Further replicas give way."""
    return here.current(desired) == placement


def _evict(here: Situation, desired: Desired, free: Mapping[NodeId, int]) -> bool:
    """Unloads no more models with a limited keep_alive than it takes; none where it is in vain."""
    chosen: list[Holder] = []
    for pair in _idle(here, desired):
        if pair[0].stay_s == inf and _is_last(here, *pair):
            continue
        chosen.append(pair)
        if _fits(here, desired, _without_all(here, free, chosen)):
            break
    else:
        return False
    for pair in list(chosen):
        fewer = [other for other in chosen if other is not pair]
        if _fits(here, desired, _without_all(here, free, fewer)):
            chosen = fewer
    for each, placement in chosen:
        if _is_last(here, each, placement):
            here.actions.append(Release(each.model))
        for runner in placement.runners:
            here.unload(runner, f"{desired.model} needs the room")
    here.free = dict.fromkeys(here.free, 0)  # kept from models of lower priority
    return True


def _shrink(here: Situation, desired: Desired, free: Mapping[NodeId, int]) -> bool:
    """Loads idle models again in less memory, if then all of them fit."""
    idle = [
        pair for pair in _idle(here, desired) if _is_last(here, *pair) and _has_extras(here, *pair)
    ]
    idle.sort(key=lambda pair: -sum(pair[1].plan.memory))
    for count in range(1, len(idle) + 1):
        later = _without_all(here, free, idle[:count])
        if not _all_fit(here, [desired, *(each for each, _ in idle[:count])], later):
            continue
        for _, placement in idle[:count]:
            here.replan(placement, f"in less memory, to make room for {desired.model}")
            for runner in placement.runners:
                here.unload(runner, "it is loaded again in less memory")
        here.free = dict.fromkeys(here.free, 0)
        return True
    return False


def _has_extras(here: Situation, desired: Desired, placement: ObservedPlacement) -> bool:
    """Whether it would take less memory where it is if it had to."""
    if placement.plan.frugal:
        return False
    own = here.without(here.free, placement.runners)
    there = {node: unused for node, unused in own.items() if node in placement.nodes}
    planned = here.view.plan(desired, there, frugal=True)
    return isinstance(planned, StagedPlan) and sum(planned.memory) < sum(placement.plan.memory)


def _all_fit(here: Situation, models: Iterable[Desired], free: Mapping[NodeId, int]) -> bool:
    """Whether all of them fit, one after the other, each in no more memory than it takes."""
    unused = dict(free)
    for each in models:
        planned = here.view.plan(each, unused, frugal=True)
        if isinstance(planned, ExoNodeError):
            return False
        for node, size in zip(planned.nodes, planned.memory, strict=True):
            unused[node] -= size
    return True


def _fits(here: Situation, desired: Desired, free: Mapping[NodeId, int]) -> bool:
    return isinstance(here.view.plan(desired, free, frugal=True), StagedPlan)


def _without_all(
    here: Situation, free: Mapping[NodeId, int], chosen: Iterable[Holder]
) -> dict[NodeId, int]:
    return here.without(free, (r for _, placement in chosen for r in placement.runners))
