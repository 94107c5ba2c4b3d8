"""What the generator's engine is asked for, and what of an earlier attempt it may go on with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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
    rebuild_all: bool = False
    """Nothing that a stage holds of an earlier attempt is kept."""
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
    def keeps(self) -> bool:
        """Whether stages may go on with what they hold of an earlier attempt.

        Not where drafts were rejected: a stage that was lost before they were taken back holds rows
        that are no part of the answer.
        """
        whole = all(recorded.forward.rows == len(recorded.tokens) for recorded in self.replay[1:])
        return self.attempt > 1 and not self.rebuild_all and whole

    @property
    def anew(self) -> bool:
        """Whether something failed so that nothing of the attempt before is gone on with."""
        return self.rebuild_all and self.attempt > 1

    @property
    def ids(self) -> list[int]:
        """The prompt's and those of the rounds that were handed out."""
        return [*self.prompt, *(token for recorded in self.replay for token in recorded.tokens)]

    @property
    def committed(self) -> int:
        """Rows that every stage had written when the last of the replayed rounds was handed out.

        Where there are none, the prompt's: the stages have written so many of it at most.
        """
        tokens = sum(len(recorded.tokens) for recorded in self.replay)
        return len(self.prompt) + max(0, tokens - 1)

    @property
    def policy(self) -> DraftPolicy:
        if self.k == 0:
            return "none"
        return "adaptive" if self.adaptive else "fixed"

    def ends_a_forward(self, rows: int, prefill_ends: Sequence[int]) -> bool:
        """Whether the recorded forwards can go on behind so many rows."""
        prompt = len(self.prompt)
        if rows <= prompt:
            return rows in (0, *prefill_ends)
        tokens = (len(recorded.tokens) for recorded in self.replay[1:])
        return rows in accumulate(tokens, initial=prompt)
