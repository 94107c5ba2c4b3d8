"""The planner as the reconciler sees it: plans within the memory that it may give away.

Cards of the models that run or are desired are looked up once and beside the passes.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from math import inf
from typing import Final

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView, StageAssignment
from ...placement.errors import ExoNodeError, ModelNotFound
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.options import PlanOptions
from ...placement.plan import plan, planned_bytes, prompt_seconds, seconds_now
from ...placement.reader_choice import reading_on, upper_layers
from ...placement.reading import ALONE, ReadingPlan
from ...placement.split_refusal import SplitRefusal
from ..cluster.desired import Desired, relaxed
from ..machine.tasks import background
from ..machine.timing import Timing
from .stages import Facts
from .state import StagedPlan, StageRunner

log = logging.getLogger(__name__)

_CACHED: Final = 256
_Cost = Callable[[ModelCard, ClusterView, Sequence[StageAssignment], str], float]
_Question = tuple[ModelCard, ClusterView, PlanOptions, SplitRefusal]


class PlannerView:
    """`PlanningView` over the node's facts. The loop sets `head`, `term` and `leads_since`."""

    def __init__(self, facts: Facts, timing: Timing, cards: Mapping[ModelId, ModelCard]) -> None:
        """`cards`: of every model that may be planned."""
        self.head = NodeId("")
        self.term = 0
        self.leads_since = -inf
        self.timing = timing
        self._facts = facts
        self._cards = cards
        self._answers: dict[_Question, StagedPlan | ExoNodeError] = {}

    def plan(
        self,
        desired: Desired,
        free: Mapping[NodeId, int],
        *,
        frugal: bool,
        shorten: bool = False,
        strict: bool = False,
    ) -> StagedPlan | ExoNodeError:
        """`strict`: with just the bounds that are desired, whichever nodes are live."""
        card = self._card(desired.model, desired.options)
        if card is None:
            return ModelNotFound(f"{desired.model} is not known here", param="model")
        view = self._facts.view(desired.model)
        nodes = tuple(
            replace(node, memory_bytes=max(0, free[node.id]))
            for node in view.nodes
            if node.id in free
        )
        live = {node.id for node in nodes}
        options = desired.options if strict else relaxed(desired.options, live)
        bounds = replace(options, frugal=frugal, shorten=shorten)
        refusal = self._facts.split_refusal(desired.model)
        planned = self._ask((card, replace(view, nodes=nodes), bounds, refusal))
        if isinstance(planned, ExoNodeError):
            return planned
        return replace(planned, options=desired.options, displaced=options != desired.options)

    def _card(self, model: ModelId, options: PlanOptions) -> ModelCard | None:
        """The card of the model as it is loaded with these options."""
        card = self._cards.get(model)
        return None if card is None else options.apply(card)

    def _ask(self, question: _Question) -> StagedPlan | ExoNodeError:
        """The planner's answer. Planning for many nodes takes tenths of a second, so it is kept."""
        if question not in self._answers:
            if len(self._answers) >= _CACHED:
                self._answers.clear()
            self._answers[question] = _planned(question)
        return self._answers[question]

    def seconds(self, plan: StagedPlan, nodes: Sequence[NodeId]) -> float:
        return self._of_stages(seconds_now, plan, nodes, inf)

    def prompt_seconds(self, plan: StagedPlan, nodes: Sequence[NodeId]) -> float:
        return self._of_stages(prompt_seconds, plan, nodes, 0.0)

    def _of_stages(
        self, cost: _Cost, plan: StagedPlan, nodes: Sequence[NodeId], unknown: float
    ) -> float:
        """The cost of the plan's stages on these nodes; `unknown` where one of them is lost."""
        card, view = self._card(plan.model, plan.options), self._facts.view(plan.model)
        if card is None or not set(nodes) <= {node.id for node in view.nodes}:
            return unknown
        stages = zip(plan.plan.stages, nodes, strict=True)
        return cost(
            card, view, [replace(stage, node=node) for stage, node in stages], plan.plan.dtype
        )

    def copy_seconds(self, plan: StagedPlan, source: NodeId, target: NodeId, nbytes: int) -> float:
        links = self._facts.view(plan.model).between(source, target)
        times = (
            link.round_trip_s + nbytes / link.bandwidth for link in links if link.bandwidth > 0
        )
        return min(times, default=inf)

    def reading(
        self,
        plan: StagedPlan,
        answering: NodeId,
        others: Mapping[NodeId, tuple[int, int]],
        rows: int,
        cached_rows: int,
    ) -> ReadingPlan:
        card, view = self._card(plan.model, plan.options), self._facts.view(plan.model)
        if card is None:
            return ALONE
        return reading_on(card, plan.plan, view, answering, others, rows, cached_rows)

    def reader(
        self, plan: StagedPlan, answering: NodeId, node: NodeId, free: int
    ) -> StagedPlan | None:
        card, view = self._card(plan.model, plan.options), self._facts.view(plan.model)
        facts = {each.id: each for each in view.nodes}
        if card is None or answering not in facts or node not in facts:
            return None
        layers = upper_layers(card, plan.plan, view, answering, facts[node], free)
        if isinstance(layers, str):
            return None
        first, need = layers
        return replace(plan, reader=(StageAssignment(node, first, card.num_layers), need))

    def lacks_head(self, plan: StagedPlan, generator: StageRunner) -> bool:
        card, spec = self._card(plan.model, plan.options), generator.spec
        if card is None or card.drafts is None or plan.plan.mtp_off_reason:
            return False
        if spec is None or spec.native_mtp:
            return False
        return self._facts.mtp_switch(generator.key.node).enabled

    def short_of_chunk(self, plan: StagedPlan) -> frozenset[NodeId]:
        limits = {node.id: node.chunk_limit for node in self._facts.view(plan.model).nodes}
        rows = plan.plan.prefill_chunk
        return frozenset(node for node, limit in limits.items() if limit and limit.rows < rows)

    def name(self, serial: int) -> PlacementId:
        """Unique because terms are: see `election`."""
        digest = hashlib.sha256(f"{self.head} {self.term} {serial}".encode())
        return PlacementId(f"p-{digest.hexdigest()[:8]}")


def _planned(question: _Question) -> StagedPlan | ExoNodeError:
    card, view, options, refusal = question
    try:
        planned = plan(card, view, options, refusal)
    except ExoNodeError as fault:
        return fault
    memory = tuple(planned_bytes(card, planned, number) for number in range(len(planned.stages)))
    return StagedPlan(planned, options, memory, frugal=options.frugal)


class ModelCards:
    """`by_model` and `fingerprints` hold what was found; `close` ends what is being looked up."""

    def __init__(self, facts: Facts, changed: Callable[[], None]) -> None:
        self._facts = facts
        self._changed = changed
        self._unknown: set[ModelId] = set()
        self._tasks: dict[ModelId, asyncio.Task[None]] = {}
        self.by_model: dict[ModelId, ModelCard] = {}
        self.fingerprints: dict[ModelId, str] = {}
        """The hashes of this node's files; empty where it has none."""

    async def resolve(self, model: ModelId) -> None:
        """Reads a model's card. Raises ModelNotFound, InvalidCard and InvalidCheckpoint."""
        self.by_model[model], self.fingerprints[model] = await self._facts.card(model)
        self._unknown.discard(model)

    def of(self, model: ModelId) -> tuple[ModelCard, str]:
        """The card of a resolved model, and its fingerprint."""
        return self.by_model[model], self.fingerprints[model]

    def look_up(self, models: Iterable[ModelId]) -> Set[ModelId]:
        """Looks up what is not known yet; `changed` is called after each. Returns the models that
        are being looked up."""
        for model in {*models} - self.by_model.keys() - self._unknown - self._tasks.keys():
            self._tasks[model] = background(self._look_up(model), "the card of a model")
        return self._tasks.keys()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_up(self, model: ModelId) -> None:
        try:
            await self.resolve(model)
        except ExoNodeError as fault:
            self._unknown.add(model)
            log.warning("%s, which runs or is desired, has no card here: %s", model, fault)
        finally:
            _ = self._tasks.pop(model, None)
            self._changed()
