"""How many layers each stage of a pipeline gets: the fastest nodes are filled first. Exact."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby

from .cost import ModelSizes


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
