"""Which drafts stand, and what follows them. Pure on arrays; nothing here synchronises."""

from typing import NamedTuple

import mlx.core as mx

from .sampling import ACCEPT, RESIDUAL, Noise
from .seams import as_ids


class Verdict(NamedTuple):
    """`tokens[: accepted + 1]` may be emitted: accepted drafts and the target's own next one."""

    accepted: mx.array  # () int32, 0..K
    tokens: mx.array  # (K + 1,) int32

    def read(self) -> tuple[int, list[int]]:
        """The round's one synchronisation: (accepted, the ids that may be emitted)."""
        accepted, *tokens = as_ids(mx.concatenate([self.accepted[None], self.tokens]))
        return accepted, tokens[: accepted + 1]


def _prefix(matches: mx.array) -> mx.array:
    """How many of (K,) booleans are true before the first false one."""
    return mx.cumprod(matches.astype(mx.int32)).sum()


def accept_matching(targets: mx.array, drafts: mx.array) -> Verdict:
    """Keeps drafts (K,) while they are the target's own choices (K+1,).

    Exact for greedy decoding and for coupled sampling, where the choice at a position is a function
    of its prefix and its noise alone (Daliri et al. 2024, arXiv 2408.07978).
    """
    accepted = _prefix(targets[: drafts.shape[0]] == drafts)
    return Verdict(accepted.astype(mx.int32), targets.astype(mx.int32))


def accept_by_ratio(
    target: mx.array, draft: mx.array, drafts: mx.array, noise: Noise, position: int
) -> Verdict:
    """Accepts draft x with probability min(1, p(x)/q(x)), else draws from norm(max(p - q, 0)).

    `target` (K+1, V) and `draft` (K, V) are log-probabilities, `drafts` (K,) were drawn from
    `draft`; `position` is that of the first draft. Leviathan et al. 2022 (arXiv 2211.17192),
    theorem 1: the emitted tokens have the target's distribution.
    """
    k = drafts.shape[0]
    chosen = drafts[:, None]
    log_p = mx.take_along_axis(target[:k], chosen, axis=-1)[:, 0]
    log_q = mx.take_along_axis(draft, chosen, axis=-1)[:, 0]
    accepted = _prefix(mx.log(noise.uniform(position, k, ACCEPT)) < log_p - log_q)
    p, q = mx.exp(target[:k]), mx.exp(draft)
    residual = mx.maximum(p - q, 0)
    # Equal distributions leave no residual, and rounding may reject all the same: p is right then.
    residual = mx.where(residual.sum(axis=-1, keepdims=True) > 0, residual, p)
    weights = mx.concatenate([mx.log(residual), target[k:]])
    gumbel = noise.gumbel(position, k + 1, target.shape[-1], RESIDUAL)
    replacements = mx.argmax(weights + gumbel, axis=-1)
    padded = mx.concatenate([drafts, drafts[-1:]]).astype(mx.int32)
    tokens = mx.where(mx.arange(k + 1) < accepted, padded, replacements.astype(mx.int32))
    return Verdict(accepted.astype(mx.int32), tokens)
