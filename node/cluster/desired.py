"""The models that should be loaded: sent in the head's heartbeats, used by the next head."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from pydantic import ValidationError

from ...placement.card import BlockDrafter
from ...placement.ids import ModelId, NodeId
from ...placement.kv_bits import CHOICES
from ...placement.options import ANY, PlanOptions
from ...proto import peer_pb2 as pb
from ...proto.bounds import MAX_REAL
from ..machine.setting_values import LONGEST

NEVER = -inf


@dataclass(frozen=True, slots=True)
class Desired:
    """One model that should be loaded while it is used, or within its keep_alive.

    Times are of this process's monotonic clock.
    """

    model: ModelId
    options: PlanOptions = ANY
    replicas: int = 1
    """Placements that answer at the same time, each on nodes of its own."""
    auto_replicas: bool = False
    """`replicas` follows the answers in progress."""
    requested_at: float = NEVER
    """When a person last requested it, 0 where another head was asked: that is older than all that
    happens here. NEVER: an answer used it first."""
    keep_alive_s: float | None = None
    """How long it stays loaded without use. None is the setting, and without one for ever."""
    used_at: float = NEVER
    """When it was last used or requested, or NEVER since it was released."""
    removed: bool = False
    """Nothing desires it any more: its answers end, and then it goes."""

    @property
    def requested(self) -> bool:
        return self.requested_at > NEVER

    @property
    def stay_s(self) -> float:
        """`keep_alive_s`; infinity for ever."""
        return inf if self.keep_alive_s is None else self.keep_alive_s


def relaxed(options: PlanOptions, live: Collection[NodeId]) -> PlanOptions:
    """The bounds without those that live nodes cannot keep: an answer matters more."""
    pinned = [*options.nodes, *(node for node, _ in options.layers)]
    whole = all(node in live for node in pinned)
    return replace(
        options,
        min_nodes=max(1, min(options.min_nodes, len(set(live) - options.exclude))),
        nodes=options.nodes if whole else (),
        layers=options.layers if whole else (),
    )


@dataclass(eq=False, repr=False)
class DesiredPlacements:
    """The desired placement of each model, the same on every node that follows the head."""

    _clock: Callable[[], float] = time.monotonic
    keep_alive_s: float = inf
    """The setting, for models whose requests say nothing else."""

    def __post_init__(self) -> None:
        self._by_model: dict[ModelId, Desired] = {}
        self._of_heads: dict[NodeId, tuple[pb.DesiredPlacement, ...]] = {}

    @property
    def models(self) -> Mapping[ModelId, Desired]:
        return self._by_model

    def get(self, model: ModelId) -> Desired | None:
        return self._by_model.get(model)

    def effective(self, models: Collection[ModelId]) -> list[Desired]:
        """The desired placements of the models, each with the stay that holds for it."""
        return [
            replace(each, keep_alive_s=self._stay_s(model))
            for model, each in self._by_model.items()
            if model in models
        ]

    def note(self, desired: Desired) -> None:
        """Adds a model, or replaces its placement."""
        self._by_model[desired.model] = desired

    def change(self, model: ModelId, **fields: object) -> None:
        """Does nothing for a model that is not desired."""
        if (desired := self._by_model.get(model)) is not None:
            self._by_model[model] = replace(desired, **fields)  # pyright: ignore[reportArgumentType]

    def add_used(self, model: ModelId, options: PlanOptions = ANY) -> None:
        """Adds a model that answers use; does nothing for one that is desired already."""
        if model not in self._by_model:
            self.note(Desired(model, options, used_at=self._clock()))

    def touch(self, model: ModelId) -> None:
        """The model is used now."""
        self.change(model, used_at=self._clock())

    def extend_stay(self, model: ModelId, keep_alive_s: float, *, trusted: bool) -> None:
        """Sets how long the model stays, for a request. One that is not `trusted` can only lengthen
        it, up to the setting: another user of the machine may not unload what all use."""
        if not trusted:
            keep_alive_s = min(keep_alive_s, self.keep_alive_s)
            if keep_alive_s <= self._stay_s(model):
                return
        self.change(model, keep_alive_s=keep_alive_s)

    def left_s(self, model: ModelId, *, in_use: bool) -> float:
        """Seconds until the model is unloaded if it is not used; infinity for never."""
        if (desired := self.get(model)) is None:
            return inf
        idle_s = 0.0 if in_use else self._clock() - desired.used_at
        return max(0.0, self._stay_s(model) - max(0.0, idle_s))

    def _stay_s(self, model: ModelId) -> float:
        """Seconds without use after which the model is unloaded; infinity for never."""
        desired = self.get(model)
        own_s = None if desired is None else desired.keep_alive_s
        stay_s = self.keep_alive_s if own_s is None else own_s
        return stay_s if stay_s <= LONGEST else inf

    def forget(self, model: ModelId) -> None:
        """Removes a model; does nothing for one that is not desired."""
        _ = self._by_model.pop(model, None)

    def to_wire(self) -> list[pb.DesiredPlacement]:
        """The messages for the head's heartbeats."""
        now = self._clock()
        return [desired_to_wire(each, now) for each in self._by_model.values()]

    def learn(
        self, head: NodeId, received: Iterable[pb.DesiredPlacement], *, followed: bool
    ) -> None:
        """Records a head's heartbeat. `followed`: it is this node's head, and replaces all."""
        if followed:
            self._of_heads.clear()
            self._by_model = self._from_wire(received)
        else:
            self._of_heads[head] = tuple(received)

    def take(self, leads: Callable[[NodeId], bool]) -> Mapping[ModelId, Desired]:
        """Removes and returns the last desires of heads that lead no longer."""
        former = [head for head in self._of_heads if not leads(head)]
        return self._from_wire(each for head in former for each in self._of_heads.pop(head))

    def _from_wire(self, messages: Iterable[pb.DesiredPlacement]) -> dict[ModelId, Desired]:
        now = self._clock()
        return {ModelId(each.model): desired_from_wire(each, now) for each in messages}


def desired_to_wire(desired: Desired, now: float) -> pb.DesiredPlacement:
    """The inverse of `desired_from_wire`."""
    options, keep_alive_s = desired.options, desired.keep_alive_s
    return pb.DesiredPlacement(
        model=desired.model,
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes or 0,
        context=options.context or 0,
        exclude=sorted(options.exclude),
        nodes=options.nodes,
        layers=[pb.LayerShare(node=node, layers=layers) for node, layers in options.layers],
        kv_bits=options.kv_bits,
        drafter=_drafter_to_wire(options.drafter),
        replicas=desired.replicas,
        auto_replicas=desired.auto_replicas,
        requested=desired.requested,
        # The wire has no infinity; its greatest number is as good.
        keep_alive_s=None if keep_alive_s is None else min(keep_alive_s, MAX_REAL),
        idle_s=None if desired.used_at == NEVER else max(0.0, now - desired.used_at),
    )


def desired_from_wire(message: pb.DesiredPlacement, now: float) -> Desired:
    """Reads a message; bounds that it omits do not hold. `now` is by this process's clock."""
    options = PlanOptions(
        min_nodes=max(1, message.min_nodes),
        max_nodes=message.max_nodes or None,
        context=int(message.context) or None,
        exclude=frozenset(map(NodeId, message.exclude)),
        nodes=tuple(map(NodeId, message.nodes)),
        layers=tuple((NodeId(share.node), int(share.layers)) for share in message.layers),
        kv_bits=chosen_bits(message),
        drafter=_drafter_from_wire(message),
    )
    return Desired(
        ModelId(message.model),
        options,
        max(1, message.replicas),
        message.auto_replicas,
        0.0 if message.requested else NEVER,
        keep_alive_s=message.keep_alive_s if message.HasField("keep_alive_s") else None,
        used_at=now - message.idle_s if message.HasField("idle_s") else NEVER,
    )


def _drafter_to_wire(drafter: BlockDrafter | str | None) -> pb.BlockDrafter | None:
    match drafter:
        case None:
            return None
        case BlockDrafter():
            return pb.BlockDrafter(**drafter.model_dump())
        case _:
            return pb.BlockDrafter()


def _drafter_from_wire(message: pb.DesiredPlacement) -> BlockDrafter | Literal["none"] | None:
    """None where there is none, or one that no card of this version could name."""
    if not message.HasField("drafter"):
        return None
    if not message.drafter.model:
        return "none"
    fields = {each.name: value for each, value in message.drafter.ListFields()}
    with suppress(ValidationError):
        return BlockDrafter.model_validate(fields)
    return None


def chosen_bits(message: pb.DesiredPlacement | pb.NodeFacts) -> int | None:
    """`kv_bits` of a message; None where it has none, or one that this version does not know."""
    is_choice = message.HasField("kv_bits") and message.kv_bits in CHOICES
    return message.kv_bits if is_choice else None
