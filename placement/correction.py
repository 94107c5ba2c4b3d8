"""What layers take at work, and how it corrects what they took when they were probed. Pure.

A node's layers are probed once, by the least of a few runs. Later its GPU may be shared, hot or at
another clock, or the probe itself may have met a busy machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from .cluster import LayerProfile

WINDOW = 5
"""Forwards whose least is one observation, as a probe is the least of its repeats: what disturbs
one forward does not count, what stays for longer than some tenths of a second is in all of them."""
FIRST = 9
"""Observations whose median begins the mean: one poisoned by a cold cache would take long to fade.
Nothing is told before."""
HALF_LIFE = 32
"""Observations after which an older one counts half. That is 160 forwards of a row, about one
answer: longer than the slices in which programs share a GPU, far shorter than heating up takes."""
OUTLIER = 4.0
"""An observation counts as at most so many times the mean, and so moves it by 6.4 % at most: a
machine that swaps or is stopped again and again is followed step by step, and nothing is lost by
one bad second. Only upwards: nothing makes a forward quicker than it is."""
FADE_S = 3600.0
"""Age at which half of a correction is still believed. A node that is avoided because of one has
no other way back: after four hours without work a fourfold slowness is forgotten."""
UNCHANGED = 1.15
"""A factor nearer to 1 than this is none: probes run back to back on empty caches, work has pauses
and up to a thousand tokens before it, and nodes that have worked are weighed against idle ones."""

MOST = 1000.0
"""A change counts as at most so many times, either way: keeps a peer's absurd figure finite."""

Rows = int


class LayerMean:
    """The exponentially weighted mean of one layer's seconds in forwards of one number of rows."""

    def __init__(self, window: int = WINDOW) -> None:
        """The first `window` forwards are dropped: they compile kernels and meet cold caches."""
        self._window = window
        self._warm = False
        self._least, self._seen = 0.0, 0
        self._first: list[float] = []
        self._mean = 0.0
        self.count = 0
        """Forwards that the mean is of; 0 while there is none."""

    @property
    def seconds(self) -> float:
        """0 while `count` is."""
        return self._mean

    def add(self, seconds: float) -> None:
        """One forward's, for one layer. What is no time does not count."""
        if not seconds > 0:
            return
        self._least = min(self._least, seconds) if self._seen else seconds
        self._seen += 1
        if self._seen < self._window:
            return
        self._seen = 0
        if self._warm:
            self._observe(self._least)
        self._warm = True

    def _observe(self, seconds: float) -> None:
        if self.count:
            new = 1 - 0.5 ** (1 / HALF_LIFE)
            self._mean += new * (min(seconds, OUTLIER * self._mean) - self._mean)
            self.count += self._window
            return
        self._first.append(seconds)
        if len(self._first) == FIRST:
            self._mean, self.count = median(self._first), FIRST * self._window
            self._first.clear()


@dataclass(frozen=True, slots=True)
class ObservedTime:
    """What one layer took at work lately, and how long ago that was."""

    seconds: float
    age_s: float = 0.0


def corrected(
    probed: LayerProfile,
    at_work: Mapping[Rows, ObservedTime],
    verify_rows: Rows,
    prefill_rows: Rows,
) -> LayerProfile:
    """The profile to plan with: `probed` where nothing else is known, else nearer to `at_work`.

    What slows a row through the layers slows a verify and the tail as well: they keep their
    proportion to it unless they were measured themselves. The tail never is.
    """
    decode = _factor(probed.decode_s, at_work.get(1))
    verify = _factor(probed.verify_s, at_work.get(verify_rows), decode)
    return replace(
        probed,
        decode_s=probed.decode_s * decode,
        verify_s=probed.verify_s * verify,
        prefill_s=probed.prefill_s * _factor(probed.prefill_s, at_work.get(prefill_rows)),
        tail_s=probed.tail_s * decode,
    )


def _factor(probed_s: float, now: ObservedTime | None, expected: float = 1.0) -> float:
    """How many times the probed figure counts: `expected`, unless work showed something else."""
    if now is None or probed_s <= 0:
        return expected
    change = min(max(now.seconds / probed_s / expected, 1 / MOST), MOST)
    change **= 0.5 ** (now.age_s / FADE_S)
    return expected * change if max(change, 1 / change) >= UNCHANGED else expected
