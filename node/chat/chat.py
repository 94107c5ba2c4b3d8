"""Runs one internal request: a claim, the generator's stream, and resumes after losses.

Runs on the entry node, which keeps the log of the answer's rounds: whichever other node is lost,
the head among them, the answer resumes from that log.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from ...placement.errors import PROMPT, ExoNodeError, InvalidRequest, PeerLost, StateLost
from ...placement.ids import PlacementId
from ...placement.sampling_values import SourcedValue
from ...proto import peer_pb2 as pb
from ...proto.fields import changed
from ..machine.tasks import cancel
from ..machine.timing import Timing
from ..runners.runner_client import Endpoint, endpoints_of
from .claim import Claim, Heads, Runners, replica_prefixes
from .images import as_read
from .metrics import AnswerMeter, Metrics
from .requests import (
    AnswerProgress,
    CallPart,
    Encoded,
    Event,
    Finished,
    GenerationRequest,
    PromptLogprobs,
    ReasoningDelta,
    Started,
    TextDelta,
)
from .resuming import AnswerLog
from .wire import encode_to_wire, sources_of, stats_to_json, to_wire


@dataclass(eq=False, repr=False)
class ChatService:
    """Answers the requests of this node's own clients."""

    _heads: Heads
    _runners: Runners
    _metrics: Metrics
    timing: Timing
    _: KW_ONLY
    guards_loops: bool = True
    """Whether answers may be ended where they repeat themselves, if their requests allow it."""

    def __post_init__(self) -> None:
        self.events = 0
        """The number of events of all answers so far; it grows while an answer makes progress."""

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Waits for the placement and for the request's turn, then streams; see `requests.Chat`."""
        arrived = self._metrics.now()
        if not self.guards_loops:
            request = replace(request, limits=changed(request.limits, loop_guard=False))
        prefixes = await replica_prefixes(self._heads, self._runners, request, self.timing)
        embeds = request.embeddings is not None
        claim = Claim(self._heads, request, self.timing, prefixes=prefixes, embeds=embeds)
        try:
            # Closing this generator must close those inside it now, not when they are collected.
            async with aclosing(claim.acquire()) as acquired:
                _ = await anext(acquired)  # the model is known, and may be a label
                with self._metrics.answer(request.model, arrived) as meter:
                    answer = _Answer(self, request, claim, meter)
                    async with aclosing(answer.events(acquired)) as events:
                        async for event in events:
                            self.events += 1
                            meter.record(event)
                            yield event
        finally:
            await claim.close()

    async def encode(self, request: GenerationRequest) -> Encoded:
        claim = Claim(self._heads, request, self.timing)
        try:
            async with aclosing(claim.acquire()) as acquired:
                async for news in acquired:
                    if isinstance(news, pb.Placed):
                        generator = self._runners.near(endpoints_of(news)[0])
                        read, _ = as_read(request, generator.ready.images)
                        wire = encode_to_wire(read)
                        with _blames(request.prompt_field):
                            reply = await self._runners.encode(generator, wire)
                        return Encoded(tuple(reply.ids), reply.text, reply.context_length)
        finally:
            await claim.close()
        raise PeerLost("the head gave no placement")

    async def release(self, request: GenerationRequest) -> None:
        claim = Claim(self._heads, request, self.timing, release=True)
        try:
            async with aclosing(claim.acquire()) as acquired:
                _ = await anext(acquired)
        finally:
            await claim.close()

    @property
    def runners(self) -> Runners:
        return self._runners


class _Answer:
    """One answer with all its attempts."""

    def __init__(
        self, chat: ChatService, request: GenerationRequest, claim: Claim, meter: AnswerMeter
    ) -> None:
        self._chat = chat
        self._request = request
        self._claim = claim
        self._meter = meter
        self._runners = chat.runners
        self._log = AnswerLog(request.id, chat.timing)
        self._notes: tuple[str, ...] = ()
        """The parts of the request that the model does not read."""
        self._sampling: dict[str, SourcedValue] = {}
        self._stages: list[Endpoint] = []
        """The stages of the present placement."""
        self._silent_stages: list[int] = []
        """Numbers of the stages of the present attempt that do not respond."""

    async def events(
        self, acquired: AsyncGenerator[str | pb.Placed, None]
    ) -> AsyncGenerator[Event, None]:
        """`acquired` continues with the progress of the first placement, then the placement."""
        wire: pb.GenerateRequest | None = None
        while True:
            placed: pb.Placed | None = None
            async for news in acquired:
                if isinstance(news, pb.Placed):
                    placed = news
                elif news:
                    self._log.waits_for_load()
                    yield _resuming(news) if self._log.resumes else AnswerProgress(news)
            assert placed is not None
            self._meter.mark_running()
            self._stages = [self._runners.near(stage) for stage in endpoints_of(placed)]
            if wire is None:
                images = self._stages[0].ready.images
                self._request, self._notes = as_read(self._request, images)
                self._sampling = sources_of(self._request, placed)
            wire = _wire(self._request, placed, wire)
            try:
                with _blames(self._request.prompt_field):
                    async with aclosing(self._attempt(wire, placed)) as events:
                        async for event in events:
                            yield event
                return
            except PeerLost as fault:
                lost = self._resumption(placed, fault)
                if lost is None:
                    raise
                yield _resuming(fault.message)
            for stage in self._silent_stages:
                await self._runners.forget(self._stages[stage])
            acquired = _losses_only(self._claim.acquire(lost))

    def _resumption(self, placed: pb.Placed, fault: PeerLost) -> pb.Resumption | None:
        """The report of the loss to the head; None if no other attempt is allowed."""
        state_only = isinstance(fault, StateLost)
        if state_only:
            self._log.begin_alone()
        if not self._log.lost():
            return None
        return pb.Resumption(
            why=fault.message,
            rounds=len(self._log.rounds),
            attempt=self._log.attempt,
            broken="" if state_only else placed.placement,
            epoch=placed.epoch,
            gone=self._silent_stages,
        )

    async def _attempt(
        self, wire: pb.GenerateRequest, placed: pb.Placed
    ) -> AsyncGenerator[Event, None]:
        """The events of one attempt. Raises PeerLost if it fails."""
        answer, reported_well = self._log, False
        answer.runs_on(placed)
        self._silent_stages = []
        events = self._runners.generate(self._stages[0], answer.continues(wire))
        async with aclosing(events):
            while (event := await self._next(events, placed)) is not None:
                answer.saw(event)
                kind = event.WhichOneof("event")
                if not reported_well and (answer.steady or kind == "finished"):
                    reported_well = True
                    self._claim.send_report(pb.AttemptReport(placement=placed.placement, well=True))
                for out in _events(event, placed, answer):
                    if isinstance(out, Started):
                        out = replace(out, notes=(*self._notes, *out.notes))
                    elif isinstance(out, Finished) and self._request.embeddings is None:
                        own = {"load_s": answer.load_s, "sampling": self._sampling}
                        out = replace(out, stats={**out.stats, **own})
                    yield out
                if kind == "finished":
                    return
        raise PeerLost("the generator's stream ended before its answer did")

    async def _next(
        self, events: AsyncGenerator[pb.GenerateEvent, None], placed: pb.Placed
    ) -> pb.GenerateEvent | None:
        """The next event, None after the last; pings every stage whenever none came for `quiet_s`.

        A stopped process breaks no connection, and gRPC's own pings take twice as long.
        """
        following = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait([following], timeout=self._chat.timing.quiet_s))[0]:
                await self._check(placed)
        finally:
            if not following.done():
                await cancel([following])
            elif not following.cancelled():
                _ = following.exception()  # retrieved, or asyncio complains if `_check` raised
        return following.result()

    async def _check(self, placed: pb.Placed) -> None:
        """Pings all stages. Raises PeerLost if one does not respond in time."""
        placement = PlacementId(placed.placement)
        outcomes = await asyncio.gather(
            *(
                _is_silent(self._runners.ping(endpoint, placement, number))
                for number, endpoint in enumerate(self._stages)
            )
        )
        self._silent_stages = [number for number, silent in enumerate(outcomes) if silent]
        if self._silent_stages:
            model = self._request.model
            raise PeerLost(f"stage {self._silent_stages[0]} of {model} is gone or does not answer")


@contextmanager
def _blames(field: str) -> Generator[None]:
    """Names the client's field in errors about the whole prompt."""
    try:
        yield
    except InvalidRequest as fault:
        if fault.param == PROMPT:
            fault.param = field
        raise


async def _is_silent(ping: Any) -> bool:
    """Whether a stage does not respond."""
    try:
        _ = await ping
    except ExoNodeError:
        return True
    return False


async def _losses_only(
    acquired: AsyncGenerator[str | pb.Placed, None],
) -> AsyncGenerator[str | pb.Placed, None]:
    """`acquired`, with every error as PeerLost: an answer that has begun cannot be refused."""
    async with aclosing(acquired):
        try:
            async for news in acquired:
                yield news
        except ExoNodeError as fault:
            raise PeerLost(f"the answer cannot go on: {fault.message}") from fault


def _resuming(step: str) -> AnswerProgress:
    return AnswerProgress(f"resuming: {step}")


def _wire(
    request: GenerationRequest, placed: pb.Placed, earlier: pb.GenerateRequest | None
) -> pb.GenerateRequest:
    """The request to the runner. Later attempts keep the drafting of the first."""
    if earlier is None:
        return to_wire(request, placed)
    wire = pb.GenerateRequest()
    wire.CopyFrom(earlier)
    wire.placement = placed.placement
    for field in ("prefix_source", "readers", "read_reason"):
        wire.ClearField(field)
    if wire.drafting.num_draft_tokens and not placed.head_loaded:
        # The tokens are the same without drafts; the answer matters more than its speed.
        drafting = wire.drafting
        drafting.num_draft_tokens, drafting.adaptive_draft = 0, False
        drafting.drafting_reason = f"resumed where no draft head is loaded: {placed.head_reason}"
    return wire


def _events(event: pb.GenerateEvent, placed: pb.Placed, answer: AnswerLog) -> Iterator[Event]:
    match event.WhichOneof("event"):
        case "started":
            if answer.announce():
                yield Started(answer.prompt_ids, tuple(event.started.notes))
        case "prefill":
            if scores := answer.new_prompt_logprobs(event.prefill.logprobs):
                yield PromptLogprobs(tuple(scores))
            yield AnswerProgress(f"prefill {event.prefill.done}/{event.prefill.total}")
        case "rebuilt":
            yield _resuming(f"{event.rebuilt.done}/{event.rebuilt.total}")
        case "delta":
            yield _delta(event.delta)
            yield from _pieces(event.delta.pieces)
        case "embedded":
            yield event.embedded
        case "finished":
            if event.finished.text:
                yield TextDelta(event.finished.text, ())
            yield from _pieces(event.finished.pieces)
            yield _finished(event.finished, placed, answer)
        case None:
            raise PeerLost("the generator sent an event of a kind this node does not know")


def _delta(delta: pb.Delta) -> TextDelta:
    tokens, accepted = tuple(delta.round.tokens), delta.round.accepted
    return TextDelta(delta.text, tokens, tuple(delta.logprobs), accepted)


def _pieces(pieces: Iterable[pb.Piece]) -> Iterator[Event]:
    for piece in pieces:
        match piece.WhichOneof("piece"):
            case "text":
                yield TextDelta(piece.text, ())
            case "reasoning":
                yield ReasoningDelta(piece.reasoning)
            case "call":
                yield CallPart(name=piece.call.name, arguments=piece.call.arguments, ends=True)
            case "call_part":
                yield piece.call_part
            case None:
                raise PeerLost("the generator sent a piece of a kind this node does not know")


def _finished(finished: pb.Finished, placed: pb.Placed, answer: AnswerLog) -> Finished:
    stats = stats_to_json(finished.stats)
    if answer.resumes:
        # Rounds of a batch were recomputed alone: near ties see it.
        same = not stats["batched_tokens"] or stats["batch_identity"] == "bitwise"
        exact = stats["resume_exact"] and answer.exact and same
        stats.update(answer.timings(), resumes=answer.resumes, resume_exact=exact)
    prompt, completion = stats.pop("prompt_tokens"), stats.pop("completion_tokens")
    prompt = sum(answer.embedded.values()) or prompt  # an attempt counts its own inputs
    stages = [
        {"node": stage.node, "layers": [stage.first_layer, stage.end_layer]}
        for stage in placed.stages
    ]
    stats["placement"] = {"id": placed.placement, "stages": stages, "reason": placed.reason}
    return Finished(
        reason="stop" if finished.reason == "stop" else "length",
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=stats["cached_tokens"],
        accepted_draft_tokens=stats["accepted_draft_tokens"],
        stats=stats,
        reasoning_tokens=min(completion, finished.reasoning_tokens),
        stopped_by=finished.stopped_by,
    )
