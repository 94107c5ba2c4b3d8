"""What a generation is asked for and what it reports; free of mlx, so that the node shares it."""

from dataclasses import dataclass, field
from typing import Literal

AcceptanceRule = Literal["greedy", "ratio", "block", "coupled"]
DraftPolicy = Literal["none", "fixed", "adaptive"]
FinishReason = Literal["stop", "length"]
TRACE_LENGTH = 64
COLDEST = 1e-5
"""Temperatures below it are greedy: there is no other token that float32 could tell from 0."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """What changes logits before sampling, as mlx-lm's `make_logits_processors` defines it.

    The penalties look at the last `context_size` tokens, the prompt's among them. `repetition` 1
    and the others at 0 are off; `logit_bias` pairs ids with what is added to their logits.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    context_size: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def active(self) -> bool:
        return self != Penalties(context_size=self.context_size)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The target distribution: filters at temperature 1 in mlx-lm's order, then temperature.

    `temperature` below COLDEST is greedy. `top_p` 1, `top_k` 0, `min_p` 0 and `xtc_probability` 0
    are off. With `seed`, noise is keyed by absolute position, so the tokens do not depend on K.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None
    penalties: Penalties = Penalties()

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    def rule_of(self, k: int) -> AcceptanceRule:
        """How up to `k` drafts a round are accepted: what can be promised about the output.

        With one draft the two rules that sample are the same, so a request that drafts more at
        times is accepted by "block" throughout.
        """
        if self.greedy:
            return "greedy"
        if self.seed is not None:
            return "coupled"
        return "block" if k > 1 else "ratio"


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of the target: `rows` rows after `position` committed ones.

    `batch`: of so many requests at once, with as many rows each.
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
    """What one verify emitted. `accepted` of the `drafted` tokens are among `tokens`.

    `forward` is its entry in the schedule log: a resume that repeats (position, rows) repeats the
    kernels and so the numbers. `logprobs` has an entry for each token where they were asked for.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    forward: Forward
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """The final numbers of one answer; times in seconds, rates in tokens per second.

    `draft_k_histogram[k]` counts the rounds that drafted k tokens, `draft_k_trace` lists them in
    order as (k, rounds in a row), its last TRACE_LENGTH entries. The two shares of acceptance are
    of proposed drafts and of emitted tokens; None where there were none. `kernels` names those of
    our own that computed; none: all are MLX's. `cached_tokens` are the prompt's that were not read
    again; `prompt_tps` is of the others. `batched_tokens` came of forwards that other requests
    shared, `batch_size` is the mean number of requests in a forward; `batching_reason` says why a
    request is always computed alone.
    """

    drafter_kind: Literal["native_mtp", "none"]
    num_draft_tokens: int
    drafting_reason: str
    acceptance_rule: AcceptanceRule
    prompt_tokens: int
    completion_tokens: int
    spec_decode_rounds: int = 0
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    acceptance_rate: float | None = None
    accepted_share_of_output: float | None = None
    draft_policy: DraftPolicy = "none"
    draft_k_histogram: tuple[int, ...] = field(default=())
    draft_k_trace: tuple[tuple[int, int], ...] = ()
    head_parked: bool = False
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
