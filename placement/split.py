"""Where each stage of a pipeline ends: shares of the layers, moved as far as memory asks."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from .card import ModelCard
from .cost import stage_bytes


def proportional_layers(total: int, weights: Sequence[int]) -> list[int]:
    """`total` layers shared in proportion to `weights` by largest remainder, at least one each.

    Needs a positive sum of weights and `total` >= len(weights).
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


def stage_ends(card: ModelCard, memory: Sequence[int], context: int) -> list[int] | None:
    """The end of each stage on nodes of `memory` bytes, in this order; the first is the generator.

    Each gets layers in proportion to its memory, more or fewer where memory forces it. None where
    no choice of ends fits this order (exact while each node can hold any one layer).
    """
    due = _due(card, memory, context)
    ends: list[int] = []
    first = 0
    for i, target in enumerate(accumulate(proportional_layers(card.num_layers, memory))):
        lowest = max(due[i + 1], first + 1)
        highest = _reach(card, memory[i], first, i == 0, context)
        if lowest > highest:
            return None
        first = min(max(target, lowest), highest)
        ends.append(first)
    return ends


def _due(card: ModelCard, memory: Sequence[int], context: int) -> list[int]:
    """For each stage the first layer from which it and those behind it can finish.

    A stage needs less the later it starts and the earlier it ends, hence one bisection each.
    """
    due = [card.num_layers] * (len(memory) + 1)
    for i in range(len(memory) - 1, 0, -1):
        end = due[i + 1]

        def fits(first: int, end: int = end, room: int = memory[i]) -> bool:
            return stage_bytes(card, first, end, False, context, False) <= room

        due[i] = bisect_left(range(end), True, key=fits)
    return due


def _reach(card: ModelCard, room: int, first: int, generator: bool, context: int) -> int:
    """The last end of a stage that starts at `first`; `first` if not even one layer fits."""

    def overflows(end: int) -> bool:
        return stage_bytes(card, first, end, generator, context, False) > room

    return first + bisect_right(range(first + 1, card.num_layers + 1), False, key=overflows)
