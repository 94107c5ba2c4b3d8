"""Interfaces between rooms: results of forwards, drafts, and an answer's stop condition."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol, cast

import mlx.core as mx

from .types import FinishReason

Want = Literal["all", "last", "none"]
"""The rows of a forward whose logits are needed."""

FORWARD_FAULTS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that MLX or a model's class raises in a forward. In a shared forward they are errors
of the forward, not of one of its requests."""


class ForwardOutput(NamedTuple):
    """The results of one forward of the target."""

    logits: mx.array  # (rows, 1 or 0, vocabulary)
    hidden: mx.array | None  # (1, rows, hidden_size), the draft head's input, if there is one


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
    """Decides, token by token as in plain decoding, when an answer ends."""

    def push(self, token: int) -> FinishReason | None:
        """Adds `token`. Returns why the answer ends with it, or None if it does not."""
        ...


def as_row(tokens: Sequence[int]) -> mx.array:
    """Ids as the (rows,) int32 array that forwards take."""
    return mx.array(list(tokens), dtype=mx.int32)


def as_ids(row: mx.array) -> list[int]:
    """The inverse of `as_row`; waits until the row is computed."""
    return cast("list[int]", row.tolist())
