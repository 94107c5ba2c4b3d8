"""Stand-ins for the node's services, each driven by the test that uses it."""

import asyncio
import functools
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exo_node.node.api.operations.plan_request import PlacementBody, PlanBody
from exo_node.node.chat.images import as_read
from exo_node.node.chat.requests import (
    AnswerProgress,
    Encoded,
    Event,
    Finished,
    GenerationRequest,
    Started,
    TextDelta,
)
from exo_node.node.cluster.desired import DesiredPlacements
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.switches import Name, Value
from exo_node.node.machine.timing import LOCAL, Timing
from exo_node.node.placements.claims import Claims
from exo_node.node.placements.placements import Placements
from exo_node.node.placements.stage_specs import StageSettings
from exo_node.node.placements.stages import Facts, Stages
from exo_node.node.placements.state import LiveNode
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.drafting import EnabledState
from exo_node.placement.errors import InvalidRequest, ModelNotFound, PlacementNotFound
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.library import packaged_cards
from exo_node.placement.split_refusal import MAY_BE_SPLIT, SplitRefusal
from exo_node.proto import peer_pb2 as pb

CARDS = functools.cache(packaged_cards)
"""They are files, which a request to a fake need not read again."""
Script = Callable[[], AsyncIterator[Event]]
Json = dict[str, Any]

STATS: Mapping[str, Any] = {
    "drafter_kind": "native_mtp",
    "num_draft_tokens": 2,
    "accepted_draft_tokens": 1,
}
FINISHED = Finished("stop", 3, 3, 2, 1, STATS)
ANSWER: tuple[Event, ...] = (
    AnswerProgress("prefill 2/3"),
    AnswerProgress("prefill 3/3"),
    Started((7, 8, 9)),
    TextDelta("", (10,)),
    TextDelta("hé", (11,)),
    TextDelta("llo", (12,)),
    FINISHED,
)


def says(*events: Event, then: Exception | None = None) -> Script:
    """These events, and the error after them."""

    async def script() -> AsyncGenerator[Event]:
        for event in events:
            yield event
        if then is not None:
            raise then

    return script


def hangs(*events: Event) -> Script:
    """These events, and never another."""

    async def script() -> AsyncGenerator[Event]:
        for event in events:
            yield event
        await asyncio.Event().wait()

    return script


def repeats(event: Event) -> Script:
    """This event for ever, as fast as it is taken."""

    async def script() -> AsyncGenerator[Event]:
        while True:
            yield event
            await asyncio.sleep(0)

    return script


@dataclass
class FakeChat:
    """A chat service with one script a model; `demo` gives ANSWER. Safe to watch from a thread."""

    scripts: dict[str, Script] = field(default_factory=lambda: {"demo": says(*ANSWER)})
    requests: list[GenerationRequest] = field(default_factory=list[GenerationRequest])
    released: list[str] = field(default_factory=list[str])
    streams: list[AsyncIterator[Event]] = field(default_factory=list[AsyncIterator[Event]])
    events: int = 0
    open: int = 0
    """Number of answers in progress; `closed` is set when the last one ends."""
    images: str = ""
    """"read", or why the model reads no images."""
    began: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        """As new, for the next test over the same server."""
        self.scripts = {"demo": says(*ANSWER)}
        self.requests.clear()
        self.released.clear()
        self.streams.clear()
        self.events = 0
        self.images = ""
        self.began.clear()
        self.closed.clear()

    async def encode(self, request: GenerationRequest) -> Encoded:
        """An id for each character."""
        if request.model not in self.scripts:
            raise ModelNotFound(f"there is no model '{request.model}'", param="model")
        request, _ = as_read(request, self.images)
        self.requests.append(request)
        if request.ids is not None:
            return Encoded((), "".join(chr(min(id, 0x10FFFF)) for id in request.ids), 4096)
        text = request.text or "".join(str(m["content"]) for m in request.messages)
        return Encoded(tuple(map(ord, text)), "", 4096)

    async def release(self, request: GenerationRequest) -> None:
        if request.model not in self.scripts:
            raise ModelNotFound(f"there is no model '{request.model}'", param="model")
        self.released.append(request.model)

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Event]:
        events = self._events(request)
        # Held, so that it ends by being closed and not by being forgotten.
        self.streams.append(events)
        return events

    async def _events(self, request: GenerationRequest) -> AsyncGenerator[Event]:
        if request.model not in self.scripts:
            raise ModelNotFound(f"there is no model '{request.model}'", param="model")
        request, notes = as_read(request, self.images)
        self.requests.append(request)
        self.began.set()
        self.open += 1
        try:
            async for event in self.scripts[request.model]():
                self.events += 1
                is_first = isinstance(event, Started)
                yield replace(event, notes=(*notes, *event.notes)) if is_first else event
        finally:
            self.open -= 1
            if not self.open:
                self.closed.set()


@dataclass
class FakeOperations:
    """A node's operations in memory; `native_mtp_async_draft_eval` is fixed by a variable."""

    is_ready: bool = True
    enabled: bool = True
    keep_awake: Value = "answers"
    placed: dict[str, Json] = field(default_factory=dict[str, Json])
    cluster_source: Callable[[], Json] = lambda: {"head": "a" * 20, "nodes": []}
    mtp_stats_body: Json = field(default_factory=lambda: {"models": {}})

    async def models(self) -> Json:
        ids = ("demo", "owner/large-model")
        data = [{"id": id, "object": "model", "created": 1, "owned_by": "exo-node"} for id in ids]
        return {"object": "list", "data": data}

    async def no_model(self, model: str) -> ModelNotFound:
        return ModelNotFound(f"there is no model '{model}'", param="model")

    async def catalogue(self) -> Json:
        entry = {"id": "owner/catalogued", "object": "model", "created": 1, "owned_by": "owner"}
        return {"object": "list", "data": [entry]}

    async def cluster(self) -> Json:
        return self.cluster_source()

    async def reach(self) -> Json:
        return {"mdns": "off", "mdns_failure": None, "members": []}

    async def profile(self) -> Json:
        return {"nodes": [], "links": []}

    async def placements(self) -> Json:
        return {"object": "list", "data": list(self.placed.values())}

    async def preview(self, body: PlanBody) -> Json:
        return {"object": "placement.preview", **body.model_dump()}

    async def place(self, body: PlacementBody) -> Json:
        fields = body.model_dump(include={"model", "min_nodes"})
        placement: Json = {"id": f"p{len(self.placed)}", **fields}
        self.placed[placement["id"]] = placement
        return placement

    async def unplace(self, placement: str) -> None:
        if self.placed.pop(placement, None) is None:
            raise PlacementNotFound(f"there is no placement '{placement}'", param="id")

    async def settings(self) -> Json:
        return {
            "native_mtp_enabled": {"value": self.enabled, "writable": True},
            "native_mtp_async_draft_eval": {"value": True, "writable": False},
            "native_mtp_adaptive": {"value": True, "writable": True},
            "keep_awake": {"value": self.keep_awake, "writable": True, "reason": ""},
        }

    async def change_settings(self, changes: Mapping[Name, Value]) -> Json:
        name = "native_mtp_async_draft_eval"
        if name in changes:
            raise InvalidRequest(f"{name} is fixed by a variable", param=name)
        self.enabled = bool(changes.get("native_mtp_enabled", self.enabled))
        self.keep_awake = changes.get("keep_awake", self.keep_awake)
        return await self.settings()

    async def ready(self) -> tuple[bool, str]:
        return (True, "") if self.is_ready else (False, "a placement is failed")

    async def mtp_stats(self) -> Json:
        return self.mtp_stats_body

    async def metrics(self) -> tuple[bytes, str]:
        return b"exo_node_up 1\n", "text/plain"

    async def version(self) -> Json:
        return {"name": "exo-node", "version": "0.0.0"}


NODE = NodeId("a" * 20)


def leading(
    stages: Stages,
    facts: Facts,
    timing: Timing = LOCAL,
    events: EventLog | None = None,
    keep_alive_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Placements:
    """The placements of a node that has just become the head."""
    desired = DesiredPlacements(clock, keep_alive_s)
    placements = Placements(stages, facts, timing, events or EventLog(), desired, clock)
    placements.lead(NODE, 1, adopts=False)
    return placements


@dataclass
class FakeFacts:
    """One node that knows the packaged models; `adaptive` and `default_k` are its settings."""

    adaptive: bool = True
    default_k: int = 0

    def nodes(self) -> Sequence[LiveNode]:
        return [LiveNode(NODE, 10**12)]

    def name(self, node: NodeId) -> str:
        return f"{node}'s name"

    def view(self, placing: ModelId) -> ClusterView:
        return ClusterView((NodeFacts(NODE, "n", 10**12, 10**10),))

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        if model not in CARDS():
            raise ModelNotFound(f"there is no model '{model}'", param="model")
        return CARDS()[model], ""

    async def require_files(self, model: ModelId) -> None:
        """Every model is on some disk."""

    def split_refusal(self, model: ModelId) -> SplitRefusal:
        return MAY_BE_SPLIT

    def mtp_switch(self, generator: NodeId) -> EnabledState:
        return EnabledState(True)

    def stage_settings(self, generator: NodeId) -> StageSettings:
        return StageSettings(adaptive_draft=self.adaptive, default_k=self.default_k)


@dataclass
class FakeStages:
    """Stages that are loaded at once, with their MTP head; loads wait while `held` is not set."""

    held: asyncio.Event | None = None

    async def encode(self, endpoint: Endpoint, request: pb.EncodeRequest) -> pb.EncodeReply:
        return pb.EncodeReply(ids=map(ord, request.text), context_length=64)

    async def find_prefix(self, endpoint: Endpoint, request: pb.GenerateRequest) -> pb.CachedPrefix:
        return pb.CachedPrefix()

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        if self.held is not None:
            _ = await self.held.wait()
        return pb.LoadReady(mtp_head="loaded", greedy_identity="bitwise")

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        pass

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        return pb.RunnerState()

    async def connect(
        self, stage: Endpoint, following: Endpoint, placement: PlacementId, epoch: pb.Epoch
    ) -> None:
        pass

    async def enter(
        self, stage: Endpoint, placement: PlacementId, number: int, epoch: pb.Epoch
    ) -> None:
        pass

    async def forget(self, stage: Endpoint) -> None:
        pass

    def near(self, stage: Endpoint) -> Endpoint:
        return stage


@dataclass
class FakeGenerators(FakeStages):
    """Runners that send `events`, then raise `fault` where there is one, else end or never do."""

    events: Sequence[pb.GenerateEvent] = ()
    fault: Exception | None = None
    requests: list[pb.GenerateRequest] = field(default_factory=list[pb.GenerateRequest])
    ends: bool = False

    async def generate(
        self, endpoint: Endpoint, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        self.requests.append(request)
        for event in self.events:
            yield event
        if self.fault is not None:
            raise self.fault
        if not self.ends:
            _ = await asyncio.Event().wait()

    async def encode(self, endpoint: Endpoint, request: pb.EncodeRequest) -> pb.EncodeReply:
        return pb.EncodeReply(ids=map(ord, request.text), context_length=64)


class OneHead:
    """`claim.Heads` of a cluster with one node, whose claims these are."""

    def __init__(self, placements: Placements, facts: FakeFacts) -> None:
        self.claims = Claims(placements, facts, EventLog(), LOCAL)

    async def head(self) -> NodeId:
        return NODE

    def acquire(
        self, head: NodeId, request: pb.AcquireRequest
    ) -> AsyncGenerator[pb.AcquireEvent, None]:
        return self.claims.acquire(request)

    async def report(self, head: NodeId, report: pb.AttemptReport) -> None:
        self.claims.report(report)

    def has_readers(self, model: ModelId) -> bool:
        del model
        return False

    def generators(self, model: ModelId) -> Mapping[PlacementId, Endpoint]:
        return {}
