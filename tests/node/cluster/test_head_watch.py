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


async def test_a_placement_that_lost_is_told_once_however_often_its_head_repeats_it(
    monkeypatch: MonkeyPatch,
) -> None:
    """Heartbeats of a head that lost can come after this node heeded the first."""
    held, events, taken = Held(), EventLog(), list[Any]()
    record = SimpleNamespace(id="p-theirs")

    def record_of(*_: object) -> SimpleNamespace:
        return record

    def adopt(it: object) -> None:
        """The model has another placement here."""
        taken.append(it)

    def leads(_: NodeId) -> bool:
        return False

    monkeypatch.setattr(reconcile, "record_of", record_of)

    async def card(_: ModelId) -> tuple[None, None]:
        return None, None

    async def nothing(*_: object) -> None: ...

    placements = SimpleNamespace(
        adopt=adopt, expected=dict, tend=lambda: None, sweep=nothing, let_go=nothing
    )
    cluster = SimpleNamespace(head=SELF, self_id=SELF, leads=leads, members=list, draining=list)
    claims = SimpleNamespace(lead=lambda: None, let_go=lambda: None)
    watch = reconcile.StageReconciler(
        cast(Any, cluster), cast(Any, placements), cast(Any, claims), held, DesiredPlacements(),
        cast(Any, SimpleNamespace(card=card)), events, cast(Any, None), LAN.placements,
    )  # fmt: skip
    beat = pb.Heartbeat(held=[pb.HeldPlacement(placement="p-theirs", model="demo")])

    def told() -> list[str]:
        return [e.kind for e in events.held() if e.kind == "superseded"]

    for _ in range(3):
        held.learn(LOST, beat, only=False)
        await watch.look()
    assert len(taken) == 3 and told() == ["superseded"]
    cluster.head = LOST
    await watch.look()
    cluster.head = SELF
    held.learn(LOST, beat, only=False)
    await watch.look()
    assert told() == ["superseded"] * 2, "another time as the head begins anew"
