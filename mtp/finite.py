"""Logits that are not finite: an error where they are the target's, no draft where a head's."""

import mlx.core as mx


def finite_rows(logits: mx.array) -> mx.array:
    """(rows,) whether logits (rows, V) are a distribution: no NaN, no +inf, not all of them -inf.

    In float32: a sum may overflow float16 where no logit does.
    """
    return mx.isfinite(mx.logsumexp(logits.astype(mx.float32), axis=-1))


def with_finite_rows(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Logits (rows, V) with rows of zeros for those that are not finite, and `finite_rows`.

    Acceptance stays exact for any distribution that drafts were drawn from, a uniform one among
    them, but not for one that cannot be compared with the target's.
    """
    finite = finite_rows(logits)
    return mx.where(finite[:, None], logits, mx.zeros_like(logits)), finite
