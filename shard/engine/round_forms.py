"""How rounds are computed: the rows of a forward, and which rounds are issued early."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from .states.cache_set import can_count_on_device

COUNTS_ON_DEVICE: Final = frozenset({"traced_layer", "row_attention"})
"""Kernels that take positions, and states of several rows, from the device: with them rounds whose
row counts only the device knows are computed as the others are, bit for bit."""


def computes_asynchronously() -> bool:
    """Whether the device computes while Python continues. Not on a CPU, where MLX returns from
    `async_eval` only before the last ten operations.
    """
    return mx.default_device() != mx.Device(mx.cpu)


@dataclass(slots=True)
class RoundForms:
    """The forms of an engine's rounds. Measurements may take some back before its first request."""

    counts_on_device: bool = False
    """Whether rounds with drafts may be issued before the earlier ones are read."""
    overlaps: bool = False
    """Whether any rounds are."""

    @classmethod
    def of(
        cls,
        caches: Sequence[Any],
        runs_ahead: bool | None = False,
        *,
        kernels: Collection[str] = (),
        drafts: bool = True,
    ) -> "RoundForms":
        """The forms that a request's caches permit. `drafts`: whether rounds with drafts may be
        among those that are issued early.

        `runs_ahead` None: if the device computes asynchronously, and rounds with drafts if
        `kernels`, those in use, make that exact.
        """
        overlaps = computes_asynchronously() if runs_ahead is None else runs_ahead
        is_exact = runs_ahead is not None or set(kernels) >= COUNTS_ON_DEVICE
        counts = overlaps and is_exact and drafts and can_count_on_device(caches)
        return cls(counts, overlaps)
