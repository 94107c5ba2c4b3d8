"""Estimates for models that a node has not measured, by those that it has. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .cluster import MeasuredLayer, NodeFacts

UNMEASURED_BANDWIDTH = 50e9
"""Bytes a second of an unmeasured node: a plain laptop's, so that a measured node wins."""
BULK_READ_S = 3e-4
"""A layer whose bytes take less at full bandwidth shows nothing of the bandwidth that is reached:
what else it does takes as long."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The time of a layer: a part that every layer takes, and one by its bytes."""

    overhead_s: float
    byte_s: float

    def seconds(self, nbytes: int) -> float:
        """Seconds of a layer that reads `nbytes` for a row."""
        return self.overhead_s + nbytes * self.byte_s


def pace_of(node: NodeFacts) -> Pace:
    """A node's pace, by memory bandwidth alone where nothing was measured.

    The smallest layer that was measured shows the overhead, if it is small. The largest one shows
    how much of the bandwidth is reached, if it is large enough.
    """
    byte_s = 1 / bandwidth_of(node)
    if not node.measured:
        return Pace(0.0, byte_s)
    smallest, largest = min(node.measured), max(node.measured)
    small_s, large_s = smallest.nbytes * byte_s, largest.nbytes * byte_s
    overhead_s = max(0.0, smallest.seconds - small_s) if small_s < BULK_READ_S else 0.0
    reached = max(0.0, largest.seconds - overhead_s) / largest.nbytes
    if large_s < BULK_READ_S:
        return Pace(overhead_s, min(byte_s, largest.seconds / largest.nbytes))
    return Pace(overhead_s, max(reached, byte_s) if overhead_s else reached)


def bandwidth_of(node: NodeFacts) -> float:
    """Bytes a second, assumed where they are not known."""
    return sane(node.memory_bandwidth, UNMEASURED_BANDWIDTH)


def lent(nodes: Sequence[NodeFacts]) -> tuple[NodeFacts, ...]:
    """The nodes; those that have measured nothing get what another one of their backend has, by
    bandwidth. Else they are weighed by their data sheets against what others really reach."""
    lenders = {node.backend: node for node in reversed(nodes) if node.measured}

    def measured(node: NodeFacts) -> tuple[MeasuredLayer, ...]:
        lender = lenders.get(node.backend, node)
        ratio = bandwidth_of(lender) / bandwidth_of(node)
        return tuple(replace(each, seconds=each.seconds * ratio) for each in lender.measured)

    return tuple(n if n.measured else replace(n, measured=measured(n)) for n in nodes)


def sane(measured: float, assumed: float) -> float:
    """A peer's figure, unless it is none: zero, negative, infinite or NaN."""
    return measured if 0 < measured < math.inf else assumed
