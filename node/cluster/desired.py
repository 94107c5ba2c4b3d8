"""What was asked of placements: told by the head with its heartbeats, and kept by the next one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...placement.cluster import ClusterView
from ...placement.ids import ModelId, NodeId
from ...placement.options import ANY, PlanOptions
from ...proto import peer_pb2 as pb


@dataclass(frozen=True, slots=True)
class DesiredPlacement:
    """What is asked of a placement."""

    options: PlanOptions = ANY
    spares: int = 0
    flexible: bool = False
    """Fewer nodes will do where no more are live: an answer matters more than where it runs."""

    def within(self, view: ClusterView) -> PlanOptions:
        """The options; if it is flexible, as far as the live nodes allow."""
        options, live = self.options, {node.id for node in view.nodes}
        if not self.flexible:
            return options
        pinned = [*options.nodes, *(node for node, _ in options.layers)]
        whole = all(node in live for node in pinned)
        return replace(
            options,
            min_nodes=max(1, min(options.min_nodes, len(live))),
            nodes=options.nodes if whole else (),
            layers=options.layers if whole else (),
        )


class DesiredPlacements:
    """By model, where somebody asked. The same on every node that hears the head."""

    def __init__(self) -> None:
        self._by_model: dict[ModelId, DesiredPlacement] = {}

    def of(self, model: ModelId) -> DesiredPlacement:
        """For a placement that nobody asks for anew: fewer nodes will do where no more are live."""
        return replace(self._by_model.get(model, DesiredPlacement()), flexible=True)

    def note(self, model: ModelId, desired: DesiredPlacement) -> None:
        """Somebody asked for it."""
        self._by_model[model] = desired

    def forget(self, model: ModelId) -> None:
        """Somebody had it removed."""
        _ = self._by_model.pop(model, None)

    def told(self) -> list[pb.DesiredPlacement]:
        """For the head's heartbeats."""
        return [desired_to_wire(model, desired) for model, desired in self._by_model.items()]

    def asked(self, model: ModelId) -> bool:
        """Whether somebody asked for it."""
        return model in self._by_model

    def learn(self, told: Iterable[pb.DesiredPlacement]) -> None:
        """The head told this, and nothing else holds."""
        self._by_model = {ModelId(desired.model): desired_from_wire(desired) for desired in told}


def desired_to_wire(model: ModelId, desired: DesiredPlacement) -> pb.DesiredPlacement:
    """See `desired_from_wire`."""
    options = desired.options
    return pb.DesiredPlacement(
        model=model,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes or 0,
        context=options.context or 0,
        exclude=sorted(options.exclude),
        nodes=options.nodes,
        layers=[pb.LayerShare(node=node, layers=layers) for node, layers in options.layers],
        spares=desired.spares,
    )


def desired_from_wire(told: pb.DesiredPlacement) -> DesiredPlacement:
    """What is not named is not asked for."""
    options = PlanOptions(
        min_nodes=max(1, told.min_nodes),
        max_nodes=told.max_nodes or None,
        context=int(told.context) or None,
        exclude=frozenset(map(NodeId, told.exclude)),
        nodes=tuple(map(NodeId, told.nodes)),
        layers=tuple((NodeId(share.node), int(share.layers)) for share in told.layers),
    )
    return DesiredPlacement(options, told.spares)
