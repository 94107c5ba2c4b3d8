"""What the entry node asks of a model's replicas before it claims one."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest
from fakes import FakeFacts, FakeGenerators, FakeStages, leading
from test_chat import ENDED, LOST, REQUEST, STARTED, Attempts, NotedHead

from exo_node.node.chat.chat import ChatService
from exo_node.node.chat.metrics import Metrics
from exo_node.node.chat.requests import Event, Finished, GenerationRequest
from exo_node.node.chat.totals import Totals
from exo_node.node.machine.timing import LOCAL
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.errors import PeerLost
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.proto import peer_pb2 as pb

P, Q = PlacementId("p"), PlacementId("q")
WITH_HEAD = pb.LoadReady(host="127.0.0.1", port=1, mtp_head="loaded")
WITHOUT = pb.LoadReady(host="127.0.0.1", port=2, mtp_head="no head")
CACHED = pb.CachedPrefix(prompt_rows=10, rows=8, tier="memory", bytes=100, key="k")


class ReplicatedHead(NotedHead):
    """The heartbeats of a model with as many generators as `ready` has; sources are added."""

    ready: tuple[pb.LoadReady, ...] = (WITH_HEAD, WITHOUT)
    source: pb.PrefixSource | None = None

    def has_readers(self, model: ModelId) -> bool:
        del model
        return False

    def generators(self, model: ModelId) -> Mapping[PlacementId, Endpoint]:
        nodes = zip((P, Q), self.ready, strict=False)
        return {name: Endpoint(NodeId(f"node-{name}"), ready) for name, ready in nodes}

    async def acquire(
        self, head: NodeId, request: pb.AcquireRequest
    ) -> AsyncGenerator[pb.AcquireEvent, None]:
        async with aclosing(super().acquire(head, request)) as events:
            async for event in events:
                if event.HasField("placed") and self.source is not None:
                    event.placed.prefix_source.CopyFrom(self.source)
                    event.placed.reason = "it has less work"
                yield event


@dataclass
class Replicas(FakeGenerators):
    """Runners of which the second one does not answer in time."""

    asked: list[pb.GenerateRequest] = field(default_factory=list[pb.GenerateRequest])
    fault: Exception | None = None
    defect: Exception = field(default_factory=lambda: PeerLost("it does not answer"))

    async def find_prefix(self, endpoint: Endpoint, request: pb.GenerateRequest) -> pb.CachedPrefix:
        self.asked.append(request)
        if request.placement == Q:
            raise self.defect
        return CACHED


async def answered(
    request: GenerationRequest, head: ReplicatedHead, runners: Replicas | Attempts
) -> list[Event]:
    totals = Totals()
    chat = ChatService(head, runners, Metrics(totals), LOCAL)
    async with aclosing(chat.stream(request)) as stream:
        return [event async for event in stream]


def replicated(runners: FakeStages) -> ReplicatedHead:
    facts = FakeFacts(True)
    return ReplicatedHead(leading(runners, facts), facts)


async def test_the_claim_has_the_prefixes_of_the_replicas_that_say_so() -> None:
    runners = Replicas(events=[STARTED, ENDED], ends=True)
    head = replicated(runners)
    _ = await answered(REQUEST, head, runners)
    [claim] = head.requests
    assert list(claim.prefixes) == [pb.ReplicaPrefix(placement=P, prefix=CACHED)]
    drafts = {asked.placement: asked.drafting.num_draft_tokens for asked in runners.asked}
    assert drafts == {P: 1, Q: 0}, "a prefix that a draft head cannot go on from does not count"
    assert all(asked.messages.json == '[{"role": "user"}]' for asked in runners.asked)


@pytest.mark.parametrize(
    ("request_", "ready"),
    [
        (REQUEST, (WITH_HEAD,)),
        (REQUEST, ()),
        (replace(REQUEST, sharing=pb.Sharing(cache=False)), (WITH_HEAD, WITHOUT)),
    ],
    ids=["one placement", "none", "a request that uses no cache"],
)
async def test_nothing_is_asked_where_it_changes_nothing(
    request_: GenerationRequest, ready: tuple[pb.LoadReady, ...]
) -> None:
    runners = Replicas(events=[STARTED, ENDED], ends=True)
    head = replicated(runners)
    head.ready = ready
    _ = await answered(request_, head, runners)
    assert runners.asked == [] and not head.requests[0].prefixes


async def test_a_defect_is_not_taken_for_a_replica_that_is_silent() -> None:
    runners = Replicas(events=[STARTED, ENDED], ends=True, defect=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        _ = await answered(REQUEST, replicated(runners), runners)


async def test_a_replica_that_hangs_is_not_waited_for() -> None:
    @dataclass
    class Hanging(Replicas):
        ended: int = 0

        async def find_prefix(
            self, endpoint: Endpoint, request: pb.GenerateRequest
        ) -> pb.CachedPrefix:
            if request.placement == P:
                return CACHED
            try:
                _ = await asyncio.Event().wait()
                return CACHED
            finally:
                self.ended += 1

    runners = Hanging(events=[STARTED, ENDED], ends=True)
    head = replicated(runners)
    async with asyncio.timeout(30):
        events = await answered(REQUEST, head, runners)
    assert isinstance(events[-1], Finished)
    assert list(head.requests[0].prefixes) == [pb.ReplicaPrefix(placement=P, prefix=CACHED)]
    assert runners.ended == 1, "its call is ended"


async def test_a_state_is_copied_for_the_first_attempt_only() -> None:
    runners = Attempts(scripts=[([STARTED], LOST), ([STARTED, ENDED], None)])
    head = replicated(runners)
    head.ready = ()
    head.source = pb.PrefixSource(placement=Q, node="node-q", ready=WITHOUT)
    events = await answered(REQUEST, head, runners)
    first, second = runners.requests
    assert first.prefix_source == head.source
    assert not second.HasField("prefix_source")
    assert isinstance(events[-1], Finished)
    assert events[-1].stats["placement"]["reason"] == "it has less work"
