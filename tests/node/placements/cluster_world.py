"""A cluster in virtual time under the real `Placements`: nodes, runners, answers, two heads.

What is made up: processes, heartbeats, the election (the lowest id of a side leads) and the entry
nodes of answers. Faults are injected by methods, and `check` says which promise was broken.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

from cards import stage_bytes
from fakes import FakeFacts, FakeStages

from exo_node.node.cluster.desired import DesiredPlacements
from exo_node.node.links.measurements import CHUNK
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LAN, Timing
from exo_node.node.placements.loaded_placement import LoadedPlacement, epoch_from_wire
from exo_node.node.placements.observations import promised
from exo_node.node.placements.placements import Placements
from exo_node.node.placements.state import Epoch, LiveNode
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.card import BlockDrafter, ModelCard
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.errors import (
    ExoNodeError,
    HeadGone,
    InsufficientMemory,
    InvalidRequest,
    LoadFailed,
    PeerLost,
    PeerRefused,
)
from exo_node.placement.gpu_faults import ChunkLimit
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.kv_bits import load_refusal, source_of
from exo_node.placement.library import packaged_cards
from exo_node.proto import peer_pb2 as pb

DEMO = packaged_cards()[ModelId("demo")]
CONTEXT = 512
WHOLE = stage_bytes(DEMO, 0, DEMO.num_layers, True, CONTEXT, True)
"""Bytes of one model."""
STEP_S = 0.5
DEAD_AFTER_S = 3.5


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        selector = cast(Any, self)._selector
        select: Callable[[float | None], list[Any]] = selector.select

        def jump(timeout: float | None) -> list[Any]:
            ready = select(0)
            if not ready and timeout is not None:
                self._now += max(0.0, timeout)
            assert ready or timeout is not None, "all tasks wait for ever"
            return ready

        selector.select = jump

    def time(self) -> float:
        return self._now


@dataclass(eq=False)
class Process:
    """A runner as it really is."""

    spec: pb.StageSpec
    ready: pb.LoadReady | None = None
    epoch: pb.Epoch | None = None
    hangs: bool = False
    requests: int = 0

    @property
    def memory(self) -> int:
        return self.spec.plan.stages[self.spec.stage].memory_bytes


@dataclass(eq=False)
class Machine:
    """A node as it really is."""

    id: NodeId
    memory: int
    up: bool = True
    draining: bool = False
    side: int = 0
    unreachable: bool = False
    """Its node answers, and its runners cannot be called."""
    fails: list[ExoNodeError] = field(default_factory=list[ExoNodeError])
    """Errors of its next loads."""
    processes: dict[tuple[str, int], Process] = field(
        default_factory=dict[tuple[str, int], Process]
    )


class World:
    """Nodes `a`, `b`, … with room for `room` models each."""

    def __init__(self, count: int = 3, room: float = 2.2, timing: Timing = LAN) -> None:
        ids = [NodeId("abcdef"[number]) for number in range(count)]
        self.timing = timing
        self.machines = {id: Machine(id, int(room * WHOLE)) for id in ids}
        self.heads = {id: Head(self, id) for id in ids}
        self.term = 0
        self.faults: list[str] = []
        self.calls: list[str] = []
        self.answers: set[asyncio.Task[None]] = set()
        self.pids = 0
        self.card_bits: int | None = None
        """`kv_bits` of every card."""
        self.card_drafter: BlockDrafter | None = None
        """`drafter` of every card."""
        self.kv_bits: dict[NodeId, int] = {}
        """EXO_KV_BITS by node."""
        self.kv_refusals: tuple[tuple[ModelId, str], ...] = ()
        """Caches that no node can quantise, as the first load that tries shows."""
        self.known_kv_refusals: tuple[tuple[ModelId, str], ...] = ()
        self.chunk_limits: dict[NodeId, ChunkLimit] = {}
        """As GPU faults have set them on nodes."""
        self.known_chunk_limits: dict[NodeId, ChunkLimit] = {}
        """As heads see them, a while after a node has refused a load."""
        self._clock = asyncio.ensure_future(self._tick())

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _tick(self) -> None:
        while True:
            for head in self.heads.values():
                await head.beat()
            self.check()
            await asyncio.sleep(STEP_S)

    async def close(self) -> None:
        tasks = [self._clock, *self.answers]
        for task in tasks:
            _ = task.cancel()
        _ = await asyncio.gather(*tasks, return_exceptions=True)
        for head in self.heads.values():
            await head.placements.close()

    def reaches(self, one: NodeId, other: NodeId) -> bool:
        x, y = self.machines[one], self.machines[other]
        return x.up and y.up and (one == other or x.side == y.side)

    def head(self, of: NodeId | None = None) -> "Head | None":
        """The head of a node's side."""
        side = 0 if of is None else self.machines[of].side
        ups = [m.id for m in self.machines.values() if m.up and m.side == side]
        return self.heads[min(ups)] if ups else None

    def leader(self, of: NodeId | None = None) -> Placements:
        head = self.head(of)
        assert head is not None
        return head.placements

    # ------------------------------------------------------------------ faults

    async def kill(self, node: str) -> None:
        """The node ends with its runners; it knows nothing when it starts again."""
        machine, id = self.machines[NodeId(node)], NodeId(node)
        machine.up, machine.draining = False, False
        machine.processes.clear()
        await self.heads[id].placements.close()
        self.heads[id] = Head(self, id)

    def start(self, node: str) -> None:
        self.machines[NodeId(node)].up = True

    def fail_loads(self, count: int, nodes: str = "abcdef") -> None:
        """The next loads of each of these nodes fail, so many of them."""
        for machine in self.machines.values():
            if machine.id in nodes:
                machine.fails = [LoadFailed("it broke")] * count

    def part(self, nodes: str) -> None:
        """These nodes reach no others; `""` ends that."""
        for machine in self.machines.values():
            machine.side = int(machine.id in nodes)

    def take_over(self, node: str) -> Placements:
        """The node leads by heartbeats from before, and hears the others at the next ones."""
        head = self.heads[NodeId(node)]
        self.term += 1
        head.take_over(self.term)
        return head.placements

    def crash(self, node: str, placement: str, stage: int) -> None:
        _ = self.machines[NodeId(node)].processes.pop((placement, stage), None)
        self.heads[NodeId(node)].placements.actions.note_ended(
            NodeId(node), placement, stage, "its process ended"
        )

    def processes(self) -> list[tuple[NodeId, tuple[str, int], Process]]:
        return [(m.id, key, p) for m in self.machines.values() for key, p in m.processes.items()]

    # ------------------------------------------------------------------ answers

    def ask(self, model: ModelId, seconds: float, entry: str = "a") -> "asyncio.Task[None]":
        """A chat request, driven by its entry node until it has its tokens."""
        task = asyncio.ensure_future(self._answer(model, seconds, NodeId(entry)))
        self.answers.add(task)
        task.add_done_callback(self.answers.discard)
        return task

    async def _answer(self, model: ModelId, seconds: float, entry: NodeId) -> None:
        remaining_s, lost = seconds, None
        while remaining_s > 0 and self.machines[entry].up:
            head = self.head(entry)
            if head is None or not head.placements.leading.is_set():
                await asyncio.sleep(0.2)
                continue
            if lost is not None:
                head.placements.actions.note_broken(*lost)
                lost = None
            try:
                record = (await head.placements.ensure(model)).record
            except HeadGone:
                await asyncio.sleep(0.2)
                continue
            except ExoNodeError as fault:
                if isinstance(fault, LoadFailed | InsufficientMemory):
                    self.calls.append(f"error {model}")
                    return
                raise
            remaining_s, lost = await self._attempt(head, record, remaining_s, entry)

    async def _attempt(
        self, head: "Head", record: LoadedPlacement, remaining_s: float, entry: NodeId
    ) -> tuple[float, tuple[PlacementId, Epoch, str, list[int]] | None]:
        """The seconds that are left, and what the head is told of a loss."""
        placement, epoch = record.id, record.epoch
        ring = [(node, self.machines[node].processes.get((placement, stage)))
                for stage, node in enumerate(s.node for s in record.stages)]  # fmt: skip
        while remaining_s > 0:
            _ = record.begin()
            try:
                while (
                    remaining_s > 0
                    and self.head(entry) is head
                    and head.placements.leading.is_set()
                ):
                    await asyncio.sleep(STEP_S)
                    if not self.machines[entry].up:
                        return 0, None
                    lost_stages = [
                        stage
                        for stage, (node, process) in enumerate(ring)
                        if process is None
                        or process.hangs
                        or self.machines[node].processes.get((placement, stage)) is not process
                        or not self.reaches(entry, node)
                    ]
                    if lost_stages or any(p is None or _of(p) != epoch for _, p in ring):
                        return remaining_s, (placement, epoch, "it broke off", lost_stages)
                    remaining_s -= STEP_S
            finally:
                head.placements.end(record, epoch)
            if remaining_s > 0:  # the claim is made again at the next head
                while (other := self.head(entry)) is None or not other.placements.leading.is_set():
                    await asyncio.sleep(0.2)
                renewed = other.placements.find(placement)
                if renewed is None or renewed.epoch != epoch:
                    return remaining_s, None
                head, record = other, renewed
        head.placements.succeeded(record)
        return 0, None

    # ------------------------------------------------------------------ promises

    def check(self) -> None:
        for machine in self.machines.values():
            used_bytes = sum(process.memory for process in machine.processes.values())
            if used_bytes > machine.memory:
                self.faults.append(
                    f"{self.now}: {machine.id} holds {used_bytes} of {machine.memory}"
                )
        for name in {key[0] for _, key, _ in self.processes()}:
            by_epoch: dict[tuple[int, Epoch], int] = {}
            for _, (placement, stage), process in self.processes():
                if placement == name and process.epoch is not None:
                    key = (stage, _of(process))
                    by_epoch[key] = by_epoch.get(key, 0) + 1
            if any(count > 1 for count in by_epoch.values()):
                self.faults.append(f"{self.now}: two runners of {name} own a stage in one epoch")

    def serving(self, model: ModelId) -> list[list[NodeId]]:
        """The nodes of the placements whose stages are all connected in one epoch."""
        rings: dict[tuple[str, Epoch], dict[int, NodeId]] = {}
        sizes: dict[str, int] = {}
        for node, (placement, stage), process in self.processes():
            if process.spec.model == model and process.epoch is not None and not process.hangs:
                rings.setdefault((placement, _of(process)), {})[stage] = node
                sizes[placement] = process.spec.num_stages
        return sorted(
            [ring[stage] for stage in sorted(ring)]
            for (name, _), ring in rings.items()
            if len(ring) == sizes[name]
        )

    async def until(self, condition: Callable[[], object], within_s: float = 120.0) -> None:
        end = self.now + within_s
        while not condition():
            assert self.now < end, "\n".join([*self.calls[-40:], *self.faults])
            await asyncio.sleep(STEP_S)


def _of(process: Process) -> Epoch:
    return Epoch() if process.epoch is None else epoch_from_wire(process.epoch)


class Head(FakeStages, FakeFacts):
    """One node's `Placements`, with the cluster as that node sees it: `Stages` and `Facts`."""

    def __init__(self, world: World, id: NodeId) -> None:
        super().__init__()
        self.world, self.id = world, id
        self.desired = DesiredPlacements(lambda: world.now)
        self.events = EventLog()
        self.placements = Placements(
            self, self, world.timing, self.events, self.desired, lambda: world.now
        )
        self.contacts: dict[NodeId, float] = {}
        self.since: dict[NodeId, float] = {}
        self.reported: dict[NodeId, list[pb.StageState]] = {}
        """The runners in each node's last heartbeat."""
        self.led = False
        self._looked_at = 0.0

    # ------------------------------------------------------------------ heartbeats

    async def beat(self) -> None:
        world = self.world
        if not world.machines[self.id].up:
            return
        for other in world.machines:
            if world.reaches(self.id, other):
                if world.now - self.contacts.get(other, -1e9) > DEAD_AFTER_S:
                    self.since[other] = world.now
                self.contacts[other] = world.now
                self.reported[other] = self._states(other)
            elif other in self.contacts and world.now - self.contacts[other] > DEAD_AFTER_S:
                del self.contacts[other]
                self.placements.actions.note_node_lost(other, f"{other} does not answer any more")
        lower = [node for node in self.contacts if node < self.id]
        if lower:
            await self._follow(min(lower))
            return
        if not self.led:
            world.term += 1
            self.led = True
        for wish in self.desired.take(lambda node: world.heads[node].led).values():
            if self.desired.get(wish.model) is None:
                self.desired.note(wish)
        self.placements.lead(self.id, world.term)
        if world.now - self._looked_at >= self.world.timing.watch_s:
            self._looked_at = world.now
            self.placements.look()

    def take_over(self, term: int) -> None:
        heard_at = self.world.now - STEP_S / 2
        for node in self.world.machines:
            self.contacts[node], self.reported[node] = heard_at, self._states(node)
            self.since[node] = heard_at
        self.led = True
        self.placements.lead(self.id, term)

    async def _follow(self, head: NodeId) -> None:
        leader = self.world.heads[head]
        if self.led:
            self.led = False
            if self.world.reaches(self.id, head):
                leader.desired.learn(self.id, self.desired.to_wire(), followed=False)
            await self.placements.let_go()
        if self.world.reaches(self.id, head) and leader.led:
            self.desired.learn(head, leader.desired.to_wire(), followed=True)

    # ------------------------------------------------------------------ Facts

    def nodes(self) -> Sequence[LiveNode]:
        world = self.world
        return [
            LiveNode(
                node,
                world.machines[node].memory,
                draining=world.machines[node].draining,
                follows=self._follows(node),
                alive_since=self.since[node],
                heard_at=inf if node == self.id else contact_at,
                stages=self._states(node) if node == self.id else self.reported[node],
            )
            for node, contact_at in self.contacts.items()
        ]

    def _follows(self, node: NodeId) -> bool:
        contacts = self.world.heads[node].contacts
        return min(contacts, default=node) == self.id

    def _states(self, node: NodeId) -> list[pb.StageState]:
        return [
            pb.StageState(
                placement=process.spec.placement,
                model=process.spec.model,
                stage=process.spec.stage,
                status="loading" if process.ready is None else "ready",
                live_requests=process.requests,
                spec=process.spec,
                ready=process.ready,
                epoch=process.epoch,
            )
            for process in self.world.machines[node].processes.values()
        ]

    def view(self, placing: ModelId) -> ClusterView:
        promises = promised(self.placements.runners)
        alive = [
            node
            for node in sorted(self.contacts)
            if not self.world.machines[node].draining and self.world.now - self.contacts[node] < 1.5
        ]
        return ClusterView(
            tuple(
                NodeFacts(
                    node,
                    node,
                    self.world.machines[node].memory
                    - sum(s for m, s in promises.get(node, {}).items() if m != placing),
                    1e11,
                    chunk_limit=self.world.known_chunk_limits.get(node),
                )
                for node in alive
            ),
            kv_bits=self.world.kv_bits.get(self.id),
            kv_refusals=self.world.known_kv_refusals,
        )

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        await asyncio.sleep(0)
        facts = {"kv_bits": self.world.card_bits, "drafter": self.world.card_drafter}
        return DEMO.model_copy(update={"id": model, **facts}), ""

    # ------------------------------------------------------------------ Stages

    def _process(self, node: NodeId, placement: str, stage: int) -> Process:
        machine = self.world.machines[node]
        process = machine.processes.get((placement, stage))
        if machine.unreachable:
            raise PeerRefused(f"nobody listens at the runner on {node}")
        if not self.world.reaches(self.id, node) or process is None or process.hangs:
            raise PeerLost(f"the runner on {node} does not answer")
        return process

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        world, machine = self.world, self.world.machines[node]
        world.calls.append(f"load {spec.placement}/{spec.stage} on {node}")
        await asyncio.sleep(0.01)
        if not world.reaches(self.id, node):
            await asyncio.sleep(1.0)
            raise PeerLost(f"{node} is gone")
        if (limit := world.chunk_limits.get(node)) and spec.prefill_chunk > limit.rows:
            learn = world.known_chunk_limits.update
            _ = asyncio.get_running_loop().call_later(20.0, learn, {node: limit})
            raise LoadFailed("the chunk is too long here", param=CHUNK)
        key = (spec.placement, spec.stage)
        _ = machine.processes.pop(key, None)
        used_bytes = sum(process.memory for process in machine.processes.values())
        process = Process(spec)
        if used_bytes + process.memory > machine.memory:
            world.calls.append(f"{node} refuses {spec.placement}/{spec.stage}")
            raise InsufficientMemory(f"{node} has promised its memory")
        machine.processes[key] = process
        try:
            await asyncio.sleep(2.0)
            if machine.processes.get(key) is not process or not world.reaches(self.id, node):
                raise PeerLost(f"{node} was lost while it loaded a stage")
            if machine.fails:
                raise machine.fails.pop(0)
            if spec.kv_bits and (why := dict(world.kv_refusals).get(ModelId(spec.model))):
                world.known_kv_refusals = world.kv_refusals
                raise load_refusal(why, source_of(spec.kv_bits_source))
        except BaseException:
            if machine.processes.get(key) is process:
                del machine.processes[key]
            raise
        world.pids += 1
        process.ready = pb.LoadReady(host=node, port=spec.stage, pid=world.pids, mtp_head="loaded")
        return process.ready

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        world = self.world
        world.calls.append(f"{'kill' if kill else 'unload'} {placement}/{stage} on {node}")
        await asyncio.sleep(0.01 if kill else 0.5)
        if not world.reaches(self.id, node):
            raise PeerLost(f"{node} is gone")
        _ = world.machines[node].processes.pop((placement, stage), None)

    async def enter(
        self, stage: Endpoint, placement: PlacementId, number: int, epoch: pb.Epoch
    ) -> None:
        await asyncio.sleep(0.01)
        process = self._process(stage.node, placement, number)
        if process.epoch is not None and epoch_from_wire(epoch) <= _of(process):
            raise InvalidRequest("it is in a later epoch", param="epoch")
        process.epoch = epoch

    async def connect(
        self, stage: Endpoint, following: Endpoint, placement: PlacementId, epoch: pb.Epoch
    ) -> None:
        await asyncio.sleep(0.01)
        process = self._process(stage.node, placement, stage.ready.port)
        if _of(process) != epoch_from_wire(epoch):
            raise InvalidRequest("it is in another epoch", param="epoch")
        _ = self._process(following.node, placement, following.ready.port)

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        await asyncio.sleep(0.01)
        try:
            _ = self._process(stage.node, placement, number)
        except PeerLost:
            await asyncio.sleep(1.0)
            raise
        return pb.RunnerState()


@asynccontextmanager
async def known_nodes(count: int = 3, room: float = 2.2) -> AsyncGenerator[World]:
    """A world whose nodes know each other; no promise may be broken in it."""
    world = World(count, room)
    try:
        await asyncio.sleep(4)
        yield world
        assert world.faults == []
    finally:
        await world.close()
