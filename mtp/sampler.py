"""Turns logits into tokens, drafts into verdicts: greedy, by ratio, by block, or coupled."""

from collections.abc import Iterable, Sequence
from typing import assert_never

import mlx.core as mx

from .accept import VerifyResult, accept_by_block, accept_matching
from .finite import finite_rows, tokens_of, with_finite_rows
from .grammar import GrammarMask, GrammarMatcher
from .processors import EndBar, Processors
from .sampling import Distribution, Noise, TargetDistribution, draw, greedy_choice
from .seams import Drafts, as_row
from .types import Sampling


class Sampler:
    """Chooses the tokens of one request. `entropy` seeds requests without a seed of their own.

    With a seed, a token is drawn with the noise of its position, whether drafted or not. Without
    one, each round's drafts and verdict have their own noise: see `accept_by_block`.
    """

    def __init__(
        self,
        sampling: Sampling,
        entropy: int,
        special_tokens: tuple[int, ...] = (),
        prompt: Sequence[int] = (),
        grammar: GrammarMatcher | None = None,
        ends: Iterable[int] = (),
    ) -> None:
        """`prompt`: the tokens that penalties apply to before the first token. `ends`: the tokens
        that end the answer."""
        self._sampling = sampling
        self._noise = Noise(entropy if sampling.seed is None else sampling.seed)
        self._distribution = TargetDistribution(sampling, self._noise, special_tokens)
        self._processors = Processors(sampling, prompt)
        self._grammar = None if grammar is None else GrammarMask(grammar)
        self._bar = EndBar(ends, sampling.min_tokens) if sampling.min_tokens else None

    @property
    def is_argmax(self) -> bool:
        """Whether its choices are `greedy_choice` of the logits as they are."""
        return self._sampling.greedy and self._is_unchanged

    @property
    def is_free(self) -> bool:
        """Whether its choices depend on logits and on a round's noise alone, neither on committed
        tokens nor on a position."""
        s = self._sampling
        drawn = s.greedy or (s.seed is None and s.xtc_probability == 0)
        return drawn and self._is_unchanged

    @property
    def _is_unchanged(self) -> bool:
        """Whether nothing that depends on committed tokens changes logits."""
        return not self._processors.active and self._grammar is None and self._bar is None

    def token(self, logits: mx.array, position: int) -> mx.array:
        """The target's token (1,) at `position` from its logits (1, V), or NO_TOKEN."""
        return self._targets(self._allowed(logits), position)

    def commit(self, tokens: mx.array) -> None:
        """Adds tokens (n,) to the answer: later choices may depend on them."""
        self._processors.commit(tokens)
        if self._grammar is not None:
            self._grammar.commit(tokens)
        if self._bar is not None:
            self._bar.commit(tokens)

    def draft(self, logits: mx.array, position: int, before: Sequence[Drafts] = ()) -> Drafts:
        """One drafted token from logits (1, V'), after `before`, all of the round's earlier ones.

        V' may be less than the vocabulary: the ids from V' on are then never drafted.
        """
        logits = self._processors.apply_after(logits, [draft.tokens for draft in before])
        if self._grammar is not None:
            logits = self._grammar.apply_draft(logits, [draft.tokens for draft in before])
        if self._bar is not None:
            logits = self._bar.apply(logits, len(before))
        if self._sampling.greedy:
            ids, finite = greedy_choice(logits)
            return Drafts(ids.astype(mx.int32), None, None, finite)
        logits, finite = with_finite_rows(logits)
        q = self._distribution(logits, position)
        if self._sampling.seed is not None:
            return Drafts(draw(q, self._noise, position), None, None, finite)
        noise = self._noise.of_round(position - len(before))
        return Drafts(draw(q, noise, position), q.log_p, q.ids, finite)

    def copy(self, tokens: Sequence[int]) -> Drafts:
        """Drafts that are a function of committed tokens, with probability 1 each."""
        row = as_row(tokens)
        if self._sampling.greedy or self._sampling.seed is not None:
            return Drafts(row, None)
        return Drafts(row, mx.zeros((len(tokens), 1)), row[:, None])

    def allowed_count(self, tokens: Sequence[int]) -> int:
        """The number of `tokens` in front of the first one that a grammar does not allow."""
        return len(tokens) if self._grammar is None else self._grammar.allowed_count(tokens)

    def judge(self, logits: mx.array, drafts: Drafts | None, position: int) -> VerifyResult:
        """The verdict over logits (K+1, V); `position` is that of the first draft."""
        if drafts is None:
            return VerifyResult(mx.array(0, dtype=mx.int32), self.token(logits, position))
        logits = self._allowed(logits, drafts.tokens)
        match rule := self._sampling.rule_of(drafts.tokens.shape[0]):
            case "greedy" | "coupled":
                return accept_matching(self._targets(logits, position), drafts.tokens)
            case "ratio" | "block":
                assert drafts.log_probabilities is not None
                # Rows after a rejected draft must not matter, whatever a head drafted there.
                logits, finite = with_finite_rows(logits)
                p = self._distribution(logits, position)
                q = Distribution(drafts.log_probabilities, drafts.support)
                noise = self._noise.of_round(position)
                verdict = accept_by_block(p, q, drafts.tokens, noise, position)
                return VerifyResult(verdict.accepted, tokens_of(finite, verdict.tokens))
            case _:
                assert_never(rule)

    def target_logprobs(self, logits: mx.array, drafts: Drafts | None) -> mx.array:
        """Log-probabilities (n, V), float32, of the target's logits (n, V) that `judge` takes.

        After penalties, bias and grammar, before temperature and filters. Call it before `commit`.
        """
        allowed = self._allowed(logits, None if drafts is None else drafts.tokens)
        x = allowed.astype(mx.float32)
        return x - mx.logsumexp(x, axis=-1, keepdims=True)

    def _allowed(self, logits: mx.array, drafts: mx.array | None = None) -> mx.array:
        """The target's logits (rows, V), of which row i follows `drafts`[:i]."""
        logits = self._processors.apply(logits, drafts)
        if self._grammar is not None:
            logits = self._grammar.apply(logits, drafts)
        return logits if self._bar is None else self._bar.apply(logits)

    def _targets(self, logits: mx.array, position: int) -> mx.array:
        if self._sampling.greedy:
            ids, finite = greedy_choice(logits)
        else:
            finite = finite_rows(logits)
            ids = draw(self._distribution(logits, position), self._noise, position)
        return tokens_of(finite, ids)
