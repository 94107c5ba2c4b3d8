"""Steps of an answer in progress: progress through its prompt and log, and its rounds."""

from dataclasses import dataclass

from .types import Round, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Progress through the prompt, in rows."""

    rows: int
    total: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's next tokens, if requested; the first token's is 0."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Progress through the rounds of an earlier attempt; at `total` new rounds follow."""

    rounds: int
    total: int


Step = Prefilled | Rebuilt | Round
