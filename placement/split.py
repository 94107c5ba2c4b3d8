"""How many layers each stage of a pipeline gets: the fastest nodes are filled first. Exact."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby

from .cost import ModelSizes
from .split_refusal import MAY_BE_SPLIT, SplitRefusal


def proportional_layers(total: int, weights: Sequence[int]) -> list[int]:
    """`total` layers shared in proportion to `weights` by largest remainder, at least one each.

    Needs a positive sum of weights and `total` >= len(weights). Where `weights` are what each can
    hold and `total` is no more than their sum, nobody gets more than that.
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
    """The most layers that fit, wherever in the model they are; may be more than there are."""

    # Of all stages of one length that at the front has the fewest caches.
    def overflows(end: int) -> bool:
        return sizes.need(0, end, generator=generator) > memory

    return bisect_right(range(1, memory // sizes.layer + 1), False, key=overflows)


def filled(total: int, costs: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """The cheapest shares of `total` layers: one each, the rest to whoever computes them fastest.

    `costs` are of one layer on each node, `rooms` the most layers that each can hold. Equally fast
    nodes share in proportion to their room, so that none is full while its twin is empty. None
    where it does not fit, or where there are fewer layers than nodes.
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
    return counts


def holds(sizes: ModelSizes, memory: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether every stage fits where it is; the first is the generator's."""
    ends = list(accumulate(counts))
    ranges = zip([0, *ends], ends, memory, strict=False)
    return all(
        sizes.need(first, end, generator=i == 0) <= room
        for i, (first, end, room) in enumerate(ranges)
    )


def cheapest_split(
    sizes: ModelSizes,
    memory: Sequence[int],
    costs: Sequence[int],
    refusal: SplitRefusal = MAY_BE_SPLIT,
) -> list[int] | None:
    """The cheapest shares for nodes in this order where not every split fits.

    By dynamic programming over (stages, layers placed); None where nothing fits.
    """
    layers = sizes.layers
    reached: list[int | None] = [0, *[None] * layers]
    choices: list[list[int]] = []
    for i, (room, cost) in enumerate(zip(memory, costs, strict=True)):
        following: list[int | None] = [None] * (layers + 1)
        choice = [0] * (layers + 1)
        first = 0  # the earliest start from which a stage reaches `end`: it only grows with `end`
        for end in range(1, layers + 1):
            while first < end and sizes.need(first, end, generator=i == 0) > room:
                first += 1
            starts = [
                (done + (end - at) * cost, at)
                for at, done in enumerate(reached[first:end], first)
                if done is not None
            ]
            if starts and refusal.may_end_at(end, layers):
                following[end], choice[end] = min(starts)
        reached = following
        choices.append(choice)
    if reached[layers] is None:
        return None
    counts: list[int] = []
    end = layers
    for choice in reversed(choices):
        counts.append(end - choice[end])
        end = choice[end]
    return counts[::-1]
