"""The dtype that a placement computes in, the same for all of its stages."""

from collections.abc import Sequence
from dataclasses import dataclass

from .card import ModelCard
from .cluster import OWN, NodeFacts

CHECKPOINTS = "the checkpoint's own"
"""The reason of a dtype that needs no other."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype to compute in, with the reason for a person."""

    name: str
    reason: str


def dtypes_of(card: ModelCard, nodes: Sequence[NodeFacts]) -> tuple[Dtype, ...]:
    """The dtypes in which `nodes` (the generator first) may compute: the best first, then those for
    lack of memory.

    What the generator's operator asked for, else the checkpoint's, but for what one of the nodes
    cannot run or runs far slower: on CPUs MLX multiplies gathered experts in float32 only, 4- and
    8-bit weights with 16-bit scales at a tenth of the speed of float32 scales, and other matrices
    of 16 bits at a quarter of that of exo-node's own float32 products. The GPUs of M1 and M2 have
    no bfloat16.
    """
    if (requested := nodes[0].dtype) != "auto":
        return (Dtype(requested, f"{nodes[0].name} was started with --dtype {requested}"),)
    if card.dtype == "float32":
        return (Dtype("float32", CHECKPOINTS),)
    cpu = next((node for node in nodes if node.backend == "cpu"), None)
    if cpu is not None and (why := _needs_float32(card)):
        return (Dtype("float32", f"{cpu.name} computes on a CPU, where {why}"),)
    usual = _sixteen_bits(card, nodes, cpu)
    if not all(is_fast(node) for node in nodes):
        return (usual,)
    reason = "exo-node's own products, which need float32, are far faster on such a CPU"
    return (Dtype("float32", reason), usual)


def is_fast(node: NodeFacts) -> bool:
    """Whether float32 is the node's fastest dtype, and may be chosen for it."""
    return node.backend == "cpu" and node.float32_products == OWN and node.dtype == "auto"


def needs_float32(card: ModelCard, node: NodeFacts) -> bool:
    """Whether a placement with this node must compute in float32 unless a setting overrides it."""
    return node.backend == "cpu" and bool(_needs_float32(card))


def _needs_float32(card: ModelCard) -> str:
    if card.num_experts:
        return "MLX multiplies experts in float32 only"
    return "quantised weights need float32 scales to be fast" if card.quantization else ""


def _sixteen_bits(card: ModelCard, nodes: Sequence[NodeFacts], cpu: NodeFacts | None) -> Dtype:
    old = next((n for n in nodes if n.chip.startswith(("Apple M1", "Apple M2"))), None)
    if old is not None and card.dtype == "bfloat16":
        return Dtype("float16", f"{old.name} has an {old.chip}, whose GPU has no bfloat16")
    reason = CHECKPOINTS
    if cpu is not None:
        slow = next((node for node in nodes if not is_fast(node)), None)
        if slow is not None and slow.backend != "cpu":
            reason += f"; {slow.name} has a GPU, and all stages compute in one dtype"
        elif slow is not None and slow.float32_products not in ("", OWN):
            why = slow.float32_products
            reason += f"; {slow.name} has no fast products of float32: {why}"
    return Dtype(card.dtype, reason)
