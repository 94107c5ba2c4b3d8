"""Claims on placements: turns by model, and heads that are lost."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fakes import NODE, FakeFacts, FakeStages, leading

from exo_node.mtp.types import Sampling
from exo_node.node.chat.claim import Claim
from exo_node.node.chat.requests import GenerationRequest
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LOCAL
from exo_node.node.placements.claims import Claims
from exo_node.node.placements.placements import Placements
from exo_node.node.placements.turns import MAX_RUNNING, MAX_WAITING, SPARE_PLACES, Turn, Turns
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.errors import (
    HeadGone,
    InsufficientMemory,
    PeerLost,
    QueueFull,
    UnsupportedParameter,
)
from exo_node.placement.ids import ModelId, NodeId, PlacementId, RequestId
from exo_node.placement.library import packaged_cards
from exo_node.placement.options import PlanOptions
from exo_node.proto import peer_pb2 as pb

A, B = NodeId("a" * 20), NodeId("b" * 20)
DEMO, OTHER = ModelId("demo"), next(m for m in packaged_cards() if m != "demo")
REQUEST = GenerationRequest(RequestId("r"), DEMO, ({"role": "user"},), Sampling())


def request(model: ModelId = DEMO) -> pb.AcquireRequest:
    return pb.AcquireRequest(model=model, request="r")


async def placed(events: AsyncGenerator[pb.AcquireEvent, None]) -> pb.Placed:
    async for event in events:
        if event.WhichOneof("event") == "placed":
            return event.placed
    raise AssertionError("the claim ended without a placement")


@dataclass
class SlowStages(FakeStages):
    """Loads of one model never end."""

    slow: ModelId = DEMO

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        if spec.model == self.slow:
            _ = await asyncio.Event().wait()
        return await super().load(node, spec, progress)


@asynccontextmanager
async def claiming(stages: FakeStages) -> AsyncGenerator[tuple[Claims, Placements]]:
    facts, events = FakeFacts(), EventLog()
    placements = leading(stages, facts, LOCAL, events)
    async with asyncio.timeout(60):
        yield Claims(placements, facts, events, LOCAL), placements
        await placements.close()


# -------------------------------------------------------------------------- turns


async def test_requests_that_wait_for_one_model_to_load_are_in_no_other_models_way() -> None:
    async with claiming(SlowStages()) as (claims, _):
        waiting = [asyncio.ensure_future(placed(claims.acquire(request()))) for _ in range(9)]
        await asyncio.sleep(0.05)
        got = await asyncio.wait_for(placed(claims.acquire(request(OTHER))), 60)
        assert got.placement
        for each in waiting:
            _ = each.cancel()
        _ = await asyncio.gather(*waiting, return_exceptions=True)


def test_a_turn_comes_in_the_order_of_arrival_when_another_ends() -> None:
    turns = Turns(running=2, waiting=2)
    first, second, third, fourth = (turns.enter() for _ in range(4))
    for turn in (first, second, third, fourth):
        turns.ask(turn)
    assert [t.runs for t in (first, second, third, fourth)] == [True, True, False, False]
    with pytest.raises(QueueFull):
        _ = turns.enter()
    turns.leave(third)  # one that waits and goes away
    turns.leave(first)
    assert fourth.runs
    turns.leave(second)
    turns.leave(fourth)
    assert turns.present == 0


def test_a_client_with_many_answers_keeps_no_other_client_waiting() -> None:
    turns = Turns(running=4, waiting=20, spare=2)

    def come(client: str) -> Turn:
        turn = turns.enter(client=client)
        turns.ask(turn)
        return turn

    many = [come("a") for _ in range(10)]
    assert [turn.runs for turn in many] == [True] * 4 + [False] * 6
    b, c, d = come("b"), come("c"), come("d")
    assert (b.runs, c.runs, d.runs) == (True, True, False), "the spare turns are used up"
    second = come("b")
    turns.leave(many[0])
    assert d.runs, "before what 'a' asked for earlier"
    turns.leave(many[1])
    assert not second.runs and not many[4].runs, "the spare turns come back first"
    for turn in many[2:4]:
        turns.leave(turn)
    assert many[4].runs, "'a' has none by now"
    for turn in (b, c, d, second, *many[4:]):
        turns.leave(turn)
    assert turns.present == 0


def test_turns_go_round_the_clients_and_within_one_in_its_order() -> None:
    turns = Turns(running=2, waiting=20, spare=0)
    asked_for = [turns.enter(client=client) for client in "aaaabb"]
    for turn in asked_for:
        turns.ask(turn)
    running, order = [turn for turn in asked_for if turn.runs], list[str]()
    assert [turn.client for turn in running] == ["a", "a"]
    while running:
        turns.leave(running.pop(0))
        new = [turn for turn in asked_for if turn.runs and turn not in running]
        order += [turn.client for turn in new]
        running += new
    assert "".join(order) == "baba"


def test_requests_that_wait_take_no_turn_from_their_client() -> None:
    turns = Turns(running=2, waiting=20, spare=0)
    asked_for = [turns.enter(client=client) for client in "aaabbbb"]
    for turn in asked_for:
        turns.ask(turn)
    assert [turn.client for turn in asked_for if turn.runs] == ["a", "a"]
    turns.leave(asked_for[0])
    assert asked_for[3].runs, "none of the four answers of 'b' runs, and one of 'a' does"


def test_a_queue_that_one_client_fills_has_places_for_another() -> None:
    turns = Turns(running=1, waiting=1)
    for _ in range(2):
        turns.ask(turns.enter(client="a"))
    with pytest.raises(QueueFull):
        _ = turns.enter(client="a")
    other = turns.enter(client="b")
    turns.ask(other)
    assert other.runs
    with pytest.raises(QueueFull):
        _ = turns.enter(client="b")
    for number in range(SPARE_PLACES - 1):
        _ = turns.enter(client=f"c{number}")
    with pytest.raises(QueueFull):
        _ = turns.enter(client="d")


def test_those_in_the_background_wait_for_all_others() -> None:
    turns = Turns(running=1, waiting=9)
    first = turns.enter()
    turns.ask(first)
    late, later = turns.enter(background=True), turns.enter(background=True)
    person, other = turns.enter(), turns.enter()
    for turn in (late, later, person, other):
        turns.ask(turn)
    order, here = [first], [person, other, late, later]
    while here:
        turns.leave(order[-1])
        (now,) = (turn for turn in here if turn.runs)
        here.remove(now)
        order.append(now)
    assert order == [first, person, other, late, later]
    turns.leave(later)
    absent = turns.enter(background=True)
    turns.ask(absent)
    waits = turns.enter(background=True)
    turns.ask(waits)
    turns.leave(waits)  # while it waits
    turns.leave(absent)
    assert turns.present == 0


async def test_a_request_in_the_background_is_one_at_the_head() -> None:
    async with claiming(FakeStages()) as (claims, _):
        entered = list[bool]()
        enter = Turns.enter

        def copy(self: Turns, *, background: bool = False, **rest: Any) -> Turn:
            entered.append(background)
            return enter(self, background=background, **rest)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Turns, "enter", copy)
            for background in (True, False):
                one = request()
                one.background = background
                _ = await placed(claims.acquire(one))
        assert entered == [True, False]


def test_an_answer_that_was_lost_runs_on_at_once_however_many_wait() -> None:
    turns = Turns(running=1, waiting=1)
    for turn in (turns.enter(), turns.enter()):
        turns.ask(turn)
    assert turns.enter(is_resumed=True).runs


async def test_more_than_may_run_and_wait_are_refused_while_the_model_loads() -> None:
    async with claiming(SlowStages()) as (claims, _):
        most = MAX_RUNNING + MAX_WAITING
        waiting = [asyncio.ensure_future(placed(claims.acquire(request()))) for _ in range(most)]
        await asyncio.sleep(0.1)
        with pytest.raises(QueueFull):
            _ = await placed(claims.acquire(request()))
        for each in waiting:
            _ = each.cancel()
        _ = await asyncio.gather(*waiting, return_exceptions=True)


# -------------------------------------------------------------------------- heads


async def test_a_claim_ends_where_another_node_becomes_the_head() -> None:
    async with claiming(FakeStages()) as (claims, placements):
        events = claims.acquire(request())
        got = await placed(events)
        record = placements.find(PlacementId(got.placement))
        assert record is not None and record.activity.requests == 1
        await placements.let_go()
        with pytest.raises(HeadGone):
            _ = await anext(events)
        assert record.activity.requests == 0
        assert placements.records == []


async def test_so_does_one_that_waits_for_a_load() -> None:
    async with claiming(SlowStages()) as (claims, placements):
        waiting = asyncio.ensure_future(placed(claims.acquire(request())))
        await asyncio.sleep(0.05)
        await placements.let_go()
        with pytest.raises(HeadGone):
            _ = await waiting


@dataclass
class TwoHeads:
    """The first head is lost when `lost` is set; the second one then gives what it is told."""

    answers: list[pb.AcquireEvent | Exception]
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[pb.AcquireRequest] = field(default_factory=list[pb.AcquireRequest])
    closed: int = 0

    async def head(self) -> NodeId:
        return B if self.lost.is_set() else A

    def has_readers(self, model: ModelId) -> bool:
        del model
        return False

    def generators(self, model: ModelId) -> Mapping[PlacementId, Endpoint]:
        return {}

    async def acquire(
        self, head: NodeId, request: pb.AcquireRequest
    ) -> AsyncGenerator[pb.AcquireEvent, None]:
        copy = pb.AcquireRequest()
        copy.CopyFrom(request)
        self.requests.append(copy)
        try:
            if head == A:
                yield pb.AcquireEvent(waiting=pb.Waiting())
                yield pb.AcquireEvent(placed=pb.Placed(placement="p"))
                _ = await self.lost.wait()
                raise HeadGone("it died")
            for answer in self.answers:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
            _ = await asyncio.Event().wait()
        finally:
            self.closed += 1

    async def report(self, head: NodeId, report: pb.AttemptReport) -> None:
        raise PeerLost("nobody listens")


async def acquired(claim: Claim, resumes: pb.Resumption | None = None) -> pb.Placed:
    async with aclosing(claim.acquire(resumes)) as news:
        async for event in news:
            if isinstance(event, pb.Placed):
                return event
    raise AssertionError("no placement")


async def test_a_held_placement_is_claimed_again_at_the_next_head() -> None:
    heads = TwoHeads([pb.AcquireEvent(placed=pb.Placed(placement="p"))])
    claim = Claim(heads, REQUEST, LOCAL)
    assert (await acquired(claim)).placement == "p"
    heads.lost.set()
    async with asyncio.timeout(60):
        while len(heads.requests) < 2:
            await asyncio.sleep(0.01)
    assert [each.holding for each in heads.requests] == ["", "p"]
    await claim.close()
    assert heads.closed == 2


async def test_a_renewed_claim_gives_up_its_place_when_its_answer_ends() -> None:
    async with claiming(FakeStages()) as (claims, placements):
        record = await placements.place(DEMO, PlanOptions())
        for _ in range(MAX_RUNNING + MAX_WAITING):
            renewed = request()
            renewed.holding = record.id
            events = claims.acquire(renewed)
            _ = await placed(events)
            await events.aclose()
        assert (await placed(claims.acquire(request()))).placement == record.id


async def test_a_resumed_answer_gives_up_the_claim_of_its_lost_attempt() -> None:
    heads = TwoHeads([])
    claim = Claim(heads, REQUEST, LOCAL)
    _ = await acquired(claim)
    _ = await acquired(claim, pb.Resumption(why="gone", attempt=2, broken="p"))
    assert (len(heads.requests), heads.closed) == (2, 1)
    await claim.close()
    assert heads.closed == 2


async def test_an_answer_continues_whose_placement_the_next_head_does_not_know() -> None:
    heads = TwoHeads([InsufficientMemory("nothing of that kind is here")])
    claim = Claim(heads, REQUEST, LOCAL)
    _ = await acquired(claim)
    heads.lost.set()
    async with asyncio.timeout(60):
        while heads.closed < 2:
            await asyncio.sleep(0.01)
    claim.send_report(pb.AttemptReport(placement="p", well=True))
    await claim.close()


async def test_what_was_lost_is_told_to_whichever_head_answers() -> None:
    heads = TwoHeads([pb.AcquireEvent(placed=pb.Placed(placement="q"))])
    heads.lost.set()
    claim = Claim(heads, REQUEST, LOCAL)
    lost = pb.Resumption(why="gone", attempt=2, broken="p", epoch=pb.Epoch(number=1), gone=[1])
    assert (await acquired(claim, lost)).placement == "q"
    assert heads.requests[0].resumes == lost
    await claim.close()


async def test_a_request_that_finds_no_head_is_told_so() -> None:
    timing = replace(LOCAL, heartbeat_s=0.0)
    heads = TwoHeads([HeadGone("not the head")])
    heads.lost.set()
    with pytest.raises(PeerLost, match="no head that answers") as raised:
        _ = await acquired(Claim(heads, REQUEST, timing))
    assert raised.value.code == "peer_lost"


async def test_a_claim_keeps_its_placement_in_use() -> None:
    async with claiming(FakeStages()) as (claims, placements):
        events = claims.acquire(request())
        got = await placed(events)
        assert got.stages[0].node == NODE
        [record] = placements.records
        assert record.activity.requests == 1
        await events.aclose()
        assert record.activity.requests == 0


# ------------------------------------------------------------------- embedders


EMBEDDER = ModelId("Qwen/Qwen3-Embedding-0.6B")


@pytest.mark.parametrize(
    ("model", "embeds", "remedy"),
    [(EMBEDDER, False, "send its inputs to /v1/embeddings"), (DEMO, True, "exo-card.toml")],
)
async def test_the_wrong_kind_of_model_is_refused_before_anything_is_loaded(
    model: ModelId, embeds: bool, remedy: str
) -> None:
    async with claiming(FakeStages()) as (claims, placements):
        wrong = pb.AcquireRequest(model=model, request="r", embeds=embeds)
        with pytest.raises(UnsupportedParameter, match=remedy) as refused:
            _ = await placed(claims.acquire(wrong))
        assert refused.value.param == "model"
        assert placements.records == []
        for right in (
            pb.AcquireRequest(model=model, request="r", embeds=not embeds),
            pb.AcquireRequest(model=model, request="r"),  # only its tokenizer is wanted
        ):
            events = claims.acquire(right)
            assert (await placed(events)).stages
            await events.aclose()
