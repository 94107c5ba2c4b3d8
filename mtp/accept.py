"""Acceptance of drafts: the accepted ones and the token that follows. Pure on arrays; nothing here
synchronises."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from .sampling import ACCEPT, RESIDUAL, Distribution, Noise, draw
from .seams import as_ids


class VerifyResult(NamedTuple):
    """`tokens[: accepted + 1]` may be emitted: the accepted drafts and the target's next token."""

    accepted: mx.array  # () int32, 0..K
    tokens: mx.array  # (K + 1,) int32; `finite.NO_TOKEN` where logits are not finite

    def read(self) -> tuple[int, list[int]]:
        """The round's one synchronisation: (accepted, the ids that may be emitted)."""
        accepted, *tokens = as_ids(mx.concatenate([self.accepted[None], self.tokens]))
        return accepted, tokens[: accepted + 1]


Rule = Callable[[Distribution, Distribution, mx.array, Noise, int], VerifyResult]
"""(target of K+1 rows, draft of K, drafts (K,), noise, the first draft's position)."""


def _prefix(matches: mx.array) -> mx.array:
    """The number of (K,) booleans before the first false one."""
    return mx.cumprod(matches.astype(mx.int32)).sum()


def accept_matching(targets: mx.array, drafts: mx.array) -> VerifyResult:
    """Accepts drafts (K,) as long as they equal the target's own choices (K+1,).

    Exact for greedy decoding and for coupled sampling, where the choice at a position is a function
    of its prefix and its noise alone (Daliri et al. 2024, arXiv 2408.07978).
    """
    accepted = _prefix(targets[: drafts.shape[0]] == drafts)
    return VerifyResult(accepted.astype(mx.int32), targets.astype(mx.int32))


def accept_by_ratio(
    target: Distribution, draft: Distribution, drafts: mx.array, noise: Noise, position: int
) -> VerifyResult:
    """Accepts draft x with probability min(1, p(x)/q(x)), else draws from norm(max(p - q, 0)).

    `target` has K+1 rows and `draft` K, from which `drafts` (K,) were drawn; `position` is that of
    the first draft. Leviathan et al. 2022 (arXiv 2211.17192), theorem 1: the emitted tokens have
    the target's distribution.
    """
    log_ratio = _log_ratio(target, draft, drafts)
    stands = mx.log(noise.uniform(position, drafts.shape[0], ACCEPT)) < log_ratio
    weight = mx.ones((drafts.shape[0],))
    return _verdict(_prefix(stands), weight, target, draft.on(target), drafts, noise, position)


def accept_by_block(
    target: Distribution, draft: Distribution, drafts: mx.array, noise: Noise, position: int
) -> VerifyResult:
    """Accepts the longest block of drafts that passes, in which a draft may compensate for others.

    Draft by draft the ratios multiply to a weight w_i = min(1, w_{i-1} p/q), and a block of i
    drafts is accepted with a probability h_i that also depends on the draft after it. It accepts
    at least as many drafts as `accept_by_ratio` in expectation: Sun et al. 2024 (arXiv 2403.10444),
    algorithm 2 and theorems 1 and 2. With one draft it is `accept_by_ratio`.

    A shorter block is accepted only after longer ones were rejected by their drafts and uniform
    draws, which must not be used again: `noise` and that of the drafts must be the round's own
    (`Noise.of_round`).
    """
    k = drafts.shape[0]
    q = draft.on(target)
    # log w_i = min(log w_{i-1} + r_i, 0), unrolled: a sum that restarts at each new maximum.
    total = mx.cumsum(mx.concatenate([mx.zeros((1,)), _log_ratio(target, draft, drafts)]))
    log_weight = total - mx.cummax(total)
    weight = mx.exp(log_weight[:k])
    # h_i = m / (m + 1 - w_i), m the residual's mass after i drafts; h_K = w_K.
    mass = mx.maximum(weight[1:, None] * mx.exp(target.log_p[1:k]) - mx.exp(q[1:]), 0).sum(axis=-1)
    whole = mass - mx.expm1(log_weight[1:k])
    # 0 / 0: the weight is full and p equals q, so a longer block is accepted in any case. NaN is
    # not replaced: comparisons with it accept no draft.
    shorter = mx.where(whole == 0, 1, mass / whole)
    chance = mx.concatenate([shorter, mx.exp(log_weight[k:])])
    stands = noise.uniform(position, k, ACCEPT) < chance
    accepted = (stands * mx.arange(1, k + 1)).max()
    return _verdict(accepted, weight, target, q, drafts, noise, position)


def _log_ratio(target: Distribution, draft: Distribution, drafts: mx.array) -> mx.array:
    """(K,) log p(x)/q(x) of the drafts x; q(x) > 0, since they were drawn from it."""
    k, chosen = drafts.shape[0], drafts[:, None]
    ids = None if target.ids is None else target.ids[:k]
    log_p = Distribution(target.log_p[:k], ids).of(chosen)
    return (log_p - draft.of(chosen))[:, 0]


def _verdict(
    accepted: mx.array,
    weight: mx.array,
    target: Distribution,
    log_q: mx.array,
    drafts: mx.array,
    noise: Noise,
    position: int,
) -> VerifyResult:
    """The accepted drafts and a draw from norm(max(w p - q, 0)), or from p after all K drafts.

    `weight` (K,) is w, by the number of accepted drafts; `log_q` (K, n) has the target's columns.
    A token is drawn from one row only, with the noise of the round, not of a position.
    """
    k = drafts.shape[0]
    next_ = target.row(accepted)
    last = mx.minimum(accepted, k - 1)
    residual = mx.maximum(weight[last] * mx.exp(next_.log_p) - mx.exp(log_q[last]), 0)
    # Equal distributions leave no residual, but rounding may still reject: then p is right.
    has_residual = (accepted < k) & (residual.sum() > 0)
    replacing = Distribution(mx.where(has_residual, mx.log(residual), next_.log_p), next_.ids)
    replacement = draw(replacing, noise, position, RESIDUAL)
    padded = mx.concatenate([drafts, drafts[-1:]]).astype(mx.int32)
    tokens = mx.where(mx.arange(k + 1) < accepted, padded, replacement)
    return VerifyResult(accepted.astype(mx.int32), tokens)
