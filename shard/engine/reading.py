"""A forward over prompts, computed some layers at a time, so that answers go on in between.

Only when an array is computed changes, never what: the forward is one graph. So its parts may
depend on the clock and on who else is there, which its rows must not.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import mlx.core as mx

from ...mtp.batch_prompts import PromptTarget, read_together
from ...mtp.rollback import cache_arrays
from ...mtp.seams import Block, as_row
from .request import Request
from .state import State
from .targets import PromptReader

LEAST_S: Final = 0.02
"""A part takes no less: there is a look at who else is there behind each."""
SHARE: Final = 0.6
"""Of what the others took: an answer's gap is the time of both, and most of it is to be theirs."""
MOST_S: Final = 0.25
"""A part takes no more than this and a layer, however long the others took."""


class Reading:
    """One forward over the next rows of several prompts, each in its own caches."""

    def __init__(
        self,
        target: PromptReader,
        together: PromptTarget | None,
        states: dict[Request, State],
        ends: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        """Builds the graph. `together`: the target again; None where one prompt is read."""
        self.states = states
        self.ends = tuple(ends)
        """By request, the row behind this forward."""
        self._clock = clock
        self._begun = [request.rows for request in states]
        self.blocks = self._build(target, together)
        """By request: logits of the last row where they are wanted, and hidden (1, n, H)."""
        self._layers = _layers([state.caches for state in states.values()])
        self._ahead = _issued(self._layers)
        self._left_at = clock()

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those whose prompts it reads."""
        return tuple(self.states)

    def ids(self, index: int) -> Sequence[int]:
        """The ids of one request's rows in it."""
        return self.requests[index].prompt[self._begun[index] : self.ends[index]]

    def begin(self, index: int) -> int:
        """The row that one request's rows begin at."""
        return self._begun[index]

    def go_on(self) -> bool:
        """Evaluates the caches layer by layer for a while; whether all of them are.

        It takes SHARE of what the others had since the last part. Each layer is issued before the
        one in front of it is waited for: a GPU is never without work. What is behind the last
        layer's cache stays lazy, since nobody may want it.
        """
        begun = self._clock()
        part_s = min(max(LEAST_S, SHARE * (begun - self._left_at)), MOST_S)
        while self._ahead is not None:
            under_way, self._ahead = self._ahead, _issued(self._layers)
            mx.eval(under_way)
            if self._ahead is not None and self._clock() - begun >= part_s:
                self._left_at = self._clock()
                return False
        return True

    def _build(self, target: PromptReader, together: PromptTarget | None) -> list[Block]:
        if together is None:
            (request,), (state,) = self.requests, self.states.values()
            wants = self.ends[0] == len(request.prompt)
            rows = as_row(self.ids(0))
            return [target.forward(rows, state.caches, want="last" if wants else "none")]
        caches = [state.caches for state in self.states.values()]
        rows = [as_row(self.ids(index)) for index in range(len(caches))]
        hidden = read_together(together, rows, caches, self._begun)
        return [Block(together.logits_of(each[:, -1:]), each) for each in hidden]


def _issued(layers: Iterator[list[mx.array]]) -> list[mx.array] | None:
    if (arrays := next(layers, None)) is not None:
        mx.async_eval(arrays)
    return arrays


def _layers(requests: Sequence[Sequence[Any]]) -> Iterator[list[mx.array]]:
    for layer in zip(*requests, strict=True):
        if arrays := cache_arrays(layer):
            yield arrays
