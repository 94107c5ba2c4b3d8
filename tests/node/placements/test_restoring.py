"""How a placement gets over what it lost: spares, fresh runners, other nodes, or a clear end."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from exo_node.node.cluster.desired import DesiredPlacements
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LAN, PlacementTiming
from exo_node.node.placements import maintenance as settling
from exo_node.node.placements import restart_backoff as failures
from exo_node.node.placements.claims import Claims
from exo_node.node.placements.loaded_placement import LoadedPlacement
from exo_node.node.placements.placements import Placements
from exo_node.node.placements.stage_specs import StageSettings
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.drafting import EnabledState
from exo_node.placement.errors import LoadFailed, PeerLost
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.library import packaged_cards
from exo_node.placement.plan import PlanOptions, plan
from exo_node.placement.split_refusal import MAY_BE_SPLIT, SplitRefusal
from exo_node.proto import peer_pb2 as pb

DEMO = ModelId("demo")
A, B, C, D = (NodeId(letter * 20) for letter in "abcd")
ONE = PlanOptions(max_nodes=1)
THREE = PlanOptions(min_nodes=3, max_nodes=3)
AT_ONCE = replace(
    LAN.placements, max_pause_s=0.0, answers_return_s=0.0, refill_after_s=0.0, orphan_s=0.0
)
"""Nothing is waited for."""
SLOWER = replace(AT_ONCE, max_pause_s=60.0)
"""With the pauses of real use; see `pauses`."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that would have been made."""
    lengths: list[float] = []
    pause_s = failures.RestartBackoff.pause_s

    def noted(backoff: failures.RestartBackoff, *asked: Any) -> float:
        lengths.append(pause_s(backoff, *asked))
        return 0.0

    monkeypatch.setattr(failures.RestartBackoff, "pause_s", noted)
    return lengths


@dataclass
class Cluster:
    """Nodes with runners that answer until they are told not to; also what placing asks of it."""

    nodes: list[NodeId] = field(default_factory=lambda: [A, B, C, D])
    memory: int = 10**10
    up: set[tuple[NodeId, int]] = field(default_factory=set[tuple[NodeId, int]])
    broken: set[NodeId] = field(default_factory=set[NodeId])
    """Nodes on which every load fails."""
    failing: int = 0
    """Loads that fail wherever they are, from now on."""
    silent: set[NodeId] = field(default_factory=set[NodeId])
    """Nodes that count as alive and are gone."""
    leaving: set[NodeId] = field(default_factory=set[NodeId])
    """Nodes that answer and take nothing new."""
    connected: list[tuple[NodeId, NodeId]] = field(default_factory=list[tuple[NodeId, NodeId]])
    calls: list[str] = field(default_factory=list[str])
    forgotten: list[NodeId] = field(default_factory=list[NodeId])

    async def load(
        self, node: NodeId, spec: pb.StageSpec, progress: Callable[[pb.LoadProgress], None]
    ) -> pb.LoadReady:
        await asyncio.sleep(0)
        self.calls.append(f"load {spec.stage} on {node[0]}")
        if node in self.silent:
            raise PeerLost(f"{node} is gone")
        self.failing -= 1
        if self.failing >= 0 or node in self.broken or node not in self.nodes:
            raise LoadFailed(f"{node} cannot load")
        self.up.add((node, spec.stage))
        return pb.LoadReady(host=node, port=spec.stage, mtp_head="loaded")

    async def unload(
        self, node: NodeId, placement: PlacementId, stage: int, *, kill: bool = False
    ) -> None:
        if node not in self.nodes:
            raise PeerLost(f"{node} is gone")
        self.calls.append(f"{'kill' if kill else 'unload'} {stage} on {node[0]}")
        self.up.discard((node, stage))

    async def connect(self, stage: Endpoint, following: Endpoint, placement: PlacementId) -> None:
        self.connected.append((stage.node, following.node))
        if (following.node, following.ready.port) not in self.up:
            raise PeerLost(f"{following.node} does not answer")

    async def ping(self, stage: Endpoint, placement: PlacementId, number: int) -> pb.RunnerState:
        await asyncio.sleep(0)
        if (stage.node, number) not in self.up:
            raise PeerLost(f"{stage.node} does not answer")
        return pb.RunnerState()

    async def forget(self, stage: Endpoint) -> None:
        self.forgotten.append(stage.node)

    def near(self, stage: Endpoint) -> Endpoint:
        return stage

    def view(self, placing: ModelId) -> ClusterView:
        may = [node for node in self.nodes if node not in self.leaving]
        return ClusterView(tuple(NodeFacts(n, n[0], self.memory, 1e11) for n in may))

    async def require_files(self, model: ModelId) -> None:
        """Every model is on some disk."""

    def split_refusal(self, model: ModelId) -> SplitRefusal:
        return MAY_BE_SPLIT

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        return packaged_cards()[model], ""

    def mtp_switch(self, generator: NodeId) -> EnabledState:
        return EnabledState(True)

    def stage_settings(self, generator: NodeId) -> StageSettings:
        return StageSettings()

    def lose(self, record: LoadedPlacement, stage: int) -> NodeId:
        """The stage's runner ends; nobody is told."""
        node = record.stages[stage].node
        self.up.discard((node, stage))
        return node


@asynccontextmanager
async def playing(
    timing: PlacementTiming = AT_ONCE, desired: DesiredPlacements | None = None, **made: Any
) -> AsyncGenerator[tuple[Cluster, Placements, EventLog]]:
    cluster, events = Cluster(**made), EventLog()
    placements = Placements(cluster, cluster, timing, events, desired)
    yield cluster, placements, events
    await placements.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def with_spares(placements: Placements) -> LoadedPlacement:
    record = await placements.place(DEMO, THREE, spares=1)
    await until(lambda: [s.status for s in record.spares] == ["ready"] * 3)
    return record


def kinds(events: EventLog) -> list[str]:
    return [event.kind for event in events.entries()]


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_spare_takes_the_place_of_a_lost_stage_and_is_replaced_itself(stage: int) -> None:
    async with playing() as (cluster, placements, events):
        record = await with_spares(placements)
        spares = {spare.stage: spare.node for spare in record.spares}
        lost = cluster.lose(record, stage)
        cluster.calls.clear()
        placements.broke(record.id, record.connections, "an answer on it broke off")
        assert await placements.ensure(DEMO) is record
        assert record.status == "ready"
        assert record.stages[stage].node == spares[stage] != lost
        order = [s.node for s in record.stages]
        assert cluster.connected[-3:] == list(zip(order, [*order[1:], order[0]], strict=True))
        await until(lambda: [s.status for s in record.spares] == ["ready"] * 3)
        # What was lost may be stopped and not gone; only then a new spare is loaded.
        assert cluster.calls[0] == f"kill {stage} on {lost[0]}"
        assert cluster.calls[1].startswith(f"load {stage} on ")
        assert {"stage_lost", "replanned"} <= set(kinds(events))


async def test_without_a_spare_only_the_lost_stage_is_loaded_anew() -> None:
    async with playing() as (cluster, placements, _):
        record = await placements.place(DEMO, THREE)
        before = [stage.node for stage in record.stages]
        lost = cluster.lose(record, 1)
        cluster.calls.clear()
        placements.lost(record.id, 1, "it is gone")
        assert await placements.ensure(DEMO) is record
        assert [call for call in cluster.calls if call.startswith("load")] == ["load 1 on d"]
        assert cluster.calls[0] == f"kill 1 on {lost[0]}", "what hangs holds memory"
        assert [s.node for s in record.stages] == [before[0], D, before[2]]


async def test_a_stage_is_loaded_elsewhere_where_the_node_that_it_would_go_to_is_gone_too() -> None:
    """The membership may show a dead node as alive for a while, with most memory left."""

    async with playing() as (cluster, placements, _):
        record = await placements.place(DEMO, THREE)
        cluster.silent = {D}
        lost = cluster.lose(record, 1)
        cluster.silent.add(lost)
        cluster.calls.clear()
        placements.lost(record.id, 1, "it is gone")
        assert await placements.ensure(DEMO) is record
        loads = [call for call in cluster.calls if call.startswith("load")]
        assert loads[0] == "load 1 on d"
        assert record.status == "ready"
        assert record.stages[1].node not in cluster.silent


async def test_the_only_other_machine_dies_and_the_head_takes_its_stage() -> None:
    async with playing(nodes=[A, B]) as (cluster, placements, _):
        record = await placements.place(DEMO, PlanOptions(min_nodes=2, max_nodes=2))
        gone = record.stages[1].node
        cluster.silent.add(gone)  # and it still counts as alive, with all its memory free
        cluster.up.discard((gone, 1))
        placements.broke(record.id, record.connections, "its stream broke")
        assert await placements.ensure(DEMO) is record
        assert {stage.node for stage in record.stages} == {record.stages[0].node}


async def test_a_model_is_planned_anew_without_a_node_that_is_found_to_be_gone() -> None:
    async with playing() as (cluster, placements, _):
        cluster.silent = {A, B}
        record = await placements.ensure(DEMO)
        assert record.status == "ready"
        assert {stage.node for stage in record.stages} <= {C, D}


async def test_a_node_that_died_takes_all_its_stages_and_spares_with_it() -> None:
    async with playing() as (cluster, placements, _):
        record = await with_spares(placements)
        gone = record.stages[2].node
        cluster.nodes.remove(gone)
        cluster.up = {(node, stage) for node, stage in cluster.up if node != gone}
        placements.lost_node(gone, "its node died")
        assert await placements.ensure(DEMO) is record
        assert gone not in {stage.node for stage in record.stages}
        assert gone not in {spare.node for spare in record.spares}


async def test_a_spare_that_is_gone_too_is_passed_over() -> None:
    async with playing() as (cluster, placements, _):
        record = await with_spares(placements)
        spare = next(s.node for s in record.spares if s.stage == 1)
        cluster.up.discard((spare, 1))
        _ = cluster.lose(record, 1)
        placements.lost(record.id, 1, "it is gone")
        assert await placements.ensure(DEMO) is record
        assert (record.stages[1].node, 1) in cluster.up


async def test_what_cannot_be_restored_is_placed_anew_on_what_is_left() -> None:
    """Here the loads of a third stage fail everywhere: two nodes are left, and fewer stages."""

    async with playing() as (cluster, placements, events):
        record = await placements.place(DEMO, THREE)
        gone = record.stages[1].node
        cluster.nodes = [node for node in cluster.nodes if node not in (gone, D)]
        cluster.up = {(node, stage) for node, stage in cluster.up if node != gone}
        cluster.broken = set(cluster.nodes)
        placements.lost_node(gone, "its node died")
        await until(lambda: record.status == "failed")
        assert "load_failed" in kinds(events)
        cluster.broken = set()
        again = await placements.ensure(DEMO)
        assert again is not record
        assert len(again.stages) == 2, "as many as are left, of the three that were asked for"


async def test_losses_in_a_row_of_different_stages_are_each_restored_at_once(
    pauses: list[float],
) -> None:
    """Three stages, two losses each, and no good answer between them."""
    async with playing(SLOWER) as (cluster, placements, _):
        record = await placements.place(DEMO, THREE)
        for stage in (0, 1, 2):
            _ = cluster.lose(record, stage)
            placements.lost(record.id, stage, "it is gone")
            assert await placements.ensure(DEMO) is record
        assert [pause for pause in pauses if pause] == []
        for stage in (0, 1, 2):
            _ = cluster.lose(record, stage)
            placements.lost(record.id, stage, "it is gone")
            assert await placements.ensure(DEMO) is record
        assert [pause for pause in pauses if pause] == [1, 1, 1]


async def test_losses_of_one_stage_wait_ever_longer_up_to_a_minute_and_are_never_given_up(
    pauses: list[float],
) -> None:
    async with playing(SLOWER) as (cluster, placements, _):
        record = await placements.place(DEMO, THREE)
        for _ in range(10):
            _ = cluster.lose(record, 1)
            placements.lost(record.id, 1, "it is gone")
            assert await placements.ensure(DEMO) is record
        assert record.status == "ready"
        assert [pause for pause in pauses if pause] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        placements.succeeded(record)
        _ = cluster.lose(record, 1)
        placements.lost(record.id, 1, "it is gone")
        assert await placements.ensure(DEMO) is record
        assert [pause for pause in pauses if pause][9:] == [], "an answer was good"


async def test_a_person_who_unloads_or_loads_a_model_waits_for_no_pause() -> None:
    async with playing(replace(AT_ONCE, max_pause_s=3600.0)) as (cluster, placements, _):
        record = await placements.place(DEMO, THREE)
        for again in (True, False):
            for _ in range(2):
                _ = cluster.lose(record, 1)
                placements.lost(record.id, 1, "it is gone")
                await until(lambda r=record: r.status == "ready" or "again in" in r.load.step)
            assert record.status == "restoring"
            if again:
                record = await placements.place(DEMO, THREE)
            else:
                await placements.remove(record.id)
        assert not placements.records and not cluster.up


async def test_a_claim_that_waits_for_a_pause_is_told_why() -> None:
    async with playing(replace(AT_ONCE, max_pause_s=3600.0)) as (cluster, placements, events):
        timing = replace(AT_ONCE, loading_every_s=0.01)
        claims = Claims(placements, cluster, events, timing, leads=True)
        record = await placements.place(DEMO, THREE)
        for _ in range(2):
            _ = cluster.lose(record, 1)
            placements.lost(record.id, 1, "its runner ended")
            await until(lambda: record.status == "ready" or "again in" in record.load.step)
        async with aclosing(claims.acquire(pb.AcquireRequest(model=DEMO))) as waiting:
            steps = [(await anext(waiting)).waiting.step for _ in range(2)]
        assert steps[1].startswith("its runner ended; loaded again in 1 s")
        assert steps[1] in events.entries()[-1].text


async def test_a_placement_that_could_not_be_restored_is_placed_again_without_a_request() -> None:
    async with playing() as (cluster, placements, events):
        record = await placements.place(DEMO, THREE)
        gone = cluster.lose(record, 1)
        cluster.broken = set(cluster.nodes)
        placements.lost(record.id, 1, "it is gone")
        await until(lambda: record.status == "failed")
        placements.tend()
        await until(lambda: "could not be placed" in events.entries()[-1].text)
        assert gone in cluster.nodes, "every node lives"
        cluster.broken = set()
        placements.tend()
        await until(lambda: [r.status for r in placements.records] == ["ready"])


async def test_a_stage_that_is_lost_while_it_is_loaded_again_was_lost_once_more() -> None:
    async with playing() as (cluster, placements, _):
        record = await placements.place(DEMO, THREE)
        _ = cluster.lose(record, 1)
        cluster.failing = failures.TRIES - 1
        placements.lost(record.id, 1, "it is gone")
        assert await placements.ensure(DEMO) is record, "the other stages keep what they hold"


async def test_who_waits_for_a_model_that_worked_waits_through_loads_that_fail() -> None:
    """Its answers would else be lost to runners that are killed while they load."""
    async with playing() as (cluster, placements, _):
        record = await placements.place(DEMO, THREE)
        _ = cluster.lose(record, 1)
        cluster.failing = failures.TRIES + 2
        placements.lost(record.id, 1, "it is gone")
        placed = await asyncio.gather(*(placements.ensure(DEMO) for _ in range(3)))
        assert placed[0] is placed[1] is placed[2] is not record
        assert placed[0].status == "ready"
        _ = cluster.lose(placed[0], 1)
        cluster.failing = 1000
        placements.lost(placed[0].id, 1, "it is gone")
        with pytest.raises(LoadFailed, match="cannot load"):
            _ = await placements.ensure(DEMO)


async def test_one_that_was_never_loaded_is_not_tried_again_by_itself() -> None:
    async with playing(replace(AT_ONCE, max_pause_s=3600.0)) as (cluster, placements, _):
        cluster.broken = set(cluster.nodes)
        for _ in range(2):
            with pytest.raises(LoadFailed, match="cannot load"):
                _ = await placements.ensure(DEMO)
        with pytest.raises(LoadFailed, match=r"2 times in a row: .* A request in 1 s tries it"):
            _ = await placements.ensure(DEMO)
        cluster.calls.clear()
        placements.tend()
        await asyncio.sleep(0)
        assert cluster.calls == []
        cluster.broken = set()
        assert (await placements.place(DEMO, PlanOptions())).status == "ready"


async def test_a_person_is_told_of_every_stage_that_is_not_where_it_was_planned() -> None:
    async with playing() as (cluster, placements, _):
        record = await with_spares(placements)
        for stage in (1, 2):
            _ = cluster.lose(record, stage)
            placements.lost(record.id, stage, f"loss {stage}")
            assert await placements.ensure(DEMO) is record
        one, two = (record.stages[stage].node[0] for stage in (1, 2))
        moved = f"since then stage 1 moved to {one}, stage 2 moved to {two} (loss 2)"
        assert record.moved == moved


def test_losses_that_spares_make_up_for_count_a_third() -> None:
    backoff = failures.RestartBackoff(LAN.placements)
    for number in range(9):
        assert backoff.count(DEMO, 1) == number // 3
        backoff.note(DEMO, 1, covered=True)
    assert (backoff.count(DEMO, 1), backoff.count(DEMO, 0), backoff.count(DEMO)) == (3, 0, 0)
    assert backoff.pause_s(DEMO, (0, 1)) == 2


async def test_a_second_loss_waits_before_a_load_and_not_for_a_spare(pauses: list[float]) -> None:
    async with playing(SLOWER) as (cluster, placements, _):
        for spares, waits in ((1, []), (0, [1])):
            record = await placements.place(DEMO, PlanOptions(max_nodes=1), spares=spares)
            for _ in range(2):
                ready = ["ready"] * spares
                await until(lambda r=record, w=ready: [s.status for s in r.spares] == w)
                _ = cluster.lose(record, 0)
                placements.lost(record.id, 0, "it is gone")
                assert await placements.ensure(DEMO) is record
            assert [pause for pause in pauses if pause] == waits


async def test_a_placement_that_lost_a_node_goes_back_to_it_once_nobody_asks() -> None:
    async with playing(replace(AT_ONCE, settle_after_s=0.0), nodes=[A, B]) as (
        cluster,
        placements,
        events,
    ):
        record = await placements.place(DEMO, PlanOptions(min_nodes=2))
        gone = cluster.lose(record, 1)
        cluster.nodes.remove(gone)
        placements.lost(record.id, 1, "its node died")
        assert await placements.ensure(DEMO) is record
        assert record.moved == "since then stage 1 moved to a (its node died)"
        record.activity.begin()
        placements.tend()
        assert await placements.ensure(DEMO) is record, "not while it answers"
        record.activity.end()
        placements.tend()
        alone = await placements.ensure(DEMO)
        assert len(alone.stages) == 1, "with the whole of it on one node there are drafts"
        placements.tend()
        assert await placements.ensure(DEMO) is alone, "one node is all there is"
        cluster.nodes.append(gone)
        placements.tend()
        again = await placements.ensure(DEMO)
        assert len({stage.node for stage in again.stages}) == 2
        assert "placed anew: 2 nodes can hold it again" in str(events.entries())
        placements.tend()
        assert await placements.ensure(DEMO) is again, "it has lost nothing"


def test_a_placement_that_moved_is_placed_anew_only_for_much_more_speed() -> None:
    def seconds(fast: float) -> str:
        nodes = [NodeFacts(A, "a", 10**10, 1e11), NodeFacts(B, "b", 10**10, fast)]
        view = ClusterView(tuple(nodes))
        card = packaged_cards()[DEMO]
        record = LoadedPlacement(
            PlacementId("p"), card, plan(card, ClusterView((nodes[0],)), ONE), ONE
        )
        return settling.settles(record, plan(card, view, ONE), view)

    assert seconds(1.05e11) == ""
    assert "ms a token are expected there" in seconds(2e11)


async def test_stages_that_nobody_uses_are_unloaded_and_no_others() -> None:
    """A node that was stopped comes back with a runner whose place another one took."""

    async with playing() as (cluster, placements, _):
        record = await with_spares(placements)
        held = [(node, str(record.id), stage) for node, stage in sorted(cluster.up)]
        strange = [(B, "p-old", 0), (C, str(record.id), 7)]
        cluster.calls.clear()
        for _ in range(2):
            await placements.sweep([*held, *strange])
        assert set(cluster.calls) == {"unload 0 on b", "unload 7 on c"}
        assert len(cluster.up) == 6


async def test_spares_are_loaded_once_the_interrupted_answer_speaks_again() -> None:
    async with playing(replace(AT_ONCE, answers_return_s=0.02, refill_poll_s=0.001)) as (
        cluster,
        placements,
        _,
    ):
        record = await with_spares(placements)
        gone = cluster.lose(record, 1)
        cluster.calls.clear()
        placements.lost_runner(gone, record.id, 1, "it is gone")
        assert await placements.ensure(DEMO) is record
        record.activity.begin()
        for _ in range(100):  # polls of the loop, through the wait for the answer's return
            await asyncio.sleep(0.001)
        assert not [call for call in cluster.calls if call.startswith("load")]
        record.activity.spoke_at = time.monotonic()
        await until(lambda: [s.status for s in record.spares] == ["ready"] * 3)


async def test_spares_that_no_node_has_room_for_are_missing_with_a_reason() -> None:
    async with playing(nodes=[A]) as (_, placements, _):
        record = await placements.place(DEMO, PlanOptions(), spares=1)
        await until(lambda: bool(record.spares_missing))
        assert record.status == "ready"
        assert "no live node has room" in record.spares_missing


async def test_a_node_that_leaves_is_cleared_before_it_goes() -> None:
    async with playing() as (cluster, placements, _):
        record = await placements.place(DEMO, THREE)
        node = record.stages[1].node
        cluster.nodes.remove(node)  # it takes nothing new, and its runner still answers
        cluster.calls.clear()
        for _ in range(2):
            placements.move_off(node)
        await until(lambda: record.stages[1].node == D and record.status == "ready")
        loads = [call for call in cluster.calls if call.startswith("load")]
        assert loads == ["load 1 on d"], "once, and before the stage changes over"


async def test_moves_off_leaving_nodes_are_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[object] = []

    def note(_: failures.RestartBackoff, *failure: object, **how: object) -> None:
        noted.append((failure, how))

    monkeypatch.setattr(failures.RestartBackoff, "note", note)
    async with playing(nodes=[NodeId(name) for name in "abcdef"]) as (cluster, placements, _):
        record = await placements.place(DEMO, PlanOptions(max_nodes=1))
        for _ in range(4):
            node = record.stages[0].node
            cluster.nodes.remove(node)
            placements.move_off(node)
            await until(lambda old=node: record.stages[0].node != old)
            await until(lambda: record.restoring is None)
            assert record.status == "ready"
        assert noted == []


@pytest.mark.parametrize("stage", range(3))
async def test_a_stage_that_was_moved_off_a_leaving_node_is_ended_there(stage: int) -> None:
    """Its frames lead nowhere now: answers that it drives or works for would wait in vain."""
    async with playing() as (cluster, placements, _):
        record = await placements.place(DEMO, THREE, spares=1)
        await until(lambda: [s.status for s in record.spares] == ["ready"] * 3)
        node = record.stages[stage].node
        cluster.leaving.add(node)
        placements.move_off(node)
        await until(lambda: record.stages[stage].node != node and record.status == "ready")
        await until(lambda: f"kill {stage} on {node[0]}" in cluster.calls)


async def test_answers_of_a_whole_model_end_where_they_run_when_their_node_leaves() -> None:
    async with playing() as (cluster, placements, _):
        record = await placements.place(DEMO, ONE, spares=1)
        await until(lambda: [s.status for s in record.spares] == ["ready"])
        node = record.stages[0].node
        cluster.leaving.add(node)
        placements.move_off(node)
        await until(lambda: record.stages[0].node != node and record.status == "ready")
        await until(lambda: [s.status for s in record.spares] == ["ready"])
        assert (node, 0) in cluster.up and node not in cluster.forgotten


async def test_a_stage_that_no_other_node_can_hold_stays_where_it_is() -> None:
    async with playing(nodes=[A]) as (cluster, placements, _):
        record = await placements.place(DEMO, PlanOptions())
        node = record.stages[0].node
        cluster.nodes.clear()
        placements.move_off(node)
        await until(lambda: bool(record.spares_missing))
        assert (record.status, record.stages[0].node) == ("ready", node)


@pytest.mark.parametrize(("nodes", "options"), [([A, B, C, D], THREE), ([A, D], ONE)])
async def test_a_spare_that_could_not_be_loaded_is_tried_again(
    nodes: list[NodeId], options: PlanOptions
) -> None:
    timing = replace(AT_ONCE, refill_every_s=0.0)
    async with playing(timing, nodes=nodes) as (cluster, placements, _):
        cluster.broken = {D}
        record = await placements.place(DEMO, options, spares=1)
        await until(lambda: [spare.status for spare in record.spares] == ["failed"])
        cluster.broken = set()
        placements.tend()
        await until(lambda: [s.status for s in record.spares] == ["ready"] * len(record.stages))
        assert record.spares_missing == ""
        cluster.calls.clear()
        placements.tend()
        assert cluster.calls == [], "nothing is missing"


async def test_a_second_loss_finds_the_second_spare() -> None:
    async with playing() as (cluster, placements, _):
        record = await placements.place(DEMO, THREE, spares=2)
        await until(lambda: [s.status for s in record.spares] == ["ready"] * 6)
        first, second = (spare.node for spare in record.spares if spare.stage == 1)
        for node in (first, second):
            _ = cluster.lose(record, 1)
            placements.lost(record.id, 1, "it is gone")
            assert await placements.ensure(DEMO) is record
            assert record.stages[1].node == node


# ------------------------------------------------------------------------------ another head


async def test_another_head_places_the_model_as_the_old_one_was_asked_to() -> None:
    wishes, learnt = DesiredPlacements(), DesiredPlacements()
    async with playing(desired=wishes) as (_, old, _):
        _ = await old.place(DEMO, THREE, spares=1)
    learnt.learn(wishes.told())
    async with playing(desired=learnt) as (_, new, _):
        record = await new.ensure(DEMO)
        assert len(record.stages) == 3
        await until(lambda: [s.status for s in record.spares] == ["ready"] * 3)
        await new.remove(record.id)
        assert len((await new.ensure(DEMO)).stages) == 1, "removed, and so forgotten"
