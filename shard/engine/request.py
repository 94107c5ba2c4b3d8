"""One request: what it asks, the tokens that it has emitted, and the work that it may do next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ...mtp.drafting.lookup_drafts import PromptLookup
from ...mtp.drafting.round_policy import DraftDemand, RoundChoice
from ...mtp.grammar import GrammarMatcher
from ...mtp.sampler import Sampler
from ...mtp.seams import StopCondition
from ...mtp.types import CacheTier, DraftPolicy, FinishReason, Round, Sampling, Step
from ...proto import peer_pb2 as pb
from ..checkpoint.prefix_files import ReceivedPrefix
from ..text.image_rows import PreparedImage
from ..text.stop_strings import StopStrings
from ..text.tools.channels import AnswerFormat
from .loop_guard import LoopGuard, LoopLimits
from .prefixes.prompt_path import PromptPath
from .prompt_images import PromptImages
from .reading.layer_read import LayerRead
from .reading.link import Readers

Phase = Literal["waiting", "prefill", "replay", "decode", "finished"]
"""`replay`: the rounds of an earlier attempt are repeated after the prompt."""

MAX_UNREAD_EVENTS: Final = 256
"""Events that a slow reader may leave unread before its request pauses."""


def _ignore(_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Parameters:
    """A request as it reaches the engine: its prompt is tokenised, and its limits are checked.

    `limits`, `drafting`, `output` and `sharing` are the groups of `GenerateRequest`. Nothing
    changes them.
    """

    name: str
    attempt: int
    prompt: Sequence[int]
    sampling: Sampling
    limits: pb.Limits
    """`max_tokens` is the budget: what fits the context."""
    drafting: pb.Drafting
    output: pb.Output = field(default_factory=pb.Output)
    sharing: pb.Sharing = field(default_factory=pb.Sharing)
    replay: Sequence[Round] = ()
    """The rounds that an earlier attempt of the answer delivered."""
    fills_gap: bool = False
    """Whether the tokens that mark gaps end the answer, too."""
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    """How the answer marks its content, the only part in which `stop` applies; default: all."""
    grammar: GrammarMatcher | None = None
    """A grammar that the answer must match, in its initial state; used by this attempt only."""
    loop_limits: LoopLimits | None = None
    """Limits of an answer that repeats itself, never of one under a grammar; or None."""
    images: Sequence[PreparedImage] = ()
    """The images of the prompt's rows with ids below 0, in order."""
    received: ReceivedPrefix | None = None
    """The state after a prefix that another replica's runner sent."""
    readers: Readers | None = None
    """Runners that may read its prompt's upper layers."""
    fetch_s: float = 0.0
    """Seconds that it waited for that state: part of the time to its first token."""

    @property
    def key(self) -> tuple[str, int]:
        """Name and attempt."""
        return self.name, self.attempt

    @property
    def k(self) -> int:
        """Drafts per round, at most."""
        return self.drafting.num_draft_tokens

    @property
    def top_logprobs(self) -> int | None:
        """Alternatives whose log-probabilities are returned with each token's, or None without."""
        return self.output.top_logprobs if self.output.HasField("top_logprobs") else None

    @property
    def uses_cache(self) -> bool:
        """Whether it may begin after a cached prefix, and its own states are cached."""
        return self.sharing.cache or not self.sharing.HasField("cache")

    @property
    def ids(self) -> list[int]:
        """The prompt's ids, and those of the rounds that were delivered."""
        return [*self.prompt, *(token for round_ in self.replay for token in round_.tokens)]

    @property
    def policy(self) -> DraftPolicy:
        """How the number of drafts is chosen, as the stats report it."""
        if self.k == 0:
            return "adaptive" if self.drafting.prompt_lookup else "none"
        return "adaptive" if self.drafting.adaptive_draft else "fixed"

    def stop_strings(self) -> StopStrings:
        """A matcher for `stop`, for one run of the answer."""
        return StopStrings(self.limits.stop, self.answer_format, self.prompt)

    def loop_guard(self) -> LoopGuard | None:
        """A guard against loops, for one run of the answer; None if it may repeat itself."""
        if self.loop_limits is None or self.grammar is not None or self.sampling.min_tokens:
            return None
        return LoopGuard(self.loop_limits, self.prompt, self.answer_format.calls)


@dataclass(slots=True, eq=False)
class DraftProgress:
    """How one request drafts, and its progress in that."""

    demand: DraftDemand = field(default_factory=DraftDemand)
    """Its drafts of the head."""
    lookup: PromptLookup | None = None
    """Drafts that are copied from its own tokens, unless it copies nothing."""
    overlap: bool = True
    """Whether drafts are computed while the verifier's graph is built."""
    choice: RoundChoice | None = None
    """Its last round; None before the first."""
    parked_at: int | None = None
    """The position at which drafting ended because the drafter's logits were not finite."""
    lookup_reason: str = ""
    """Why it copies nothing, if another stage of a split model said so."""


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

    parameters: Parameters
    ends: Sequence[int]
    """The row after each forward over the prompt: `prefill_ends`."""
    sampler: Sampler
    stop_condition: StopCondition
    drafts: DraftProgress = field(default_factory=DraftProgress)
    replay: ReplayProgress = field(default_factory=ReplayProgress)
    loop_guard: LoopGuard | None = None
    """Ends an answer that repeats itself, unless it may."""
    images: PromptImages | None = None
    """The images of its prompt, if it has some."""
    embedding: Embedding | None = None
    """The result of a request to an embedder, in place of an answer."""
    read: LayerRead | None = None
    """The layers of a prompt that another runner answers: all that it is for."""
    batching_reason: str = ""
    """Why it shares no decode forward; empty where it may."""
    batches_prompt: bool = False
    """Whether its prompt may share a forward: only where a batch was measured to change no bit,
    since the state after a prompt is kept for other requests."""
    uses_cache: bool = True
    """Whether it may begin after a cached prefix, and its own states are cached."""
    reads_to: int = 0
    """The row at which it ends without an answer, as only its cached states are of use; or 0."""
    deliver: Callable[[Step], None] = _ignore
    """Called with progress and rounds."""
    finish: Callable[[FinishReason | BaseException], None] = _ignore
    """Called once, at the end, with the reason or the error."""

    prompt: Sequence[int] = field(init=False)
    """Like the next five: of its parameters, for steps, which read them often."""
    max_tokens: int = field(init=False)
    k: int = field(init=False)
    top_logprobs: int | None = field(init=False)
    background: bool = field(init=False)
    alone: bool = field(init=False)

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
    """Number of the group that it shares forwards with; see `Grouping`."""
    turn: int = 0
    """Number of the last piece of work that it took part in."""
    events_delivered: int = 0
    events_read: int = 0
    """Written by the reader's thread alone."""

    def __post_init__(self) -> None:
        parameters = self.parameters
        self.prompt, self.max_tokens = parameters.prompt, parameters.limits.max_tokens
        self.k, self.top_logprobs = parameters.k, parameters.top_logprobs
        self.background, self.alone = parameters.sharing.background, parameters.sharing.alone

    @property
    def key(self) -> tuple[str, int]:
        """Name and attempt, which identify its state on every stage."""
        return self.parameters.key

    @property
    def path(self) -> PromptPath:
        """The forwards over its prompt, as the prefix cache finds states after them."""
        salt = self.parameters.sharing.cache_salt
        return PromptPath(self.prompt, self.ends, salt, drafts=self.k > 0)

    def follows(self, other: "Request") -> bool:
        """Whether it will begin after a cached prefix of the same prompt that `other` reads."""
        return (
            self.uses_cache
            and other.uses_cache
            and len(self.ends) > 1
            and (self.k > 0) == (other.k > 0)
            and self.parameters.sharing.cache_salt == other.parameters.sharing.cache_salt
            and self.background >= other.background
            and self.prompt == other.prompt
        )

    @property
    def delta(self) -> int:
        """The difference of positions after its prompt from row numbers."""
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
        return max(self.k, 0 if self.drafts.lookup is None else self.drafts.lookup.evidence.longest)

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
    def waits_for_rows(self) -> bool:
        """Whether its next forward needs rows of another runner that have not come."""
        return self.read is not None and self.read.waits

    @property
    def next_end(self) -> int:
        """The row after the next forward over its prompt."""
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
