"""The one definition of the target distribution, used for drafts and for their verification."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from .types import Sampling

_MASK64 = (1 << 64) - 1
# Separate streams of noise: a token's own draw must not decide whether it is accepted.
TOKEN, XTC, ACCEPT, RESIDUAL, ROUND = range(5)
_LANES = 64
"""Ids that share a key: fewer make a row of noise more expensive, more make single ids so."""
_BLOCK = 128
"""Ids per block, of which `_likeliest` first compares the maximum."""
SPARSE_TOP_K = 256
"""The largest top_k for which only the top ids are processed."""
LEAST_TOP_P = 1e-6
"""A smaller top_p is equivalent but could round to 0: mlx-lm's filter would read past the row."""


def greedy_token(logits: mx.array) -> mx.array:
    """Greedy ids (rows,) of logits (rows, vocabulary), in the logits' own dtype.

    mlx-lm takes the argmax of log-probabilities. Rounded to bfloat16 these may tie when the logits
    do not, so that the argmax of the logits would be another token in some rows.
    """
    return greedy_choice(logits)[0]


def greedy_choice(logits: mx.array) -> tuple[mx.array, mx.array]:
    """`greedy_token`, and (rows,) whether a row is a distribution: see `finite.finite_rows`."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.argmax(logits - total, axis=-1), mx.isfinite(total[:, 0])


def _mix(seed: int, position: int, stream: int) -> int:
    """SplitMix64's finaliser over (seed, position, stream): one key per absolute position."""
    x = (seed + 0x9E3779B97F4A7C15 * (8 * position + stream + 1)) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


class Distribution(NamedTuple):
    """Rows of log-probabilities over some ids; all other ids have probability 0."""

    log_p: mx.array  # (rows, n) float32, each row normalised
    ids: mx.array | None = None  # (rows, n) int32, no id twice in a row; None: 0, 1, .. n - 1

    def of(self, ids: mx.array) -> mx.array:
        """(rows, m) log-probabilities of ids (rows, m), -inf for ids outside."""
        if self.ids is None:
            last = self.log_p.shape[-1] - 1
            inside = mx.take_along_axis(self.log_p, mx.minimum(ids, last), axis=-1)
            return mx.where(ids <= last, inside, -math.inf)
        same = ids[:, :, None] == self.ids[:, None, :]
        return mx.where(same, self.log_p[:, None, :], -math.inf).max(axis=-1)

    def on(self, other: "Distribution") -> mx.array:
        """(rows, n) log-probabilities in the columns of the first rows of `other`.

        If `other` lists all ids of the vocabulary, this lists all, its first ones or a few.
        """
        if other.ids is not None:
            return self.of(other.ids[: self.log_p.shape[0]])
        if self.ids is not None:
            absent = mx.full((self.log_p.shape[0], other.log_p.shape[-1]), -math.inf)
            return mx.put_along_axis(absent, self.ids, self.log_p, axis=-1)
        missing = other.log_p.shape[-1] - self.log_p.shape[-1]
        if missing == 0:
            return self.log_p
        return mx.pad(self.log_p, [(0, 0), (0, missing)], constant_values=-math.inf)

    def row(self, index: mx.array) -> "Distribution":
        """The row at `index` (), which may be lazy."""
        ids = None if self.ids is None else self.ids[index][None]
        return Distribution(self.log_p[index][None], ids)


@dataclass(frozen=True, slots=True)
class Noise:
    """Randomness keyed by absolute position: the same in a draft and in its verify.

    Gumbel noise is keyed by token id too: a few ids of a row have the same noise as in the whole
    row, and a row over fewer ids is the beginning of a row over more.
    """

    seed: int

    def of_round(self, position: int) -> "Noise":
        """The noise of the round that begins at `position`, which no other round uses.

        A choice that depends on the noise of later positions, as in block verification, must not
        share it with the choices at those positions.
        """
        return Noise(_mix(self.seed, position, ROUND))

    def gumbel(self, position: int, rows: int, vocabulary: int, stream: int) -> mx.array:
        """(rows, vocabulary) Gumbel noise of the positions from `position` on."""
        lanes = mx.arange(-(-vocabulary // _LANES), dtype=mx.uint32)
        keys = self._keys(position, rows, stream, mx.broadcast_to(lanes, (rows, lanes.shape[0])))
        return _gumbel(keys).reshape(rows, -1)[:, :vocabulary]

    def gumbel_of(self, position: int, ids: mx.array, stream: int) -> mx.array:
        """(rows, n) Gumbel noise of the ids (rows, n), row i at `position` + i."""
        lanes = (ids // _LANES).astype(mx.uint32)
        noise = _gumbel(self._keys(position, ids.shape[0], stream, lanes))
        drawn = mx.take_along_axis(noise, (ids % _LANES).reshape(-1, 1), axis=-1)
        return drawn.reshape(ids.shape)

    def uniform(self, position: int, rows: int, stream: int) -> mx.array:
        """(rows,) uniform numbers in [0, 1) of the positions from `position` on."""
        return _uniform(self._keys(position, rows, stream, mx.zeros((rows, 1), dtype=mx.uint32)))

    def _keys(self, position: int, rows: int, stream: int, lanes: mx.array) -> mx.array:
        """(rows * n, 2) keys of the lanes (rows, n)."""
        mixed = [_mix(self.seed, position + row, stream) for row in range(rows)]
        high = mx.array([x >> 32 for x in mixed], dtype=mx.uint32)[:, None]
        low = mx.array([x & 0xFFFFFFFF for x in mixed], dtype=mx.uint32)[:, None]
        return mx.stack([mx.broadcast_to(high, lanes.shape), low + lanes], axis=-1).reshape(-1, 2)


def _gumbel(keys: mx.array) -> mx.array:
    """(n, 2) keys to (n, _LANES)."""

    def of_key(key: mx.array) -> mx.array:
        return mx.random.gumbel((_LANES,), key=key)

    return mx.vmap(of_key)(keys)


def _uniform(keys: mx.array) -> mx.array:
    """(n, 2) keys to (n,)."""

    def of_key(key: mx.array) -> mx.array:
        return mx.random.uniform(shape=(), key=key)

    return mx.vmap(of_key)(keys)


def draw(distribution: Distribution, noise: Noise, position: int, stream: int = TOKEN) -> mx.array:
    """(rows,) int32 ids by the Gumbel-max trick, with the noise of their positions.

    The rows of `distribution` need not be normalised.
    """
    if distribution.ids is None:
        rows, vocabulary = distribution.log_p.shape
        gumbel = noise.gumbel(position, rows, vocabulary, stream)
        return mx.argmax(distribution.log_p + gumbel, axis=-1).astype(mx.int32)
    gumbel = noise.gumbel_of(position, distribution.ids, stream)
    column = mx.argmax(distribution.log_p + gumbel, axis=-1, keepdims=True)
    return mx.take_along_axis(distribution.ids, column, axis=-1)[:, 0].astype(mx.int32)


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """Filters in mlx-lm's order (top_p, min_p, xtc, top_k, all at temperature 1), then temperature.

    `special_tokens` are never removed by XTC (the end tokens and the newline, as in mlx-lm's
    server). Not defined for greedy sampling. XTC's draw is keyed by position: draft and verify
    share it, and so do all rounds that reach the position.
    """

    sampling: Sampling
    noise: Noise
    special_tokens: tuple[int, ...] = ()

    def __call__(self, logits: mx.array, position: int) -> Distribution:
        """The distributions of logits (rows, vocabulary); row i is the token at `position` + i.

        Under a small top_k they list only its ids: the same probabilities without sorting, or
        drawing noise for, a whole vocabulary. XTC depends on all ids that pass the filters before
        it, so it needs whole rows.
        """
        s = self.sampling
        small = 0 < s.top_k <= SPARSE_TOP_K and s.top_k < logits.shape[-1]
        if small and s.xtc_probability == 0:
            return self._of_top_k(logits)
        return Distribution(self.log_probabilities(logits, position))

    def log_probabilities(self, logits: mx.array, position: int) -> mx.array:
        """(rows, vocabulary) float32, normalised: the definition, over all ids."""
        s = self.sampling
        x = logits.astype(mx.float32)
        if 0 < s.top_p < 1:
            # It takes powers of e. A constant does not change the filters: no normalisation.
            x = apply_top_p(x - x.max(axis=-1, keepdims=True), max(s.top_p, LEAST_TOP_P))
        if s.min_p > 0:
            x = apply_min_p(x, s.min_p)
        if s.xtc_probability > 0:
            x = self._exclude_top_choices(x, position)
        if 0 < s.top_k < x.shape[-1]:
            x = apply_top_k(x, s.top_k)
        return self._apply_temperature(x)

    def _of_top_k(self, logits: mx.array) -> Distribution:
        """`log_probabilities` under a small top_k: applied first, which top_p and min_p allow.

        Only top_p needs the sum over the vocabulary, for the probabilities of the top ids.
        """
        s = self.sampling
        x = logits.astype(mx.float32)
        top, ids = _likeliest(x, s.top_k)
        if 0 < s.top_p < 1:
            descending = mx.sort(top, axis=-1)[:, ::-1]
            p = mx.exp(descending - mx.logsumexp(x, axis=-1, keepdims=True))
            is_kept = mx.cumsum(p, axis=-1, inclusive=False) < max(s.top_p, LEAST_TOP_P)
            least = mx.where(is_kept, descending, math.inf).min(axis=-1, keepdims=True)
            top = mx.where(top < least, -math.inf, top)
        if s.min_p > 0:
            least = top.max(axis=-1, keepdims=True) + math.log(s.min_p)
            top = mx.where(top < least, -math.inf, top)
        return Distribution(self._apply_temperature(top), ids)

    def _apply_temperature(self, x: mx.array) -> mx.array:
        # The maximum becomes 0 first: neither a low temperature nor large logits cost precision.
        x = (x - x.max(axis=-1, keepdims=True)) * (1.0 / self.sampling.temperature)
        return x - mx.logsumexp(x, axis=-1, keepdims=True)

    def _exclude_top_choices(self, x: mx.array, position: int) -> mx.array:
        """XTC as in mlx-lm's `apply_xtc`, with a draw that draft and verify share."""
        s = self.sampling
        p = mx.softmax(x, axis=-1)
        least = mx.where(p > s.xtc_threshold, p, math.inf).min(axis=-1, keepdims=True)
        removed = p > least
        if special := [token for token in self.special_tokens if token < x.shape[-1]]:
            removed[..., mx.array(special)] = False
        skip = self.noise.uniform(position, x.shape[0], XTC) > s.xtc_probability
        return mx.where(skip[:, None] | ~removed, x, -math.inf)


def _likeliest(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest of each row (rows, V) and their ids, both (rows, k), in no order.

    They lie in the k blocks with the largest maxima or after the last whole block. This takes one
    pass over the row and two small partitions; a partition of the row would sort it on some
    backends.
    """
    rows, width = x.shape
    blocks = width // _BLOCK
    if blocks <= k:
        return _largest(x, mx.broadcast_to(mx.arange(width, dtype=mx.int32), x.shape), k)
    whole = blocks * _BLOCK
    blocked = x[:, :whole].reshape(rows, blocks, _BLOCK)
    best = mx.argpartition(-blocked.max(axis=-1), kth=k - 1, axis=-1)[:, :k].astype(mx.int32)
    values = mx.take_along_axis(blocked, best[:, :, None], axis=1).reshape(rows, -1)
    ids = (best[:, :, None] * _BLOCK + mx.arange(_BLOCK, dtype=mx.int32)).reshape(rows, -1)
    if whole < width:
        rest = mx.broadcast_to(mx.arange(whole, width, dtype=mx.int32), (rows, width - whole))
        values = mx.concatenate([values, x[:, whole:]], axis=-1)
        ids = mx.concatenate([ids, rest], axis=-1)
    return _largest(values, ids, k)


def _largest(values: mx.array, ids: mx.array, k: int) -> tuple[mx.array, mx.array]:
    chosen = mx.argpartition(-values, kth=k - 1, axis=-1)[:, :k]
    return mx.take_along_axis(values, chosen, axis=-1), mx.take_along_axis(ids, chosen, axis=-1)
