"""Logits that are not finite: the target's end the answer, a draft head's end its drafting.

NO_TOKEN, which is no token's id, replaces a token whose logits were no distribution, so that
reading the ids is enough to detect it.
"""

import mlx.core as mx

NO_TOKEN = -1


class NotFinite(Exception):
    """The target's logits for the token at `position` are no distribution."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the logits for the token at position {position} are not finite")
        self.position = position


class DraftNotFinite(Exception):
    """The logits of a verify are no distribution, and one of its drafts may be the reason.

    Masked attention multiplies the rows of later drafts by 0, and 0 times NaN is NaN. Only a
    forward without drafts shows whether the target is at fault.
    """

    def __init__(self, position: int) -> None:
        super().__init__(
            f"the logits of a verify at position {position} are not finite; its drafts may be why"
        )


def finite_rows(logits: mx.array) -> mx.array:
    """(rows,) whether logits (rows, V) are a distribution: no NaN, no +inf, not all of them -inf.

    Computed in float32, since a sum of finite logits may overflow float16.
    """
    return mx.isfinite(mx.logsumexp(logits.astype(mx.float32), axis=-1))


def with_finite_rows(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Logits (rows, V) with zeros in rows that are not finite, and `finite_rows`.

    Acceptance is exact for any distribution of the drafts, such as the uniform one of such a row,
    but not for NaN, which cannot be compared with the target's.
    """
    finite = finite_rows(logits)
    return mx.where(finite[:, None], logits, mx.zeros_like(logits)), finite


def tokens_of(finite: mx.array, ids: mx.array) -> mx.array:
    """(rows,) int32 ids, NO_TOKEN where a row was not finite."""
    return mx.where(finite, ids.astype(mx.int32), NO_TOKEN)
