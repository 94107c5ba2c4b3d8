"""Events of one answer: progress, text with its rounds, and the end."""

from dataclasses import dataclass

from ...mtp.types import FinishReason, GenerationStats, Prefilled, Round


@dataclass(frozen=True, slots=True)
class Delta:
    """One round and the text that became certain with it."""

    round: Round
    text: str


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer, with the text that was withheld until now."""

    reason: FinishReason
    text: str
    stats: GenerationStats
    identity: str
    batch_identity: str = "off"
    stopped_by: str = ""
    """The stop string that ended the answer, if one did."""


@dataclass(frozen=True, slots=True)
class RebuiltText:
    """Progress through the rounds of an earlier attempt, with the text that it delivered."""

    rounds: int
    total: int
    text: str


EngineEvent = Prefilled | RebuiltText | Delta | AnswerEnd
