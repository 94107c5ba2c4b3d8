"""One internal request to the events of its answer: a claim, the generator's stream, its losses.

Runs on the node whose client asked, which keeps the log of the answer's rounds: whichever other
node is lost, the head among them, the answer goes on from there.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any, Protocol

from ...placement.errors import ExoNodeError, PeerLost, StateLost
from ...placement.ids import PlacementId
from ...proto import peer_pb2 as pb
from ..machine.timing import ChatTiming
from ..runners.runner_client import Endpoint, endpoints_of
from .claim import Claim, Heads
from .final_stats import stats_to_json
from .metrics import AnswerMeter, Metrics
from .requests import (
    Called,
    CallPart,
    Encoded,
    Event,
    Finished,
    GenerationRequest,
    Loading,
    PrefillProgress,
    Reasoned,
    Resuming,
    Started,
    TextDelta,
    TokenLogprob,
)
from .resuming import AnswerLog
from .totals import Totals
from .wire import encode_to_wire, to_wire


class Runners(Protocol):
    """How runners are called, on whichever node they are."""

    def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Raises PeerLost, and what the runner refuses. Closing it cancels the generation."""
        ...

    async def encode(self, endpoint: Endpoint, request: pb.EncodeRequest) -> pb.EncodeReply:
        """Raises PeerLost, and what the runner refuses."""
        ...

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        """The runner's state, within a second. Raises PeerLost."""
        ...

    async def forget(self, stage: Endpoint) -> None:
        """Closes what leads to a runner that is gone."""
        ...

    def near(self, stage: Endpoint) -> Endpoint:
        """A runner that another node was told of, at the address that is quickest from here."""
        ...


class ChatService:
    """Answers the requests of this node's own clients."""

    def __init__(
        self,
        heads: Heads,
        runners: Runners,
        totals: Totals,
        metrics: Metrics,
        timing: ChatTiming,
    ) -> None:
        self._heads = heads
        self._runners = runners
        self._totals = totals
        self._metrics = metrics
        self.timing = timing
        self.events = 0
        """Of all answers so far: whether one gets on."""

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Waits for the placement and for its turn, then streams; see `requests.Chat`."""
        arrived = self._metrics.now()
        claim = Claim(self._heads, request, self.timing)
        try:
            # Closing this generator must close those inside it now, not when they are collected.
            async with aclosing(claim.acquire()) as acquired:
                _ = await anext(acquired)  # the model is known, and may be a label
                with self._metrics.answer(request.model, arrived) as meter:
                    answer = _Answer(self, request, claim, meter)
                    async with aclosing(answer.events(acquired)) as events:
                        async for event in events:
                            self.events += 1
                            meter.saw(event)
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
                        found = await self._runners.encode(generator, encode_to_wire(request))
                        return Encoded(tuple(found.ids), found.text, found.context_length)
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

    def count(self, request: GenerationRequest, end: Finished) -> None:
        self._totals.add(request.model, end.completion_tokens, end.stats, end.prompt_tokens)


class _Answer:
    """One answer, attempt after attempt."""

    def __init__(
        self, chat: ChatService, request: GenerationRequest, claim: Claim, meter: AnswerMeter
    ) -> None:
        self._chat = chat
        self._request = request
        self._claim = claim
        self._meter = meter
        self._runners = chat.runners
        self._log = AnswerLog(request.id, chat.timing)
        self._stages: list[Endpoint] = []
        """Of the present placement."""
        self._gone: list[int] = []
        """Stages of the present attempt that do not answer."""

    async def events(
        self, acquired: AsyncGenerator[str | pb.Placed, None]
    ) -> AsyncGenerator[Event, None]:
        """`acquired` goes on with what the first placement is waited for."""
        wire: pb.GenerateRequest | None = None
        while True:
            placed: pb.Placed | None = None
            async for news in acquired:
                if isinstance(news, pb.Placed):
                    placed = news
                elif news:
                    yield Resuming(news) if self._log.resumes else Loading(news)
            assert placed is not None
            self._meter.running()
            self._stages = [self._runners.near(stage) for stage in endpoints_of(placed)]
            wire = _wire(self._request, placed, wire)
            try:
                async with aclosing(self._attempt(wire, placed)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            self._chat.count(self._request, event)
                        yield event
                return
            except PeerLost as fault:
                lost = self._lost(placed, fault)
                if lost is None:
                    raise
                yield Resuming(fault.message)
            for stage in self._gone:
                await self._runners.forget(self._stages[stage])
            acquired = _going_on(self._claim.acquire(lost))

    def _lost(self, placed: pb.Placed, fault: PeerLost) -> pb.Resumption | None:
        """What the head is told; None where no other attempt may be made."""
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
            connections=placed.connections,
            gone=self._gone,
        )

    async def _attempt(
        self, wire: pb.GenerateRequest, placed: pb.Placed
    ) -> AsyncGenerator[Event, None]:
        """Raises PeerLost where it is lost."""
        answer, spoke, well = self._log, False, False
        answer.runs_on(placed)
        self._gone = []
        events = self._runners.generate(self._stages[0], answer.continues(wire))
        async with aclosing(events), aclosing(self._heard(events, placed)) as heard:
            async for event in heard:
                answer.saw(event)
                kind = event.WhichOneof("event")
                if kind == "delta" and answer.resumes and not spoke:
                    spoke = True
                    self._claim.tell(pb.AttemptReport(placement=placed.placement, speaks=True))
                if not well and (answer.steady or kind == "finished"):
                    well = True
                    self._claim.tell(pb.AttemptReport(placement=placed.placement, well=True))
                for out in _events(event, placed, answer):
                    yield out
                if kind == "finished":
                    return
        raise PeerLost("the generator's stream ended before its answer did")

    async def _heard(
        self, events: AsyncGenerator[pb.GenerateEvent, None], placed: pb.Placed
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """The events; while they stay away, every stage is asked whether it lives.

        A stopped process breaks no connection, and gRPC's own pings take twice as long.
        """
        quiet_s = self._chat.timing.quiet_s
        while True:
            following = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait([following], timeout=quiet_s))[0]:
                    await self._check(placed)
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

    async def _check(self, placed: pb.Placed) -> None:
        """Raises PeerLost where a stage does not answer in time."""
        placement = PlacementId(placed.placement)
        outcomes = await asyncio.gather(
            *(
                _silence(self._runners.ping(endpoint, placement, number))
                for number, endpoint in enumerate(self._stages)
            )
        )
        self._gone = [number for number, silent in enumerate(outcomes) if silent]
        if self._gone:
            model = self._request.model
            raise PeerLost(f"stage {self._gone[0]} of {model} is gone or does not answer")


async def _silence(ping: Any) -> bool:
    """Whether a stage gave no sign."""
    try:
        _ = await ping
    except ExoNodeError:
        return True
    return False


async def _going_on(
    acquired: AsyncGenerator[str | pb.Placed, None],
) -> AsyncGenerator[str | pb.Placed, None]:
    """An answer that has begun ends as lost, whatever finding a place for it meets."""
    async with aclosing(acquired):
        try:
            async for news in acquired:
                yield news
        except ExoNodeError as fault:
            raise PeerLost(f"the answer cannot go on: {fault.message}") from fault


def _wire(
    request: GenerationRequest, placed: pb.Placed, earlier: pb.GenerateRequest | None
) -> pb.GenerateRequest:
    """The request to the runner; what an earlier attempt drafted, later ones draft too."""
    if earlier is None:
        return to_wire(request, placed)
    wire = pb.GenerateRequest()
    wire.CopyFrom(earlier)
    wire.placement = placed.placement
    if wire.num_draft_tokens and not placed.head_loaded:
        # The tokens are the same without drafts; the answer matters more than its speed.
        wire.num_draft_tokens, wire.adaptive_draft = 0, False
        wire.drafting_reason = f"resumed where no draft head is loaded: {placed.head_reason}"
    return wire


def _events(event: pb.GenerateEvent, placed: pb.Placed, answer: AnswerLog) -> Iterator[Event]:
    match event.WhichOneof("event"):
        case "started":
            if answer.announce():
                yield Started(answer.prompt_ids, tuple(event.started.notes))
        case "prefill":
            yield PrefillProgress(event.prefill.done, event.prefill.total)
        case "rebuilt":
            yield Resuming(f"{event.rebuilt.done}/{event.rebuilt.total}")
        case "delta":
            yield _delta(event.delta)
            yield from _pieces(event.delta.pieces)
        case "finished":
            if event.finished.text:
                yield TextDelta(event.finished.text, ())
            yield from _pieces(event.finished.pieces)
            yield _finished(event.finished, placed, answer)
        case None:
            raise PeerLost("the generator sent an event of a kind this node does not know")


def _delta(delta: pb.Delta) -> TextDelta:
    logprobs = tuple(
        TokenLogprob(one.id, one.bytes, one.logprob, tuple(_likely(each) for each in one.top))
        for one in delta.logprobs
    )
    tokens, accepted = tuple(delta.round.tokens), delta.round.accepted
    return TextDelta(delta.text, tokens, logprobs, accepted)


def _pieces(pieces: Iterable[pb.Piece]) -> Iterator[Event]:
    for piece in pieces:
        match piece.WhichOneof("piece"):
            case "text":
                yield TextDelta(piece.text, ())
            case "reasoning":
                yield Reasoned(piece.reasoning)
            case "call":
                yield Called(piece.call.name, piece.call.arguments)
            case "call_part":
                part = piece.call_part
                yield CallPart(part.name, part.arguments, part.ends, part.is_cut)
            case None:
                raise PeerLost("the generator sent a piece of a kind this node does not know")


def _likely(one: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(one.id, one.bytes, one.logprob)


def _finished(finished: pb.Finished, placed: pb.Placed, answer: AnswerLog) -> Finished:
    stats = stats_to_json(finished.stats)
    if answer.resumes:
        # What was computed in a batch was recomputed alone.
        same = not stats["batched_tokens"] or stats["batch_identity"] == "bitwise"
        exact = answer.exact and same
        stats.update(answer.timings(), resumes=answer.resumes, resume_exact=exact)
    prompt, completion = stats.pop("prompt_tokens"), stats.pop("completion_tokens")
    stages = [
        {"node": stage.node, "layers": [stage.first_layer, stage.end_layer]}
        for stage in placed.stages
    ]
    stats["placement"] = {"id": placed.placement, "stages": stages}
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
