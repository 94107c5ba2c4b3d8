"""The costs of a list of stages: bytes on each node, seconds for each token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from .cluster import ClusterView, LinkFacts, MeasuredLayer, NodeFacts, StageAssignment

if TYPE_CHECKING:
    from .card import ModelCard

HEADROOM = (6, 5)
"""20 % more for activations, recurrent state and fragmentation, as a fraction of integers."""

UNMEASURED_BANDWIDTH = 50e9
"""Bytes a second of an unmeasured node: a plain laptop's, so that a measured node wins."""
BULK_READ_S = 3e-4
"""A layer whose bytes take less at full bandwidth shows nothing of the bandwidth that is reached:
what else it does takes as long."""
UNMEASURED_ROUND_TRIP_S = 1e-3
"""A quiet wired network's, for two nodes without a measured link."""
UNMEASURED_LINK_BANDWIDTH = 125e6
"""Bytes a second: 1 Gbit/s."""
SERIALISATION_S = 1e-4
"""Seconds of a hop beside the link: an array to bytes, a frame, two changes of thread and back.

Half of the 168 to 209 µs that 8 KiB took there and back over a grpcio stream on loopback.
"""
ASSUMED_MTP_SPEEDUP = 1.2
"""The unmeasured gain of native MTP: near the least of the published gains (1.16 for
Qwen3.6-35B-A3B, 1.5 to 2 for the 27B)."""
ASSUMED_ACCEPTANCE = 0.7
"""Accepted share of drafts, where only a verify was measured; published are 0.56 to 0.95."""

# Longer than any token takes: keeps a peer's absurd figure finite.
_NEVER_S = 1e6


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


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A card's bytes at one context, worked out once."""

    layers: int
    attention_layers: int
    layer: int
    """Weights of one layer."""
    cache: int
    """KV of one layer that has any, for the whole context."""
    ends: int
    head: int
    """The head or drafter, its cache included."""
    head_cache: int

    @classmethod
    def of(cls, card: "ModelCard", context: int) -> Self:
        cache = context * card.kv_bytes_per_layer_token
        head_cache = context * card.draft_bytes_per_token
        return cls(
            layers=card.num_layers,
            attention_layers=card.num_attention_layers,
            layer=card.mean_layer_bytes,
            cache=cache,
            ends=card.endpoint_bytes,
            head=card.draft_bytes + head_cache,
            head_cache=head_cache,
        )

    @property
    def uniform(self) -> bool:
        """Whether it makes no difference which of the layers a stage has."""
        return self.attention_layers in (0, self.layers)

    def caches(self, first: int, end: int, *, mtp: bool = False) -> int:
        """KV of layers [first, end), and of the head, for the whole context.

        Layers with a cache count as spread evenly, which is exact where every n-th layer is full
        attention (Qwen3-Next, 3.5, 3.6) and where all are.
        """
        before, after = (layers * self.attention_layers // self.layers for layers in (first, end))
        return (after - before) * self.cache + (self.head_cache if mtp else 0)

    def need(self, first: int, end: int, *, generator: bool, mtp: bool = False) -> int:
        """Bytes of a stage of layers [first, end), with the headroom.

        A generator, the first stage, adds embeddings and lm_head, and its draft head with `mtp`.
        """
        need = (end - first) * self.layer + self.caches(first, end)
        if generator:
            need += self.ends + (self.head if mtp else 0)
        over, under = HEADROOM
        return -(-need * over // under)


def seconds_per_token(
    card: "ModelCard", stages: Sequence[StageAssignment], view: ClusterView
) -> float:
    """Seconds from one token to the next of one request, plain decoding, short context.

    Layers take what was measured, else what other models' layers let expect (`pace_of`; KV, the
    same in total wherever it lies, is left out); the generator adds its tail; each hop, the return
    included, half a round trip, one hidden row and SERIALISATION_S. Raises KeyError for a node
    that is not in the view.
    """
    nodes = [view.node(stage.node) for stage in stages]
    compute = tail_seconds(card, nodes[0]) + sum(
        (stage.end_layer - stage.first_layer) * layer_seconds(card, node)
        for stage, node in zip(stages, nodes, strict=True)
    )
    if len(nodes) == 1:
        return compute
    ring = pairwise([*nodes, nodes[0]])
    return compute + sum(hop_seconds(card, view.between(a.id, b.id)) for a, b in ring)


def layer_seconds(card: "ModelCard", node: NodeFacts) -> float:
    """One layer, one row."""
    measured = node.profile.decode_s if node.profile else 0.0
    return min(sane(measured, pace_of(node).seconds(card.active_layer_bytes)), _NEVER_S)


def tail_seconds(card: "ModelCard", node: NodeFacts) -> float:
    """Seconds that the generator adds to a token: final norm, lm_head, sampling."""
    measured = node.profile.tail_s if node.profile else 0.0
    return min(sane(measured, card.embedding_bytes * pace_of(node).byte_s), _NEVER_S)


def hop_seconds(card: "ModelCard", links: Sequence[LinkFacts]) -> float:
    """One hidden row over the quickest of `links`; over an assumed one where there is none."""
    if not links:
        return _over(card, UNMEASURED_ROUND_TRIP_S, UNMEASURED_LINK_BANDWIDTH)
    return min(_over(card, link.round_trip_s, link.bandwidth) for link in links)


def mtp_speedup(card: "ModelCard", node: NodeFacts) -> float:
    """How many times as fast one request is with native MTP on this node: 1 to max_k + 1.

    As measured; else of the best depth up to max_k, by the measured verify and ASSUMED_ACCEPTANCE,
    a draft being one layer and a tail; else ASSUMED_MTP_SPEEDUP. Where drafts do not pay, adaptive
    K drafts none: hence 1. No round has more tokens than rows, nor takes less than a single row.
    """
    profile, mtp = node.profile, card.drafts
    if mtp is None or not node.drafts:
        return 1.0
    if profile is None:
        return ASSUMED_MTP_SPEEDUP
    if 0 < profile.mtp_speedup < math.inf:
        return min(max(1.0, profile.mtp_speedup), mtp.max_k + 1)
    if not profile.has_verify:
        return ASSUMED_MTP_SPEEDUP
    layer, tail = layer_seconds(card, node), tail_seconds(card, node)
    row = max(0.0, profile.verify_s - layer) / (profile.verify_rows - 1)
    plain = card.num_layers * layer + tail
    speedups = [1.0]
    for k in range(1, mtp.max_k + 1):
        tokens = sum(ASSUMED_ACCEPTANCE**i for i in range(k + 1))
        verify = card.num_layers * (layer + k * row) + tail
        speedups.append(tokens * plain / (verify + k * (layer + tail)))
    return max(speedups)


def _over(card: "ModelCard", round_trip_s: float, bandwidth: float) -> float:
    # Not `<= 0`: a peer's NaN takes the assumed figure too. A round trip of 0 is a fine one.
    latency = round_trip_s if 0 <= round_trip_s < _NEVER_S else UNMEASURED_ROUND_TRIP_S
    rate = sane(bandwidth, UNMEASURED_LINK_BANDWIDTH)
    return latency / 2 + min(card.hidden_bytes / rate, _NEVER_S) + SERIALISATION_S
