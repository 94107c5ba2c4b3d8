"""Work in pieces of about one forward each, between which its thread may do other work."""

from collections.abc import Generator, Sequence
from typing import TypeVar

import mlx.core as mx

from .caches.rollback import cache_arrays

T = TypeVar("T")

Pieces = Generator[float | None, None, T]
"""Yields before each piece, the seconds that it has to wait if any, and returns the result."""


def result_of(pieces: Pieces[T]) -> T:
    """Does all pieces, one after the other."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def by_layers(requests: Sequence[Sequence[object]], *outputs: mx.array) -> Pieces[None]:
    """Computes a forward whose graph is built: its caches, by request, a layer a piece; then its
    outputs. Pieces choose when arrays are computed, not their values."""
    for layer in zip(*requests, strict=True):
        mx.eval(cache_arrays(layer))
        yield
    mx.eval(outputs)
