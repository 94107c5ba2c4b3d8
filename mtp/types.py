"""Parameters and stats of a generation; free of mlx, so that the node shares them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

AcceptanceRule = Literal["greedy", "ratio", "block", "coupled"]
DrafterKind = Literal["native_mtp", "block_drafter", "prompt_lookup", "none"]
DraftPolicy = Literal["none", "fixed", "adaptive"]
FinishReason = Literal["stop", "length"]
TRACE_LENGTH = 64
MAX_ROUND_ROWS = 64
"""Rows of a round that requests share, or that copies: beyond, products use other algorithms."""
COLDEST = 1e-5
"""Lower temperatures are greedy: in float32 every other token's probability would be 0."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The target distribution: penalties, filters at temperature 1, then temperature; as in mlx-lm.

    Penalties count the last `repetition_context_size` tokens, the prompt's included. `logit_bias`
    pairs ids with the number added to their logits. `temperature` below COLDEST is greedy. `top_p`
    and `repetition_penalty` 1, and 0 of all others, are off. With `seed`, noise is keyed by
    absolute position, so the tokens do not depend on K. End tokens have probability 0 until the
    answer has `min_tokens`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_context_size: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    def rule_of(self, k: int) -> AcceptanceRule:
        """The rule by which up to `k` drafts per round are accepted.

        "ratio" is the usual name of "block" with one draft. A request that sometimes drafts more
        uses "block" throughout.
        """
        if self.greedy:
            return "greedy"
        if self.seed is not None:
            return "coupled"
        return "block" if k > 1 else "ratio"


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of the target: `rows` rows after `position` committed ones.

    `batch`: the requests that shared it, with as many rows each.
    """

    position: int
    rows: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One emitted token under the target: natural logarithms, after penalties and bias.

    Before temperature and filters, as mlx-lm's server has them. `top` holds the most likely
    (id, log-probability) pairs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one verify: of `drafted` tokens the `accepted` ones are among `tokens`.

    `forward` is its entry in the schedule log: a resume that repeats (position, rows) repeats the
    kernels and so the bits. `logprobs` has an entry for each token if they were requested.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    forward: Forward
    logprobs: tuple[TokenLogprobs, ...] = ()
    is_copied: bool = False
    """Whether its drafts were copied from the prompt or the answer; else the head drafted them."""


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


Step: TypeAlias = Prefilled | Rebuilt | Round
"""A step of an answer in progress."""

CacheTier: TypeAlias = Literal["memory", "disk", "peer", ""]
"""The place of the state after a cached prefix, "peer" if another replica's runner had it; empty if
there was none."""


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """The final numbers of one answer; times in seconds, rates in tokens per second.

    `num_draft_tokens` is the requested number of drafts, or 0 because of `drafting_reason`.
    `draft_k_histogram[k]` counts the rounds that drafted k tokens, `draft_k_trace` lists them in
    order as (k, rounds in a row), its last TRACE_LENGTH entries. `depth_reason` is why the last
    round drafted as many tokens as it did. `acceptance_rate` is relative to proposed drafts,
    `accepted_share_of_output` to emitted tokens; None if there were none.
    `kernels` names this project's kernels that were used, if any. `cached_tokens` of the prompt
    came from the prefix cache, in its tier `cached_tier`; `prompt_tps` counts the others.
    `batched_tokens` came from forwards that other requests shared, `batch_size` is the mean number
    of requests in a forward, and `batching_reason` is why the request never shared one. All counts
    of drafts include those of `lookup_rounds`, which were copied from the prompt or the answer;
    `lookup_reason` is why none could be. `loop_reason` is why the answer's repeats ended it.
    Upper layers of the prompt were computed by the nodes `read_by`, to which and from which
    `read_bytes` moved in `read_s`; `read_reason` is why by them, or why not.
    """

    drafter_kind: DrafterKind = "none"
    num_draft_tokens: int = 0
    drafting_reason: str = ""
    acceptance_rule: AcceptanceRule = "greedy"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    spec_decode_rounds: int = 0
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    acceptance_rate: float | None = None
    accepted_share_of_output: float | None = None
    draft_policy: DraftPolicy = "none"
    draft_k_histogram: tuple[int, ...] = ()
    draft_k_trace: tuple[tuple[int, int], ...] = ()
    head_parked: bool = False
    depth_reason: str = ""
    prompt_tps: float = 0.0
    generation_tps: float = 0.0
    time_to_first_token_s: float = 0.0
    peak_memory_bytes: int = 0
    resumes: int = 0
    resume_exact: bool = True
    kernels: tuple[str, ...] = ()
    cached_tokens: int = 0
    batched_tokens: int = 0
    batch_size: float = 1.0
    batching_reason: str = ""
    cached_tier: CacheTier = ""
    lookup_rounds: int = 0
    lookup_proposed_tokens: int = 0
    lookup_accepted_tokens: int = 0
    lookup_reason: str = ""
    loop_reason: str = ""
    read_by: tuple[str, ...] = ()
    read_s: float = 0.0
    read_bytes: int = 0
    read_reason: str = ""
