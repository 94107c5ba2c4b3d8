"""Estimates for models that a node has not measured, by those that it has. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .cluster import MeasuredLayer, NodeFacts

UNMEASURED_BANDWIDTH = 50e9
"""Bytes a second of an unmeasured node: a plain laptop's, so that a measured node wins."""
MOST_OVERHEAD_S = 1e-3
"""No layer takes longer without its bytes; what is more than that is bandwidth not reached."""
SLOWEST_READ = 4
"""A layer that takes longer than so many times its bytes at full bandwidth does something else."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The time of a layer: a part that every layer takes, and one by its bytes."""

    overhead_s: float
    byte_s: float

    def seconds(self, nbytes: int) -> float:
        """A layer that reads so many bytes for a row."""
        return self.overhead_s + nbytes * self.byte_s


def pace_of(node: NodeFacts) -> Pace:
    """By memory bandwidth alone, where nothing was measured.

    The smallest layer that was measured shows the overhead, if its bytes cannot be what it takes
    its time for. The largest one shows how much of the bandwidth is reached.
    """
    byte_s = 1 / bandwidth_of(node)
    if not node.measured:
        return Pace(0.0, byte_s)
    smallest, largest = min(node.measured), max(node.measured)
    read_s, overhead_s = smallest.nbytes * byte_s, 0.0
    if smallest.seconds > SLOWEST_READ * read_s:
        overhead_s = min(smallest.seconds - read_s, MOST_OVERHEAD_S)
    reached = max(0.0, largest.seconds - overhead_s) / largest.nbytes
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
