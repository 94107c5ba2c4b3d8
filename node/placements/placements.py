"""The head's placements: one loop that observes runners, reconciles, and performs the actions."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...placement.errors import ExoNodeError, PlacementNotFound, PlacementSuperseded
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.options import PlanOptions
from ...proto import peer_pb2 as pb
from ..cluster.desired import NEVER, Desired, DesiredPlacements
from ..machine.events import EventLog
from ..machine.timing import Timing
from .loaded_placement import LoadedPlacement
from .observations import Observations
from .placement_records import PlacementRecords
from .planning import ModelCards, PlannerView
from .reconcile import reconcile
from .replicas import admit, replica_refusal
from .room import free_with_evictions
from .situation import Situation
from .stage_actions import StageActions
from .stages import Facts, Stages
from .state import (
    UNCONNECTED,
    Action,
    Connect,
    Epoch,
    GiveUp,
    LiveNode,
    Load,
    Observed,
    Release,
    Replan,
    Retry,
    Scale,
    StageRunner,
    Unload,
)
from .waiting_requests import Assignment, Waiter, WaitingRequests

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Placements:
    """Every placement, replicas included, while this node leads. Runs on the node's event loop.

    `look` is the pass: it may be called at any time, and is after each outcome.
    """

    _stages: Stages
    _facts: Facts
    _timing: Timing
    _events: EventLog
    desired: DesiredPlacements
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._cards = ModelCards(self._facts, self._kick)
        cards = self._cards.by_model
        self._view = PlannerView(self._facts, self._timing, cards)
        self._observations = observations = Observations(self._clock, self._timing)
        self._records = PlacementRecords(
            self._facts, self._events, observations, cards, self._clock
        )
        self.actions = StageActions(
            self._stages, self._facts, observations, self._timing, self._records, self._kick
        )
        self._requests = WaitingRequests()
        self._scheduled: asyncio.Handle | None = None
        self._adopts = False
        self._looked_at = NEVER
        self.leading = asyncio.Event()
        """Set while this node leads and has read the placements of the last head."""
        self.over = asyncio.Event()
        """Set once another node is the head."""

    # ------------------------------------------------------------------ the head

    def lead(self, head: NodeId, term: int, *, adopts: bool = True) -> None:
        """This node is the head. Placements are read from runners once every node was heard."""
        if self._view.term:
            self._view.term = term
            return
        self._view.head, self._view.term = head, term
        self._view.leads_since = self._looked_at = self._clock()
        self.over = asyncio.Event()
        self._adopts = adopts
        if not adopts:
            self.leading.set()

    @property
    def is_taking_over(self) -> bool:
        """This node leads, and has not heard every node yet."""
        return self._view.term > 0 and not self.leading.is_set()

    async def let_go(self) -> None:
        """Another node is the head and continues with the runners: none is unloaded."""
        if self._view.term == 0:
            return
        log.info("another head has %s now", ", ".join(record.id for record in self.records))
        self._view.term = 0
        self.leading.clear()
        self.over.set()
        self._requests.cancel()  # they go to another head
        await self.actions.close()
        self._observations.clear()
        self._records.clear()

    async def close(self) -> None:
        """Leaves the runners of other nodes to the next head."""
        self._view.term = 0
        if self._scheduled is not None:
            self._scheduled.cancel()
        await self._cards.close()
        self._requests.cancel()
        await self.actions.close()

    # ------------------------------------------------------------------ for requests

    @property
    def records(self) -> list[LoadedPlacement]:
        """One for each model that is loaded, loading, or failed to load."""
        return self._records.listed()

    @property
    def runners(self) -> tuple[StageRunner, ...]:
        return self._observations.runners

    def of(self, model: ModelId) -> LoadedPlacement | None:
        return next((r for r in self.records if r.card.id == model), None)

    def ready_replicas(self, model: ModelId) -> int:
        return sum(r.card.id == model and r.status == "ready" for r in self.records)

    def missing_replica(self, model: ModelId) -> str:
        """Why a model has fewer replicas than are desired; empty if it has as many."""
        here = self._situation()
        desired = next((each for each in here.desired if each.model == model), None)
        return "" if desired is None else replica_refusal(here, desired, self._facts.name)

    def find(self, placement: PlacementId) -> LoadedPlacement | None:
        return self._records.get(placement)

    async def ensure(
        self, model: ModelId, prefixes: Mapping[PlacementId, pb.CachedPrefix] | None = None
    ) -> Assignment:
        """The model's placement for a new answer, loaded on first use.

        `prefixes`: what replicas have cached of the prompt. Raises what planning and loading raise.
        """
        await self._cards.resolve(model)
        desired = self.desired.get(model) or Desired(model)
        if self.of(model) is None:
            desired = replace(desired, keep_alive_s=None)
        self.desired.note(replace(desired, used_at=self._clock()))
        if (refusal := self._observations.refusal(model)) is not None:
            raise refusal
        assignment = await self._wait(Waiter(model, self._clock(), prefixes=prefixes or {}))
        self.desired.touch(model)
        return assignment

    async def place(
        self,
        model: ModelId,
        options: PlanOptions,
        replicas: int = 1,
        *,
        auto_replicas: bool = False,
    ) -> LoadedPlacement:
        """Loads the model within these bounds. Its other placement serves until then, if both fit.

        Further `replicas` are loaded afterwards, where live nodes have room. Raises what planning
        and loading raise; then what held before is loaded again. Raises PlacementSuperseded where
        a later request places the model otherwise, or removes it, before it is loaded.
        """
        await self._cards.resolve(model)
        now = self._clock()
        desired = Desired(model, options, replicas, auto_replicas, requested_at=now, used_at=now)
        self._observations.forget_failures(model)
        self._refuse(desired)
        waiter = Waiter(model, now, desired, self._requests.previous(self.desired.get(model)))
        self.desired.note(desired)
        try:
            assignment = await self._wait(waiter)
        except PlacementSuperseded:  # perhaps by a request after which another asks for the same
            raise
        except ExoNodeError:
            if waiter.asks_for(self.desired.get(model)):
                self._revert(model, waiter.previous)
            raise
        return assignment.record

    async def remove(self, placement: PlacementId) -> None:
        """Unloads it once its answers have ended; waits for that, up to `drain_s`.

        Of several replicas the others stay; else the model is not desired any more. Raises
        PlacementNotFound.
        """
        record = self.find(placement)
        if record is None:
            raise PlacementNotFound(f"no placement {placement} is here", param="id")
        model = record.card.id
        desired = self.desired.get(model)
        if desired is not None and self.ready_replicas(model) > (record.status == "ready"):
            self.desired.change(model, replicas=max(1, desired.replicas - 1))
            self._observations.retiring[placement] = self._clock()
        else:
            self.desired.forget(model)
            self._observations.forget_failures(model)
            self._records.forget_failed(model)
        self._kick()
        deadline = self._clock() + self._timing.drain_s
        while self.find(placement) is record and self._clock() < deadline:
            await self._records.wait_for_end(self._timing.watch_s)
            self._kick()
        if self.find(placement) is record:
            log.warning("placement %s did not drain in %.0f s", placement, self._timing.drain_s)

    def release(self, model: ModelId) -> None:
        """Unloads it as soon as it is idle."""
        self.desired.change(model, keep_alive_s=0.0)
        self._kick()

    def end(self, record: LoadedPlacement, epoch: Epoch) -> None:
        """An answer that `record.begin` has begun ends."""
        record.activity.end(epoch)
        self.desired.touch(record.card.id)
        if self._requests.all:  # one may need its memory
            self._kick()

    def succeeded(self, record: LoadedPlacement) -> None:
        """It answers well: earlier failures of the model no longer count."""
        self._observations.forget_failures(record.card.id)

    # ------------------------------------------------------------------ the loop

    def look(self) -> None:
        """One pass: observe, reconcile, begin the actions. Answers alone need none."""
        if self._view.term == 0:
            return
        now = self._clock()
        paused_s, self._looked_at = now - self._looked_at, now
        if paused_s >= self._timing.lease_s:
            return  # this process was stopped, and may be the head no longer
        nodes = self._facts.nodes()
        self._observations.merge(nodes)
        if not self._knows_cards() or not self._has_adopted(nodes):
            return
        self._requests.fail_superseded(self.desired.models)
        for waiter in self._requests.all:  # a model may have been removed meanwhile
            self.desired.add_used(waiter.model)
        self._records.update(self._situation(nodes))
        actions = reconcile(self._wishes(), self._observed(nodes), self._view, now)
        for action in actions:
            self._begin(action)
        here = self._situation(nodes)
        self._records.update(here)
        self._admit(self._requests.all, here)
        if any(isinstance(a, Replan | Release | Retry | GiveUp | Scale) for a in actions):
            self._kick()

    def _kick(self) -> None:
        """A pass soon; several calls at once are one pass."""
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._look_now)

    def _look_now(self) -> None:
        """A pass that an outcome or a request asks for; `look` alone notices a stopped process."""
        self._scheduled, self._looked_at = None, self._clock()
        self.look()

    def _situation(
        self, nodes: Sequence[LiveNode] | None = None, placing: Desired | None = None
    ) -> Situation:
        """`placing`: desired in place of the present placement of its model."""
        wishes = {each.model: each for each in self._wishes()}
        if placing is not None:
            wishes[placing.model] = placing
        nodes = self._facts.nodes() if nodes is None else nodes
        return Situation([*wishes.values()], self._observed(nodes), self._view, self._clock())

    def _wishes(self) -> list[Desired]:
        return self.desired.effective(self._cards.by_model.keys())

    def _observed(self, nodes: Sequence[LiveNode]) -> Observed:
        return replace(
            self._observations.observed(),
            nodes=tuple(nodes),
            waiting=self._requests.since,
            answers=self._records.answers(self._clock() - self._timing.claim_grace_s),
            demand=self._records.demand(),
            busy=frozenset(self.actions.busy),
        )

    def _begin(self, action: Action) -> None:
        match action:
            case Load(plan=plan):
                card, fingerprint = self._cards.of(plan.model)
                card = plan.options.apply(card)
                self.actions.load(action, card, fingerprint, self._clock())
            case Connect():
                self.actions.connect(action)
            case Unload(key):
                self._records.note_unload(key)
                self.actions.unload(action)
            case Replan(placement, model, why):
                self._observations.retiring[placement] = self._clock()
                text = f"{model} is placed again: {why}"
                self._events.add("replanned", text, model=model, placement=placement)
            case Release(model):
                self.desired.change(model, used_at=NEVER)
            case GiveUp(model, error=error):
                self._observations.given_up[model] = action
                self._records.note_failure(model, error)
                self._requests.fail(model, error)
                wish = self.desired.get(model)
                if wish and not (wish.requested or model in self._observations.proven):
                    self.desired.change(model, used_at=NEVER)
            case Scale(model, replicas, why, retired):
                self.desired.change(model, replicas=replicas)
                if retired:
                    self._observations.retiring[retired] = self._clock()
                text = f"{model} has {replicas} replica{'s'[: replicas != 1]} now: {why}"
                self._events.add("replicas", text, model=model)
            case Retry(model):
                _ = self._observations.given_up.pop(model, None)

    def _admit(self, waiters: Iterable[Waiter], here: Situation) -> None:
        wishes = {each.model: each for each in here.desired if not each.removed}
        for waiter in waiters:
            if (desired := wishes.get(waiter.model)) is None:
                continue
            route = admit(here, desired, waiter.prefixes)
            record = None if route is None else self.find(route.placement.id)
            if route is None or record is None or (waiter.requested and record.id in here.retiring):
                continue
            record.activity.give(here.now, route.reading_s)
            source = None if route.source is None else self.find(route.source)
            observed = [(self._observations.get(key), layers) for key, layers in route.readers]
            readers = [(runner, layers) for runner, layers in observed if runner is not None]
            why = route.reason, readers, route.read_reason
            self._requests.give(waiter, Assignment(record, route.reading_s, source, *why))
            here.observed = self._observed(here.observed.nodes)  # with this answer

    async def _wait(self, waiter: Waiter) -> Assignment:
        def serve() -> None:  # a placement that is there needs no pass
            recent = self._clock() - self._looked_at < self._timing.lease_s
            if recent and self.leading.is_set() and waiter.requested is None:
                self._admit([waiter], self._situation())
            if not waiter.outcome.done():
                self._look_now()

        leads, every_s = lambda: self._view.term > 0, self._timing.watch_s
        return await self._requests.wait(waiter, serve, every_s, leads)

    def _refuse(self, desired: Desired) -> None:
        """Plans with all memory that may be free. Raises what planning raises."""
        model, here = desired.model, self._situation(placing=desired)
        free = free_with_evictions(here, desired)
        planned = self._view.plan(desired, free, frugal=True, shorten=True, strict=True)
        if isinstance(planned, ExoNodeError):
            self._events.add("load_failed", f"{model} could not be placed: {planned}", model=model)
            raise planned

    def _revert(self, model: ModelId, previous: Desired | None) -> None:
        """A request failed: what was desired before it is desired again, and may be loaded now."""
        if previous is None:
            self.desired.forget(model)
            return
        self.desired.note(previous)
        self._observations.forget_failures(model)
        for record in self._records.of_model(model):
            if record.options == previous.options:
                _ = self._observations.retiring.pop(record.id, None)

    def _knows_cards(self) -> bool:
        """False while the card of a model that runs is being looked up."""
        running = {runner.plan.model for runner in self.runners}
        return self._cards.look_up(running | set(self.desired.models)).isdisjoint(running)

    def _has_adopted(self, nodes: Sequence[LiveNode]) -> bool:
        """Reads the placements of the last head once; False before every node was heard."""
        if not self._adopts:
            return True
        if any(node.heard_at < self._view.leads_since for node in nodes):
            return False
        self._adopts = False
        for runner in self.runners:
            if runner.plan.model in self._cards.by_model:
                self.desired.add_used(runner.plan.model, runner.plan.options)
        self._records.update(self._situation(nodes), adopts=True)
        self.leading.set()
        for record in self.records:
            if owners := [each for each in record.owners.values() if each.epoch != UNCONNECTED]:
                self.actions.probe(owners, "it was lost with the last head")
        return True
