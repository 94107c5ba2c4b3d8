"""Log-probabilities of emitted tokens, reduced on the device to the requested ones."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from .types import TokenLogprobs


class Scores(NamedTuple):
    """The log-probabilities of n rows' chosen tokens and of their `top` most likely; lazy."""

    chosen: mx.array  # (n,)
    top_ids: mx.array  # (n, top)
    top: mx.array  # (n, top)

    def read(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Waits for the scores and reads those of the first rows, whose ids are `tokens`."""
        mx.eval(self)
        chosen = cast("list[float]", self.chosen.tolist())
        ids = cast("list[list[int]]", self.top_ids.tolist())
        top = cast("list[list[float]]", self.top.tolist())
        return tuple(
            TokenLogprobs(token, chosen[i], _ordered(ids[i], top[i]))
            for i, token in enumerate(tokens)
        )


def _ordered(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    """Best first; among equal ones the lower id first, as greedy decoding chooses."""
    pairs = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
    return tuple((id, value) for value, id in pairs)


def score(log_probabilities: mx.array, tokens: mx.array, top: int) -> Scores:
    """The scores of ids (n,) chosen in rows (n, V), with the `top` most likely ids of each."""
    chosen = mx.take_along_axis(log_probabilities, tokens[:, None], axis=-1)[:, 0]
    top = min(top, log_probabilities.shape[-1])
    best = mx.argpartition(-log_probabilities, kth=max(top - 1, 0), axis=-1)[:, :top]
    return Scores(chosen, best, mx.take_along_axis(log_probabilities, best, axis=-1))
