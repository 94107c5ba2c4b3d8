"""A clock for tests."""

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Seconds; each call advances the clock by `step`."""

    now: float = 100.0
    step: float = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now
