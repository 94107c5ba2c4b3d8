"""Log-probabilities of emitted tokens, reduced on the device to what is asked for."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from .types import TokenLogprobs


class Scores(NamedTuple):
    """For n rows: the chosen token's log-probability and the `top` best ones; lazy."""

    chosen: mx.array  # (n,)
    top_ids: mx.array  # (n, top)
    top: mx.array  # (n, top), best first

    def read(self, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Those of the first rows, whose emitted ids are `tokens`; waits for them."""
        mx.eval(self)
        chosen = cast("list[float]", self.chosen.tolist())
        ids = cast("list[list[int]]", self.top_ids.tolist())
        top = cast("list[list[float]]", self.top.tolist())
        return tuple(
            TokenLogprobs(token, chosen[i], tuple(zip(ids[i], top[i], strict=True)))
            for i, token in enumerate(tokens)
        )


def score(log_probabilities: mx.array, tokens: mx.array, top: int) -> Scores:
    """Of (n, V) rows and the ids (n,) chosen in them, with the `top` most likely of each."""
    chosen = mx.take_along_axis(log_probabilities, tokens[:, None], axis=-1)[:, 0]
    top = min(top, log_probabilities.shape[-1])
    best = mx.argpartition(-log_probabilities, kth=max(top - 1, 0), axis=-1)[:, :top]
    values = mx.take_along_axis(log_probabilities, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return Scores(
        chosen, mx.take_along_axis(best, order, axis=-1), mx.take_along_axis(values, order, axis=-1)
    )
