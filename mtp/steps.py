"""What an answer gives while it runs: progress, and its rounds."""

from dataclasses import dataclass

from .types import Round


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Progress through the prompt, in rows."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Progress through the rounds of an earlier attempt; at `total` the answer goes on."""

    done: int
    total: int


Step = Prefilled | Rebuilt | Round
