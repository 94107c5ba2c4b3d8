"""The options of a placement in a body or a query, with the nodes that they name."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ....placement.card import BlockDrafter
from ....placement.cluster import NodeFacts
from ....placement.errors import InvalidRequest
from ....placement.ids import NodeId
from ....placement.kv_bits import CHOICES, Choice
from ....placement.options import PlanOptions, parse_split
from ...machine.node_names import named_node
from ..http.bodies import StrictBody, parse_body

Count = Annotated[int, Field(ge=1, le=1024)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
_NUMBERS = ("min_nodes", "max_nodes", "context", "kv_bits")


def _whole(value: object) -> object:
    """Refuses false and 8.0, which are equal to numbers of bits, and numbers that are too large."""
    if type(value) is not int or value not in CHOICES:
        raise PydanticCustomError("kv_bits", "should be 0, 4 or 8")
    return value


class LayersOn(StrictBody):
    """One stage of a split by hand."""

    node: Name
    layers: Count


class PlanBody(StrictBody):
    """The options of a plan; nodes go by name or id."""

    model: Name
    min_nodes: Count = 1
    max_nodes: Count | None = None
    context: Annotated[int, Field(ge=1)] | None = None
    exclude: list[Name] = Field(default_factory=list[Name], max_length=1024)
    nodes: list[Name] = Field(default_factory=list[Name], max_length=1024)
    kv_bits: Annotated[Choice, BeforeValidator(_whole)] | None = None
    """Bits a number in attention's caches; 0: not quantised; null: by the head's EXO_KV_BITS or the
    model's card."""
    drafter: Name | None = None
    """A block drafter in place of the card's one, by its id or its folder among the models of the
    head; "none"; null: the card's."""
    layers: list[LayersOn] = Field(default_factory=list[LayersOn], max_length=1024)
    """In pipeline order, the generator first."""

    def options(
        self, live: Sequence[NodeFacts], drafter: BlockDrafter | Literal["none"] | None
    ) -> PlanOptions:
        """The plan's options; `drafter`: the one that the body names. Raises InvalidRequest for a
        name of no live node, or of several."""
        on = _resolved("layers", [stage.node for stage in self.layers], live)
        return PlanOptions(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            context=self.context,
            exclude=frozenset(_resolved("exclude", self.exclude, live)),
            nodes=tuple(_resolved("nodes", self.nodes, live)),
            kv_bits=self.kv_bits,
            drafter=drafter,
            layers=tuple((node, s.layers) for node, s in zip(on, self.layers, strict=True)),
        )


class PlacementBody(PlanBody):
    """A plan that is loaded."""

    replicas: Annotated[int, Field(ge=1, le=8)] | Literal["auto"] = 1
    """Placements that answer at the same time, each on nodes of its own; "auto": as many as the
    answers in progress need. A body with nothing else leaves the other options of a model as they
    were."""

    @property
    def is_count(self) -> bool:
        """It is about the number of replicas alone."""
        return self.model_fields_set == {"model", "replicas"}


def parse_query(query: Iterable[tuple[str, str]]) -> PlanBody:
    """The PlanBody of `model=…&nodes=a,b&layers=a:8,b:8`.

    Raises InvalidRequest that names the field.
    """
    pairs = list(query)
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise InvalidRequest(f"'{name[:100]}' is given {times} times; give it once", param=name)
    fields = {name: _value(name, text) for name, text in pairs}
    return parse_body(json.dumps(fields).encode(), PlanBody)


def _value(name: str, text: str) -> object:
    """The value as a body has it; an invalid text stays a text, which the schema refuses."""
    if name in _NUMBERS:
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text
    if name in ("nodes", "exclude"):
        return text.split(",")
    return parse_split(text) if name == "layers" else text


def _resolved(field: str, names: Sequence[str], live: Sequence[NodeFacts]) -> list[NodeId]:
    return [live_node(field, name, {node.id: node.name for node in live}) for name in names]


def live_node(field: str, name: str, live: Mapping[NodeId, str]) -> NodeId:
    """The node with that name, or the beginning of its id. Raises InvalidRequest; `live`: the names
    of nodes by id."""
    return named_node(
        name, [*live], name=live.__getitem__, id=str, group="the live nodes", param=field
    )
