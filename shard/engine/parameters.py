"""What a request asks of the engine: groups of its message, and what was made of its prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...mtp.grammar import GrammarMatcher
from ...mtp.types import DraftPolicy, Round, Sampling
from ...proto import peer_pb2 as pb
from ..checkpoint.prefix_files import ReceivedPrefix
from ..text.image_rows import PreparedImage
from ..text.stop_strings import StopStrings
from ..text.tools.channels import AnswerFormat
from .loop_guard import LoopGuard, LoopLimits


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
    """Limits of an answer that repeats itself, never of one under a grammar; None: it has none."""
    images: Sequence[PreparedImage] = ()
    """The images of the prompt's rows with ids below 0, in order."""
    received: ReceivedPrefix | None = None
    """The state behind a prefix that another replica's runner sent."""
    fetch_s: float = 0.0
    """Seconds that it waited for that state: part of the time to its first token."""

    @property
    def key(self) -> tuple[str, int]:
        """Name and attempt."""
        return self.name, self.attempt

    @property
    def k(self) -> int:
        """Drafts per round, at most; 0: none."""
        return self.drafting.num_draft_tokens

    @property
    def top_logprobs(self) -> int | None:
        """Alternatives whose log-probabilities are returned with each token's; None: no
        log-probabilities at all."""
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
        """A guard against loops, for one run of the answer; None: it may repeat itself."""
        if self.loop_limits is None or self.grammar is not None or self.sampling.min_tokens:
            return None
        return LoopGuard(self.loop_limits, self.prompt, self.answer_format.calls)
