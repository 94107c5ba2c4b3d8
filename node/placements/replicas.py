"""Further placements of a model that answers already: how many, where, or why not. Pure."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Final

from ...placement.errors import ExoNodeError
from ...placement.ids import NodeId
from ..cluster.desired import Desired
from .situation import ObservedPlacement, Situation
from .state import Demand, Scale, StagedPlan

MAX_REPLICAS: Final = 8
"""Replicas of one model."""
_ORDINALS: Final = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def replica_refusal(here: Situation, desired: Desired, name: Callable[[NodeId], str]) -> str:
    """Why fewer replicas answer than are desired; empty if as many do. `name`: of a node."""
    replicas = here.replicas(desired)
    loading = [each for each in replicas if not each.connected]
    if not replicas or (not loading and len(replicas) >= desired.replicas):
        return ""
    clauses = [f"one loads on {' and '.join(map(name, each.nodes))}" for each in loading]
    if len(replicas) < desired.replicas:
        clauses.append(_missing_replica(here, desired, len(replicas), len(loading), name))
    return "; ".join(clauses)


def _missing_replica(
    here: Situation, desired: Desired, count: int, loading: int, name: Callable[[NodeId], str]
) -> str:
    """Why there is no further replica than these `count`, of which `loading` do not answer yet."""
    loads = (f for f in here.observed.failures if f.model == desired.model and f.kind == "extra")
    if (failure := max(loads, key=lambda f: f.at, default=None)) is not None:
        return f"a copy on {name(failure.node)} failed to load: {failure.error.message}"
    if loading == count:
        return "the others load once it answers"
    planned = planned_replica(here, desired)
    if not isinstance(planned, ExoNodeError):
        return "the next one is about to be loaded"
    further = _ORDINALS[count - 1]
    if beside_replicas(here, desired).keys() <= desired.options.exclude:
        return f"for a {further} no node is left"
    return f"for a {further} no node has room: {planned.message}"


def scale(here: Situation, desired: Desired) -> None:
    """Lets the number of replicas follow the answers, where that is desired.

    One more where each has had several answers for a while and other nodes have room; one less
    where none is crowded, and one has had none for longer.
    """
    replicas = here.replicas(desired)
    is_settled = len(replicas) == desired.replicas and all(each.connected for each in replicas)
    if not desired.auto_replicas or desired.removed or not is_settled:
        return
    demand = [here.observed.demand.get(each.id, Demand()) for each in replicas]
    crowded_since = max(each.crowded_since for each in demand)
    idle_since, idle = min(
        zip([each.idle_since for each in demand], replicas, strict=True), key=lambda pair: pair[0]
    )
    count, is_quiet = len(replicas), all(each.crowded_since == inf for each in demand)
    if here.now - crowded_since >= here.timing.crowded_after_s:
        if count < MAX_REPLICAS and not isinstance(planned_replica(here, desired), ExoNodeError):
            why = f"each of {count} had several answers for {here.now - crowded_since:.0f} s"
            here.actions.append(Scale(desired.model, count + 1, why))
    elif is_quiet and count > 1 and here.now - idle_since >= here.timing.settle_after_s:
        why = f"one had no answer for {here.now - idle_since:.0f} s"
        here.actions.append(Scale(desired.model, count - 1, why, idle.id))


def planned_replica(here: Situation, desired: Desired) -> StagedPlan | ExoNodeError:
    """A plan for one more replica, with the context of the others: any of them may answer."""
    context = here.replicas(desired)[0].plan.plan.context_length
    options = replace(desired.options, context=context)
    free = beside_replicas(here, desired)
    planned = here.view.plan(replace(desired, options=options), free, frugal=False)
    if isinstance(planned, ExoNodeError):
        return planned
    return replace(planned, options=desired.options)


def add_replica(here: Situation, desired: Desired) -> None:
    """Loads one more placement of a model that serves already, on nodes without it."""
    replicas = here.replicas(desired)
    serves = any(placement.connected for placement in replicas)
    if desired.removed or len(replicas) >= desired.replicas or not serves:
        return
    failed = (f.at for f in here.observed.failures if f.model == desired.model)
    if here.now - max(failed, default=-inf) < here.timing.refill_every_s:
        return
    planned = planned_replica(here, desired)
    if isinstance(planned, ExoNodeError):
        return
    here.place(planned, extra=True)


def replica_nodes(
    here: Situation, desired: Desired, placement: ObservedPlacement | None = None
) -> set[NodeId]:
    """The nodes of the model's other placements that stay."""
    return {
        runner.key.node
        for other in here.replicas(desired)
        if placement is None or other.id != placement.id
        for runner in other.runners
    }


def beside_replicas(
    here: Situation, desired: Desired, placement: ObservedPlacement | None = None
) -> dict[NodeId, int]:
    """Free bytes of the nodes on which no other placement of the model stays."""
    barred = replica_nodes(here, desired, placement) | here.doubtful()
    return {node: unused for node, unused in here.free.items() if node not in barred}
