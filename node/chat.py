"""One internal request to the events of its answer: placement, drafting, the generator's stream."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from ..mtp.types import Sampling
from ..placement.card import ModelCard
from ..placement.drafting import Drafting, EnabledState, HeadState, choose_drafting
from ..placement.errors import PeerLost, QueueFull
from ..placement.ids import ModelId
from ..proto import peer_pb2 as pb
from .metrics import AnswerMeter, Metrics
from .placements import Endpoint, Facts, Placements, Record
from .requests import (
    Event,
    Finished,
    GenerationRequest,
    Loading,
    PrefillProgress,
    Started,
    TextDelta,
    TokenLogprob,
)
from .totals import Totals

log = logging.getLogger(__name__)

MAX_RUNNING = 8
MAX_WAITING = 32
LOADING_EVERY_S = 1.0


class Generators(Protocol):
    """How a generator's runner is called."""

    def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Raises PeerLost, and what the runner refuses. Closing it cancels the generation."""
        ...


class ChatService:
    """Answers requests on the head. Counts who runs and who waits, so that nobody waits unseen."""

    def __init__(
        self,
        placements: Placements,
        facts: Facts,
        generators: Generators,
        totals: Totals,
        metrics: Metrics,
    ) -> None:
        self._placements = placements
        self._facts = facts
        self._generators = generators
        self._totals = totals
        self._metrics = metrics
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._waiting = 0

    async def card_sampling(self, model: ModelId, given: Mapping[str, float | int]) -> Sampling:
        """The card's sampling defaults under the fields that the request gave."""
        card, _ = await self._facts.card(model)
        defaults = card.sampling.model_dump(exclude_none=True)
        return replace(Sampling(temperature=1.0), **{**defaults, **given})

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Waits for its turn and for the placement, then streams; see `requests.Chat`."""
        card, _ = await self._facts.card(request.model)
        with self._metrics.answer(card.id) as meter:
            # Closing this generator must close those inside it now, not when they are collected.
            async with aclosing(self._in_turn(request, card, meter)) as events:
                async for event in events:
                    meter.saw(event)
                    yield event

    async def _in_turn(
        self, request: GenerationRequest, card: ModelCard, meter: AnswerMeter
    ) -> AsyncGenerator[Event, None]:
        if self._waiting >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} requests are waiting already; try again shortly")
        self._waiting += 1
        try:
            _ = await self._running.acquire()
        finally:
            self._waiting -= 1
        try:
            async with aclosing(self._answer(request, card, meter)) as events:
                async for event in events:
                    yield event
        finally:
            self._running.release()

    async def _answer(
        self, request: GenerationRequest, card: ModelCard, meter: AnswerMeter
    ) -> AsyncGenerator[Event, None]:
        # A K that no placement of this model could serve is refused before anything is loaded.
        _ = self._drafting(card, None, request)
        for tries_left in (1, 0):
            loading = asyncio.ensure_future(self._placements.ensure(request.model))
            try:
                while not (await asyncio.wait([loading], timeout=LOADING_EVERY_S))[0]:
                    yield Loading(self._loading_step(request.model))
            finally:
                if not loading.done():
                    loading.cancel()  # of this waiter; the load itself is shielded
            record, begun = loading.result(), False
            meter.running()
            try:
                async with aclosing(self._generate(request, record)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except PeerLost as fault:
                # A runner that ended since its last answer: nothing was said, so it may be tried
                # again, on a placement that is loaded anew.
                if begun or not tries_left:
                    raise
                self._placements.lost(record.id, 0, fault.message)

    async def _generate(
        self, request: GenerationRequest, record: Record
    ) -> AsyncGenerator[Event, None]:
        settings = self._facts.stage_settings(record.generator.node, record.card)
        drafting = self._drafting(record.card, record, request, adaptive=settings.adaptive_draft)
        wire = _to_wire(request, record, drafting)
        wire.async_draft_eval = settings.async_draft_eval
        record.begin()
        try:
            async with aclosing(self._generators.generate(record.generator, wire)) as events:
                async for event in _events(events, record):
                    if isinstance(event, Finished):
                        self._placements.succeeded(record)
                        self._totals.add(request.model, event.completion_tokens, event.stats)
                    yield event
        finally:
            record.end()

    def _drafting(
        self,
        card: ModelCard,
        record: Record | None,
        request: GenerationRequest,
        *,
        adaptive: bool = False,
    ) -> Drafting:
        if record is None:
            stages, head, enabled = 1, HeadState(True), EnabledState(True)
        else:
            stages, head = len(record.plan.stages), record.head
            enabled = self._facts.mtp_switch(record.generator.node)
        return choose_drafting(
            card,
            stages,
            head,
            enabled,
            request.num_draft_tokens,
            request.draft_policy,
            adaptive=adaptive,
        )

    def _loading_step(self, model: ModelId) -> str:
        steps = [r.progress for r in self._placements.records if r.card.id == model]
        return steps[0] if steps and steps[0] else "loading"


async def _events(
    events: AsyncGenerator[pb.GenerateEvent, None], record: Record
) -> AsyncIterator[Event]:
    async for event in events:
        match event.WhichOneof("event"):
            case "started":
                yield Started(tuple(event.started.prompt_ids))
            case "prefill":
                yield PrefillProgress(event.prefill.done, event.prefill.total)
            case "delta":
                yield _delta(event.delta)
            case "finished":
                if event.finished.text:
                    yield TextDelta(event.finished.text, ())
                yield _finished(event.finished, record)
                return
            case None:
                raise PeerLost("the generator sent an event of a kind this node does not know")
    raise PeerLost("the generator's stream ended before its answer did")


def _delta(delta: pb.Delta) -> TextDelta:
    logprobs = tuple(
        TokenLogprob(one.id, one.bytes, one.logprob, tuple(_likely(each) for each in one.top))
        for one in delta.logprobs
    )
    return TextDelta(delta.text, tuple(delta.round.tokens), logprobs)


def _likely(one: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(one.id, one.bytes, one.logprob)


def _finished(finished: pb.Finished, record: Record) -> Finished:
    stats = json.loads(finished.stats_json)
    prompt, completion = stats.pop("prompt_tokens"), stats.pop("completion_tokens")
    stages = [
        {"node": stage.node, "layers": [stage.first_layer, stage.end_layer]}
        for stage in record.plan.stages
    ]
    stats["placement"] = {"id": record.id, "stages": stages}
    return Finished(
        reason="stop" if finished.reason == "stop" else "length",
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=0,
        accepted_draft_tokens=stats["accepted_draft_tokens"],
        stats=stats,
    )


def _to_wire(request: GenerationRequest, record: Record, drafting: Drafting) -> pb.GenerateRequest:
    s = request.sampling
    sampling = pb.Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        xtc_probability=s.xtc_probability,
        xtc_threshold=s.xtc_threshold,
        seed=s.seed,
        repetition_penalty=s.penalties.repetition,
        presence_penalty=s.penalties.presence,
        frequency_penalty=s.penalties.frequency,
        penalty_context=s.penalties.context_size,
        logit_bias=dict(s.penalties.logit_bias),
    )
    return pb.GenerateRequest(
        placement=record.id,
        request=request.id,
        attempt=1,
        messages=pb.Messages(json=json.dumps([dict(m) for m in request.messages])),
        sampling=sampling,
        max_tokens=request.max_tokens or 0,
        stop=request.stop,
        num_draft_tokens=drafting.k,
        adaptive_draft=drafting.adaptive,
        drafting_reason="" if drafting.kind == "native_mtp" else drafting.reason,
        ignore_eos=request.ignore_eos,
        top_logprobs=request.top_logprobs,
    )
