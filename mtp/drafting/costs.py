"""Measured seconds of rounds, by number of drafts and length of the context."""

import statistics
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

RECENT = 15
"""Measurements per cell, the latest ones; their median is the cell's cost."""
ENOUGH = 3
"""Measurements that a cell needs."""
LONGEST_S = 3600.0
"""Longer rounds are not recorded: the process was stopped, or the machine asleep."""
PACE_ROUNDS = 9
"""Rounds that show how fast the machine is at present."""
SHORTEST_BUCKET = 512
Cell = TypeVar("Cell", bound=Hashable)


class RecentSeconds(dict[Cell, deque[float]]):
    """The latest measurements of each cell."""

    def add(self, cell: Cell, seconds: float) -> None:
        self.setdefault(cell, deque(maxlen=RECENT)).append(seconds)

    def cost(self, cell: Cell) -> float | None:
        """The median of a cell, or None if it has too few measurements."""
        seconds = self.get(cell, ())
        return statistics.median(seconds) if len(seconds) >= ENOUGH else None


def bounded(seconds: Sequence[float]) -> list[float]:
    """Seconds by number of drafts, each at most those of more drafts.

    A wider round computes all that a narrower one does, and what else ran during a measurement
    only adds to it. So no round of k drafts seems more than k + 1 times as fast as a plain token.
    """
    return list(accumulate(reversed(seconds), min))[::-1]


def bucket_of(position: int) -> int:
    """The bucket of a context: 0 below 512 rows, 1 below 1,024, and so on by doubling."""
    return (position // SHORTEST_BUCKET).bit_length()


class RoundCosts:
    """The costs of one model on one machine. `k` = 0 is a plain token.

    A cell without measurements is estimated from the nearest measured context, scaled by the ratio
    of a depth that was measured in both; without any, from `probed`, which is measured at load.
    """

    def __init__(
        self,
        probed: Sequence[float] | Mapping[int, float] = (),
        cells: Mapping[tuple[int, int], Sequence[float]] | None = None,
    ) -> None:
        """`probed[k]`: seconds of a round of k drafts. `cells`: recent seconds by (bucket, k)."""
        by_k = probed if isinstance(probed, Mapping) else dict(enumerate(probed))
        self._probed = dict(by_k)
        self._paces: deque[float] = deque(maxlen=PACE_ROUNDS)
        """The seconds of the last rounds, relative to what their cells held before."""
        self._spent = 0.0
        """Seconds of all rounds."""
        self._tried_at: dict[int, float] = {}
        """`_spent` when a depth was last tried."""
        self._cells = RecentSeconds[tuple[int, int]](
            (cell, deque(seconds, RECENT)) for cell, seconds in (cells or {}).items()
        )

    def add(self, position: int, k: int, seconds: float, *, is_trial: bool = False) -> None:
        """Adds a measurement, unless no round can take that long: a stopped clock, a debugger.

        A trial shows the cost of its depth, other rounds show the machine's present pace, too.
        """
        if not 0 < seconds <= LONGEST_S:
            return
        self._spent += seconds
        cell = (bucket_of(position), k)
        if not is_trial and (measured := self._cells.cost(cell)) is not None:
            self._paces.append(seconds / measured)
        self._cells.add(cell, seconds / self._pace)

    def seconds_since_trial(self, k: int) -> float:
        """Seconds of all rounds since a policy last tried this depth in place of its best."""
        return self._spent - self._tried_at.get(k, 0.0)

    def begin_trial(self, position: int, k: int) -> None:
        """Forgets all but the newest measurements of a cell that is about to be measured again."""
        self._tried_at[k] = self._spent
        cell = self._cells.get((bucket_of(position), k), deque[float]())
        while len(cell) > ENOUGH:
            _ = cell.popleft()

    def seconds(self, position: int, k: int) -> float | None:
        """Seconds of a round of `k` drafts after `position` rows; None if nothing was measured."""
        seconds = self._usual_seconds(bucket_of(position), k)
        return None if seconds is None else seconds * self._pace

    @property
    def _pace(self) -> float:
        """The seconds of a round at present, relative to those in the cells.

        Heat and other programs slow rounds of all depths alike. A depth that was measured before
        is compared as if it had been measured now.
        """
        return statistics.median(self._paces) if len(self._paces) >= ENOUGH else 1.0

    def _usual_seconds(self, bucket: int, k: int) -> float | None:
        if (measured := self._cells.cost((bucket, k))) is not None:
            return measured
        buckets = {other for other, _ in self._cells} - {bucket}
        for near in sorted(buckets, key=lambda other: (abs(other - bucket), other)):
            if (there := self._cells.cost((near, k))) is not None:
                return there * self._scale(near, bucket)
        if k in self._probed:
            return self._probed[k] * self._probe_scale(bucket)
        return None

    def is_measured(self, position: int, k: int) -> bool:
        """Whether a round of `k` drafts was measured after about that many rows."""
        return self._cells.cost((bucket_of(position), k)) is not None

    def cells(self) -> Iterator[tuple[int, int, tuple[float, ...]]]:
        """(bucket, k, recent seconds) of all cells, to be saved."""
        for (bucket, k), seconds in sorted(self._cells.items()):
            yield bucket, k, tuple(seconds)

    @property
    def probed(self) -> tuple[float, ...]:
        """Seconds of the probed rounds, in the order of their numbers of drafts."""
        return tuple(self._probed.values())

    def _scale(self, near: int, bucket: int) -> float:
        """The cost of `bucket` relative to `near`, from the first depth measured in both."""
        for _, k in sorted(self._cells):
            here, there = self._cells.cost((bucket, k)), self._cells.cost((near, k))
            if here is not None and there is not None:
                return here / there
        return 1.0

    def _probe_scale(self, bucket: int) -> float:
        for k, probed in self._probed.items():
            if (here := self._cells.cost((bucket, k))) is not None:
                return here / probed
        return 1.0
