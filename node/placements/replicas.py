"""Further placements of a model that answers already: how many, where, or why not; and which one
gets a new answer. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from ...placement.errors import ExoNodeError
from ...placement.ids import NodeId, PlacementId
from ...placement.reading import ReaderLayers, may_read
from ...proto import peer_pb2 as pb
from ..cluster.desired import Desired
from .readers import free_readers, readers_of
from .situation import ObservedPlacement, Situation
from .state import Demand, RunnerKey, Scale, StagedPlan

MAX_REPLICAS: Final = 8
"""Replicas of one model."""
_ORDINALS: Final = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
TYPICAL_TOKENS: Final = 32
"""Tokens that another answer on a replica is expected to need by itself: it ends at some time, and
shares forwards until then."""
_Prefixes = Mapping[PlacementId, pb.CachedPrefix]


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
    if isinstance(planned, ExoNodeError) or free_readers(here, f"{desired.model} needs the room"):
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
        if not runner.is_reader
    }


def beside_replicas(
    here: Situation, desired: Desired, placement: ObservedPlacement | None = None
) -> dict[NodeId, int]:
    """Free bytes of the nodes on which no other placement of the model stays; readers go first."""
    barred = replica_nodes(here, desired, placement) | here.doubtful()
    free = here.without(here.free, readers_of(here))
    return {node: unused for node, unused in free.items() if node not in barred}


@dataclass(frozen=True, slots=True)
class ReplicaRoute:
    """The placement for an answer, and what is expected of it."""

    placement: ObservedPlacement
    reading_s: float = 0.0
    """Seconds until its prompt is read, once those before it are."""
    source: PlacementId | None = None
    """The replica whose cached state is to be copied first."""
    reason: str = ""
    """The reason of the choice, for a person."""
    is_at_home: bool = True
    """No other replica has more of its prompt."""
    readers: tuple[tuple[RunnerKey, ReaderLayers], ...] = ()
    """The runners that read upper layers of its prompt, in order."""
    read_reason: str = ""
    """Why those, or none."""


def admit(
    here: Situation, desired: Desired, prefixes: _Prefixes | None = None
) -> ReplicaRoute | None:
    """The placement for a new answer, or None if it has to wait.

    One that is being replaced serves until its successor is connected. `prefixes`: what replicas
    have cached of its prompt, as far as that is known.
    """
    replicas = here.replicas(desired)
    candidates = [placement for placement in replicas if placement.connected]
    if not candidates and replicas and not replicas[0].missing:
        retiring = (p for p in here.placements[desired.model] if p.id in here.retiring)
        candidates = [placement for placement in retiring if placement.connected][:1]
    free = [placement for placement in candidates if placement.id not in here.observed.busy]
    if len(free) <= 1:
        return _with_readers(here, ReplicaRoute(free[0]), free, prefixes or {}) if free else None
    return _quickest(here, free, prefixes or {})


def _quickest(
    here: Situation, candidates: Sequence[ObservedPlacement], prefixes: _Prefixes
) -> ReplicaRoute:
    """The placement on which the answer is expected to end first."""
    routes = [route for each in candidates for route in _routes(here, each, candidates, prefixes)]
    best = min(routes, key=lambda route: (_wait_s(here, route), here.answers_on(route.placement)))
    return _with_readers(here, best, candidates, prefixes)


def _with_readers(
    here: Situation,
    route: ReplicaRoute,
    candidates: Sequence[ObservedPlacement],
    prefixes: _Prefixes,
) -> ReplicaRoute:
    """The route with the replicas and readers that read its prompt too, where that is quicker."""
    placement = route.placement
    own = prefixes.get(placement.id)
    if own is None or not own.key or len(placement.plan) > 1:
        return route
    prefix = own if route.source is None else prefixes[route.source]
    others = {
        each.nodes[0]: each.owners[0].key
        for each in candidates
        if each is not placement
        and each.id in prefixes
        and may_read(own.key, prefixes[each.id].key)
    }
    busy = {
        each.nodes[0]: (1, _work_on(here, each)) for each in candidates if each.nodes[0] in others
    }
    for runner in placement.others:
        key = "" if runner.ready is None else runner.ready.read_key
        can_read = runner.is_reader and runner.state == "ready" and may_read(own.key, key)
        if can_read and runner.plan.reader:
            others[runner.key.node] = runner.key
            busy[runner.key.node] = runner.plan.reader[0].first_layer, runner.requests
    answering = placement.nodes[0]
    plan = here.view.reading(placement.plan, answering, busy, own.prompt_rows, prefix.rows)
    readers = tuple((others[each.node], each) for each in plan.readers)
    seconds = plan.seconds if readers else route.reading_s
    return replace(route, reading_s=seconds, readers=readers, read_reason=plan.reason)


def _work_on(here: Situation, placement: ObservedPlacement) -> int:
    """Answers on a placement, and prompts that it reads."""
    demand = here.observed.demand.get(placement.id, Demand())
    return here.answers_on(placement) + (demand.reading_until > here.now)


def _wait_s(here: Situation, route: ReplicaRoute) -> float:
    """Seconds that the answer waits for prompts before its own, its own, and others' tokens."""
    placement = route.placement
    demand = here.observed.demand.get(placement.id, Demand())
    token_s = here.view.seconds(placement.plan, placement.nodes)
    shared_s = here.answers_on(placement) * TYPICAL_TOKENS * (token_s if token_s < inf else 1.0)
    move_s = 0.0 if route.is_at_home else here.timing.move_gain_s
    return max(0.0, demand.reading_until - here.now) + route.reading_s + shared_s + move_s


def _routes(
    here: Situation,
    placement: ObservedPlacement,
    candidates: Sequence[ObservedPlacement],
    prefixes: _Prefixes,
) -> list[ReplicaRoute]:
    """One placement with the prefix that it has, and with each longer one that it could copy."""
    prompt_rows = max((each.prompt_rows for each in prefixes.values()), default=0)
    row_s = here.view.prompt_seconds(placement.plan, placement.nodes)
    own = prefixes.get(placement.id, pb.CachedPrefix(prompt_rows=prompt_rows))
    reason = "it has the least work"
    if own.rows:
        reason = f"{own.rows} of {prompt_rows} prompt tokens are in its {own.tier}"
    is_at_home = own.rows == max((each.rows for each in prefixes.values()), default=0)
    routes = [ReplicaRoute(placement, (prompt_rows - own.rows) * row_s, None, reason, is_at_home)]
    for other in candidates:
        theirs = prefixes.get(other.id)
        if theirs is None or not own.key or theirs.key != own.key or theirs.rows <= own.rows:
            continue
        copy_s = here.view.copy_seconds(
            placement.plan, other.nodes[0], placement.nodes[0], theirs.bytes
        )
        reading_s = (prompt_rows - theirs.rows) * row_s + copy_s
        reason = f"it has less work, and copies {theirs.rows} prompt tokens from {other.id}"
        routes.append(ReplicaRoute(placement, reading_s, other.id, reason, is_at_home))
    return routes
