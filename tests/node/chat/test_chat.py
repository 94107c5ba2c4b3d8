"""The chat service over fakes: what it asks of a runner, and what it makes of the answer."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest
from fakes import FakeFacts, FakeGenerators, FakeStages, OneHead, leading

from exo_node.mtp.types import GenerationStats, Sampling
from exo_node.node.chat.chat import ChatService
from exo_node.node.chat.claim import Runners
from exo_node.node.chat.metrics import Metrics
from exo_node.node.chat.requests import (
    AnswerProgress,
    Event,
    Finished,
    GenerationRequest,
    Started,
    TextDelta,
    TokenLogprob,
)
from exo_node.node.chat.totals import Totals
from exo_node.node.machine.timing import LOCAL, Timing
from exo_node.node.placements.placements import Placements
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.drafting import DraftPolicy
from exo_node.placement.errors import PROMPT, InvalidRequest, ModelNotFound, PeerLost, StateLost
from exo_node.placement.ids import ModelId, NodeId, PlacementId, RequestId
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.runner.generator_wire import stats_to_wire

STATS = GenerationStats("native_mtp", 2, "", "greedy", prompt_tokens=3, completion_tokens=3)
ENDED = pb.GenerateEvent(finished=pb.Finished(reason="stop", stats=stats_to_wire(STATS, "bitwise")))
STARTED = pb.GenerateEvent(started=pb.Started(prompt_ids=[7, 8, 9]))
REQUEST = GenerationRequest(RequestId("r"), ModelId("demo"), ({"role": "user"},), Sampling())


def spoken(text: str, *ids: int, logprobs: Sequence[pb.TokenLogprob] = ()) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        delta=pb.Delta(round=pb.Round(tokens=ids), text=text, logprobs=logprobs)
    )


async def events_of(
    request: GenerationRequest, runners: Runners, facts: FakeFacts, timing: Timing = LOCAL
) -> list[Event]:
    placements = leading(FakeStages(), facts)
    chat = ChatService(OneHead(placements, facts), runners, Metrics(Totals()), timing)
    async with aclosing(chat.stream(request)) as stream:
        got = [event async for event in stream]
    await placements.close()
    return got


def answered(
    request: GenerationRequest, *events: pb.GenerateEvent, adaptive: bool = True, default_k: int = 0
) -> tuple[list[Event], pb.GenerateRequest]:
    """The events of the answer, and the request that the runner got."""
    generators = FakeGenerators(events=events)
    got = asyncio.run(events_of(request, generators, FakeFacts(adaptive, default_k)))
    return got, generators.requests[0]


def test_logprobs_of_the_wire_reach_the_delta_that_has_their_ids() -> None:
    likely = [pb.TokenLogprob(id=5, bytes=b"a", logprob=-0.5), pb.TokenLogprob(id=6, logprob=-2)]
    entry = pb.TokenLogprob(id=6, bytes=b"\xc3", logprob=-2, top=likely)
    events, wire = answered(
        replace(REQUEST, output=pb.Output(top_logprobs=2)),
        STARTED,
        spoken("", 6, logprobs=[entry]),
        ENDED,
    )
    assert wire.output.HasField("top_logprobs") and wire.output.top_logprobs == 2
    top = (TokenLogprob(id=5, bytes=b"a", logprob=-0.5), TokenLogprob(id=6, bytes=b"", logprob=-2))
    assert TextDelta("", (6,), (TokenLogprob(id=6, bytes=b"\xc3", logprob=-2, top=top),)) in events


def test_the_delta_says_how_many_of_its_ids_were_drafted() -> None:
    delta = spoken("ab", 5, 6, 7)
    delta.delta.round.accepted = 2
    events, _ = answered(REQUEST, STARTED, delta, ENDED)
    assert TextDelta("ab", (5, 6, 7), accepted_drafts=2) in events


POLICIES: list[tuple[int | None, DraftPolicy | None, bool, tuple[int, bool]]] = [
    (None, None, True, (7, True)),
    (None, None, False, (2, False)),
    (3, None, True, (3, False)),
    (3, "adaptive", False, (3, True)),
    (None, "adaptive", False, (7, True)),
    (None, "fixed", True, (2, False)),
    (3, "fixed", True, (3, False)),
    (0, "adaptive", True, (0, False)),
]
"""(num_draft_tokens, draft_policy, the node's setting, (K, adaptive) of the runner's request)."""


@pytest.mark.parametrize(("k", "policy", "setting", "expected"), POLICIES)
def test_request_and_setting_decide_k_and_whether_it_adapts(
    k: int | None, policy: DraftPolicy | None, setting: bool, expected: tuple[int, bool]
) -> None:
    request = replace(REQUEST, num_draft_tokens=k, draft_policy=policy)
    _, wire = answered(request, STARTED, ENDED, adaptive=setting)
    assert (wire.drafting.num_draft_tokens, wire.drafting.adaptive_draft) == expected
    assert wire.drafting.prompt_lookup == (k is None), "who names a K gets just the head's drafts"


@pytest.mark.parametrize(
    ("k", "default_k", "initial"),
    [
        (None, 0, (2, "the model's default")),
        (None, 1, (1, "EXO_NATIVE_MTP_DEFAULT_K=1")),
        (3, 1, (3, "the request's num_draft_tokens")),
        (0, 1, (0, "")),
    ],
)
def test_the_runner_learns_where_depth_begins_and_who_said_so(
    k: int | None, default_k: int, initial: tuple[int, str]
) -> None:
    request = replace(REQUEST, num_draft_tokens=k)
    _, wire = answered(request, STARTED, ENDED, default_k=default_k)
    drafting = wire.drafting
    assert (drafting.initial_draft_tokens, drafting.initial_draft_source) == initial


def test_what_was_held_back_comes_without_ids_before_the_end() -> None:
    end = pb.GenerateEvent()
    end.CopyFrom(ENDED)
    end.finished.text = "EN"
    events, _ = answered(REQUEST, STARTED, spoken("a", 1, 2), end)
    assert [event for event in events if isinstance(event, TextDelta)] == [
        TextDelta("a", (1, 2)),
        TextDelta("EN", ()),
    ]
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        (replace(REQUEST, model=ModelId("nope")), ModelNotFound),
        (replace(REQUEST, num_draft_tokens=9), InvalidRequest),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    request_: GenerationRequest, fault: type[Exception]
) -> None:
    with pytest.raises(fault):
        _ = answered(request_, STARTED, ENDED)


def test_a_profile_whose_model_there_is_none_of_is_named() -> None:
    with pytest.raises(ModelNotFound, match=r"the profile 'mine' names it: .*nope"):
        _ = answered(replace(REQUEST, model=ModelId("nope"), profile="mine"), STARTED, ENDED)


# ------------------------------------------------------------------- resuming


@dataclass
class Attempts(FakeStages):
    """A generator's runner that plays one script a call; a fault at its end is raised."""

    scripts: list[tuple[Sequence[pb.GenerateEvent], Exception | None]] = field(
        default_factory=list[tuple[Sequence[pb.GenerateEvent], Exception | None]]
    )
    requests: list[pb.GenerateRequest] = field(default_factory=list[pb.GenerateRequest])

    async def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        events, fault = self.scripts[len(self.requests)]
        self.requests.append(request)
        for event in events:
            yield event
        if fault is not None:
            raise fault


def resumed(
    *scripts: tuple[Sequence[pb.GenerateEvent], Exception | None], timing: Timing = LOCAL
) -> tuple[list[Event], list[pb.GenerateRequest]]:
    attempts = Attempts(scripts=list(scripts))
    events = asyncio.run(events_of(REQUEST, attempts, FakeFacts(True), timing))
    return events, attempts.requests


LOST = PeerLost("a stage is gone")


def test_a_lost_attempt_is_followed_by_one_that_begins_after_what_was_handed_out() -> None:
    events, (first, second) = resumed(
        ([STARTED, spoken("a", 1), spoken("b", 2, 3)], LOST),
        ([STARTED, spoken("c", 4), ENDED], None),
    )
    assert (first.attempt, second.attempt) == (1, 2)
    assert [list(r.tokens) for r in second.replay] == [[1], [2, 3]]
    assert list(second.token_ids.ids) == [7, 8, 9], "the prompt is not rendered again"
    assert (second.drafting.num_draft_tokens, second.drafting.adaptive_draft) == (7, True), (
        "as the first attempt"
    )
    text = [event.text for event in events if isinstance(event, TextDelta)]
    assert text == ["a", "b", "c"]
    assert sum(isinstance(event, Started) for event in events) == 1
    assert AnswerProgress(f"resuming: {LOST.message}") in events
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.stats["resumes"], end.stats["resume_exact"]) == (1, True)


@pytest.mark.parametrize(
    ("first", "second", "exact"),
    [
        ((0, False), (0, False), True),
        ((2, False), (2, False), True),
        ((2, False), (1, False), False),
        ((2, True), (2, True), False),
        ((2, False), (0, False), False),
        ((2, True), (0, False), False),
        ((0, False), (2, False), False),
    ],
    ids=["none", "fixed", "another K", "adaptive", "fixed, not measured", "not measured", "later"],
)
def test_a_resume_is_not_called_exact_where_its_rounds_may_decide_near_ties_otherwise(
    first: tuple[int, bool], second: tuple[int, bool], *, exact: bool
) -> None:
    """Adaptive K begins anew after a loss, and a runner that has measured nothing drafts nothing:
    later rounds may have other rows."""
    starts = [
        pb.GenerateEvent(started=pb.Started(prompt_ids=[7], near_tie_drafts=k, adaptive_draft=own))
        for k, own in (first, second)
    ]
    events, _ = resumed(([starts[0], spoken("a", 1)], LOST), ([starts[1], ENDED], None))
    end = events[-1]
    assert isinstance(end, Finished) and end.stats["resume_exact"] is exact


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_resume_is_not_exact_where_another_kind_of_machine_may_have_read_the_prompt(
    attempt: int,
) -> None:
    starts = [
        pb.GenerateEvent(started=pb.Started(prompt_ids=[7], reads_any=number == attempt))
        for number in range(2)
    ]
    events, _ = resumed(([starts[0], spoken("a", 1)], LOST), ([starts[1], ENDED], None))
    end = events[-1]
    assert isinstance(end, Finished) and end.stats["resume_exact"] is False


@pytest.mark.parametrize(
    ("identity", "exact"), [("bitwise", True), ("near_tie", False), ("off", False)]
)
def test_a_resume_of_shared_steps_is_exact_only_where_that_was_measured(
    identity: str, *, exact: bool
) -> None:
    stats = stats_to_wire(replace(STATS, batched_tokens=3), "off", identity)
    ended = pb.GenerateEvent(finished=pb.Finished(reason="stop", stats=stats))
    events, _ = resumed(([STARTED, spoken("a", 1)], LOST), ([STARTED, ended], None))
    end = events[-1]
    assert isinstance(end, Finished) and end.stats["resume_exact"] is exact


class NotedHead(OneHead):
    """Keeps a copy of each request."""

    def __init__(self, placements: Placements, facts: FakeFacts) -> None:
        super().__init__(placements, facts)
        self.requests: list[pb.AcquireRequest] = []

    def acquire(
        self, head: NodeId, request: pb.AcquireRequest
    ) -> AsyncGenerator[pb.AcquireEvent, None]:
        self.requests.append(pb.AcquireRequest.FromString(request.SerializeToString()))
        return super().acquire(head, request)


@pytest.mark.parametrize("fault", [LOST, StateLost("rows from 0 on are lacking")])
async def test_a_placement_is_reported_as_broken_unless_only_an_answers_state_is_lost(
    fault: PeerLost,
) -> None:
    facts, totals = FakeFacts(True), Totals()
    attempts = Attempts(scripts=[([STARTED, spoken("a", 1)], fault), ([STARTED, ENDED], None)])
    placements = leading(FakeStages(), facts)
    head = NotedHead(placements, facts)
    chat = ChatService(head, attempts, Metrics(totals), LOCAL)
    async with aclosing(chat.stream(REQUEST)) as stream:
        assert isinstance([event async for event in stream][-1], Finished)
    [_, again] = head.requests
    [record] = placements.records
    assert again.resumes.why == fault.message
    assert again.resumes.broken == (record.id if fault is LOST else "")
    assert record.activity.requests == 0
    await placements.close()


def test_an_attempt_that_brought_nothing_is_followed_by_one_that_rebuilds_everything() -> None:
    _, requests = resumed(
        ([STARTED, spoken("a", 1)], LOST), ([], LOST), ([spoken("b", 2), ENDED], None)
    )
    assert [request.sharing.alone for request in requests] == [False, False, True]


def test_where_what_rebuilds_a_stage_is_gone_every_stage_is_rebuilt_at_once() -> None:
    """No runner is: nothing is restored, and it is no failure of the placement."""
    state_lost = StateLost("rows from 0 on are lacking")
    events, requests = resumed(
        ([STARTED, spoken("a", 1)], LOST),
        ([STARTED], state_lost),
        ([STARTED, spoken("b", 2)], LOST),
        ([ENDED], None),
    )
    assert [request.sharing.alone for request in requests] == [False, False, True, False]
    assert AnswerProgress(f"resuming: {state_lost.message}") in events


def test_an_answer_that_is_lost_again_and_again_without_a_token_ends_as_lost() -> None:
    with pytest.raises(PeerLost, match="a stage is gone"):
        _ = resumed(*[([STARTED], LOST)] * 9)


@pytest.mark.parametrize("keep_alive_s", [0.0, LOCAL.keep_alive_s])
def test_losses_between_which_the_answer_got_on_never_end_it(keep_alive_s: float) -> None:
    timing = replace(LOCAL, keep_alive_s=keep_alive_s)  # `steady_s` follows
    lost = [([STARTED, spoken("a", 1)], LOST)] * 9
    events, _ = resumed(*lost, ([STARTED, ENDED], None), timing=timing)
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.stats["resumes"] == 9


@pytest.mark.parametrize(("param", "field"), [("x", "x"), (PROMPT, "messages")])
def test_what_the_runner_refuses_is_not_tried_again(param: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _ = resumed(([STARTED], InvalidRequest("no", param=param)))
    assert caught.value.param == field


class LostTogether(Attempts):
    """The stream breaks while a stage is pinged, and that stage does not respond."""

    def __init__(self) -> None:
        super().__init__()
        self.first_ping = asyncio.Event()

    async def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        yield STARTED
        if request.attempt == 1:
            _ = await self.first_ping.wait()
            raise LOST
        yield ENDED

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        if not self.first_ping.is_set():
            self.first_ping.set()
            await asyncio.sleep(0.05)  # by then the stream has broken
            raise LOST
        return pb.RunnerState()


def test_a_loss_that_shows_in_two_ways_is_one_loss() -> None:
    timing = replace(LOCAL, tick_s=0.005)
    complaints: list[object] = []

    async def scenario() -> list[Event]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
        got = await events_of(REQUEST, LostTogether(), FakeFacts(True), timing)
        _ = gc.collect()
        return got

    end = asyncio.run(scenario())[-1]
    assert isinstance(end, Finished)
    assert end.stats["resumes"] == 1
    assert complaints == [], "a traceback in the log"
