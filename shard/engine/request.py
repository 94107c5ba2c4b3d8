"""One request: what it asked for, what it has emitted, and what it may do next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ...mtp.depth import DepthPolicy, FixedDepth, Plan
from ...mtp.grammar import Grammar
from ...mtp.sampler import Sampler
from ...mtp.seams import StopCondition
from ...mtp.steps import Step
from ...mtp.types import DraftPolicy, FinishReason, Round, Sampling
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


Phase = Literal["waiting", "prefill", "replay", "decode", "finished"]

MOST_UNREAD: Final = 256
"""Events that a slow reader may leave unread before its request pauses."""


def _ignore(_: object) -> None:
    pass


@dataclass(slots=True, eq=False)
class Request:
    """An answer in progress. The compute thread owns every field but `taken`."""

    prompt: Sequence[int]
    ends: Sequence[int]
    """The row behind each forward over the prompt: `prefill_ends`."""
    max_tokens: int
    sampler: Sampler
    ending: StopCondition
    name: str = ""
    attempt: int = 1
    """With its name these tell it from others on every stage."""
    k: int = 0
    """Drafts per round, at most."""
    depth: DepthPolicy = field(default_factory=lambda: FixedDepth(0))
    """How many tokens each round drafts while it is computed alone."""
    log: Sequence[Round] = ()
    """Rounds of an earlier attempt: its state is rebuilt from them, and none is emitted again."""
    top_logprobs: int | None = None
    """None: no log-probabilities; else the emitted token's and those of so many others."""
    background: bool = False
    """It begins, and its prompt is read, behind those that are not."""
    alone: str = ""
    """Why it shares no forward; empty where it may."""
    after_fault: bool = False
    """It is begun anew after a fault, so each round is read before the next one: that shows whether
    logits that are not finite are the target's or a draft's."""
    overlap: bool = True
    """Whether drafts are computed while the verifier's graph is built."""
    cache_salt: bytes = b""
    deliver: Callable[[Step], None] = _ignore
    """Takes progress and rounds."""
    finish: Callable[[FinishReason | BaseException], None] = _ignore
    """Takes the end, once: why the answer is over, or what went wrong with it."""

    phase: Phase = "waiting"
    rows: int = 0
    """Rows in the caches, without those of rounds in flight."""
    cached: int = 0
    """Rows of the prompt that came from a prefix store."""
    pending: int = 0
    """Tokens, at most, that rounds in flight will emit."""
    issued: int = 0
    """Rounds issued: names the noise of a round whose position only the device knows."""
    emitted: int = 0
    """Tokens of the answer, those of the log among them."""
    replayed: int = 0
    """Rounds of the log that were rebuilt."""
    token: int = 0
    """The last token; the next forward writes its row."""
    plan: Plan | None = None
    """What is left of the depth policy's last decision."""
    parked_at: int | None = None
    """The position from which on nothing is drafted: the drafter's logits were not finite."""
    checks: bool = False
    """A plain round shows whether the target or a draft gave logits that are not finite."""
    group: int | None = None
    """The requests that it shares forwards with; see `Scheduler`."""
    turn: int = 0
    """Number of the last piece of work that it took part in."""
    delivered: int = 0
    """Events that were delivered."""
    taken: int = 0
    """Events that its reader has taken; written by the reader's thread alone."""

    @property
    def key(self) -> tuple[str, int]:
        """Its name and attempt."""
        return self.name, self.attempt

    @property
    def room(self) -> int:
        """Tokens that a new round may emit."""
        return self.max_tokens - self.emitted - self.pending

    @property
    def position(self) -> int:
        """Rows that the next round begins behind, as far as the host knows."""
        return self.rows + self.pending

    @property
    def draft_limit(self) -> int:
        """The most tokens that its next round may draft."""
        if self.parked_at is not None or self.checks:
            return 0
        return max(0, min(self.k, self.room - 1))

    @property
    def paused(self) -> bool:
        """Whether its reader is too slow for more rounds."""
        return self.delivered - self.taken >= MOST_UNREAD

    @property
    def next_end(self) -> int:
        """The row behind the next forward over its prompt."""
        return next(end for end in self.ends if end > self.rows)

    def count(self, token: int) -> FinishReason | None:
        """Adds a token to the answer; why the answer ends with it, if it does."""
        self.emitted, self.token = self.emitted + 1, token
        reason = self.ending.push(token)
        if reason is None and self.emitted >= self.max_tokens:
            return "length"
        return reason

    def cut(self, ids: list[int]) -> tuple[FinishReason | None, list[int]]:
        """Adds ids to the answer, up to the one at which plain decoding would have ended."""
        for count, token in enumerate(ids, 1):
            if (reason := self.count(token)) is not None:
                return reason, ids[:count]
        return None, ids
