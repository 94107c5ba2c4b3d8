"""Forwards, drafts, and the end of an answer, as the rooms hand them to each other."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol, cast

import mlx.core as mx

from .types import FinishReason

Want = Literal["all", "last", "none"]
"""The rows of a forward whose logits are read."""

FORWARD_FAULTS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that MLX or a model's class raises in a forward. In a forward that several requests
share, each of them is a fault of the forward and of none of the requests."""


class Block(NamedTuple):
    """What one forward of the target gives."""

    logits: mx.array  # (rows, 1 or 0, vocabulary)
    hidden: mx.array | None  # (1, rows, hidden_size) as the draft head wants it, if one was asked


class Drafts(NamedTuple):
    """K drafted tokens and, where acceptance needs them, the log-probabilities they came from."""

    tokens: mx.array  # (K,)
    log_probabilities: mx.array | None  # (K, n)
    support: mx.array | None = None  # (K, n) their ids; None: 0, 1, .. n - 1
    finite: mx.array | None = None  # (K,) whether the logits of each were


def joined_drafts(drafts: Sequence[Drafts]) -> Drafts:
    """The drafts of one round, one after the other."""
    if len(drafts) == 1:
        return drafts[0]
    tokens = mx.concatenate([draft.tokens for draft in drafts])
    rows = [d.log_probabilities for d in drafts if d.log_probabilities is not None]
    ids = [d.support for d in drafts if d.support is not None]
    finite = [d.finite for d in drafts if d.finite is not None]
    return Drafts(tokens, *(mx.concatenate(each) if each else None for each in (rows, ids, finite)))


class StopCondition(Protocol):
    """Sees each token as plain decoding would emit it and says when the answer is over."""

    def push(self, token: int) -> FinishReason | None:
        """None while the answer goes on; `token` is part of the answer in any case."""
        ...


def as_row(tokens: Sequence[int]) -> mx.array:
    """Ids as the (rows,) int32 array that forwards take."""
    return mx.array(list(tokens), dtype=mx.int32)


def as_ids(row: mx.array) -> list[int]:
    """The inverse; it waits until the row is computed."""
    return cast("list[int]", row.tolist())
