"""Chooses the nodes of a cluster that read long prompts of one model together. Pure."""

from bisect import bisect_left
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .cluster import ClusterView, NodeFacts, StageAssignment
from .cost import ModelSizes
from .ids import NodeId
from .plan import loaded_card, prompt_seconds
from .reading import (
    ALONE,
    MIN_FORWARDS,
    ReaderLayers,
    ReadingPlan,
    ReadingSizes,
    plan_reading,
    reader_of,
)

if TYPE_CHECKING:
    from .card import ModelCard
    from .plan import Placement

LONG_PROMPT: Final = 16_384
"""Rows of the prompts for which a reader's layers are chosen."""


def reading_on(
    card: "ModelCard",
    placement: "Placement",
    view: ClusterView,
    answering: NodeId,
    others: Mapping[NodeId, tuple[int, int]],
    rows: int,
    cached_rows: int,
) -> ReadingPlan:
    """The readers of a prompt of `rows` rows on a whole model's placement.

    `others`: the first layer that each other node has, and how many answers and prompts.
    """
    nodes = {node.id: node for node in view.nodes if node.reads}
    if answering not in nodes:
        return ALONE
    sizes = ReadingSizes.of(loaded_card(card, placement), placement.prefill_chunk)
    row_s = {
        node: prompt_seconds(card, view, [StageAssignment(node, 0, 1)], placement.dtype)
        for node in {answering, *others} & nodes.keys()
    }
    readers = [
        reader
        for node, (first, busy) in others.items()
        if node in nodes
        and (reader := reader_of(node, row_s[node], view.between(answering, node), busy, first))
    ]
    names = {node: facts.name for node, facts in nodes.items()}
    return plan_reading(rows, cached_rows, row_s[answering], readers, sizes, names)


def upper_layers(
    card: "ModelCard",
    placement: "Placement",
    view: ClusterView,
    answering: NodeId,
    node: NodeFacts,
    free: int,
) -> tuple[int, int] | str:
    """The first layer that a node without a copy would hold to read, and the bytes of its layers;
    or why it holds none."""
    if not node.keeps_readers:
        return "holds no copy of it, and EXO_READERS is not 1 there"
    if not is_kin(view.node(answering), node):
        return "is a machine of another kind"
    if placement.model not in node.models:
        return "lacks its files"
    sizes = ModelSizes.of(loaded_card(card, placement), placement.context_length)
    last, layers = card.num_layers, range(1, card.num_layers)
    fits = (n for n in layers if sizes.need(n, last, generator=False) <= free)
    if (first := next(fits, None)) is None:
        return "has no room for a layer of it"
    plan = reading_on(card, placement, view, answering, {node.id: (first, 0)}, LONG_PROMPT, 0)
    if not plan.readers:
        return "would not make it quicker" if plan.reason else "has no measured link"
    first = plan.readers[0].first_layer
    return first, sizes.need(first, last, generator=False)


def is_kin(own: NodeFacts, other: NodeFacts) -> bool:
    """Whether two nodes may read together: they compute the same bits, as far as their chips decide
    that, or both allow other ones."""
    same = (own.backend, own.chip) == (other.backend, other.chip)
    return same or (own.reads_any and other.reads_any)


@dataclass(frozen=True, slots=True)
class ExpectedReaders:
    """The readers that prompts of a placement would have, if nothing else were under way."""

    readers: tuple[ReaderLayers, ...]
    """The readers of a prompt of LONG_PROMPT rows, or of the context if that is shorter."""
    rows: int
    """The shortest prompt that others read too; 0 if none is."""
    reason: str
    """The reason for it, in words."""


def expected_readers(
    card: "ModelCard", placement: "Placement", view: ClusterView, copies: Set[NodeId]
) -> ExpectedReaders:
    """The nodes that would read prompts of a placement. `copies`: those with the whole model."""
    answering = placement.stages[0].node
    if len(placement.stages) > 1 or card.embeds:
        why = "an embedder's inputs are short" if card.embeds else "its stages read them in turn"
        return ExpectedReaders((), 0, f"none but those: {why}")
    if not view.node(answering).reads:
        return ExpectedReaders((), 0, f"EXO_READERS=0 on {view.node(answering).name}")
    others, refusals = dict[NodeId, tuple[int, int]](), list[str]()
    for node in view.nodes:
        if node.id == answering:
            continue
        first = _first_layer(card, placement, view, node, copies)
        if isinstance(first, str):
            refusals.append(f"{node.name} {first}")
        else:
            others[node.id] = first, 0
    if not others:
        return ExpectedReaders((), 0, "; ".join(refusals) or "there is no other node")

    def planned(rows: int) -> ReadingPlan:
        return reading_on(card, placement, view, answering, others, rows, 0)

    chunk, most = placement.prefill_chunk, placement.context_length
    forwards = range(MIN_FORWARDS, most // chunk + 1)
    index = bisect_left(forwards, True, key=lambda count: bool(planned(count * chunk).readers))
    best = planned(min(LONG_PROMPT, most))
    if index == len(forwards):
        return ExpectedReaders((), 0, "; ".join([planned(most).reason, *refusals]))
    rows = forwards[index] * chunk
    reason = f"from about {rows:,} tokens on, {best.reason}"
    return ExpectedReaders(best.readers, rows, "; ".join([reason, *refusals]))


def _first_layer(
    card: "ModelCard",
    placement: "Placement",
    view: ClusterView,
    node: NodeFacts,
    copies: Set[NodeId],
) -> int | str:
    """The first layer that a node could read, or why it reads none."""
    answering = placement.stages[0].node
    if not node.reads:
        return "has EXO_READERS=0"
    if node.id not in copies:
        layers = upper_layers(card, placement, view, answering, node, node.memory_bytes)
        return layers if isinstance(layers, str) else layers[0]
    if not is_kin(view.node(answering), node):
        return "is a machine of another kind"
    return 1 if view.between(answering, node.id) else "has no measured link"
