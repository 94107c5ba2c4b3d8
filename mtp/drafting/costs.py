"""Measured seconds of rounds, by requests, context, rows, and drafts of the head."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

RECENT: Final = 31
"""Measurements per form, the latest ones; their median is its cost: of half as many, a stretch in
which other programs run would be most."""
ENOUGH: Final = 3
"""Measurements that a form needs."""
LONGEST_S: Final = 3600.0
"""Longer rounds are not recorded: the process was stopped, or the machine asleep."""
PACE_ROUNDS: Final = 5
"""Rounds that show how fast the machine is at present: the fewer, the sooner they follow it."""
PACE_AFTER: Final = 9
"""Measurements that a form needs before its rounds do: else the pace would for ever make up for
what was wrong with the first few."""
SHORTEST_BUCKET: Final = 512


def size_bucket(size: int) -> int:
    """The bucket of a number of requests: one for each of 1 to 4, then 5 to 8, 9 to 16, …"""
    return size if size <= 4 else 2 + (size - 1).bit_length()


def context_bucket(position: int) -> int:
    """The bucket of a context: 0 below 512 rows, 1 below 1,024, and so on by doubling."""
    return (position // SHORTEST_BUCKET).bit_length()


def interpolated(seconds: Mapping[int, float]) -> list[float]:
    """Seconds by number of drafts, from 0 to the largest of those in `seconds`."""
    depths = sorted(seconds)
    pairs = [(low, high) for low, high in pairwise(depths) for _ in range(low, high)]
    return [
        seconds[low] + (seconds[high] - seconds[low]) * (k - low) / (high - low)
        for k, (low, high) in enumerate(pairs)
    ] + [seconds[depths[-1]]]


class Form(NamedTuple):
    """All that decides the seconds of a round."""

    size: int
    """The bucket of its number of requests."""
    context: int
    """The bucket of its context; 0 for several requests."""
    width: int
    """Drafts for which each request has a row; more than `head` if some are copied."""
    head: int
    """Drafts of the head, or 0 if it does not run."""

    @classmethod
    def of(cls, size: int, position: int, width: int, head: int) -> "Form":
        """The form of a round of `size` requests, the only one of which has `position` rows."""
        return cls(size_bucket(size), context_bucket(position) if size == 1 else 0, width, head)


class CostTable:
    """Seconds of a request's share of rounds, of one model on one machine.

    A form of one request without measurements is estimated from the nearest measured context,
    scaled by a form that was measured in both; without any, from what was probed at load. One of
    several requests is estimated from two of one or two drafts more, or less. Copies are estimated
    from the round without them.
    """

    def __init__(
        self,
        probed: Sequence[float] = (),
        cells: Mapping[tuple[int, int], Sequence[float]] | None = None,
    ) -> None:
        """`probed`: see `probe`. `cells`: recent seconds of one request's rounds by (bucket of the
        context, drafts of the head)."""
        self._recent = dict[Form, deque[float]]()
        self._medians = dict[Form, float]()
        """The costs of the forms with enough measurements."""
        self._probed = dict[int, float]()
        self.copy_ratios = dict[tuple[int, int], float]()
        """Probed seconds of rounds that copy, by (bucket of sizes, length), relative to those that
        do not."""
        self._paces = dict[int, deque[float]]()
        """The seconds of the last rounds, by size, relative to what their form cost before."""
        self._pace = dict[int, float]()
        """Their medians: heat and other programs slow rounds of all forms alike, so one that was
        measured before is compared as if it had been measured now."""
        self._spent = dict[int, float]()
        """Seconds of all rounds, by size."""
        self._tried_at = dict[int, float]()
        """`_spent` at the last trial, by size."""
        self.row_seconds = 0.0
        """Seconds in which the head reads one waiting row."""
        self.probe(probed)
        for (context, k), seconds in (cells or {}).items():
            self._set(Form(1, context, k, k), deque(seconds, RECENT))

    def probe(self, probed: Sequence[float]) -> None:
        """Sets the probed seconds of one request's rounds of 0, 1, … drafts of the head."""
        self._probed = dict(enumerate(probed))

    def add(self, form: Form, seconds: float, *, is_trial: bool = False) -> None:
        """Adds a measurement, unless no round can take that long: a stopped clock, a debugger.

        A trial shows the cost of its form, other rounds show the machine's present pace, too.
        """
        if not 0 < seconds <= LONGEST_S:
            return
        size = form.size
        self._spent[size] = self._spent.get(size, 0.0) + seconds
        recent = self._recent.get(form) or deque(maxlen=RECENT)
        if not is_trial and len(recent) >= PACE_AFTER:
            paces = self._paces.setdefault(size, deque(maxlen=PACE_ROUNDS))
            paces.append(seconds / self._medians[form])
            if len(paces) >= ENOUGH:
                self._pace[size] = _median(paces)
        recent.append(seconds / self._pace.get(size, 1.0))
        self._set(form, recent)

    def _set(self, form: Form, recent: deque[float]) -> None:
        self._recent[form] = recent
        if len(recent) >= ENOUGH:
            self._medians[form] = _median(recent)

    def seconds(self, form: Form) -> float | None:
        """Seconds of a round at the present pace; None if none was measured."""
        if (seconds := self._medians.get(form)) is None:
            return self.estimate(form)
        return seconds * self._pace.get(form.size, 1.0)

    def is_measured(self, form: Form) -> bool:
        """Whether rounds of this very form were measured."""
        return form in self._medians

    def seconds_since_trial(self, size: int) -> float:
        """Seconds of all rounds of this size since the last trial."""
        return self._spent.get(size, 0.0) - self._tried_at.get(size, 0.0)

    def begin_trial(self, form: Form) -> None:
        """Forgets all but the newest measurements of a form that is about to be measured again,
        since a trial alone is noisy; all of one that copies, whose trial ends with its cost."""
        self._tried_at[form.size] = self._spent.get(form.size, 0.0)
        recent = self._recent.pop(form, ())
        _ = self._medians.pop(form, None)
        if form.width == form.head:
            self._set(form, deque(list(recent)[-ENOUGH:], RECENT))

    def estimate(self, form: Form) -> float | None:
        """Seconds of a round at the present pace, as other forms let expect them, if they do."""
        size, context, width, head = form
        if size == 1:
            others = [
                (abs(each.context - context), each.context, seconds)
                for each, seconds in self._medians.items()
                if each.context != context
                and (each.width, each.head, each.size) == (width, head, 1)
            ]
            if others:
                _, near, seconds = min(others)
                return seconds * self._scale(near, context) * self._pace.get(1, 1.0)
        if width > head:
            base = self.seconds(Form(size, context, head, head))
            ratio = self.copy_ratios.get((size, width))
            return None if base is None or ratio is None else base * ratio
        if size > 1:
            return self._continued(form)
        if head not in self._probed:
            return None
        return self._probed[head] * self._probe_scale(context) * self._pace.get(1, 1.0)

    def _continued(self, form: Form) -> float | None:
        """The cost of one draft more, or one less, than in two forms that were measured, if each
        draft costs the same."""
        for step in (-1, 1):
            depths = form.head + step, form.head + 2 * step
            near, far = (self._medians.get(form._replace(width=k, head=k)) for k in depths)
            if near is not None and far is not None:
                least = near if step < 0 else near / 2
                return max(2 * near - far, least) * self._pace.get(form.size, 1.0)
        return None

    def _scale(self, near: int, context: int) -> float:
        """The cost of one context relative to another, from the first form measured in both."""
        measured = self._medians
        for form in sorted(each for each in measured if each.size == 1 and each.context == context):
            if (there := measured.get(form._replace(context=near))) is not None:
                return measured[form] / there
        return 1.0

    def _probe_scale(self, context: int) -> float:
        for k, probed in self._probed.items():
            if (here := self._medians.get(Form(1, context, k, k))) is not None:
                return here / probed
        return 1.0

    def cells(self) -> Iterator[tuple[int, int, tuple[float, ...]]]:
        """(Bucket of the context, drafts of the head, recent seconds) of one request's rounds
        without copies, to be saved."""
        for (size, context, width, head), seconds in sorted(self._recent.items()):
            if size == 1 and width == head:
                yield context, head, tuple(seconds)

    @property
    def probed(self) -> tuple[float, ...]:
        """Seconds of the probed rounds, in the order of their numbers of drafts."""
        return tuple(self._probed.values())


def _median(seconds: Iterable[float]) -> float:
    """The same as `statistics.median`, in half of its time: each round needs two."""
    ordered = sorted(seconds)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
