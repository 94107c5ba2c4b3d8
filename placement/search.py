"""The cheapest pipeline over two nodes or more: which nodes, in which order, with which layers.

Exact for up to EXACT_NODES nodes that have room for a layer. A pipeline costs its stages' layers,
the generator's tail and the hops of its ring. Every set of nodes and generator has a lower bound:
layers given to the fastest nodes first, as if each stage lay where it needs the least memory, plus
the cheapest ring through the set. Sets are weighed by rising bound, until the bound reaches the
second-best cost. Where all layers need the same memory and the model may be split anywhere, the
bound is the cost. Elsewhere a split may fit in some orders only, and dynamic programming over
(nodes placed, last node, layers placed) finds the cheapest order and split.

Of more nodes, the EXACT_NODES that compute a layer fastest are searched so; of equally fast nodes,
those with the most room. Only where these cannot hold the model, or more stages are requested, are
nodes added: fastest first until the model fits, each followed by its nearest neighbour. Where
`max_stages` of the fastest cannot hold it either, the same is tried with the roomiest nodes first.
`SearchResult.floor` then bounds what a pipeline over any other set could cost.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import sub

from .cost import ModelSizes
from .split_refusal import MAY_BE_SPLIT, SplitRefusal

EXACT_NODES = 8
"""Nodes that are searched in every combination."""
UNREACHED = 1 << 200
"""More than any pipeline costs; as an integer, so that sums stay exact."""

Ring = tuple[int, int, tuple[int, ...]]
"""The cost of all hops and of the first one, and the nodes in order, the lowest first."""
_Partial = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The first stages of a pipeline: their cost, nodes, and first layers (the last stage's first)."""


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
    """`hop[i][j]`: cost of one hidden row from node i to node j."""
    min_stages: int
    max_stages: int
    """2 <= min_stages <= max_stages <= layers."""
    required: int = 0
    """Nodes that must take part, as a bit mask."""
    split: SplitRefusal = MAY_BE_SPLIT
    """The layers that a stage may begin with."""


@dataclass(frozen=True, slots=True)
class Route:
    """One pipeline; the first node is the generator."""

    nodes: tuple[int, ...]
    counts: tuple[int, ...]
    """Layers of each."""
    cost: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best pipelines, and a bound on all that were not searched."""

    routes: tuple[Route, ...]
    """The two cheapest on different sets of nodes that beat the costs given to `search`."""
    floor: int
    """No pipeline outside the search costs less; UNREACHED where the search was exact."""
    sets: int
    """Sets of nodes that were weighed, others having been ruled out by their bound."""


def search(problem: Problem, other_costs: Sequence[int] = ()) -> SearchResult:
    """The two cheapest pipelines; `other_costs` are those of the single-node placements."""
    searcher = _Search(problem, other_costs)
    able = [node for node, room in enumerate(searcher.room) if room]
    fastest = sorted(able, key=lambda node: (problem.layer[node], -searcher.room[node]))
    searcher.weigh_every_set(sorted(fastest[:EXACT_NODES]))
    omitted, floor = fastest[EXACT_NODES:], UNREACHED
    if omitted:
        floor = searcher.floor_with(omitted[0])
        roomiest = sorted(able, key=lambda node: (-searcher.room[node], node))
        for nodes in (fastest, roomiest):
            if not searcher.routes and not other_costs:
                searcher.add_until_it_fits(nodes)
    best = sorted(searcher.routes, key=lambda route: (route.cost, route.nodes))[:2]
    return SearchResult(tuple(best), floor, searcher.sets)


def cheapest_rings(hop: Sequence[Sequence[int]], nodes: Sequence[int]) -> dict[int, Ring]:
    """The cheapest directed cycle through every set of two or more of `nodes`, by bit mask.

    Held and Karp's dynamic programme (1962). Of equally cheap cycles, the one that begins with the
    cheapest hop, then the lexicographically first.
    """
    rings: dict[int, Ring] = {}
    for position, start in enumerate(nodes):
        paths: dict[tuple[int, int], Ring] = {(1 << start, start): (0, 0, (start,))}
        while paths:
            longer: dict[tuple[int, int], Ring] = {}
            for (mask, last), (cost, first_hop, path) in paths.items():
                if last != start:
                    ring = cost + hop[last][start], first_hop, path
                    rings[mask] = min(ring, rings.get(mask, ring))
                for node in nodes[position + 1 :]:
                    if not mask >> node & 1:
                        further = (
                            cost + hop[last][node],
                            first_hop or hop[last][node],
                            (*path, node),
                        )
                        key = mask | 1 << node, node
                        longer[key] = min(further, longer.get(key, further))
            paths = longer
    return rings


def members(mask: int) -> Iterator[int]:
    """The nodes of a set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(slots=True)
class _Search:
    problem: Problem
    other_costs: Sequence[int]
    routes: list[Route] = field(default_factory=list[Route])
    """The cheapest of each set that was weighed."""
    sets: int = 0
    room: list[int] = field(init=False)
    """The most layers that each node holds where they need the least memory."""
    _generator_room: list[int] = field(init=False)
    _least_hop: int = field(init=False)
    _rest_costs: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    _allowed_ends: int = field(init=False)
    _reachable: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    _ends: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def __post_init__(self) -> None:
        p = self.problem
        self.room = [most_layers(p.sizes, memory, generator=False) for memory in p.memory]
        self._generator_room = [most_layers(p.sizes, memory, generator=True) for memory in p.memory]
        hops = (cost for i, row in enumerate(p.hop) for j, cost in enumerate(row) if i != j)
        self._least_hop = min(hops, default=0)
        layers = p.sizes.layers
        ends = (end for end in range(1, layers + 1) if p.split.may_end_at(end, layers))
        self._allowed_ends = sum(1 << end for end in ends)

    @property
    def limit(self) -> int:
        """The second-best cost so far; a set must beat it to be the best or the runner-up."""
        costs = sorted([*self.other_costs, *(route.cost for route in self.routes)])
        return costs[1] if len(costs) > 1 else UNREACHED

    def weigh_every_set(self, nodes: Sequence[int]) -> None:
        """Weighs every set of `nodes`, except those whose bound shows that they cannot win."""
        p = self.problem
        bounds = [
            (
                min(p.tail[node] for node in ring)
                + self._least_layers(mask, p.sizes.layers)
                + hops,
                ring,
                hops,
            )
            for mask, (hops, _, ring) in cheapest_rings(p.hop, nodes).items()
            if p.min_stages <= len(ring) <= p.max_stages and mask & p.required == p.required
        ]
        for bound, ring, hops in sorted(bounds):
            if bound >= self.limit:
                break
            self._weigh(ring, hops)

    def add_until_it_fits(self, nodes: Sequence[int]) -> None:
        """Weighs the fewest first `nodes` that can hold the model, in nearest-neighbour order."""
        p = self.problem
        for count in range(p.min_stages, min(p.max_stages, len(nodes)) + 1):
            ring, rest = [nodes[0]], set(nodes[1:count])
            while rest:
                ring.append(min(rest, key=lambda node: (p.hop[ring[-1]][node], node)))
                rest.remove(ring[-1])
            hops = sum(p.hop[i][j] for i, j in zip(ring, [*ring[1:], ring[0]], strict=True))
            self._weigh(tuple(ring), hops)
            if self.routes:
                return

    def floor_with(self, node: int) -> int:
        """A bound on every pipeline with `node` or a slower one: other nodes may help for free."""
        p = self.problem
        rest, cost = p.sizes.layers - 1, min(p.tail) + p.layer[node] + 2 * self._least_hop
        for layer, room in zip(p.layer, self.room, strict=True):
            share = min(rest, room)
            cost += share * layer
            rest -= share
        return cost if rest == 0 else UNREACHED

    def _least_layers(self, mask: int, layers: int) -> int:
        """The least cost of `layers` on the set, one each at least; UNREACHED: they do not fit."""
        cached = self._rest_costs.get((mask, layers))
        if cached is not None:
            return cached
        rest, cost = layers - mask.bit_count(), 0
        for node in members(mask):
            share = min(rest, self.room[node] - 1)
            cost += (share + 1) * self.problem.layer[node]
            rest -= share
        cost = cost if rest == 0 else UNREACHED
        self._rest_costs[mask, layers] = cost
        return cost

    def _weigh(self, ring: tuple[int, ...], hops: int) -> None:
        """Keeps the set's cheapest route, if it beats `limit`. No other ring has cheaper hops."""
        p, best, limit = self.problem, None, self.limit
        mask, layers = sum(1 << node for node in ring), p.sizes.layers
        self.sets += 1
        layer = [p.layer[node] for node in ring]
        bounds: list[tuple[int, int, tuple[int, ...]]] = []
        for position, generator in enumerate(ring):
            room = [self._generator_room[n] if n == generator else self.room[n] for n in ring]
            counts = fill_fastest_first(layers, layer, room)
            if counts is not None:
                compute = sum(count * cost for count, cost in zip(counts, layer, strict=True))
                bounds.append((p.tail[generator] + compute + hops, position, counts))
        for bound, position, counts in sorted(bounds):
            if bound >= limit:
                break
            nodes = (*ring[position:], *ring[:position])
            counts = (*counts[position:], *counts[:position])
            fits = p.sizes.uniform or fits_in_order(p.sizes, [p.memory[n] for n in nodes], counts)
            if fits and p.split.allows(counts):
                route = Route(nodes, counts, bound)
            elif len(ring) > EXACT_NODES or self._reachable_ends(ring[position], mask) >> layers:
                route = self._cheapest_order(nodes, limit)
            else:
                route = None
            if route is not None:
                best, limit = route, route.cost
        if best is not None:
            self.routes.append(best)

    def _reachable_ends(self, generator: int, mask: int) -> int:
        """The ends, as bits, that stages on all nodes of the set can reach in some order.

        Weighs all subsets, so that it is for EXACT_NODES nodes at most.
        """
        if (generator, mask) in self._reachable:
            return self._reachable[generator, mask]
        p, ends = self.problem, 0
        if mask == 1 << generator:
            ends = (2 << min(self._generator_room[generator], p.sizes.layers)) - 2
        for node in members(mask & ~(1 << generator)):
            for start in members(self._reachable_ends(generator, mask ^ 1 << node)):
                ends |= (2 << self._end(node, start)) - (2 << start)
        ends &= self._allowed_ends
        self._reachable[generator, mask] = ends
        return ends

    def _cheapest_order(self, nodes: tuple[int, ...], limit: int) -> Route | None:
        """The cheapest order and split that costs less than `limit`; `nodes[0]` generates.

        Of more than EXACT_NODES nodes, only the order given is tried.
        """
        p, layers, generator = self.problem, self.problem.sizes.layers, nodes[0]
        every = sum(1 << node for node in nodes)
        partials: dict[int, _Partial] = {}
        for end in range(1, min(self._generator_room[generator], layers - 1) + 1):
            if p.split.may_end_at(end, layers):
                cost = p.tail[generator] + end * p.layer[generator]
                partials[end] = cost, (generator,), (0,)
        reached = {(1 << generator, generator): partials}
        for placed in range(1, len(nodes)):
            hops_after = (len(nodes) - placed) * self._least_hop
            longer: dict[tuple[int, int], dict[int, _Partial]] = defaultdict(dict)
            for (mask, last), partials in reached.items():
                following = members(every ^ mask) if len(nodes) <= EXACT_NODES else [nodes[placed]]
                for node in following:
                    hop, rest = p.hop[last][node], every ^ mask ^ 1 << node
                    for end, partial in self._extensions(
                        partials, node, rest, limit - hops_after, hop
                    ):
                        ends = longer[mask | 1 << node, node]
                        ends[end] = min(partial, ends.get(end, partial))
            reached = longer
        complete = [
            (partials[layers][0] + p.hop[last][generator], *partials[layers][1:])
            for (_, last), partials in reached.items()
            if layers in partials
        ]
        cost, order, starts = min(complete, default=(limit, (), ()))
        if cost >= limit:
            return None
        ends = [*starts[-2::-1], layers]
        return Route(order, tuple(map(sub, ends, starts[::-1])), cost)

    def _extensions(
        self, partials: dict[int, _Partial], node: int, rest: int, limit: int, hop: int
    ) -> Iterator[tuple[int, _Partial]]:
        """Each of `partials`, by the layer that it ends at, with a further stage on `node`.

        Leaves out those that cost `limit` or more with the least layers of the set `rest`.
        """
        p, layers, layer = self.problem, self.problem.sizes.layers, self.problem.layer[node]
        least_end = layers - sum(self.room[other] for other in members(rest))
        most_end = layers - rest.bit_count()
        for start, (cost, nodes, starts) in partials.items():
            for end in range(max(start + 1, least_end), min(self._end(node, start), most_end) + 1):
                total = cost + hop + (end - start) * layer
                if total + self._least_layers(rest, layers - end) >= limit:
                    continue
                if p.split.may_end_at(end, layers):
                    yield end, (total, (*nodes, node), (start, *starts))

    def _end(self, node: int, start: int) -> int:
        """The last layer (exclusive) that a stage on `node` can hold from `start` on."""
        if node not in self._ends:
            p, end, ends = self.problem, 0, list[int]()
            for first in range(p.sizes.layers + 1):
                end = max(end, first)
                while end < p.sizes.layers and (
                    p.sizes.need(first, end + 1, generator=False) <= p.memory[node]
                ):
                    end += 1
                ends.append(end)
            self._ends[node] = ends
        return self._ends[node][start]


def proportional_layers(total: int, weights: Sequence[int]) -> list[int]:
    """`total` layers shared in proportion to `weights` by largest remainder, at least one each.

    Needs a positive sum of weights and `total` >= len(weights). Where `weights` are the most layers
    of each node and `total` is at most their sum, no share exceeds its weight.
    """
    whole = sum(weights)
    counts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    for i, count in enumerate(counts):
        if count == 0:
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
    return counts


def most_layers(sizes: ModelSizes, memory: int, *, generator: bool) -> int:
    """The most layers that fit where they need the least memory; may exceed the model's layers."""

    # Of all stages of one length, the one at the front has the fewest caches.
    def overflows(end: int) -> bool:
        return sizes.need(0, end, generator=generator) > memory

    return bisect_right(range(1, memory // sizes.layer + 1), False, key=overflows)


def fill_fastest_first(
    total: int, costs: Sequence[int], rooms: Sequence[int]
) -> tuple[int, ...] | None:
    """The cheapest shares of `total` layers: one each, the rest to the nodes that are fastest.

    `costs` are of one layer on each node, `rooms` the most layers that each can hold. Equally fast
    nodes share in proportion to their room, so that none is full while its twin is empty. None
    where the layers do not fit, or where there are fewer layers than nodes.
    """
    if not len(costs) <= total <= sum(rooms) or min(rooms) < 1:
        return None
    counts = [1] * len(costs)
    rest = total - len(costs)
    for _, twins in groupby(sorted(range(len(costs)), key=costs.__getitem__), costs.__getitem__):
        group = list(twins)
        room = [rooms[i] for i in group]
        more = min(rest, sum(room) - len(group))
        shares = proportional_layers(more + len(group), room)
        for i, count in zip(group, shares, strict=True):
            counts[i] = count
        rest -= more
    return tuple(counts)


def fits_in_order(sizes: ModelSizes, memory: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether stages of `counts` layers fit `memory` in this order; the first generates."""
    ends = list(accumulate(counts))
    ranges = zip([0, *ends], ends, memory, strict=False)
    return all(
        sizes.need(first, end, generator=i == 0) <= room
        for i, (first, end, room) in enumerate(ranges)
    )
