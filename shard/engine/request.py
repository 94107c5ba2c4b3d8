"""One request: its parameters, the tokens that it has emitted, and the work that it may do next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ...mtp.drafting.depth import DepthPolicy, FixedDepth, Plan
from ...mtp.drafting.lookup_drafts import PromptLookup
from ...mtp.grammar import GrammarMatcher
from ...mtp.sampler import Sampler
from ...mtp.seams import StopCondition
from ...mtp.steps import Step
from ...mtp.types import CacheTier, DraftPolicy, FinishReason, Round, Sampling
from ..checkpoint.prefix_stream import ReceivedPrefix
from ..text.image_rows import PreparedImage
from ..text.stop_strings import StopStrings
from ..text.tools.channels import AnswerFormat
from .loop_guard import LoopGuard, LoopLimits
from .prefixes.prompt_path import PromptPath
from .prompt_images import PromptImages


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as it reaches the engine: its prompt is tokenised, and its limits are checked."""

    request: str
    attempt: int
    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int
    stop: Sequence[str]
    k: int
    """Drafts per round, at most; 0: none."""
    drafting_reason: str
    """Why it does not draft; empty where it does."""
    replay: Sequence[Round] = ()
    """The rounds that an earlier attempt of the answer delivered."""
    after_fault: bool = False
    """Whether a forward of an earlier attempt may have failed: then this one shares no forward, and
    in a pipeline it begins without a cached prefix."""
    ignore_end: bool = False
    continues: bool = False
    """Whether the answer continues a text, so that a leading space is part of it."""
    adaptive: bool = False
    """Whether measured costs decide how many tokens each round drafts, up to `k`."""
    initial_k: int = 0
    """Drafts of an adaptive round until depths can be compared; 0: `k`."""
    k_source: str = ""
    """The source of `initial_k`, or of `k` if it is fixed, for a person."""
    lookup: bool = False
    """Whether it may copy drafts from its own tokens, in lengths that measured costs decide."""
    top_logprobs: int | None = None
    """Alternatives whose log-probabilities are returned with each token's; None: not even that."""
    scores_prompt: bool = False
    """Whether the prompt's tokens get log-probabilities too, with `top_logprobs`."""
    fills_gap: bool = False
    """Whether the tokens that mark gaps end the answer, too."""
    async_draft_eval: bool | None = None
    """None: the engine's own setting."""

    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    """How the answer marks its content, the only part in which `stop` applies; default: all."""

    grammar: GrammarMatcher | None = None
    """A grammar that the answer must match, in its initial state; used by this attempt only."""

    loop_limits: LoopLimits | None = None
    """Limits of an answer that repeats itself, never of one under a grammar; None: it has none."""

    cache_salt: bytes = b""
    """Cached prefixes are shared only between requests of equal salts; see `PrefixCache`."""
    uses_cache: bool = True
    """Whether it may begin behind a cached prefix, and its own states are cached."""
    received: ReceivedPrefix | None = None
    """The state behind a prefix that another replica's runner sent."""
    images: Sequence[PreparedImage] = ()
    """The images of the prompt's rows with ids below 0, in order."""
    fetch_s: float = 0.0
    """Seconds that it waited for that state: part of the time to its first token."""
    background: bool = False
    """Whether requests in the foreground are admitted, and have their prompts read, first."""

    def stop_strings(self) -> StopStrings:
        """A matcher for `stop`, for one run of the answer."""
        return StopStrings(self.stop, self.answer_format, self.prompt)

    def loop_guard(self) -> LoopGuard | None:
        """A guard against loops, for one run of the answer; None: it may repeat itself."""
        if self.loop_limits is None or self.grammar is not None or self.sampling.min_tokens:
            return None
        return LoopGuard(self.loop_limits, self.prompt, self.answer_format.calls)

    @property
    def ids(self) -> list[int]:
        """The prompt's ids, and those of the rounds that were delivered."""
        return [*self.prompt, *(token for round_ in self.replay for token in round_.tokens)]

    @property
    def policy(self) -> DraftPolicy:
        """How the number of drafts is chosen, as the stats report it."""
        if self.k == 0:
            return "adaptive" if self.lookup else "none"
        return "adaptive" if self.adaptive else "fixed"


Phase = Literal["waiting", "prefill", "replay", "decode", "finished"]
"""`replay`: the rounds of an earlier attempt are repeated behind the prompt."""

MAX_UNREAD_EVENTS: Final = 256
"""Events that a slow reader may leave unread before its request pauses."""


def _ignore(_: object) -> None:
    pass


@dataclass(slots=True, eq=False)
class DraftProgress:
    """How one request drafts, and its progress in that."""

    depth: DepthPolicy = field(default_factory=lambda: FixedDepth(0))
    """Decides how many tokens a round drafts that it shares with no other request."""
    lookup: PromptLookup | None = None
    """Drafts that are copied from its own tokens, unless it copies nothing."""
    overlap: bool = True
    """Whether drafts are computed while the verifier's graph is built."""
    plan: Plan | None = None
    """The rest of the depth policy's last decision."""
    parked_at: int | None = None
    """The position at which drafting ended because the drafter's logits were not finite."""


@dataclass(slots=True, eq=False)
class ReplayProgress:
    """The rounds of an earlier attempt: a state is rebuilt from them, and none is emitted again."""

    log: Sequence[Round] = ()
    rows: int = 0
    """Rows of the forwards that rebuild the log, if they were measured to give what single steps
    give; else 0, and each forward has as many rows as the log records."""
    rebuilt: int = 0
    """Rounds of the log that were rebuilt."""

    @property
    def is_done(self) -> bool:
        """Whether all rounds were rebuilt."""
        return self.rebuilt == len(self.log)


@dataclass(slots=True, eq=False)
class Embedding:
    """The end of a request that has no answer."""

    dimensions: int
    pooling: str
    """How it is made of the hidden states of the last forward: a key of `POOLINGS`."""
    vector: bytes = b""
    """Float32, once the prompt is read."""


@dataclass(slots=True, eq=False)
class Request:
    """A request in progress. The compute thread owns every field but `events_read`."""

    prompt: Sequence[int]
    ends: Sequence[int]
    """The row behind each forward over the prompt: `prefill_ends`."""
    max_tokens: int
    sampler: Sampler
    stop_condition: StopCondition
    name: str = ""
    attempt: int = 1
    """Name and attempt identify the request's state on every stage."""
    k: int = 0
    """Drafts per round, at most."""
    drafts: DraftProgress = field(default_factory=lambda: DraftProgress())
    replay: ReplayProgress = field(default_factory=lambda: ReplayProgress())
    loop_guard: LoopGuard | None = None
    """Ends an answer that repeats itself, unless it may."""
    top_logprobs: int | None = None
    """Alternatives whose log-probabilities are returned with each token's; None: not even that."""
    scores_prompt: bool = False
    """Whether the prompt's tokens get log-probabilities too: all its rows are read, alone."""
    background: bool = False
    """Whether requests in the foreground are admitted, and have their prompts read, first."""
    batching_reason: str = ""
    """Why it shares no decode forward; empty where it may."""
    batches_prompt: bool = False
    """Whether its prompt may share a forward: only where a batch was measured to change no bit,
    since the state behind a prompt is kept for other requests."""
    after_fault: bool = False
    """Whether an earlier attempt may have failed in a forward. Then each round is read before the
    next one is issued, which shows whether the target or a draft gave logits that are not finite.
    """
    cache_salt: bytes = b""
    uses_cache: bool = True
    """Whether it may begin behind a cached prefix, and its own states are cached."""
    reads_to: int = 0
    """The row at which it ends without an answer, as only its cached states are of use; or 0."""
    received: ReceivedPrefix | None = None
    """A state that another runner sent, until the request begins."""
    images: PromptImages | None = None
    """The images of its prompt; None: it has none."""
    embedding: Embedding | None = None
    """What it ends with in place of an answer."""
    deliver: Callable[[Step], None] = _ignore
    """Called with progress and rounds."""
    finish: Callable[[FinishReason | BaseException], None] = _ignore
    """Called once, at the end, with the reason or the error."""

    phase: Phase = "waiting"
    rows: int = 0
    """Rows in the caches, without those of rounds in flight."""
    cached_rows: int = 0
    """Rows of the prompt that came from the prefix cache."""
    cached_tier: CacheTier = ""
    """The tier that they came from."""
    pending_tokens: int = 0
    """Upper bound of the tokens that rounds in flight will emit."""
    issued_rounds: int = 0
    """Rounds issued so far: seeds the noise of a round whose position only the device knows."""
    emitted_tokens: int = 0
    """Tokens of the answer, those of the log included."""
    token: int = 0
    """The last token; the next forward writes its row."""
    round_size: int = 1
    """Requests of its last round, itself included."""
    checks_target: bool = False
    """Whether its next round is plain, to show whether the target or a draft gave logits that are
    not finite."""
    group: int | None = None
    """Number of the requests that it shares forwards with; see `Scheduler`."""
    turn: int = 0
    """Number of the last piece of work that it took part in."""
    events_delivered: int = 0
    events_read: int = 0
    """Written by the reader's thread alone."""

    @property
    def key(self) -> tuple[str, int]:
        """Name and attempt."""
        return self.name, self.attempt

    @property
    def path(self) -> PromptPath:
        """The forwards over its prompt, as the prefix cache finds states behind them."""
        return PromptPath(self.prompt, self.ends, self.cache_salt, drafts=self.k > 0)

    def follows(self, other: "Request") -> bool:
        """Whether it will begin after a cached prefix of the same prompt that `other` reads."""
        return (
            self.uses_cache
            and other.uses_cache
            and len(self.ends) > 1
            and (self.cache_salt, self.k > 0) == (other.cache_salt, other.k > 0)
            and self.background >= other.background
            and self.prompt == other.prompt
        )

    @property
    def delta(self) -> int:
        """The difference of positions behind its prompt from row numbers."""
        return 0 if self.images is None else self.images.delta

    @property
    def remaining_tokens(self) -> int:
        """Tokens that a new round may emit at most."""
        return self.max_tokens - self.emitted_tokens - self.pending_tokens

    @property
    def position(self) -> int:
        """Rows before the next round, as far as the host knows."""
        return self.rows + self.pending_tokens

    @property
    def draft_limit(self) -> int:
        """Tokens that its next round may draft at most."""
        if self.drafts.parked_at is not None or self.checks_target:
            return 0
        return max(0, min(self.k, self.remaining_tokens - 1))

    @property
    def most_drafts(self) -> int:
        """Tokens that one of its rounds may draft or copy at most."""
        return max(self.k, 0 if self.drafts.lookup is None else self.drafts.lookup.policy.longest)

    @property
    def copy_limit(self) -> int:
        """Tokens that its next round may copy at most."""
        return 0 if self.checks_target else max(0, self.remaining_tokens - 1)

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is read: its state may be in a group, and must outlive changes."""
        return self.phase in ("replay", "decode")

    @property
    def is_paused(self) -> bool:
        """Whether its reader has left too many events unread for more rounds."""
        return self.events_delivered - self.events_read >= MAX_UNREAD_EVENTS

    @property
    def is_read(self) -> bool:
        """Whether it has read the rows that it is for; never true of a request with an answer."""
        return 0 < self.reads_to <= self.rows

    @property
    def next_end(self) -> int:
        """The row behind the next forward over its prompt."""
        return next(end for end in self.ends if end > self.rows)

    def count(self, token: int) -> FinishReason | None:
        """Adds a token to the answer. Returns why the answer ends with it, if it does."""
        self.emitted_tokens, self.token = self.emitted_tokens + 1, token
        if self.drafts.lookup is not None:
            self.drafts.lookup.push(token)
        reason = self.stop_condition.push(token)
        if reason is None and self.emitted_tokens >= self.max_tokens:
            return "length"
        if reason is None and self.loop_guard is not None and self.loop_guard.push(token):
            return "length"
        return reason

    def extend(self, ids: list[int]) -> tuple[FinishReason | None, list[int]]:
        """Adds ids to the answer, up to the one at which plain decoding would have ended.

        Returns why the answer ends, if it does, and the ids that were added.
        """
        for count, token in enumerate(ids, 1):
            if (reason := self.count(token)) is not None:
                return reason, ids[:count]
        return None, ids
