"""One answer's tokens: how they are chosen, counted and ended, whoever computes them."""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from .finite import NO_TOKEN, DraftNotFinite, NotFinite
from .logprobs import Scores, score
from .sampler import Sampler
from .seams import Drafts, StopCondition
from .types import FinishReason, Forward, Round

CLEAR_EVERY: Final = 256
"""Tokens between calls of `mx.clear_cache`, as in mlx-lm: buffers of many sizes pile up."""


class Answer:
    """A generation's, alone or in a batch."""

    def __init__(
        self, max_tokens: int, top_logprobs: int | None, sampler: Sampler, ending: StopCondition
    ) -> None:
        self.sampler = sampler
        self.parked_at: int | None = None
        """The position from which on nothing is drafted: the drafter's logits were not finite."""
        self._max_tokens = max_tokens
        self._top_logprobs = top_logprobs
        self._ending = ending
        self._emitted = 0
        self._cleared = 0

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self._max_tokens - self._emitted

    @property
    def scored(self) -> bool:
        """Whether its tokens carry log-probabilities."""
        return self._top_logprobs is not None

    def count(self, token: int) -> FinishReason | None:
        """`token` is part of the answer now; why it ends with it, if it does."""
        self._emitted += 1
        if self._emitted // CLEAR_EVERY > self._cleared:
            self._cleared = self._emitted // CLEAR_EVERY
            mx.clear_cache()
        ended = self._ending.push(token)
        if ended is None and self._emitted >= self._max_tokens:
            return "length"
        return ended

    def cut(self, ids: list[int]) -> tuple[FinishReason | None, list[int]]:
        """The ids up to and with the one that plain decoding would have ended at."""
        for count, token in enumerate(ids, 1):
            if (reason := self.count(token)) is not None:
                return reason, ids[:count]
        return None, ids

    def scores(self, logits: mx.array, drafts: Drafts | None, tokens: mx.array) -> Scores | None:
        """Of `tokens` (n,) in the target's logits (n, V); before they are committed."""
        if self._top_logprobs is None:
            return None
        chosen = self.sampler.target_logprobs(logits, drafts)
        return score(chosen, tokens, self._top_logprobs)


def check_finite(ids: Sequence[int], position: int, drafts: int = 0) -> None:
    """Raises NotFinite where one of `ids`, the first of them at `position`, is no token.

    DraftNotFinite if the forward that gave them had rows of `drafts`.
    """
    if NO_TOKEN in ids:
        raise DraftNotFinite(position) if drafts else NotFinite(position + ids.index(NO_TOKEN))


def round_of(
    ids: list[int], drafted: int, accepted: int, forward: Forward, scores: Scores | None
) -> Round:
    """What one verify emitted; waits for its log-probabilities."""
    logprobs = () if scores is None else scores.read(ids)
    return Round(tuple(ids), drafted, accepted, forward, logprobs)
