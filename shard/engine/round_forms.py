"""How rounds are computed: the rows of a forward, and which rounds are issued early."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import mlx.core as mx

from ...mtp.caches.rollback import can_roll_back
from .states.cache_set import can_count_on_device

COUNTS_ON_DEVICE: Final = frozenset({"traced_layer", "row_attention"})
"""Kernels that take positions, and states of several rows, from the device: with them rounds whose
row counts only the device knows are computed as the others are, bit for bit."""
Lookahead: TypeAlias = Literal["none", "plain", "drafted"]
"""The rounds that are issued before the earlier ones are read: none; those without drafts; or also
those with drafts, whose row counts only the device knows."""


def computes_asynchronously() -> bool:
    """Whether the device computes while Python continues. Not on a CPU, where MLX returns from
    `async_eval` only before the last ten operations.
    """
    return mx.default_device() != mx.Device(mx.cpu)


def lookahead_of(kernels: Collection[str], runs_ahead: bool | None, *, drafts: bool) -> Lookahead:
    """The rounds to issue early. `drafts`: whether those with drafts may be among them.

    `runs_ahead` None: if the device computes asynchronously, and rounds with drafts if `kernels`,
    those in use, make that exact.
    """
    if not (computes_asynchronously() if runs_ahead is None else runs_ahead):
        return "none"
    exact = runs_ahead is not None or set(kernels) >= COUNTS_ON_DEVICE
    return "drafted" if exact and drafts else "plain"


@dataclass(slots=True)
class RoundForms:
    """The forms of an engine's rounds. Measurements may take some back before its first request."""

    fixed_rows: int = 0
    """Strict mode's rows of a forward, or 0."""
    counts_on_device: bool = False
    """Whether rounds with drafts may be issued before the earlier ones are read."""
    overlaps: bool = False
    """Whether any rounds are."""

    @classmethod
    def of(
        cls, caches: Sequence[Any], fixed_rows: int = 0, lookahead: Lookahead = "none"
    ) -> "RoundForms":
        """The forms that a request's caches permit."""
        padded = fixed_rows if can_roll_back(caches) else 0  # a rollback removes padding rows
        counts_on_device = lookahead == "drafted" and can_count_on_device(caches)
        return cls(padded, counts_on_device, lookahead != "none")
