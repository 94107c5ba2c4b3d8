"""One internal request to the events of its answer: placement, drafting, the generator's stream."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from ..mtp.types import Sampling
from ..placement.card import ModelCard
from ..placement.drafting import Drafting, EnabledState, HeadState, choose_drafting
from ..placement.errors import ExoNodeError, PeerLost, QueueFull, StateLost
from ..placement.ids import ModelId
from ..proto import peer_pb2 as pb
from .events import EventLog
from .metrics import AnswerMeter, Metrics
from .placements import Placements
from .records import Endpoint, Record
from .requests import (
    Event,
    Finished,
    GenerationRequest,
    Loading,
    PrefillProgress,
    Resuming,
    Started,
    TextDelta,
    TokenLogprob,
)
from .resuming import AnswerLog
from .stages import Facts
from .totals import Totals

MAX_RUNNING = 8
MAX_WAITING = 32
LOADING_EVERY_S = 1.0
QUIET_S = 0.5
"""Without a sign from the generator for this long, every stage is asked for one."""


class Generators(Protocol):
    """How a generator's runner is called."""

    def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Raises PeerLost, and what the runner refuses. Closing it cancels the generation."""
        ...

    async def park(self, endpoint: Endpoint, request: str, attempt: int) -> None:
        """Before a lost attempt's call is closed: another attempt takes up what it holds."""
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
        events: EventLog | None = None,
    ) -> None:
        self._placements = placements
        self._facts = facts
        self._generators = generators
        self._totals = totals
        self._metrics = metrics
        self._events = EventLog() if events is None else events
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
        answer = AnswerLog(request.id)
        wire: pb.GenerateRequest | None = None
        while True:
            loading = asyncio.ensure_future(self._placements.ensure(request.model))
            try:
                while not (await asyncio.wait([loading], timeout=LOADING_EVERY_S))[0]:
                    yield self._waiting_for(request.model, answer)
            finally:
                if not loading.done():
                    loading.cancel()  # of this waiter; the load itself is shielded
            record = _placed(loading, answer)
            meter.running()
            wire, connections = self._wire(request, record, wire), record.connections
            try:
                async with aclosing(self._generate(wire, record, answer)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            self._totals.add(request.model, event.completion_tokens, event.stats)
                        yield event
                return
            except PeerLost as fault:
                if isinstance(fault, StateLost):
                    answer.begin_anew()
                else:
                    self._placements.broke(record, connections, fault.message)
                if not answer.lost():
                    raise
                self._events.add(
                    "resumed",
                    f"an answer of {request.model} is resumed behind its {len(answer.rounds)} "
                    f"rounds: {fault.message}",
                    model=request.model,
                    request=request.id,
                    attempt=answer.attempt,
                )
                yield Resuming(fault.message)

    def _wire(
        self, request: GenerationRequest, record: Record, earlier: pb.GenerateRequest | None
    ) -> pb.GenerateRequest:
        """The request to the runner; what an earlier attempt drafted, later ones draft too."""
        if earlier is None:
            settings = self._facts.stage_settings(record.generator.node, record.card)
            adaptive = settings.adaptive_draft
            drafting = self._drafting(record.card, record, request, adaptive=adaptive)
            wire = _to_wire(request, record, drafting)
            wire.async_draft_eval = settings.async_draft_eval
            return wire
        wire = pb.GenerateRequest()
        wire.CopyFrom(earlier)
        wire.placement = record.id
        if wire.num_draft_tokens and not record.head.loaded:
            # The tokens are the same without drafts; the answer matters more than its speed.
            wire.num_draft_tokens, wire.adaptive_draft = 0, False
            wire.drafting_reason = f"resumed where no draft head is loaded: {record.head.reason}"
        return wire

    async def _generate(
        self, wire: pb.GenerateRequest, record: Record, answer: AnswerLog
    ) -> AsyncGenerator[Event, None]:
        """One attempt. Raises PeerLost where it is lost."""
        answer.runs_on(record)
        record.begin()
        try:
            events = self._generators.generate(record.generator, answer.continues(wire))
            async with aclosing(events), aclosing(self._heard(events, record, answer)) as heard:
                async for event in heard:
                    answer.saw(event)
                    record.stepped_at = time.monotonic()
                    if event.WhichOneof("event") == "delta":
                        record.spoke_at = record.stepped_at
                    if answer.steady:
                        self._placements.succeeded(record)
                    for out in _events(event, record, answer):
                        if isinstance(out, Finished):
                            self._placements.succeeded(record)
                        yield out
                    if event.WhichOneof("event") == "finished":
                        return
            raise PeerLost("the generator's stream ended before its answer did")
        finally:
            record.end()

    async def _heard(
        self, events: AsyncGenerator[pb.GenerateEvent, None], record: Record, answer: AnswerLog
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """The events; while they stay away, every stage is asked whether it lives.

        A stopped process breaks no connection, and gRPC's own pings take twice as long.
        """
        while True:
            following = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait([following], timeout=QUIET_S))[0]:
                    await self._placements.check(record)
            except PeerLost:
                if 0 not in record.gone:
                    with contextlib.suppress(PeerLost):  # then there is nothing to keep
                        parked = self._generators.park(
                            record.generator, answer.request, answer.attempt
                        )
                        await parked
                raise
            finally:
                if not following.done():
                    following.cancel()
                    _ = await asyncio.gather(following, return_exceptions=True)
                elif not following.cancelled():
                    _ = following.exception()  # seen; else asyncio complains where `check` raised
            event = following.result()
            if event is None:
                return
            yield event

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

    def _waiting_for(self, model: ModelId, answer: AnswerLog) -> Event:
        step = self._loading_step(model)
        return Resuming(step) if answer.resumes else Loading(step)

    def _loading_step(self, model: ModelId) -> str:
        steps = [r.progress for r in self._placements.records if r.card.id == model]
        return steps[0] if steps and steps[0] else "loading"


def _placed(loading: "asyncio.Future[Record]", answer: AnswerLog) -> Record:
    """What was loaded. An answer that has begun ends as lost, whatever the load met."""
    try:
        return loading.result()
    except ExoNodeError as fault:
        if not answer.resumes:
            raise
        raise PeerLost(f"the answer cannot go on: {fault.message}") from fault


def _events(event: pb.GenerateEvent, record: Record, answer: AnswerLog) -> Iterator[Event]:
    match event.WhichOneof("event"):
        case "started":
            if answer.announce():
                yield Started(answer.prompt_ids)
        case "prefill":
            yield PrefillProgress(event.prefill.done, event.prefill.total)
        case "rebuilt":
            yield Resuming(f"{event.rebuilt.done}/{event.rebuilt.total}")
        case "delta":
            yield _delta(event.delta)
        case "finished":
            if event.finished.text:
                yield TextDelta(event.finished.text, ())
            yield _finished(event.finished, record, answer)
        case None:
            raise PeerLost("the generator sent an event of a kind this node does not know")


def _delta(delta: pb.Delta) -> TextDelta:
    logprobs = tuple(
        TokenLogprob(one.id, one.bytes, one.logprob, tuple(_likely(each) for each in one.top))
        for one in delta.logprobs
    )
    return TextDelta(delta.text, tuple(delta.round.tokens), logprobs)


def _likely(one: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(one.id, one.bytes, one.logprob)


def _finished(finished: pb.Finished, record: Record, answer: AnswerLog) -> Finished:
    stats = json.loads(finished.stats_json)
    if answer.resumes:
        stats.update(answer.timings(), resumes=answer.resumes, resume_exact=answer.exact)
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
