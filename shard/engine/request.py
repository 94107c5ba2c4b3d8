"""What the generator's engine is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...mtp.grammar import Grammar
from ...mtp.types import DraftPolicy, Round, Sampling
from ..text.channels import AnswerFormat
from ..text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request whose prompt is tokenised. `k` 0 drafts nothing, because of `drafting_reason`."""

    request: str
    attempt: int
    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int
    stop: Sequence[str]
    k: int
    drafting_reason: str
    replay: Sequence[Round] = ()
    alone: bool = False
    """It shares no forward, since one may have failed; over stages it begins behind no prefix."""
    ignore_end: bool = False
    continues: bool = False
    """The answer goes on in a text, so a space that begins it is part of it."""
    adaptive: bool = False
    """`k` is the most that a round drafts; fewer, or none, where measured costs say so."""
    top_logprobs: int | None = None
    """None: no log-probabilities; else the emitted token's and those of so many others."""
    async_draft_eval: bool | None = None
    """None: as the engine was opened with."""

    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    """How the answer marks its content, in which alone `stop` counts; by default all is that."""

    grammar: Grammar | None = None
    """What the answer may be; this attempt's alone, with nothing of the answer taken yet."""

    cache_salt: bytes = b""
    """Only prefixes that were kept with the same one are found; see `PrefixCache`."""
    background: bool = False
    """It has room, and its prompt is read, behind those that are not."""

    def stop_strings(self) -> StopStrings:
        """For one run of the answer."""
        return StopStrings(self.stop, self.answer_format, self.prompt)

    @property
    def ids(self) -> list[int]:
        """The prompt's and those of the rounds that were handed out."""
        return [*self.prompt, *(token for recorded in self.replay for token in recorded.tokens)]

    @property
    def policy(self) -> DraftPolicy:
        if self.k == 0:
            return "none"
        return "adaptive" if self.adaptive else "fixed"
