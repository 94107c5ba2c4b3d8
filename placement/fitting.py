"""Whether a model fits the nodes that there are, and how fast it would be: for lists of models."""

from dataclasses import dataclass

from .card import ModelCard
from .cluster import ClusterView
from .cost import ModelSizes
from .errors import InsufficientMemory
from .options import DEFAULT_CONTEXT
from .plan import plan


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


def fit(card: ModelCard, view: ClusterView) -> Fit:
    """Where the model would run if nothing else did; the view's memory decides."""
    sizes = ModelSizes.of(card, min(card.context_length, DEFAULT_CONTEXT))
    needed = sizes.need(0, card.num_layers, generator=True)
    try:
        best = plan(card, view)
    except InsufficientMemory as fault:
        return Fit(0, needed, 0.0, 0, fault.message)
    return Fit(len(best.stages), needed, best.score, best.context_length)
