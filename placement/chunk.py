"""The number of prompt rows in one forward."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from .cluster import OWN, NodeFacts, StageAssignment
from .cost import HEADROOM, ModelSizes
from .dtype_bytes import BYTES

if TYPE_CHECKING:
    from .card import ModelCard

MOST: Final = 512
"""Longer ones spare little, as they read the weights for many rows already; and what prompts
have in common is kept where forwards end."""
LEAST: Final = 256
"""Shorter ones would seldom end with turns, where what prompts have in common ends. And one forward
reads all rows of an image of Gemma 3, which are as many, so that none has more rows than these."""
CHUNK_S: Final = 0.25
"""The longest that a cancel, another answer's next token and a stage's sign of life wait."""
_OWN_RATE, _MLX_RATE = 20e9, 1.5e9
"""Weights times rows a second of a CPU without measurements, by our products and by MLX's."""


def prefill_chunk(
    card: "ModelCard",
    nodes: Sequence[NodeFacts],
    stages: Sequence[StageAssignment],
    context: int,
    *,
    mtp: bool,
) -> int:
    """Rows of a forward over a prompt, halved from MOST down to LEAST until no stage takes more
    than CHUNK_S for them, and what one and a half of them hold at once is within half of a stage's
    headroom. `card` is of what is in memory.

    Times are as measured; of a node without, a CPU's are estimated, and a GPU is quick enough.
    """
    sizes, rows = ModelSizes.of(card, context), MOST
    over, under = HEADROOM
    while rows > LEAST:
        fits = True
        for node, stage in zip(nodes, stages, strict=True):
            count, first = stage.end_layer - stage.first_layer, stage.first_layer == 0
            need = sizes.need(stage.first_layer, stage.end_layer, generator=first, mtp=mtp)
            room = need * (over - under) // over // 2
            slow = count * prefill_seconds(card, node, rows) > CHUNK_S
            fits = fits and not slow and 3 * rows * _row_bytes(card) // 2 <= room
        if fits:
            break
        rows //= 2
    return rows


def prefill_seconds(card: "ModelCard", node: NodeFacts, rows: int) -> float:
    """One layer, `rows` rows of a prompt, or 0 if it is not known, but quick."""
    if node.prefill_s > 0:
        return node.prefill_s * rows / MOST
    if node.backend != "cpu":
        return 0.0
    quick = node.float32_products == OWN and card.dtype == "float32" and not card.quantization
    return _weights(card) * rows / (_OWN_RATE if quick else _MLX_RATE)


def _row_bytes(card: "ModelCard") -> int:
    """Bytes of a layer's activations for one row: about one number a column of its matrices."""
    return _weights(card) // card.hidden_size * BYTES[card.dtype]


def _weights(card: "ModelCard") -> int:
    """The weights of a mean layer that a row is multiplied with."""
    plain = BYTES[card.dtype]
    if card.quantization is None:
        return card.active_layer_bytes // plain
    return card.active_layer_bytes * 8 // card.quantization
