"""A clock that only tests move."""

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Seconds; stands still, but for `step` from one look to the next."""

    now: float = 100.0
    step: float = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now
