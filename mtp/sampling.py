"""The one definition of the target distribution, used for drafts and for their verification."""

import math
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from .types import Sampling

_MASK64 = (1 << 64) - 1
# Separate streams of noise: a token's own draw must not decide whether it is accepted.
TOKEN, XTC, ACCEPT, RESIDUAL = range(4)


def greedy_token(logits: mx.array) -> mx.array:
    """Greedy ids (rows,) of logits (rows, vocabulary), in the logits' own dtype.

    mlx-lm takes the argmax of log-probabilities; rounded to bfloat16 these tie where the logits do
    not, so an argmax of the logits would be another token in some rows.
    """
    return mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)


def _mix(seed: int, position: int, stream: int) -> int:
    """SplitMix64's finaliser over (seed, position, stream): one key per absolute position."""
    x = (seed + 0x9E3779B97F4A7C15 * (4 * position + stream + 1)) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@dataclass(frozen=True, slots=True)
class Noise:
    """Randomness keyed by absolute position: the same for a position whoever draws it, and when."""

    seed: int

    def _key(self, position: int, stream: int) -> mx.array:
        return mx.random.key(_mix(self.seed, position, stream))

    def gumbel(self, position: int, rows: int, vocabulary: int, stream: int) -> mx.array:
        """(rows, vocabulary) Gumbel noise of the positions from `position` on."""
        rows_of = [
            mx.random.gumbel((1, vocabulary), key=self._key(position + row, stream))
            for row in range(rows)
        ]
        return mx.concatenate(rows_of) if rows > 1 else rows_of[0]

    def uniform(self, position: int, rows: int, stream: int) -> mx.array:
        """(rows,) uniform numbers in [0, 1) of the positions from `position` on."""
        draws = [
            mx.random.uniform(shape=(1,), key=self._key(position + row, stream))
            for row in range(rows)
        ]
        return mx.concatenate(draws) if rows > 1 else draws[0]


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """Filters in mlx-lm's order (top_p, min_p, xtc, top_k, all at temperature 1), then temperature.

    `special_tokens` are never removed by XTC (the end tokens and the newline, as mlx-lm's server
    does). Not defined for greedy sampling.
    """

    sampling: Sampling
    noise: Noise
    special_tokens: tuple[int, ...] = ()

    def log_probabilities(self, logits: mx.array, position: int) -> mx.array:
        """(rows, vocabulary) float32, normalised; row i is the token at `position` + i."""
        s = self.sampling
        x = logits.astype(mx.float32)
        x = x - mx.logsumexp(x, axis=-1, keepdims=True)
        if 0 < s.top_p < 1:
            x = apply_top_p(x, s.top_p)
        if s.min_p > 0:
            x = apply_min_p(x, s.min_p)
        if s.xtc_probability > 0:
            x = self._exclude_top_choices(x, position)
        if 0 < s.top_k < x.shape[-1]:
            x = apply_top_k(x, s.top_k)
        x = x * (1.0 / s.temperature)
        return x - mx.logsumexp(x, axis=-1, keepdims=True)

    def draw(self, log_probabilities: mx.array, position: int) -> mx.array:
        """(rows,) ids by the Gumbel-max trick, with the noise of their positions."""
        rows, vocabulary = log_probabilities.shape
        noise = self.noise.gumbel(position, rows, vocabulary, TOKEN)
        return mx.argmax(log_probabilities + noise, axis=-1)

    def _exclude_top_choices(self, x: mx.array, position: int) -> mx.array:
        """XTC as in mlx-lm's `apply_xtc`, with a draw that draft and verify share."""
        s = self.sampling
        p = mx.softmax(x, axis=-1)
        least = mx.where(p > s.xtc_threshold, p, math.inf).min(axis=-1, keepdims=True)
        removed = p > least
        if self.special_tokens:
            removed[..., mx.array(self.special_tokens)] = False
        skip = self.noise.uniform(position, x.shape[0], XTC) > s.xtc_probability
        return mx.where(skip[:, None] | ~removed, x, -math.inf)
