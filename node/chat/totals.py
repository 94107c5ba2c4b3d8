"""Sums of the final stats of answers, by model, since the node started."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ...placement.ids import ModelId

_SUMS: Final = (
    *("cached_tokens", "batched_tokens"),
    *("spec_decode_rounds", "proposed_draft_tokens", "accepted_draft_tokens"),
    *("lookup_rounds", "lookup_proposed_tokens", "lookup_accepted_tokens"),
)
"""Numbers of `generation_stats` that are added up under the same name."""


@dataclass(slots=True)
class ModelTotals:
    """The finished answers of one model. Answers that failed have no stats and are not counted.

    `accepted_per_position[p]` counts accepted drafts at position p of their round, from 0;
    `draft_k_histogram[k]` counts rounds that drafted k tokens. Both grow with the positions and
    the k that occur. `by_policy_and_rule` counts answers by (`draft_policy`, `acceptance_rule`).
    """

    requests: int = 0
    drafted_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    completion_tokens: int = 0
    batched_tokens: int = 0
    """Completion tokens from steps that other requests shared."""
    spec_decode_rounds: int = 0
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    lookup_rounds: int = 0
    """Rounds that copied their drafts, among all with drafts; likewise the two counts below."""
    lookup_proposed_tokens: int = 0
    lookup_accepted_tokens: int = 0
    looped_requests: int = 0
    """Answers that ended because they repeated themselves."""
    accepted_per_position: list[int] = field(default_factory=list[int])
    draft_k_histogram: list[int] = field(default_factory=list[int])
    by_policy_and_rule: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    greedy_identity: str | None = None
    """The value that the last answer with drafts reported."""
    parked_requests: int = 0
    head_parked: str | None = None
    """Why the draft head was parked, as the last answer with a parked head reported."""

    def add(self, prompt_tokens: int, completion_tokens: int, stats: Mapping[str, Any]) -> None:
        """`stats` is the `generation_stats` object of one answer."""
        drafted = stats["drafter_kind"] != "none"
        self.requests += 1
        self.drafted_requests += drafted
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + stats[name])
        self.looped_requests += bool(stats["loop_reason"])
        _add_each(self.accepted_per_position, stats["accepted_per_position"])
        _add_each(self.draft_k_histogram, stats["draft_k_histogram"])
        self.by_policy_and_rule[stats["draft_policy"], stats["acceptance_rule"]] += 1
        if stats["head_parked"]:
            self.parked_requests += 1
            self.head_parked = stats["drafting_reason"]
        if drafted:
            self.greedy_identity = stats["greedy_identity"]

    def describe(self) -> dict[str, Any]:
        """JSON-ready, with acceptance by both usual definitions; None where none was possible."""
        fields = asdict(self)
        del fields["by_policy_and_rule"]
        accepted, proposed = self.accepted_draft_tokens, self.proposed_draft_tokens
        share = accepted / self.completion_tokens if self.drafted_requests else None
        return {
            **fields,
            "acceptance_rate": accepted / proposed if proposed else None,
            "accepted_share_of_output": share,
            "requests_by_draft_policy": self._requests_by(0),
            "requests_by_acceptance_rule": self._requests_by(1),
        }

    def _requests_by(self, part: int) -> dict[str, int]:
        counts = Counter[str]()
        for key, count in self.by_policy_and_rule.items():
            counts[key[part]] += count
        return dict(counts)


class Totals:
    """The totals of every model that has answered."""

    def __init__(self) -> None:
        self._by_model: dict[ModelId, ModelTotals] = {}

    def add(
        self, model: ModelId, completion: int, stats: Mapping[str, Any], prompt: int = 0
    ) -> None:
        """Adds an answer and its number of tokens."""
        self._by_model.setdefault(model, ModelTotals()).add(prompt, completion, stats)

    def __iter__(self) -> Iterator[tuple[ModelId, ModelTotals]]:
        return iter(self._by_model.items())

    def describe(self) -> dict[str, dict[str, Any]]:
        """`ModelTotals.describe` by model."""
        return {str(model): totals.describe() for model, totals in self}


def _add_each(sums: list[int], counts: Sequence[int]) -> None:
    sums.extend([0] * (len(counts) - len(sums)))
    for index, count in enumerate(counts):
        sums[index] += count
