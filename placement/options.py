"""The options of a placement, checked against the model and the live nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from .card import BlockDrafter, ModelCard
from .cluster import ClusterView, NodeFacts
from .errors import InsufficientMemory, InvalidRequest
from .ids import NodeId
from .split_refusal import MAY_BE_SPLIT, SplitRefusal

DEFAULT_CONTEXT = 32768
"""Tokens of KV that nodes are chosen for by default; see `context.longest_context`."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The bounds of a plan; the defaults leave everything to the planner."""

    min_nodes: int = 1
    max_nodes: int | None = None
    context: int | None = None
    """Tokens of KV to keep room for; None: nodes are chosen for the card's context, at most
    DEFAULT_CONTEXT, and their memory may lengthen or shorten it."""
    exclude: frozenset[NodeId] = frozenset()
    """Nodes that are not used; they need not be live."""
    nodes: tuple[NodeId, ...] = ()
    """Pinned: all of these are used and no others, in the quickest order. Any if empty."""
    layers: tuple[tuple[NodeId, int], ...] = ()
    """A split by hand: node and number of layers in pipeline order, the generator first."""
    kv_bits: int | None = None
    """Bits a number in attention's caches, 0 for whole ones, None for the setting's or card's."""
    drafter: BlockDrafter | Literal["none"] | None = None
    """The block drafter in place of the card's one; None for the card's."""
    frugal: bool = False
    """No more memory than it takes: no lengthened context, no float32 where 16 bits would do."""
    shorten: bool = True
    """A context that was not requested may be shorter than usual where nothing else fits."""

    def apply(self, card: ModelCard) -> ModelCard:
        """The card of what is loaded: with the drafter of these options, if they name one."""
        if self.drafter is None:
            return card
        drafter = None if self.drafter == "none" else self.drafter
        return card.model_copy(update={"drafter": drafter})

    @property
    def drafter_name(self) -> str | None:
        """`drafter` as a body has it."""
        return self.drafter.model if isinstance(self.drafter, BlockDrafter) else self.drafter

    def describe(self, name: Callable[[NodeId], str]) -> str:
        """The bounds that differ from the defaults, for a person; `name`: of a node."""
        most, bits, drafter = self.max_nodes, self.kv_bits, self.drafter_name
        bounds = {
            f"at least {self.min_nodes} nodes": self.min_nodes > 1,
            f"at most {most} node{'s'[most == 1 :]}": most,
            f"on {' and '.join(map(name, self.nodes))}": self.nodes,
            ", ".join(f"{count} layers on {name(node)}" for node, count in self.layers): True,
            f"not on {' or '.join(sorted(map(name, self.exclude)))}": self.exclude,
            f"{self.context or 0:,} tokens of context": self.context,
            f"caches of {bits} bits" if bits else "caches not quantised": bits is not None,
            "without a block drafter" if drafter == "none" else f"drafter {drafter}": drafter,
        }
        return ", ".join(text for text, holds in bounds.items() if text and holds)

    def allows(self, nodes: Sequence[NodeId]) -> bool:
        """Whether stages may run on these nodes, whichever of them are live."""
        pinned = {*self.nodes, *(node for node, _ in self.layers)}
        selected = set(nodes)
        return (
            self.min_nodes <= len(selected) <= (self.max_nodes or len(selected))
            and selected.isdisjoint(self.exclude)
            and pinned in (set(), selected)
        )


ANY: Final = PlanOptions()


def parse_split(text: str) -> list[dict[str, object]]:
    """The stages of `a:8,b:8` as a body has them, the generator first. Raises InvalidRequest."""
    return [_stage(part) for part in text.split(",")]


def _stage(part: str) -> dict[str, object]:
    node, colon, count = part.rpartition(":")
    if not (node and colon and count.isascii() and count.isdecimal() and len(count) < 10):
        raise InvalidRequest(
            f"'layers' has {part[:100]!r}; write node:number with commas between, generator first",
            param="layers",
        )
    return {"node": node, "layers": int(count)}


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The nodes and numbers of stages that options leave."""

    nodes: tuple[NodeFacts, ...]
    """Ordered by id; with a split by hand, in pipeline order."""
    min_stages: int
    max_stages: int
    context: int
    """Tokens of KV."""
    pinned: bool
    """Whether all of `nodes` must be used."""
    split: SplitRefusal = MAY_BE_SPLIT


def limits_of(
    card: ModelCard, view: ClusterView, options: PlanOptions, refusal: SplitRefusal
) -> PlanLimits:
    """The limits that `options` set; `refusal`: why the model must not be split.

    Raises InvalidRequest naming the field where no cluster could meet the options, and
    InsufficientMemory where no node is left.
    """
    nodes = _nodes(card, view, options)
    pinned = bool(options.nodes or options.layers)
    least, most = (_pinned_sizes if pinned else _sizes)(card, len(nodes), options)
    if refusal.forbids and least > 1:
        field = "layers" if options.layers else "nodes" if options.nodes else "min_nodes"
        raise InvalidRequest(
            f"{field} asks for {least} stages, and {card.id} runs on one node only: "
            f"{refusal.reason}; leave {field} out, or name one node",
            param=field,
        )
    counts = [count for _, count in options.layers]
    if not refusal.allows(counts):
        raise InvalidRequest(
            f"layers puts the ends of stages at {', '.join(map(str, accumulate(counts)))}, and "
            f"{card.id} is not split so: {refusal}; choose others, or leave layers out",
            param="layers",
        )
    context = _context(card, options.context)
    return PlanLimits(nodes, least, 1 if refusal.forbids else most, context, pinned, refusal)


def _nodes(card: ModelCard, view: ClusterView, options: PlanOptions) -> tuple[NodeFacts, ...]:
    by_id = {node.id: node for node in view.nodes}
    for field, named in (("nodes", options.nodes), ("layers", [n for n, _ in options.layers])):
        _check_named(field, named, by_id, options.exclude)
    if options.layers:
        return _split_by_hand(card, by_id, options)
    selected = options.nodes or sorted(by_id.keys() - options.exclude)
    if not selected:
        raise InsufficientMemory(
            f"no live node is left to hold {card.id}; start a node or exclude fewer"
        )
    return tuple(by_id[id] for id in sorted(selected))


def _check_named(
    field: str, named: Sequence[NodeId], live: dict[NodeId, NodeFacts], exclude: frozenset[NodeId]
) -> None:
    for at, node in enumerate(named):
        if node not in live:
            names = ", ".join(sorted(each.name for each in live.values()))
            raise InvalidRequest(f"{field}: {node} is no live node; there are {names}", param=field)
        if node in exclude:
            what = f"{live[node].name} is in exclude too; name it in one of them"
            raise InvalidRequest(f"{field}: {what}", param=field)
        if node in named[:at]:
            what = f"{live[node].name} stands there twice; name each node once"
            raise InvalidRequest(f"{field}: {what}", param=field)


def _split_by_hand(
    card: ModelCard, live: dict[NodeId, NodeFacts], options: PlanOptions
) -> tuple[NodeFacts, ...]:
    if options.nodes and set(options.nodes) != {node for node, _ in options.layers}:
        raise InvalidRequest("layers names other nodes than nodes; leave nodes out", param="layers")
    for node, count in options.layers:
        if count < 1:
            raise InvalidRequest(
                f"layers gives {live[node].name} {count} layers; give it 1 or more or leave it out",
                param="layers",
            )
    total = sum(count for _, count in options.layers)
    if total != card.num_layers:
        fault = f"{card.num_layers - total} more" if total < card.num_layers else "fewer"
        raise InvalidRequest(
            f"layers adds up to {total}, and {card.id} has {card.num_layers}; give {fault}",
            param="layers",
        )
    return tuple(live[node] for node, _ in options.layers)


def _sizes(card: ModelCard, live: int, options: PlanOptions) -> tuple[int, int]:
    """The least and the most stages."""
    least, most = options.min_nodes, options.max_nodes
    if not 1 <= least <= live:
        raise InvalidRequest(
            f"min_nodes is {least} of {live} live nodes; ask for 1 to {live} or start more",
            param="min_nodes",
        )
    if least > card.num_layers:
        raise InvalidRequest(
            f"min_nodes is {least}, and {card.id} has {card.num_layers} layers to share; "
            f"ask for 1 to {card.num_layers}",
            param="min_nodes",
        )
    if most is not None and most < least:
        raise InvalidRequest(
            f"max_nodes is {most}, below min_nodes = {least}; raise it or leave it out",
            param="max_nodes",
        )
    return least, min(live, card.num_layers, live if most is None else most)


def _pinned_sizes(card: ModelCard, size: int, options: PlanOptions) -> tuple[int, int]:
    """The least and the most stages where all the named nodes are used, and no others."""
    field = "layers" if options.layers else "nodes"
    most = size if options.max_nodes is None else options.max_nodes
    for name, bound, broken in (
        ("min_nodes", options.min_nodes, options.min_nodes > size),
        ("max_nodes", most, most < size),
    ):
        if broken:
            raise InvalidRequest(
                f"{name} is {bound}, and {field} names {size}; leave {name} out", param=name
            )
    if size > card.num_layers:
        raise InvalidRequest(
            f"{field} names {size} nodes, and {card.id} has {card.num_layers} layers to share; "
            f"name {card.num_layers} or fewer",
            param=field,
        )
    return size, size


def usual_context(card: ModelCard) -> int:
    """Tokens that nodes are chosen for where no context was requested."""
    return min(card.context_length, DEFAULT_CONTEXT)


def _context(card: ModelCard, requested: int | None) -> int:
    if requested is None:
        return usual_context(card)
    if not 1 <= requested <= card.context_length:
        raise InvalidRequest(
            f"context is {requested} tokens; {card.id} takes 1 to {card.context_length}",
            param="context",
        )
    return requested
