"""What a generation yields while it runs: waits, progress, and the rounds of its answer."""

from collections.abc import Generator
from dataclasses import dataclass

from .seams import Wait
from .types import FinishReason, Round


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


Step = Wait | Prefilled | Rebuilt | Round
Steps = Generator[Step, None, FinishReason | None]
