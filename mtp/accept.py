"""Acceptance of drafts: the accepted ones and the token that follows. Pure on arrays; nothing here
synchronises."""

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


def accept_matching(targets: mx.array, drafts: mx.array) -> VerifyResult:
    """Accepts drafts (K,) as long as they equal the target's own choices (K+1,).

    Exact for greedy decoding and for coupled sampling, where the choice at a position is a function
    of its prefix and its noise alone (Daliri et al. 2024, arXiv 2408.07978).
    """
    matches = (targets[: drafts.shape[0]] == drafts).astype(mx.int32)
    return VerifyResult(mx.cumprod(matches).sum().astype(mx.int32), targets.astype(mx.int32))


def accept_by_block(
    target: Distribution, draft: Distribution, drafts: mx.array, noise: Noise, position: int
) -> VerifyResult:
    """Accepts the longest block of drafts that passes, in which a draft may compensate for others.

    `target` has K+1 rows and `draft` K, from which `drafts` (K,) were drawn; `position` is that of
    the first draft. Draft by draft the ratios multiply to a weight w_i = min(1, w_{i-1} p/q), and a
    block of i drafts is accepted with a probability h_i that also depends on the draft after it:
    Sun et al. 2024 (arXiv 2403.10444), algorithm 2 and theorems 1 and 2. The emitted tokens have
    the target's distribution. A single draft x is accepted with probability min(1, p(x)/q(x)), as
    in Leviathan et al. 2022 (arXiv 2211.17192), theorem 1.

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
    # The next token comes from norm(max(w p - q, 0)), or from p after all K drafts.
    next_ = target.row(accepted)
    last = mx.minimum(accepted, k - 1)
    residual = mx.maximum(weight[last] * mx.exp(next_.log_p) - mx.exp(q[last]), 0)
    # Equal distributions leave no residual, but rounding may still reject: then p is right.
    has_residual = (accepted < k) & (residual.sum() > 0)
    replacing = Distribution(mx.where(has_residual, mx.log(residual), next_.log_p), next_.ids)
    replacement = draw(replacing, noise, position, RESIDUAL)
    padded = mx.concatenate([drafts, drafts[-1:]]).astype(mx.int32)
    tokens = mx.where(mx.arange(k + 1) < accepted, padded, replacement)
    return VerifyResult(accepted.astype(mx.int32), tokens)


def _log_ratio(target: Distribution, draft: Distribution, drafts: mx.array) -> mx.array:
    """(K,) log p(x)/q(x) of the drafts x; q(x) > 0, since they were drawn from it."""
    k, chosen = drafts.shape[0], drafts[:, None]
    ids = None if target.ids is None else target.ids[:k]
    log_p = Distribution(target.log_p[:k], ids).of(chosen)
    return (log_p - draft.of(chosen))[:, 0]
