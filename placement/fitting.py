"""Whether a model fits the nodes that there are, and how fast it would be: for lists of models."""

from collections.abc import Sequence
from dataclasses import dataclass

from .card import ModelCard
from .cluster import ClusterView, StageAssignment
from .context import LEAST
from .cost import ModelSizes
from .errors import InsufficientMemory
from .ids import NodeId
from .options import usual_context
from .plan import loaded_card, plan, seconds_now


@dataclass(frozen=True, slots=True)
class Fit:
    """The best placement in short. Without one `nodes` is 0, and `reason` is set."""

    nodes: int
    needed_bytes: int
    """On one node, with the headroom and KV for a usual context, or the longest shorter one."""
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


@dataclass(frozen=True, slots=True)
class Speed:
    """The predicted speed of a model where it is loaded."""

    seconds: float
    """Seconds a token."""
    is_measured: bool
    """See `Fit`."""

    @property
    def tokens_per_second(self) -> float:
        """Rounded for display."""
        return round(1 / self.seconds, 1)


def speed_of(
    card: ModelCard, view: ClusterView, stages: Sequence[StageAssignment], dtype: str
) -> Speed | None:
    """The speed of loaded stages, by the figures of `fit`, or None if a node is lost."""
    nodes = [stage.node for stage in stages]
    if not nodes or not set(nodes) <= {node.id for node in view.nodes}:
        return None
    return Speed(seconds_now(card, view, stages, dtype), _is_measured(view, nodes, dtype))


def fit(card: ModelCard, view: ClusterView) -> Fit:
    """The best placement within the memory of `view`."""
    try:
        best = plan(card, view)
    except InsufficientMemory as fault:
        return Fit(0, _needed(card, LEAST), 0.0, 0, fault.message)
    needed = _needed(loaded_card(card, best), best.context_length)
    why = (best.dtype, best.dtype_reason)
    nodes = tuple(stage.node for stage in best.stages)
    return Fit(
        len(nodes),
        needed,
        best.score,
        best.context_length,
        "",
        *why,
        on=nodes,
        is_measured=_is_measured(view, nodes, best.dtype),
    )


def _is_measured(view: ClusterView, nodes: Sequence[NodeId], dtype: str) -> bool:
    view = view.measured_in(dtype)
    return all(view.node(node).profile is not None for node in nodes)


def _needed(card: ModelCard, context: int) -> int:
    sizes = ModelSizes.of(card, min(context, usual_context(card)))
    return sizes.need(0, card.num_layers, generator=True)
