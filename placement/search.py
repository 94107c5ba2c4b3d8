"""The cheapest pipeline over two nodes or more: which nodes, in which order, with which layers.

A pipeline's cost is a sum: its stages' layers, the generator's tail, and the hops round the ring.
Where layers are alike, the first two depend on the set of nodes and on which of them generates, the
hops on the order alone. So a set is weighed once: the fastest filled first (`filled`), in the
cheapest cycle (`Tours`). Exact for up to MAX_NODES nodes. Where layers need unequal memory, or the
model may be split at some layers only, a split may fit one order and not another; orders are then
tried, and `Outcome.floor` says what is proven.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, permutations

from .cost import ModelSizes
from .split import cheapest_split, filled, holds, most_layers
from .split_refusal import MAY_BE_SPLIT, SplitRefusal
from .tour import UNREACHED, Tours, members

MAX_NODES = 16
"""Weighed at once: their 2^16 sets take tenths of a second."""
_ALL_ORDERS = 6
"""Sets of up to so many nodes are tried in every order, where orders matter for memory."""
_MAX_TRIES = 2000
"""Orders tried in all; what is left then is bounded only."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Nodes by index, the fastest first; costs are integers, so that equal ones compare equal."""

    sizes: ModelSizes
    memory: Sequence[int]
    layer: Sequence[int]
    """Cost of one layer on each node, rising."""
    tail: Sequence[int]
    """Cost that a node adds as the generator."""
    hop: Sequence[Sequence[int]]
    least: int
    most: int
    """Stages: 2 <= least <= most <= layers."""
    required: int = 0
    """Nodes that must take part, as a bit mask."""
    split: SplitRefusal = MAY_BE_SPLIT
    """Where stages may meet."""

    def only(self, nodes: Sequence[int]) -> "Problem":
        """These nodes, renumbered in the order of `nodes`."""
        return replace(
            self,
            memory=[self.memory[i] for i in nodes],
            layer=[self.layer[i] for i in nodes],
            tail=[self.tail[i] for i in nodes],
            hop=[[self.hop[i][j] for j in nodes] for i in nodes],
            required=sum(1 << at for at, i in enumerate(nodes) if self.required >> i & 1),
        )


@dataclass(frozen=True, slots=True)
class Route:
    """One pipeline; the first node is the generator."""

    nodes: tuple[int, ...]
    counts: tuple[int, ...]
    """Layers of each."""
    cost: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found, and what is proven."""

    routes: tuple[Route, ...]
    """The two cheapest on different sets of nodes, as far as they beat what was known."""
    floor: int
    """A pipeline that was not weighed in full costs no less; UNREACHED where none is left."""
    sets: int
    """Sets of nodes that were weighed."""
    relaxations: int
    """Steps of Held and Karp's programme."""


def search(problem: Problem, known: Sequence[int] = ()) -> Outcome:
    """The two cheapest pipelines; `known` are costs of other placements that they must beat."""
    first = _Search(problem, known)
    first.seed()
    floors = [first.floor(1 << i) for i in range(len(problem.memory))]
    useful = [i for i, floor in enumerate(floors) if first.room[i] and floor < first.limit]
    nodes = _widest(useful, first.room)
    dropped = min((floors[i] for i in useful if i not in nodes), default=UNREACHED)
    second = _Search(problem.only(nodes), known, ceiling=first.limit)
    kept = second.problem.required.bit_count() == problem.required.bit_count()
    if len(nodes) >= problem.least and kept:
        second.run()
    routes = first.routes | {
        sum(1 << nodes[i] for i in route.nodes): replace(
            route, nodes=tuple(nodes[i] for i in route.nodes)
        )
        for route in second.routes.values()
    }
    best = sorted(routes.values(), key=lambda route: (route.cost, route.nodes))[:2]
    sets = len(first.weighed | {_renumbered(mask, nodes) for mask in second.weighed})
    floor = min(dropped, first.open, second.open)
    return Outcome(tuple(best), floor, sets, second.tours.relaxations)


def _widest(nodes: list[int], room: Sequence[int]) -> list[int]:
    """All of them up to MAX_NODES; else half the fastest, and of the others the roomiest."""
    if len(nodes) <= MAX_NODES:
        return nodes
    half = MAX_NODES // 2
    roomiest = sorted(nodes[half:], key=lambda i: -room[i])[: MAX_NODES - half]
    return [*nodes[:half], *sorted(roomiest)]


def _sums(values: Sequence[int]) -> list[int]:
    """The sum over every set of nodes."""
    sums = [0]
    for value in values:
        sums += [value + each for each in sums]
    return sums


def _renumbered(mask: int, nodes: Sequence[int]) -> int:
    return sum(1 << nodes[i] for i in members(mask))


@dataclass(slots=True)
class _Search:
    problem: Problem
    known: Sequence[int]
    ceiling: int = UNREACHED
    """What a set must beat, whatever is found here."""
    routes: dict[int, Route] = field(default_factory=dict[int, Route])
    """The cheapest found, by set."""
    weighed: set[int] = field(default_factory=set[int])
    open: int = UNREACHED
    """The least that an order which was not tried may cost."""
    limit: int = field(init=False)
    """What a set must beat to be the best or the runner-up."""
    room: list[int] = field(init=False)
    front: list[int] = field(init=False)
    tours: Tours = field(init=False)
    _costs: list[int] = field(init=False)
    _least_out: list[int] = field(init=False)
    _tries: int = 0

    def __post_init__(self) -> None:
        p = self.problem
        self.room = [most_layers(p.sizes, m, generator=False) for m in p.memory]
        self.front = [most_layers(p.sizes, m, generator=True) for m in p.memory]
        self.tours = Tours(p.hop)
        self._costs = sorted(self.known)
        self._least_out = [
            min((cost for j, cost in enumerate(row) if j != i), default=0)
            for i, row in enumerate(p.hop)
        ]
        self._lower_limit()

    def run(self) -> None:
        """Every set, but for those that cannot beat `limit`."""
        p = self.problem
        self.seed()
        at_most = self.limit
        slack: dict[int, int] = {}  # what hops may cost, by set
        self.tours.find(self._budget(at_most, slack))
        floors = sorted(
            (floor, mask)
            for mask, cycle in self.tours.cost.items()
            if cycle < slack[mask]
            if mask.bit_count() >= p.least and mask & p.required == p.required
            if (floor := self._least_compute(mask) + cycle) < at_most
        )
        for floor, mask in floors:
            if floor >= self.limit:
                break
            self._weigh(mask, self.tours.order(mask), cheapest=True)

    def _budget(self, at_most: int, slack: dict[int, int]) -> Callable[[int], int]:
        """What is left of `at_most` for the way through a set, as `Tours.find` asks; 0: nothing.

        Taken away are layers and tail at their least, and the hops to the nodes that the set lacks
        to hold the model, and back.
        """
        p, hop = self.problem, min(self._least_out)
        layer, room, out = (_sums(x) for x in (p.layer, self.room, self._least_out))
        # Nodes before a set's first one never join it: the way round starts at the first.
        roomiest = [
            list(accumulate(sorted(self.room[first:], reverse=True), initial=0))
            for first in range(len(self.room))
        ]
        tail, longest = min(p.tail), max(self._least_out)

        def budget(mask: int) -> int:
            count, lacking = mask.bit_count(), p.sizes.layers - room[mask]
            first = (mask & -mask).bit_length() - 1
            more = bisect_left(roomiest[first], lacking) if lacking > 0 else 0
            more = max(p.least - count, more)
            if count + more > p.most:
                return 0
            left = at_most - tail - layer[mask] - self._others_fill(mask, first)
            slack[mask] = left
            left -= (more + 1) * hop
            return left if left > out[mask] - longest else 0

        return budget

    def seed(self) -> None:
        """Likely sets, in a likely order: what the search must beat from the start."""
        p, size = self.problem, len(self.problem.memory)
        by_room = sorted(range(size), key=lambda i: -self.room[i])
        centres = [
            sorted(range(size), key=lambda j: (-1 if j == i else p.hop[i][j], j))
            for i in range(min(size, MAX_NODES))
        ]
        for nodes in ([*range(size)], by_room, *centres):
            for count in range(p.least, min(p.most, size, MAX_NODES) + 1):
                mask = sum(1 << i for i in nodes[:count])
                if mask not in self.weighed and mask & p.required == p.required:
                    self._weigh(mask, self._nearest_neighbours(mask), cheapest=False)
        for route in sorted(self.routes.values(), key=lambda route: route.cost)[:2]:
            mask = sum(1 << i for i in route.nodes)
            self._weigh(mask, self._untangled(list(route.nodes)), cheapest=False)

    def floor(self, mask: int) -> int:
        """Less than any set costs that contains this one: the others may help and cost no hop."""
        p = self.problem
        alone = sum(p.layer[i] + self._least_out[i] for i in members(mask))
        return min(p.tail) + alone + self._others_fill(mask)

    def _others_fill(self, mask: int, first: int = 0) -> int:
        """The layers beyond one for each of the set, on the quickest of nodes `first` and on."""
        rest, cost = self.problem.sizes.layers - mask.bit_count(), 0
        for i in range(first, len(self.room)):
            if rest <= 0:
                break
            share = min(rest, self.room[i] - (mask >> i & 1))
            cost += share * self.problem.layer[i]
            rest -= share
        return cost if rest == 0 else UNREACHED

    def _least_compute(self, mask: int) -> int:
        """Layers and tail of the set, if the generator's ends took no memory."""
        p = self.problem
        rest = p.sizes.layers - mask.bit_count()
        cost, tail = 0, UNREACHED
        for i in members(mask):
            share = min(rest, self.room[i] - 1)
            cost += (share + 1) * p.layer[i]
            rest -= share
            tail = min(tail, p.tail[i])
        return cost + tail if rest == 0 else UNREACHED

    def _weigh(self, mask: int, cycle: Sequence[int], *, cheapest: bool) -> None:
        """Keeps the set's cheapest route; `cheapest` says that no cycle costs less than `cycle`."""
        self.weighed.add(mask)
        hops = self.tours.length(cycle)
        shares = [self._shares(cycle, generator) for generator in cycle]
        choices = sorted(
            (found[0] + hops, start) for start, found in enumerate(shares) if found is not None
        )
        best: Route | None = None
        for cost, start in choices:
            if cost >= (self.limit if best is None else best.cost):
                break
            _, counts = shares[start] or (0, {})
            nodes = (*cycle[start:], *cycle[:start])
            route = self._route(nodes, [counts[i] for i in nodes], cost)
            if route is None and cheapest:
                route = self._in_any_order(nodes, cost - hops)
            if route is not None and (best is None or route.cost < best.cost):
                best = route
        if best is not None:
            self._keep(mask, best)

    def _shares(self, nodes: Sequence[int], generator: int) -> tuple[int, dict[int, int]] | None:
        """The layers of each and what they and the tail cost, wherever in the order they are."""
        p = self.problem
        room = [self.front[i] if i == generator else self.room[i] for i in nodes]
        counts = filled(p.sizes.layers, [p.layer[i] for i in nodes], room)
        if counts is None:
            return None
        return self._compute(generator, nodes, counts), dict(zip(nodes, counts, strict=True))

    def _compute(self, generator: int, nodes: Sequence[int], counts: Sequence[int]) -> int:
        layer = self.problem.layer
        stages = sum(count * layer[i] for i, count in zip(nodes, counts, strict=True))
        return self.problem.tail[generator] + stages

    def _route(self, nodes: tuple[int, ...], counts: Sequence[int], cost: int) -> Route | None:
        """None where the caches of unlike layers do not fit where they come to lie, and where the
        model must not be split so."""
        p = self.problem
        if not p.split.allows(counts):
            return None
        if p.sizes.uniform or holds(p.sizes, [p.memory[i] for i in nodes], counts):
            return Route(nodes, tuple(counts), cost)
        return None

    def _in_any_order(self, nodes: tuple[int, ...], compute: int) -> Route | None:
        """The cheapest route behind this generator, by trying orders, the cheapest hops first.

        `compute` is the least that layers and tail cost. What is not tried is noted in `open`.
        """
        p, best = self.problem, None
        every = len(nodes) <= _ALL_ORDERS
        others = permutations(nodes[1:]) if every else iter([nodes[1:], nodes[:0:-1]])
        orders = sorted((self.tours.length((nodes[0], *o)), (nodes[0], *o)) for o in others)
        for hops, order in orders:
            if compute + hops >= (self.limit if best is None else best.cost):
                break
            if self._tries == _MAX_TRIES:
                self.open = min(self.open, compute + hops)
                break
            self._tries += 1
            memory, layer = [p.memory[i] for i in order], [p.layer[i] for i in order]
            counts = cheapest_split(p.sizes, memory, layer, p.split)
            if counts is None:
                continue
            cost = self._compute(order[0], order, counts) + hops
            if best is None or cost < best.cost:
                best = Route(order, tuple(counts), cost)
        if not every and (best is None or best.cost > compute + orders[0][0]):
            self.open = min(self.open, compute + orders[0][0])
        return best

    def _keep(self, mask: int, route: Route) -> None:
        before = self.routes.get(mask)
        if before is not None and before.cost <= route.cost:
            return
        if before is not None:
            self._costs.remove(before.cost)
        self.routes[mask] = route
        insort(self._costs, route.cost)
        self._lower_limit()

    def _lower_limit(self) -> None:
        second = self._costs[1] if len(self._costs) > 1 else UNREACHED
        self.limit = min(self.ceiling, second)

    def _nearest_neighbours(self, mask: int) -> list[int]:
        """A cycle for a start: always on to the nearest."""
        hop, rest = self.problem.hop, list(members(mask))
        order = [rest.pop(0)]
        while rest:
            nearest = min(rest, key=lambda j: (hop[order[-1]][j], j))
            rest.remove(nearest)
            order.append(nearest)
        return order

    def _untangled(self, cycle: list[int]) -> list[int]:
        """The cycle with parts turned round as long as that makes it shorter (2-opt)."""
        least = self.tours.length(cycle)
        for start, end in combinations(range(len(cycle) + 1), 2):
            turned = [*cycle[:start], *reversed(cycle[start:end]), *cycle[end:]]
            if self.tours.length(turned) < least:
                return self._untangled(turned)
        return cycle
