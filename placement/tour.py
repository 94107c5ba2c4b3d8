"""The cheapest way round every set of nodes: Held and Karp's dynamic programme (1962)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add

UNREACHED = 1 << 200
"""More than any way costs; as an integer, so that sums stay exact."""


@dataclass(slots=True)
class Tours:
    """The cheapest directed cycles through sets of at least two nodes; a set is a bit mask.

    `hop[i][j]` is the cost of the way from i to j, an integer: equal costs are then equal exactly.
    """

    hop: Sequence[Sequence[int]]
    cost: dict[int, int] = field(default_factory=dict[int, int])
    """By set, of those that were asked for."""
    relaxations: int = 0
    """How many ends of paths were worked out: the measure of the work."""
    # For a set, the cheapest path from its lowest node through all of it, by the path's last node.
    _paths: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def find(self, budget: Callable[[int], int]) -> None:
        """Fills `cost` for every set within its budget.

        `budget` of a set is what the way through it may cost at most, on the way round any set that
        has the same lowest node and contains it: a path that costs as much is not followed further.
        So a cost is the least there is, unless it is too high anyway. The more nodes in a set, the
        smaller its budget.
        """
        size = len(self.hop)
        into = [[row[j] for row in self.hop] for j in range(size)]
        for start in range(size - 1):
            alone = [UNREACHED] * size
            alone[start] = 0
            self._paths[1 << start] = alone
            for upper in range(1, 1 << (size - start - 1)):
                mask = (upper << (start + 1)) | 1 << start
                if (most := budget(mask)) > 0:
                    self._extend(mask, start, into, most)

    def order(self, mask: int) -> list[int]:
        """The cheapest cycle from the set's lowest node on; of two directions the lower."""
        start = following = (mask & -mask).bit_length() - 1
        rest, least = mask, self.cost[mask]
        backwards: list[int] = []
        while rest.bit_count() > 1:
            path = self._paths[rest]
            ends = members(rest ^ 1 << start)
            last = next(j for j in ends if path[j] + self.hop[j][following] == least)
            backwards.append(last)
            least, following = path[last], last
            rest ^= 1 << last
        order = [start, *reversed(backwards)]
        mirrored = [start, *backwards]
        return min(order, mirrored) if self.length(mirrored) == self.cost[mask] else order

    def length(self, order: Sequence[int]) -> int:
        """Of the cycle through `order`, the way back included."""
        return sum(self.hop[i][j] for i, j in zip(order, [*order[1:], order[0]], strict=True))

    def _extend(self, mask: int, start: int, into: Sequence[Sequence[int]], most: int) -> None:
        path = [UNREACHED] * len(into)
        paths = self._paths
        ends = mask ^ 1 << start
        while ends:  # as `members`, which takes half as long again
            low = ends & -ends
            ends ^= low
            if (before := paths.get(mask ^ low)) is not None:
                j = low.bit_length() - 1
                path[j] = min(map(add, before, into[j]))
                self.relaxations += 1
        if min(path) < most:
            paths[mask] = path
            self.cost[mask] = min(map(add, path, into[start]))


def members(mask: int) -> Iterator[int]:
    """The nodes of a set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
