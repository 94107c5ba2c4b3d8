"""The head's side of answers: who may run, on which placement, and who holds one of them.

The node that a client asked drives its answer and asks here for a placement; see
`node/chat/claim.py`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from ...placement.card import ModelCard
from ...placement.drafting import Drafting, DraftPolicy, EnabledState, HeadState, choose_drafting
from ...placement.errors import HeadGone, PlacementNotFound
from ...placement.ids import ModelId, PlacementId
from ...proto import peer_pb2 as pb
from ..machine.events import EventLog
from ..machine.timing import PlacementTiming
from .loaded_placement import LoadedPlacement, epoch_from_wire, placed_of
from .placements import Placements
from .stages import Facts
from .turns import Turn, Turns

log = logging.getLogger(__name__)

Acquired = AsyncGenerator[pb.AcquireEvent, None]


class Claims:
    """Gives answers their placements while this node leads. Runs on the node's event loop."""

    def __init__(
        self,
        placements: Placements,
        facts: Facts,
        events: EventLog,
        timing: PlacementTiming,
    ) -> None:
        self._placements = placements
        self._facts = facts
        self._events = events
        self._timing = timing
        self._turns: dict[ModelId, Turns] = {}

    async def acquire(self, request: pb.AcquireRequest) -> Acquired:
        """Events until the placement is ready; then the claim holds until this is closed.

        Raises what placing raises, ModelNotFound, InvalidRequest and QueueFull; and HeadGone, at
        any time, where another head is to be asked: then every claim ends here, and is made there
        again.
        """
        await self._until_leading()
        over = asyncio.ensure_future(self._placements.over.wait())
        try:
            events = self._renew(request, over) if request.holding else self._give(request, over)
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            _ = over.cancel()

    def report(self, report: pb.AttemptReport) -> None:
        """How an answer fares that holds a placement."""
        record = self._placements.find(PlacementId(report.placement))
        if record is None:
            return
        record.activity.stepped_at = time.monotonic()
        if report.well:
            self._placements.succeeded(record)

    async def _until_leading(self) -> None:
        try:
            async with asyncio.timeout(self._timing.taking_over_s):
                _ = await self._placements.leading.wait()
        except TimeoutError:
            raise HeadGone("this node is not the head; ask the one that is") from None

    async def _renew(self, request: pb.AcquireRequest, over: "asyncio.Future[Any]") -> Acquired:
        """A claim that another head gave: the answer runs already."""
        record = self._placements.find(PlacementId(request.holding))
        if record is None:
            raise PlacementNotFound(
                f"the head holds no placement {request.holding}", param="holding"
            )
        turns, turn = self._enter(request, record.card.id, is_resumed=True)
        try:
            async with aclosing(self._claim(record, request, over)) as events:
                async for event in events:
                    yield event
        finally:
            turns.leave(turn)

    async def _give(self, request: pb.AcquireRequest, over: "asyncio.Future[Any]") -> Acquired:
        card, _ = await self._facts.card(ModelId(request.model))
        if not request.release and self._placements.of(card.id) is None:
            await self._facts.require_files(card.id)
        if request.release:
            self._placements.release(card.id)
            yield _waiting("")
            return
        # A K that no placement of this model could serve is refused before anything is loaded.
        _ = self._drafting(card, None, request)
        if request.HasField("resumes"):
            self._lost(card, request)
        is_resumed = request.HasField("resumes")
        turns, turn = self._enter(request, card.id, is_resumed=is_resumed)
        try:
            yield _waiting("")
            async with aclosing(self._in_turn(card.id, request, turns, turn, over)) as events:
                async for event in events:
                    yield event
        finally:
            turns.leave(turn)

    async def _in_turn(
        self,
        model: ModelId,
        request: pb.AcquireRequest,
        turns: Turns,
        turn: Turn,
        over: "asyncio.Future[Any]",
    ) -> Acquired:
        """The model's load first, so that who waits for one is in no other model's way."""
        while True:
            loading = asyncio.ensure_future(self._placements.ensure(model))
            loaded = self._until(loading, over, lambda: self._loading_step(model))
            async with aclosing(loaded) as events:
                async for event in events:
                    yield event
            record = loading.result()
            if turn.runs:
                break
            turns.ask(turn)
            came = asyncio.ensure_future(turn.came.wait())
            async with aclosing(self._until(came, over, lambda: "")) as events:
                async for event in events:
                    yield event
        async with aclosing(self._claim(record, request, over)) as events:
            async for event in events:
                yield event

    async def _claim(
        self, record: LoadedPlacement, request: pb.AcquireRequest, over: "asyncio.Future[Any]"
    ) -> Acquired:
        epoch, model = self._placements.begin(record), record.card.id
        if request.HasField("keep_alive_s"):
            self._placements.stays.extend(model, request.keep_alive_s, trusted=request.trusted)
        try:
            yield pb.AcquireEvent(placed=self._placed(record, request))
            _ = await asyncio.wait([over])
            raise HeadGone("another node is the head now")
        finally:
            self._placements.end(record, epoch)

    def _enter(
        self, request: pb.AcquireRequest, model: ModelId, *, is_resumed: bool
    ) -> tuple[Turns, Turn]:
        turns = self._turns.setdefault(model, Turns())
        turn = turns.enter(
            is_resumed=is_resumed, background=request.background, client=request.client
        )
        return turns, turn

    def _lost(self, card: ModelCard, request: pb.AcquireRequest) -> None:
        lost = request.resumes
        if lost.broken:
            broken = PlacementId(lost.broken)
            self._placements.losses.broke(broken, epoch_from_wire(lost.epoch), lost.why, lost.gone)
        self._events.add(
            "resumed",
            f"an answer of {card.id} is resumed behind its {lost.rounds} rounds: {lost.why}",
            model=card.id,
            request=request.request,
            attempt=lost.attempt,
        )

    def _placed(self, record: LoadedPlacement, request: pb.AcquireRequest) -> pb.Placed:
        settings = self._facts.stage_settings(record.generator.node)
        drafting = self._drafting(record.card, record, request, adaptive=settings.adaptive_draft)
        placed = placed_of(record)
        placed.num_draft_tokens, placed.adaptive_draft = drafting.k, drafting.adaptive
        placed.drafting_reason = "" if drafting.kind == "native_mtp" else drafting.reason
        placed.async_draft_eval = settings.async_draft_eval
        placed.sampling.update(record.card.sampling.model_dump(exclude_none=True))
        return placed

    def _drafting(
        self,
        card: ModelCard,
        record: LoadedPlacement | None,
        request: pb.AcquireRequest,
        *,
        adaptive: bool = False,
    ) -> Drafting:
        if record is None:
            stages, head, enabled = 1, HeadState(True), EnabledState(True)
        else:
            stages, head = len(record.stages), record.head
            enabled = self._facts.mtp_switch(record.generator.node)
        k = request.num_draft_tokens if request.HasField("num_draft_tokens") else None
        policy = _POLICIES.get(request.draft_policy)
        return choose_drafting(card, stages, head, enabled, k, policy, adaptive=adaptive)

    async def _until(
        self, work: "asyncio.Future[Any]", over: "asyncio.Future[Any]", step: Callable[[], str]
    ) -> Acquired:
        """Says now and then what is waited for. Raises HeadGone, and leaves the work's errors."""
        try:
            while not work.done():
                first = asyncio.FIRST_COMPLETED
                every_s = self._timing.loading_every_s
                _ = await asyncio.wait([work, over], timeout=every_s, return_when=first)
                if over.done():
                    raise HeadGone("another node is the head now")
                if not work.done() and (text := step()):
                    yield _waiting(text)
            if work.cancelled():
                raise HeadGone("this node places nothing any more")
        finally:
            if not work.done():
                _ = work.cancel()  # of this waiter; a load itself is shielded
            elif not work.cancelled():
                _ = work.exception()  # seen, also where nobody asks for the result

    def _loading_step(self, model: ModelId) -> str:
        record = self._placements.of(model)
        return (record and (record.step or record.error)) or "loading"


_POLICIES: dict[str, DraftPolicy] = {"fixed": "fixed", "adaptive": "adaptive"}


def _waiting(step: str) -> pb.AcquireEvent:
    return pb.AcquireEvent(waiting=pb.Waiting(step=step))
