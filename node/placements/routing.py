"""Chooses the replica for a new answer: by the prefix that it has cached, and by its work. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from ...placement.ids import PlacementId
from ...proto import peer_pb2 as pb
from ..cluster.desired import Desired
from .situation import ObservedPlacement, Situation
from .state import Demand

TYPICAL_TOKENS: Final = 32
"""Tokens that another answer on a replica is expected to need by itself: it ends at some time, and
shares forwards until then."""
_Prefixes = Mapping[PlacementId, pb.CachedPrefix]


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
        return ReplicaRoute(free[0]) if free else None
    return _quickest(here, free, prefixes or {})


def _quickest(
    here: Situation, candidates: Sequence[ObservedPlacement], prefixes: _Prefixes
) -> ReplicaRoute:
    """The placement on which the answer is expected to end first."""
    routes = [route for each in candidates for route in _routes(here, each, candidates, prefixes)]
    return min(routes, key=lambda route: (_wait_s(here, route), here.answers_on(route.placement)))


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
