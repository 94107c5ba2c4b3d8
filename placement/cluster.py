"""The planner's input and output: facts on nodes, links and stages. Pure, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from .dtype_bytes import BYTES
from .gpu_faults import ChunkLimit
from .ids import ModelId, NodeId


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Seconds that one model was measured to take on one node; 0 where a figure is missing."""

    decode_s: float
    """One layer, one row."""
    verify_s: float = 0.0
    """One layer, `verify_rows` rows."""
    prefill_s: float = 0.0
    """One layer, a chunk of 512 rows."""
    tail_s: float = 0.0
    """Final norm, lm_head and sampling of one row, as the generator adds them to each token."""
    mtp_speedup: float = 0.0
    """Tokens a second with native MTP over those without; below 1 where drafts do not pay."""
    verify_rows: int = 0
    """A verify that was kept has the rows that were drafted when it was timed, whatever max_k is
    now."""

    @property
    def has_verify(self) -> bool:
        """Whether the cost of a further row follows from it."""
        return self.verify_rows > 1 and 0 < self.verify_s < inf


@dataclass(frozen=True, slots=True, order=True)
class MeasuredLayer:
    """A layer of any model as a node measured it, one row."""

    nbytes: int
    """Weights that a row reads."""
    seconds: float
    dtype: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One live node."""

    id: NodeId
    name: str
    memory_bytes: int
    """Usable for weights and caches; the system's own share is already gone."""
    memory_bandwidth: float
    """Bytes a second; 0 where it was not measured."""
    backend: str = ""
    """Such as metal, cuda, cpu."""
    chip: str = ""
    """A name for a person, such as Apple M3 Ultra."""
    models: frozenset[ModelId] = frozenset()
    """On this node's disk, whole."""
    profile: LayerProfile | None = None
    """Times of the model that is being placed; else they are estimated (`cost.pace_of`)."""
    prefill_s: float = 0.0
    """A layer's forward over 512 rows of a prompt as this node probed it, or 0."""
    measured: tuple[MeasuredLayer, ...] = ()
    """Layers of any models: estimates for one without a profile rest on them."""
    drafts: bool = True
    """Whether its operator lets models draft with their heads."""
    profile_dtype: str = ""
    """The dtype of `profile`, or empty if it is unknown."""
    dtype: str = "auto"
    """The operator's choice."""
    float32_products: str = ""
    """`OWN`: its CPU multiplies float32 matrices by exo-node's own code; else why not."""
    reads: bool = True
    """Whether it reads prompts with other nodes."""
    keeps_readers: bool = False
    """Whether it holds upper layers of models for that, in room that no model needs."""
    reads_any: bool = False
    """Whether it does so with other kinds of machines, whose bits may differ."""
    chunk_limit: ChunkLimit | None = None
    """The limit for the model that is being placed, if a GPU fault there has set one."""


OWN = "cpu_product"
"""`NodeFacts.float32_products` where they are in use: that kernel's name."""


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One measured path between two nodes; the same in both directions."""

    a: NodeId
    b: NodeId
    round_trip_s: float
    bandwidth: float
    """Bytes a second."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as its head sees it; of several links the quickest counts."""

    nodes: tuple[NodeFacts, ...]
    links: tuple[LinkFacts, ...] = ()
    head: NodeId | None = None
    kv_bits: int | None = None
    """The head's EXO_KV_BITS, or None if each card decides."""
    kv_refusals: tuple[tuple[ModelId, str], ...] = ()
    """Models whose caches a load could not quantise, and why."""

    def node(self, node: NodeId) -> NodeFacts:
        """The node with that id. Raises KeyError if it is not in the view."""
        for facts in self.nodes:
            if facts.id == node:
                return facts
        raise KeyError(node)

    def kv_refusal(self, model: ModelId) -> str:
        """Why a load could not quantise the caches of the model; empty where none tried."""
        return next((reason for each, reason in self.kv_refusals if each == model), "")

    def measured_in(self, dtype: str) -> "ClusterView":
        """The view less times that were measured in a dtype of another size; for estimates those
        count, where there are no others."""
        return replace(self, nodes=tuple(_measured_in(node, dtype) for node in self.nodes))

    def between(self, a: NodeId, b: NodeId) -> list[LinkFacts]:
        """Every measured link of the two."""
        return [link for link in self.links if {link.a, link.b} == {a, b}]


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """Layers [first_layer, end_layer) on one node."""

    node: NodeId
    first_layer: int
    end_layer: int


def layer_range(first: int, end: int) -> str:
    """Layers [first, end) for a person: "layers 0-15", "layer 3"."""
    return f"layer {first}" if end - first == 1 else f"layers {first}-{end - 1}"


NOISE = 0.05
"""How far apart, as a share, two measurements of the same thing may be."""


def evened(nodes: Sequence[NodeFacts]) -> tuple[NodeFacts, ...]:
    """The nodes, those whose layers were measured within NOISE of one another made equally fast.

    Else of two twins the one that was luckier when it was measured is filled before the other gets
    more than a layer, which slows several requests at once.
    """
    measured = sorted((n for n in nodes if n.profile is not None), key=_layer_seconds)
    twins: list[list[NodeFacts]] = []
    for node in measured:
        if twins and _layer_seconds(node) <= _layer_seconds(twins[-1][0]) * (1 + NOISE):
            twins[-1].append(node)
        else:
            twins.append([node])
    means = {
        node.id: sum(map(_layer_seconds, group)) / len(group) for group in twins for node in group
    }
    return tuple(
        replace(node, profile=replace(node.profile, decode_s=means[node.id]))
        if node.profile is not None
        else node
        for node in nodes
    )


def _measured_in(node: NodeFacts, dtype: str) -> NodeFacts:
    size = BYTES[dtype]
    same = tuple(each for each in node.measured if BYTES.get(each.dtype) == size)
    node = replace(node, measured=same or node.measured)
    if BYTES.get(node.profile_dtype) in (None, size):
        return node
    return replace(node, profile=None, prefill_s=0.0)


def _layer_seconds(node: NodeFacts) -> float:
    return node.profile.decode_s if node.profile is not None else 0.0
