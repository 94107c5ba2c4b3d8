"""A prompt's forward computed in parts, a few layers each, so that answers go on between two.

Only when an array is computed changes, never what: a forward is one graph, as it is without parts.
So parts may depend on the clock and on who else is there, which a forward's rows must not.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final

import mlx.core as mx

from .rollback import cache_arrays
from .seams import Wait

LEAST_S: Final = 0.02
"""A part takes no less: there is a look at who else is there behind each."""
SHARE: Final = 0.6
"""Of what the others took: an answer's gap is the time of both, and most of it is to be theirs."""
MOST_S: Final = 0.25
"""A part takes no more than this and a layer, however long the others took."""


class Parts:
    """Those of one engine: each takes SHARE of what the others had between the last two.

    So where layers are that short, prompts have three eighths of the time while others answer
    (half at most: whoever gives turns sees to that), and no answer waits for much
    more than a round of all. All methods run on the compute thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._others_s = 0.0

    def computed(self, requests: Sequence[Sequence[Any]]) -> Generator[Wait]:
        """Evaluates what a forward left in the caches of `requests`, layer by layer.

        Each layer is issued before the one in front of it is waited for: a GPU is never without
        work. What is behind the last layer's cache stays lazy, since nobody may want it.
        """
        layers, begun = _layers(requests), self._clock()
        ahead = _issued(layers)
        while ahead is not None:
            under_way, ahead = ahead, _issued(layers)
            mx.eval(under_way)
            now = self._clock()
            if ahead is not None and now - begun >= self._part_s:
                yield Wait.a_part()
                begun = self._clock()
                self._others_s = begun - now

    @property
    def _part_s(self) -> float:
        return min(max(LEAST_S, SHARE * self._others_s), MOST_S)


def _issued(layers: Iterator[list[mx.array]]) -> list[mx.array] | None:
    if (arrays := next(layers, None)) is not None:
        mx.async_eval(arrays)
    return arrays


def _layers(requests: Sequence[Sequence[Any]]) -> Iterator[list[mx.array]]:
    for layer in zip(*requests, strict=True):
        if arrays := cache_arrays(layer):
            yield arrays
