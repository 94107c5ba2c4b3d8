"""Turns logits into tokens, drafts into verdicts: greedy, by ratio, or coupled by a seed."""

from collections.abc import Sequence
from typing import assert_never

import mlx.core as mx

from .accept import Verdict, accept_by_ratio, accept_matching
from .processors import Processors
from .sampling import Noise, TargetDistribution, greedy_token
from .seams import Drafts
from .types import AcceptanceRule, Sampling


class Chooser:
    """One request's way of choosing. `entropy` seeds requests that gave no seed of their own."""

    def __init__(
        self,
        sampling: Sampling,
        entropy: int,
        special_tokens: tuple[int, ...] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """`prompt` is what penalties look at before the first token."""
        self._rule: AcceptanceRule = sampling.acceptance_rule
        noise = Noise(entropy if sampling.seed is None else sampling.seed)
        self._distribution = TargetDistribution(sampling, noise, special_tokens)
        self._processors = Processors(sampling.penalties, prompt)

    def token(self, logits: mx.array, position: int) -> mx.array:
        """The target's token (1,) at `position` from its logits (1, V)."""
        return self._targets(self._processors.apply(logits), position).astype(mx.int32)

    def commit(self, tokens: mx.array) -> None:
        """(n,) tokens became part of the answer: later choices may depend on them."""
        self._processors.commit(tokens)

    def draft(self, logits: mx.array, position: int, before: Sequence[Drafts] = ()) -> Drafts:
        """One drafted token from the draft head's logits (1, V), after the round's earlier ones."""
        logits = self._processors.apply_after(logits, [draft.tokens for draft in before])
        if self._rule == "greedy":
            return Drafts(greedy_token(logits).astype(mx.int32), None)
        log_q = self._distribution.log_probabilities(logits, position)
        return Drafts(self._distribution.draw(log_q, position).astype(mx.int32), log_q)

    def judge(self, logits: mx.array, drafts: Drafts | None, position: int) -> Verdict:
        """The verdict over logits (K+1, V); `position` is that of the first draft."""
        if drafts is None:
            return Verdict(mx.array(0, dtype=mx.int32), self.token(logits, position))
        logits = self._processors.apply(logits, drafts.tokens)
        match self._rule:
            case "greedy" | "coupled":
                return accept_matching(self._targets(logits, position), drafts.tokens)
            case "ratio":
                assert drafts.log_probabilities is not None
                log_p = self._distribution.log_probabilities(logits, position)
                noise = self._distribution.noise
                log_q = drafts.log_probabilities
                return accept_by_ratio(log_p, log_q, drafts.tokens, noise, position)
            case _:
                assert_never(self._rule)

    def _targets(self, logits: mx.array, position: int) -> mx.array:
        if self._rule == "greedy":
            return greedy_token(logits)
        log_p = self._distribution.log_probabilities(logits, position)
        return self._distribution.draw(log_p, position)
