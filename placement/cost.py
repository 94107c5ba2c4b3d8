"""What a list of stages costs: bytes on each node, seconds for each token."""

from collections.abc import Sequence
from itertools import pairwise

from .card import ModelCard
from .cluster import ClusterView, NodeFacts, StageAssignment
from .ids import NodeId

# Headroom for activations, recurrent state, fragmentation: 20 %, as a fraction of integers.
_HEADROOM = (6, 5)

UNMEASURED_BANDWIDTH = 50e9
"""Bytes a second of a node that has not said: a plain laptop's, so that a measured node wins."""
UNMEASURED_ROUND_TRIP_S = 1e-3
"""Of two nodes without a measured link: a quiet wired network's."""
UNMEASURED_LINK_BANDWIDTH = 125e6
"""Bytes a second: 1 Gbit/s."""


def stage_bytes(
    card: ModelCard, first: int, end: int, generator: bool, context: int, mtp: bool
) -> int:
    """Bytes that layers [first, end) need on a node, 20 % headroom included.

    Weights, and KV for `context` tokens in the layers that hold a cache. The generator (the first
    stage) adds embeddings and lm_head and, with `mtp`, the head's weights and its KV.
    """
    weights = (end - first) * card.mean_layer_bytes
    caches = card.attention_layers(first, end)
    if generator:
        weights += card.endpoint_bytes
    if generator and mtp and card.native_mtp is not None:
        weights += card.mtp_bytes
        caches += card.native_mtp.num_layers
    need = weights + caches * context * card.kv_bytes_per_layer_token
    over, under = _HEADROOM
    return -(-need * over // under)


def seconds_per_token(
    card: ModelCard, stages: Sequence[StageAssignment], view: ClusterView
) -> float:
    """Seconds from one token to the next of one request, plain decoding, short context.

    Each stage reads its active weights once (KV, the same in total wherever it lies, is left
    out); the generator reads lm_head too; each hop, the return included, costs half a round trip
    and one hidden row. Raises KeyError for a node that is not in the view.
    """
    compute = sum(
        _stage_seconds(card, stage, view.node(stage.node), generator=index == 0)
        for index, stage in enumerate(stages)
    )
    if len(stages) == 1:
        return compute
    ring = [*stages, stages[0]]
    return compute + sum(_hop_seconds(card, a.node, b.node, view) for a, b in pairwise(ring))


def bandwidth_of(node: NodeFacts) -> float:
    """Bytes a second that the node reads, or the assumed figure where it was not measured."""
    # Not `<= 0`: a peer's NaN takes the assumed figure too.
    return node.memory_bandwidth if node.memory_bandwidth > 0 else UNMEASURED_BANDWIDTH


def _stage_seconds(
    card: ModelCard, stage: StageAssignment, node: NodeFacts, *, generator: bool
) -> float:
    read = (stage.end_layer - stage.first_layer) * card.active_layer_bytes
    if generator:
        read += card.lm_head_bytes
    return read / bandwidth_of(node)


def _hop_seconds(card: ModelCard, a: NodeId, b: NodeId, view: ClusterView) -> float:
    link = view.link(a, b)
    if link is None:
        return UNMEASURED_ROUND_TRIP_S / 2 + card.hidden_bytes / UNMEASURED_LINK_BANDWIDTH
    bandwidth = link.bandwidth if link.bandwidth > 0 else UNMEASURED_LINK_BANDWIDTH
    return link.round_trip_s / 2 + card.hidden_bytes / bandwidth
