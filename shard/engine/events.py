"""What the engine tells of one answer: progress, text with its rounds, and the end."""

from dataclasses import dataclass

from ...mtp.steps import Prefilled
from ...mtp.types import FinishReason, GenerationStats, Round


@dataclass(frozen=True, slots=True)
class Delta:
    """One round and the text that became certain with it."""

    round: Round
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end, with the text that was held back until now."""

    reason: FinishReason
    text: str
    stats: GenerationStats
    identity: str
    batch_identity: str = "off"
    stopped_by: str = ""
    """The stop string that ended it, if one did."""


@dataclass(frozen=True, slots=True)
class Retold:
    """Rounds of an earlier attempt were rebuilt; `text` is what it handed out of them."""

    done: int
    total: int
    text: str


EngineEvent = Prefilled | Retold | Delta | Done
