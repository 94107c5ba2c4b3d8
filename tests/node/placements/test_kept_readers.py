"""Runners that only read prompts: loaded in room that no model needs, and gone when one does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import pytest
from small_planner import ONE, Size, runner, runners, staged_plan, text
from test_reconcile import (
    ELSEWHERE,
    LOADED,
    NOW,
    PAIRED,
    TWIN,
    WHOLE,
    A,
    B,
    Case,
    M,
    N,
    P,
    failed,
    first,
    room,
    wish,
)

from exo_node.node.cluster.desired import Desired
from exo_node.node.placements.observations import Observations, promised
from exo_node.node.placements.plan_wire import plan_from_wire, plan_to_wire
from exo_node.node.placements.reconcile import reconcile
from exo_node.node.placements.replicas import admit
from exo_node.node.placements.situation import Situation
from exo_node.node.placements.state import LiveNode, StagedPlan, StageRunner
from exo_node.placement.cluster import StageAssignment
from exo_node.placement.errors import LoadFailed
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.options import PlanOptions
from exo_node.placement.reading import reading_key
from exo_node.proto import peer_pb2 as pb

READING: StagedPlan = replace(WHOLE, reader=(StageAssignment(B, 2, 4), 20))
KEY = "the same model"


def reader(node: str = "b", number: int = 1, key: str = KEY, **fields: object) -> StageRunner:
    layers = StageAssignment(NodeId(node), 2, 4)
    plan = replace(WHOLE, reader=(layers, 20))
    ready = pb.LoadReady(read_key=key)
    return runner("p", number, node, plan, ready=ready, **fields)


@dataclass(frozen=True)
class Row:
    name: str
    actions: Sequence[str]
    desired: Sequence[Desired] = (wish(),)
    nodes: str | tuple[LiveNode, ...] = "a b"
    runners: Sequence[StageRunner] = LOADED
    waiting: Mapping[ModelId, float] = field(default_factory=dict[ModelId, float])
    marks: Mapping[str, object] = field(default_factory=dict[str, object])
    failures: Sequence[object] = ()
    sizes: Mapping[str, Size] = field(default_factory=dict[str, Size])
    rate: float = 1e9

    def case(self) -> Case:
        return Case(
            self.name, [], self.desired, self.nodes, self.runners, self.waiting,
            failures=self.failures, marks=self.marks, sizes=self.sizes,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip


OTHER = wish(N)
BIG = {"n": Size(memory=22)}
"""Four layers, which fit where nothing else is."""
ROWS = [
    Row("a node with nothing else to hold reads", ["extra p/1 on b"]),
    Row("where it pays", [], rate=0.0),
    Row("the one with most room first", ["extra p/1 on c"], nodes=room(a=100, b=50, c=90)),
    Row("then the next", ["extra p/2 on b"], nodes=room(a=100, b=50, c=90),
        runners=[*LOADED, reader("c")]),
    Row("each once", [], runners=[*LOADED, reader()]),
    Row("none while one loads", [], runners=[*LOADED, reader(state="loading")]),
    Row("nor where there is no room", [], nodes=room(a=100, b=19)),
    Row("nor beside a copy of the model", [], [wish(replicas=2)], runners=[*LOADED, *ELSEWHERE]),
    Row("a copy that is wanted comes first", ["extra n1/0 on b"], [wish(replicas=2)]),
    Row("and takes the reader's place", ["kill p/1 on b"], [wish(replicas=2)],
        runners=[*LOADED, reader()]),
    Row("once that is gone", [], [wish(replicas=2)],
        runners=[*LOADED, reader(state="stopping")]),
    Row("none for a model over stages", [], [PAIRED], "a b c", runners=TWIN),
    Row("none on a node that a person excluded", [],
        [wish(options=PlanOptions(exclude=frozenset({B})))],
        runners=runners("p", replace(WHOLE, options=PlanOptions(exclude=frozenset({B}))), ONE)),
    Row("nor beside the nodes that a person chose", [], [wish(options=PlanOptions(nodes=(A,)))],
        runners=runners("p", replace(WHOLE, options=PlanOptions(nodes=(A,))), ONE)),
    Row("none right after a load", [], runners=[replace(LOADED[0], since=NOW - 1)]),
    Row("nor after a failure", [], failures=failed("extra", node="b", last_s=1)),
    Row("nor while a request waits", [], [wish(), first(N)], waiting={N: NOW - 1},
        runners=[*LOADED, *runners("o", staged_plan("n", "b4"), state="loading")]),
    Row("another model takes its room at once", ["kill p/1 on b"],
        [wish(), OTHER], nodes=room(a=60, b=100), waiting={N: NOW - 1}, sizes=BIG,
        runners=[*LOADED, reader()]),
    Row("and is loaded when that is free", ["load n1/0 on b"],
        [wish(), OTHER], nodes=room(a=60, b=100), waiting={N: NOW - 1}, sizes=BIG),
    Row("it waits for the reader's end", [],
        [wish(), OTHER], nodes=room(a=60, b=100), waiting={N: NOW - 1}, sizes=BIG,
        runners=[*LOADED, reader(state="stopping")]),
    Row("it goes with its placement", ["unload p/0 on a", "unload p/1 on b"],
        [first(used_at=-inf)], runners=[*LOADED, reader()]),
    Row("it goes when its node leaves", ["kill p/1 on b"], nodes="a b?",
        runners=[*LOADED, reader()]),
    Row("its placement is restored without it", ["load n1/0 on a"], runners=[],
        failures=failed("gone", node="a"), marks={"proven": frozenset({M})}, nodes=room(a=100)),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row: Row) -> None:
    case = row.case()
    view = replace(case.view(), reading_rate=row.rate)
    actions = reconcile(case.desired, case.observed(), view, NOW)
    assert [text(action) for action in actions] == list(row.actions)


def situation(*present: StageRunner, reading_rate: float = 1e9) -> Situation:
    case = Case("", [], [wish()], runners=[*LOADED, *present])
    return case.situation(reading_rate=reading_rate)


def prefixes(key: str = KEY) -> dict[object, pb.CachedPrefix]:
    return {P: pb.CachedPrefix(prompt_rows=10_000, key=key)}


def test_it_reads_the_layers_that_it_has() -> None:
    here = situation(reader())
    route = admit(here, here.desired[0], prefixes())  # pyright: ignore[reportArgumentType]
    assert route is not None and route.placement.id == P
    ((key, layers),) = route.readers
    assert key == reader().key and (layers.first_layer, layers.end_layer) == (2, 4)


def test_one_of_another_kind_reads_where_both_allow_it() -> None:
    for allowed in (True, False):
        keys = [reading_key("m", kind, any_kind=allowed) for kind in ("mac", "box")]
        here = situation(reader(key=keys[1]))
        route = admit(here, here.desired[0], prefixes(keys[0]))  # pyright: ignore[reportArgumentType]
        assert route is not None and len(route.readers) == allowed


@pytest.mark.parametrize(
    ("present", "key"),
    [(reader(), "another"), (reader(state="loading"), KEY), (reader(silent=True), KEY)],
)
def test_it_reads_nothing_where_that_is_of_no_use(present: StageRunner, key: str) -> None:
    here = situation(present)
    route = admit(here, here.desired[0], prefixes(key))  # pyright: ignore[reportArgumentType]
    assert route is not None and route.readers == ()


def test_another_head_reads_it_from_its_runner() -> None:
    spec = pb.StageSpec(model="m", stage=1, context_length=512, dtype="float32")
    spec.plan.CopyFrom(plan_to_wire(READING))
    read = plan_from_wire(spec)
    assert read is not None and read.reader == READING.reader
    assert read.promised(1) == 20 and len(read) == 1
    spec.plan.ClearField("reader")
    assert plan_from_wire(spec) is None


def test_its_memory_is_promised() -> None:
    assert promised([*LOADED, reader()])[B] == {M: 20}


def test_its_loss_is_none_of_its_model() -> None:
    from exo_node.node.machine.timing import LOCAL

    memory = Observations(lambda: NOW, LOCAL)
    for each in (*LOADED, reader()):
        memory.add(each)
    memory.fail(reader(), "loss", LoadFailed("it ended"))
    assert [failure.kind for failure in memory.failures] == ["extra"]
