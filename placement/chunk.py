"""The number of prompt rows in one forward."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from .cluster import NodeFacts
from .dtype_bytes import BYTES
from .gpu_faults import ChunkLimit

if TYPE_CHECKING:
    from .card import ModelCard

MOST: Final = 512
"""Longer ones spare little, as they read the weights for many rows already; and what prompts
have in common is kept where forwards end."""
LEAST: Final = 256
"""Shorter ones would seldom end with turns, where what prompts have in common ends. And one forward
reads all rows of an image of Gemma 3, which are as many, so that none has more rows than these."""
CHUNK_S: Final = 0.25
"""Seconds that a cancel, another answer's next token and a stage's sign of life may wait."""
_OWN_RATE, _MLX_RATE = 20e9, 1.5e9
"""Weights times rows a second of a CPU without measurements, by our products and by MLX's."""


def prefill_chunk(card: "ModelCard", nodes: Sequence[NodeFacts]) -> int:
    """Rows of a forward over a prompt: MOST, but LEAST where a node computes on its CPU, whose
    forward over the whole model is estimated at more than CHUNK_S; never more than a GPU fault has
    left one of them. `card` is of what is in memory.

    The rows decide bits, so that they follow from the model and the backends alone: neither from
    times, nor from which nodes have which layers, nor from the room there. A forward that takes
    longer is computed in parts. What one and a half of them hold at once is within half of the
    headroom of eight layers.
    """
    on_cpu = any(node.backend == "cpu" for node in nodes)
    slow = on_cpu and card.num_layers * _cpu_seconds(card, MOST) > CHUNK_S
    rows, limit = LEAST if slow else MOST, chunk_limit(nodes)
    return min(rows, limit.rows) if limit else rows


def chunk_limit(nodes: Iterable[NodeFacts]) -> ChunkLimit | None:
    """The shortest limit of these nodes, or None if none of them has one."""
    return min((each.chunk_limit for each in nodes if each.chunk_limit), default=None)


def prefill_seconds(card: "ModelCard", node: NodeFacts, rows: int) -> float:
    """One layer, `rows` rows of a prompt, or 0 if it is not known, but quick."""
    if node.prefill_s > 0:
        return node.prefill_s * rows / MOST
    return _cpu_seconds(card, rows) if node.backend == "cpu" else 0.0


def _cpu_seconds(card: "ModelCard", rows: int) -> float:
    """An estimate of one layer's on any CPU: whether it has our products is a fact of a machine,
    and the rows of a forward must not depend on that."""
    quick = card.dtype == "float32" and not card.quantization
    return _weights(card) * rows / (_OWN_RATE if quick else _MLX_RATE)


def _weights(card: "ModelCard") -> int:
    """The weights of a mean layer that a row is multiplied with."""
    plain = BYTES[card.dtype]
    if card.quantization is None:
        return card.active_layer_bytes // plain
    return card.active_layer_bytes * 8 // card.quantization
