"""Finds the first part of a model whose rows in a block have other bits than in single steps."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from .pieces import Pieces
from .probe import Subject, exact_widths
from .seams import ForwardOutput
from .targets import Target

Call = tuple[nn.Module, mx.array, mx.array]
"""A module, and the first array that a call takes and gives."""


class DifferingPart(NamedTuple):
    """A module that differs in blocks, the dtype of its input, and the rows before the block."""

    module: nn.Module
    dtype: mx.Dtype
    context: int


def differing_part(subject: Subject, rows: int) -> Pieces[DifferingPart | None]:
    """The first of the subject's modules that differs in a block of `rows` rows, if one does."""
    watched = _WatchedTarget(subject, rows)
    _ = yield from exact_widths(replace(subject, target=cast("Target", watched)), [rows])
    return watched.part


class _WatchedTarget:
    """A target whose blocks are compared, module by module, with the single steps before them."""

    def __init__(self, subject: Subject, rows: int) -> None:
        self.part: DifferingPart | None = None
        self._target, self._rows = subject.target, rows
        self._kinds = {kind for module in subject.modules for kind in type(module).__mro__}
        self._steps: list[list[Call]] = []

    def forward(self, tokens: mx.array, caches: Sequence[object], *, want: Any) -> ForwardOutput:
        rows = tokens.shape[0]
        if self.part is not None or rows not in (1, self._rows):
            return self._target.forward(tokens, caches, want=want)
        with _noted(self._kinds) as calls:
            output = self._target.forward(tokens, caches, want=want)
        if rows == 1:
            self._steps = [*self._steps, calls][-self._rows :]
        elif (call := _first_differing(calls, self._steps)) is not None:
            end = max((getattr(cache, "offset", rows) for cache in caches), default=rows)
            self.part = DifferingPart(call[0], call[1].dtype, end - rows)
        return output


@contextmanager
def _noted(kinds: set[type[Any]]) -> Generator[list[Call]]:
    """Notes the calls of modules of these classes, each after those within it."""
    calls = list[Call]()

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            out = method(self, *args, **named)
            result = next((y for _, y in tree_flatten([out]) if isinstance(y, mx.array)), None)
            if args and isinstance(args[0], mx.array) and result is not None:
                if calls and calls[-1][0] is self:  # a call of the same method, of a base class
                    _ = calls.pop()
                calls.append((self, args[0], result))
            return out

        return call

    names = ("__call__", "as_linear")  # the latter: embeddings as lm_head
    own = {(k, name): vars(k)[name] for k in kinds for name in names if name in vars(k)}
    for (kind, name), method in own.items():
        setattr(kind, name, noting(method))
    try:
        yield calls
    finally:
        for (kind, name), method in own.items():
            setattr(kind, name, method)


def _first_differing(block: list[Call], steps: list[list[Call]]) -> Call | None:
    """The first call to give other rows for the same ones."""
    for call, *ones in zip(block, *steps, strict=False):
        if any(one[0] is not call[0] for one in ones):
            return None
        inputs, outputs = (_same(call[i], [one[i] for one in ones]) for i in (1, 2))
        if inputs and outputs is False:
            return call
    return None


def _same(block: mx.array, steps: list[mx.array]) -> bool | None:
    """Whether a block has the rows of single steps; None if these are not its parts."""
    shapes = list(zip(block.shape, steps[0].shape, strict=False))
    if (len(steps), 1) not in shapes:
        return None
    rows = mx.concatenate(steps, shapes.index((len(steps), 1)))
    return bool(mx.array_equal(block, rows).item()) if rows.shape == block.shape else None
