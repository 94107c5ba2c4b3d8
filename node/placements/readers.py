"""Runners with upper layers of a whole model's placement, which only read prompts for it: in room
that no model needs. Pure."""

from collections.abc import Sequence

from ..cluster.desired import Desired
from .situation import ObservedPlacement, Situation
from .state import Load, RunnerKey, StageRunner


def readers_of(here: Situation) -> list[StageRunner]:
    """All readers that are not about to end."""
    return [
        runner
        for runner in here.observed.runners
        if runner.is_reader and runner.state != "stopping" and runner.key not in here.unloaded
    ]


def free_readers(here: Situation, why: str) -> bool:
    """Ends all readers. Returns whether there are any, or their memory is about to be free."""
    for runner in readers_of(here):
        here.unload(runner, why, kill=True)
    return any(runner.is_reader and runner.key.node in here.live for runner in here.ending())


def keep_readers(here: Situation, needed: Sequence[Desired]) -> None:
    """Loads readers for the first placement of each model where a node has nothing else to hold,
    and ends those whose placement does not answer, or whose node leaves."""
    for desired in needed:
        placement = here.current(desired)
        if placement is None or not placement.connected or desired.removed:
            continue
        for runner in placement.others:
            if runner.is_reader and runner.key.node in here.draining:
                here.unload(runner, "its node leaves", kill=True)
        is_settled = len(here.replicas(desired)) >= desired.replicas
        if is_settled and not here.observed.waiting and not here.actions:
            _add_reader(here, desired, placement)


def _add_reader(here: Situation, desired: Desired, placement: ObservedPlacement) -> None:
    """Loads one more reader on the node with the most room."""
    if len(placement.plan) > 1 or here.now - placement.loaded_at < here.timing.refill_every_s:
        return
    failed = (f.at for f in here.observed.failures if f.model == desired.model)
    if here.now - max(failed, default=-here.timing.refill_every_s) < here.timing.refill_every_s:
        return
    holders = {
        runner.key.node for runner in here.observed.runners if runner.plan.model == desired.model
    }
    options = desired.options
    for node, unused in sorted(here.free.items(), key=lambda pair: (-pair[1], pair[0])):
        if node in holders | here.doubtful() | options.exclude or not here.is_steady(node):
            continue
        plan = here.view.reader(placement.plan, placement.nodes[0], node, unused)
        if plan is None or (options.nodes and node not in options.nodes):
            continue
        number = max((r.key.stage for r in placement.runners), default=0) + 1
        here.load(Load(RunnerKey(node, placement.id, number), plan, extra=True))
        return
