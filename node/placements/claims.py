"""The head's side of answers: who may run, on which placement, and who holds one of them.

The node that a client asked drives its answer and asks here for a placement; see
`node/chat/claim.py`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from typing import Any

from ...placement.card import ModelCard
from ...placement.drafting import Drafting, DraftPolicy, EnabledState, HeadState, choose_drafting
from ...placement.errors import HeadGone, PlacementNotFound, UnsupportedParameter
from ...placement.ids import ModelId, PlacementId
from ...proto import peer_pb2 as pb
from ..machine.events import EventLog
from ..machine.timing import Timing
from .loaded_placement import LoadedPlacement, epoch_from_wire, placed_of
from .placements import Placements
from .stage_specs import StageSettings
from .stages import Facts
from .turns import Turns
from .waiting_requests import Assignment

log = logging.getLogger(__name__)

Acquired = AsyncGenerator[pb.AcquireEvent, None]


class Claims:
    """Gives answers their placements while this node leads. Runs on the node's event loop."""

    def __init__(
        self, placements: Placements, facts: Facts, events: EventLog, timing: Timing
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
        with _ending(over):
            if request.release:
                card, _ = await self._facts.card(ModelId(request.model))
                self._placements.release(card.id)
                yield _waiting("")
                return
            held = claimed = Assignment(self._claimed(request)) if request.holding else None
            model = await self._checked(request) if claimed is None else claimed.record.card.id
            turns = self._turns.setdefault(model, Turns())
            turns.set_replicas(self._placements.ready_replicas(model))
            turn = turns.enter(
                is_resumed=claimed is not None or request.HasField("resumes"),
                background=request.background,
                client=request.client,
            )
            try:
                if claimed is None:
                    yield _waiting("")
                # The model's load first, so that who waits for one is in no other model's way.
                prefixes = {PlacementId(p.placement): _bounded(p.prefix) for p in request.prefixes}
                while claimed is None or not turn.runs or not (held or claimed.record.is_loaded):
                    loading = asyncio.ensure_future(self._placements.ensure(model, prefixes))
                    with _ending(loading):  # for this request; the load itself is shielded
                        while await self._is_pending(loading, over):
                            yield _waiting(self._loading_step(model))
                        claimed = loading.result()
                    if not (turn.runs and claimed.record.is_loaded):
                        claimed.record.activity.decline(claimed.reading_s)
                    if not turn.runs:
                        turns.ask(turn)
                        came = asyncio.ensure_future(turn.came.wait())
                        with _ending(came):
                            while await self._is_pending(came, over):
                                pass
                        claimed = None  # it may be gone meanwhile
                record = claimed.record
                epoch = record.begin()
                try:
                    self._extend_stay(model, request)
                    if record.is_loaded:
                        yield pb.AcquireEvent(placed=self._placed(claimed, request))
                    else:  # the next head adopted it without a stage; its answer notices that
                        yield _waiting("restoring")
                    _ = await asyncio.wait([over])
                    raise HeadGone("another node is the head now")
                finally:
                    self._placements.end(record, epoch)
            finally:
                turns.leave(turn)

    def report(self, report: pb.AttemptReport) -> None:
        """How an answer fares that holds a placement."""
        record = self._placements.find(PlacementId(report.placement))
        if record is not None and report.well:
            self._placements.succeeded(record)

    async def _until_leading(self) -> None:
        try:
            async with asyncio.timeout(self._timing.takeover_s):
                _ = await self._placements.leading.wait()
        except TimeoutError:
            raise HeadGone("this node is not the head; ask the one that is") from None

    def _claimed(self, request: pb.AcquireRequest) -> LoadedPlacement:
        """The placement of a claim that another head gave: the answer runs already."""
        record = self._placements.find(PlacementId(request.holding))
        if record is None:
            raise PlacementNotFound(
                f"the head holds no placement {request.holding}", param="holding"
            )
        return record

    async def _checked(self, request: pb.AcquireRequest) -> ModelId:
        """Refuses, before anything is loaded, what no placement of the model could serve."""
        card, _ = await self._facts.card(ModelId(request.model))
        if request.HasField("embeds"):
            _check_use(card, embeds=request.embeds)
        record = self._placements.of(card.id)
        if record is None:
            await self._facts.require_files(card.id)
        _ = self._drafting(card if record is None else record.card, None, request)
        if request.HasField("resumes"):
            self._lost(card, request)
        return card.id

    def _extend_stay(self, model: ModelId, request: pb.AcquireRequest) -> None:
        if request.HasField("keep_alive_s"):
            self._placements.desired.extend_stay(
                model, request.keep_alive_s, trusted=request.trusted
            )

    def _lost(self, card: ModelCard, request: pb.AcquireRequest) -> None:
        lost = request.resumes
        if lost.broken:
            broken = PlacementId(lost.broken)
            self._placements.actions.note_broken(
                broken, epoch_from_wire(lost.epoch), lost.why, lost.gone
            )
        self._events.add(
            "resumed",
            f"an answer of {card.id} resumes after {lost.rounds} rounds of decoding: {lost.why}",
            model=card.id,
            request=request.request,
            attempt=lost.attempt,
        )

    def _placed(self, assignment: Assignment, request: pb.AcquireRequest) -> pb.Placed:
        record = assignment.record
        settings = self._facts.stage_settings(record.generator.node)
        drafting = self._drafting(record.card, record, request, settings)
        placed = placed_of(record)
        wire = placed.drafting
        wire.num_draft_tokens, wire.adaptive_draft = drafting.k, drafting.adaptive
        if drafting.kind != "none":
            wire.initial_draft_tokens = drafting.initial_k
            wire.initial_draft_source = drafting.reason
        else:
            wire.drafting_reason = drafting.reason
        wire.async_draft_eval = settings.async_draft_eval
        wire.prompt_lookup = not request.HasField("num_draft_tokens")
        placed.reason = assignment.reason
        if (source := assignment.source) is not None and source.endpoints:
            generator = source.generator
            placed.prefix_source.CopyFrom(
                pb.PrefixSource(placement=source.id, ready=generator.ready, node=generator.node)
            )
        placed.read_reason = assignment.read_reason
        for runner, layers in assignment.readers:
            placed.readers.add(
                source=pb.PrefixSource(
                    placement=runner.key.placement, ready=runner.ready, node=runner.key.node
                ),
                first_layer=layers.first_layer,
                end_layer=layers.end_layer,
            )
        placed.sampling.update(record.card.sampling.by_field)
        return placed

    def _drafting(
        self,
        card: ModelCard,
        record: LoadedPlacement | None,
        request: pb.AcquireRequest,
        settings: StageSettings | None = None,
    ) -> Drafting:
        if record is None:
            stages, head, enabled = 1, HeadState(True), EnabledState(True)
        else:
            stages, head = len(record.stages), record.head
            enabled = self._facts.mtp_switch(record.generator.node)
        k = request.num_draft_tokens if request.HasField("num_draft_tokens") else None
        policy = _POLICIES.get(request.draft_policy)
        settings = settings or StageSettings()
        adaptive, default_k = settings.adaptive_draft, settings.default_k
        return choose_drafting(
            card, stages, head, enabled, k, policy, adaptive=adaptive, default_k=default_k
        )

    async def _is_pending(self, work: "asyncio.Future[Any]", over: "asyncio.Future[Any]") -> bool:
        """Whether the work takes longer than a moment. Raises HeadGone."""
        first, every_s = asyncio.FIRST_COMPLETED, self._timing.watch_s
        _ = await asyncio.wait([work, over], timeout=every_s, return_when=first)
        if over.done():
            raise HeadGone("another node is the head now")
        if work.cancelled():
            raise HeadGone("this node places nothing any more")
        return not work.done()

    def _loading_step(self, model: ModelId) -> str:
        record = self._placements.of(model)
        if record is None:
            return "loading"
        return record.restoring_step(self._facts.name) or record.step or record.error or "loading"


@contextmanager
def _ending(work: "asyncio.Future[Any]") -> Generator[None]:
    """Ends the work with the block; its error is dropped if the block did not await it."""
    try:
        yield
    finally:
        if not work.cancel() and not work.cancelled():
            _ = work.exception()


def _check_use(card: ModelCard, *, embeds: bool) -> None:
    """Refuses embeddings of a chat model and answers of an embedder (UnsupportedParameter)."""
    if card.embeds == embeds:
        return
    if card.embeds:
        raise UnsupportedParameter(
            f"{card.id} is an embedder, which writes no answers; send its inputs to /v1/embeddings "
            "or /api/embed, or name a chat model",
            param="model",
        )
    raise UnsupportedParameter(
        f'{card.id} is no embedder; name a model with the capability "embeddings" in /v1/models, '
        'or, if it is one, write capabilities = ["embeddings"] into its exo-card.toml',
        param="model",
    )


_POLICIES: dict[str, DraftPolicy] = {"fixed": "fixed", "adaptive": "adaptive"}


def _bounded(prefix: pb.CachedPrefix) -> pb.CachedPrefix:
    prefix.rows = min(prefix.rows, prefix.prompt_rows)  # another node says so
    return prefix


def _waiting(step: str) -> pb.AcquireEvent:
    return pb.AcquireEvent(waiting=pb.Waiting(step=step))
