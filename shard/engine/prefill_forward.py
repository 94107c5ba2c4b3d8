"""A forward over prompts, computed some layers at a time, so that decoding continues in between.

The forward is one lazy graph; parts only choose when its arrays are computed, not their values. So
parts may depend on the clock and on the load, which the rows of the forward must not.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, cast

import mlx.core as mx

from ...mtp.batch_prompts import prefill_together
from ...mtp.caches.rollback import cache_arrays
from ...mtp.seams import ForwardOutput, as_row
from ...mtp.targets import FamilyTarget, PromptReader
from .prompt_images import set_places
from .request import Request
from .states.state import State

MIN_PART_S: Final = 0.02
"""The shortest part, since the scheduler runs after each."""
PART_SHARE: Final = 0.6
"""A part's time as a share of the time that decoding had before it: the gap between two tokens is
the sum of both, and most of it should be decoding."""
MAX_PART_S: Final = 0.25
"""The longest part, but for one layer that may exceed it."""


class PrefillForward:
    """One forward over the next rows of several prompts, each in its own caches."""

    def __init__(
        self,
        target: PromptReader,
        states: dict[Request, State],
        ends: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        """Builds the graph. `target`: a `FamilyTarget` if several prompts are read."""
        self.states = states
        self.ends = tuple(ends)
        """The row after this forward, by request."""
        self._clock = clock
        self._starts = [request.rows for request in states]
        self.outputs = self._build(target)
        """Logits of the last row or of all, as they are needed, and hidden (1, n, H), by
        request."""
        towers = [r.images.take_steps() for r in states if r.images is not None]
        steps = ([step] for tower in towers for step in tower)
        self._layers = chain(steps, _layers([state.caches for state in states.values()]))
        self._issued_layer = _issue_next(self._layers)
        self._paused_at = clock()

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests whose prompts it reads."""
        return tuple(self.states)

    def ids(self, index: int) -> Sequence[int]:
        """The ids of one request's rows in it."""
        return self.requests[index].prompt[self._starts[index] : self.ends[index]]

    def begin(self, index: int) -> int:
        """The row that one request's rows begin at."""
        return self._starts[index]

    def advance(self) -> bool:
        """Evaluates the next layers' caches for a while, those of a tower first. Returns whether
        all layers are issued.

        A part takes PART_SHARE of the time since the last part. Each layer is issued before the
        one in front of it is waited for, and the last one is not waited for here, so that a GPU
        always has work. Outputs after the last layer's cache stay lazy, since they may not be
        needed.
        """
        began_at = self._clock()
        part_s = min(max(MIN_PART_S, PART_SHARE * (began_at - self._paused_at)), MAX_PART_S)
        while self._issued_layer is not None:
            layer, self._issued_layer = self._issued_layer, _issue_next(self._layers)
            if self._issued_layer is None:
                return True
            mx.eval(layer)
            if self._clock() - began_at >= part_s:
                self._paused_at = self._clock()
                return False
        return True

    def _build(self, target: PromptReader) -> list[ForwardOutput]:
        if len(self.states) == 1:
            (request,), (state,) = self.requests, self.states.values()
            is_last = self.ends[0] == len(request.prompt)
            embeddings = set_places(
                target.rope_positions, request.images, self._starts[0], self.ends[0]
            )
            want = (
                "all"
                if request.parameters.output.prompt_logprobs
                else "last"
                if is_last
                else "none"
            )
            rows = as_row(self.ids(0))
            return [target.forward(rows, state.caches, want=want, embeddings=embeddings)]
        target.rope_positions.set_deltas([0])
        caches = [state.caches for state in self.states.values()]
        rows = [as_row(self.ids(index)) for index in range(len(caches))]
        batch_target = cast("FamilyTarget", target)
        hidden = prefill_together(batch_target, rows, caches, self._starts)
        return [ForwardOutput(batch_target.logits_of(each[:, -1:]), each) for each in hidden]


def _issue_next(layers: Iterator[list[mx.array]]) -> list[mx.array] | None:
    if (arrays := next(layers, None)) is not None:
        mx.async_eval(arrays)
    return arrays


def _layers(requests: Sequence[Sequence[Any]]) -> Iterator[list[mx.array]]:
    for layer in zip(*requests, strict=True):
        if arrays := cache_arrays(layer):
            yield arrays
