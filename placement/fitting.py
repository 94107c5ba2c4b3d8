"""Whether a model fits the nodes that there are, and how fast it would be: for lists of models."""

from dataclasses import dataclass

from .card import ModelCard
from .cluster import ClusterView
from .cost import ModelSizes
from .errors import InsufficientMemory
from .ids import NodeId
from .options import DEFAULT_CONTEXT
from .plan import loaded_card, plan


@dataclass(frozen=True, slots=True)
class Fit:
    """The best placement in short; `nodes` 0: there is none, and `reason` says why."""

    nodes: int
    needed_bytes: int
    """On one node, with KV for a usual context and the headroom."""
    seconds: float
    """A token, predicted; 0 where it does not fit."""
    context: int
    reason: str = ""
    dtype: str = ""
    """That it would compute in; empty where it does not fit."""
    dtype_reason: str = ""
    on: tuple[NodeId, ...] = ()
    """The nodes of the placement, the generator first."""
    is_measured: bool = False
    """Whether each of them measured this model's layers; else `seconds` is an estimate."""


def fit(card: ModelCard, view: ClusterView) -> Fit:
    """The best placement within the memory of `view`."""
    try:
        best = plan(card, view)
    except InsufficientMemory as fault:
        return Fit(0, _needed(card), 0.0, 0, fault.message)
    needed = _needed(loaded_card(card, best))
    why = (best.dtype, best.dtype_reason)
    nodes = tuple(stage.node for stage in best.stages)
    measured = all(view.node(node).profile is not None for node in nodes)
    return Fit(
        len(nodes),
        needed,
        best.score,
        best.context_length,
        "",
        *why,
        on=nodes,
        is_measured=measured,
    )


def _needed(card: ModelCard) -> int:
    sizes = ModelSizes.of(card, min(card.context_length, DEFAULT_CONTEXT))
    return sizes.need(0, card.num_layers, generator=True)
