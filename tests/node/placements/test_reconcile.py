"""What the head's watch does with the last words of other heads."""

from types import SimpleNamespace
from typing import Any, cast

from pytest import MonkeyPatch

from exo_node.node.cluster.desired import DesiredPlacements
from exo_node.node.cluster.held import Held
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LAN
from exo_node.node.placements import reconcile
from exo_node.placement.ids import ModelId, NodeId
from exo_node.proto import peer_pb2 as pb

LOST, SELF = NodeId("0" * 15 + "1"), NodeId("0" * 15 + "2")


class Watched:
    """A reconciler of a node that leads, between fakes; what it did of each kind is counted."""

    def __init__(self) -> None:
        self.held, self.events = Held(), EventLog()
        self.adopted = list[Any]()
        self.tended = 0
        self.cluster = SimpleNamespace(
            head=SELF, self_id=SELF, leads=self._leads, members=list, draining=list
        )
        placements = SimpleNamespace(
            adopt=self.adopted.append, records=[], tend=self._tend, sweep=_nothing,
            let_go=_nothing,
        )  # fmt: skip
        claims = SimpleNamespace(lead=lambda: None, let_go=lambda: None)
        self.reconciler = reconcile.StageReconciler(
            cast(Any, self.cluster), cast(Any, placements), cast(Any, claims), self.held,
            DesiredPlacements(), cast(Any, SimpleNamespace(card=_card)), self.events,
            cast(Any, None), LAN.placements,
        )  # fmt: skip

    async def look(self) -> None:
        await self.reconciler.look()

    def superseded(self) -> int:
        return sum(event.kind == "superseded" for event in self.events.entries())

    def _leads(self, _: NodeId) -> bool:
        return False

    def _tend(self) -> None:
        self.tended += 1


async def _card(_: ModelId) -> tuple[None, None]:
    return None, None


async def _nothing(*_: object) -> None: ...


async def test_a_placement_that_lost_is_told_once_however_often_its_head_repeats_it(
    monkeypatch: MonkeyPatch,
) -> None:
    """Heartbeats of a head that lost can come after this node heeded the first."""
    watched = Watched()

    def record_of(*_: object) -> SimpleNamespace:
        return SimpleNamespace(id="p-theirs")

    monkeypatch.setattr(reconcile, "record_of", record_of)
    beat = pb.Heartbeat(held=[pb.HeldPlacement(placement="p-theirs", model="demo")])
    for _ in range(3):
        watched.held.learn(LOST, beat, only=False)
        await watched.look()
    assert len(watched.adopted) == 3 and watched.superseded() == 1
    watched.cluster.head = LOST
    await watched.look()
    watched.cluster.head = SELF
    watched.held.learn(LOST, beat, only=False)
    await watched.look()
    assert watched.superseded() == 2, "another time as the head begins anew"


async def test_a_head_that_was_stopped_touches_no_stage_before_it_has_heard_who_leads(
    monkeypatch: MonkeyPatch,
) -> None:
    """What it knows is as old as its pause; another head may have placed everything anew."""
    now = [100.0]
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watched = Watched()
    for after_s, tended in ((0, 0), (1, 1), (1, 2), (LAN.placements.paused_s, 2), (1, 3)):
        now[0] += after_s
        await watched.look()
        assert watched.tended == tended, after_s
