"""The reconciler as a table: one state in, the actions that are due out.

Rows name what they pin down. `p` is a placement that runs, `q` and `o` others; `n1` is a new one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_planner import BY_B, ONE, TWO, Size, SmallPlanner, runner, runners, staged_plan, text

from exo_node.node.cluster.desired import Desired
from exo_node.node.placements.reconcile import reconcile
from exo_node.node.placements.situation import Situation
from exo_node.node.placements.state import (
    UNCONNECTED,
    Demand,
    Epoch,
    FailureKind,
    GiveUp,
    LiveNode,
    Observed,
    RunnerFailure,
    StageRunner,
)
from exo_node.placement.cluster import NOISE
from exo_node.placement.errors import LoadFailed
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.options import PlanOptions

NOW = 1000.0
M, N, K = ModelId("m"), ModelId("n"), ModelId("k")
P, Q, OF_N = PlacementId("p"), PlacementId("q"), PlacementId("o")
A, B, C, D = (NodeId(letter) for letter in "abcd")
SPLIT, THREE = PlanOptions(min_nodes=2), PlanOptions(min_nodes=3)
WITHOUT_C = replace(SPLIT, exclude=frozenset({C}))
PINNED = PlanOptions(nodes=(A,))
WHOLE = staged_plan("m", "a4")
PAIR = staged_plan("m", "a2", "b2", options=SPLIT)
TRIO = staged_plan("m", "a2", "b1", "c1", options=THREE)
LOADED, TWIN = runners("p", WHOLE), runners("p", PAIR)
SHARING = [*runners("p", TRIO)[:2], runner("p", 2, "a", TRIO, ONE)]
"""The third stage was moved to the node of the first one."""
SPARE = runner("p", 2, "c", TRIO)
OTHER = runners("o", staged_plan("n", "a4"))
ELSEWHERE = runners("q", staged_plan("m", "b4"))


def wish(model: ModelId = M, used_s: float = 10.0, **fields: object) -> Desired:
    """A model that a person requested an hour ago."""
    desired = Desired(model, requested_at=NOW - 3600, used_at=NOW - used_s)
    return replace(desired, **fields)  # pyright: ignore[reportArgumentType]


def first(model: ModelId = M, **fields: object) -> Desired:
    """One that an answer used first."""
    desired = replace(wish(model), requested_at=-inf)
    return replace(desired, **fields)  # pyright: ignore[reportArgumentType]


PAIRED = wish(options=SPLIT)
SPREAD = wish(used_s=11, options=THREE)
AUTO = wish(replicas=1, auto_replicas=True)
AUTO_PAIR = replace(AUTO, replicas=2)
CROWDED = Demand(crowded_since=NOW - 11)
IDLE = Demand(idle_since=NOW - 130)


def nodes(names: str, memory: int = 100) -> tuple[LiveNode, ...]:
    """`a b! c? d~`: b is dead, c is draining, d was not heard yet."""
    return tuple(
        LiveNode(NodeId(name[0]), memory, "?" in name, heard_at=-inf if "~" in name else inf)
        for name in names.split()
        if "!" not in name
    )


def room(**memory: int) -> tuple[LiveNode, ...]:
    return tuple(LiveNode(NodeId(name), size) for name, size in memory.items())


def failed(
    *kinds: FailureKind, node: str = "a", last_s: float = 100.0, stage: int = 0, **fields: object
) -> tuple[RunnerFailure, ...]:
    """Failures of the model a second apart, the last one `last_s` ago."""
    error = LoadFailed("it broke")
    return tuple(
        replace(
            RunnerFailure(M, NodeId(node), kind, NOW - last_s - i, P, stage, error),
            **fields,  # pyright: ignore[reportArgumentType]
        )
        for i, kind in reversed(list(enumerate(reversed(kinds))))
    )


def repeated(kind: FailureKind, count: int) -> list[FailureKind]:
    return [kind] * count


def mark(until: float, at: float = NOW - 90, *, no_room: bool = False) -> GiveUp:
    return GiveUp(M, at, until, LoadFailed("it broke"), no_room)


@dataclass(frozen=True)
class Case:
    name: str
    actions: Sequence[str]
    desired: Sequence[Desired] = (wish(),)
    nodes: str | tuple[LiveNode, ...] = "a b c"
    runners: Sequence[StageRunner] = ()
    waiting: Mapping[ModelId, float] = field(default_factory=dict[ModelId, float])
    answers: Sequence[tuple[PlacementId, Epoch]] = ()
    """One for each answer."""
    failures: Sequence[RunnerFailure] = ()
    marks: Mapping[str, object] = field(default_factory=dict[str, object])
    sizes: Mapping[str, Size] = field(default_factory=dict[str, Size])
    speeds: Mapping[str, float] = field(default_factory=dict[str, float])
    leads_s: float = 900.0
    lacking: frozenset[str] = frozenset()
    chunks: Mapping[str, int] = field(default_factory=dict[str, int])

    def observed(self) -> Observed:
        observed = Observed(
            nodes(self.nodes) if isinstance(self.nodes, str) else self.nodes,
            tuple(self.runners),
            self.waiting,
            Counter(self.answers),
            failures=tuple(self.failures),
        )
        return replace(observed, **self.marks)  # pyright: ignore[reportArgumentType]

    def view(self) -> SmallPlanner:
        return SmallPlanner(
            self.sizes,
            self.speeds,
            leads_since=NOW - self.leads_s,
            lacking=self.lacking,
            chunk_limits=self.chunks,
        )

    def situation(self, link_rate: float = 0.0, reading_rate: float = 0.0) -> Situation:
        view = replace(self.view(), link_rate=link_rate, reading_rate=reading_rate)
        return Situation(self.desired, self.observed(), view, NOW)


WAITS = {M: NOW - 1}
PROVEN = {"proven": frozenset({M})}

CASES = [
    # ------------------------------------------------------------------ first loads
    Case("a first use loads the model where it is fastest", ["load n1/0 on b"],
         [first()], waiting=WAITS, speeds={"b": 0.005}),
    Case("a model that no request waits for and that was released stays unloaded", [],
         [first(used_at=-inf)]),
    Case("a request is enough, without an answer", ["load n1/0 on a"]),
    Case("a model that is desired on two nodes is split", ["load n1/0 on a", "load n1/1 on b"],
         [PAIRED]),
    Case("fewer nodes will do where no more are alive", ["load n1/0 on a"], [PAIRED], "a"),
    Case("pinned nodes are given up when one of them is dead", ["load n1/0 on a"],
         [wish(options=PlanOptions(nodes=(B,)))], "a b! c"),
    Case("an excluded node is not used", ["load n1/0 on b"],
         [wish(options=PlanOptions(exclude=frozenset({A})))]),
    Case("what loads is left alone", [], runners=runners("p", WHOLE, UNCONNECTED, state="loading")),
    Case("requests that wait share one load", [], [first()], waiting=WAITS,
         runners=runners("p", WHOLE, UNCONNECTED, state="loading")),
    Case("a loaded stage is connected", ["connect p: a"],
         runners=runners("p", WHOLE, UNCONNECTED)),
    Case("stages are connected in order, once all are ready", ["connect p: a b"], [PAIRED],
         runners=runners("p", PAIR, UNCONNECTED)),
    Case("and not before", [], [PAIRED],
         runners=[TWIN[0], replace(TWIN[1], state="loading", epoch=UNCONNECTED)]),
    Case("a connection in flight is not repeated", [], [PAIRED],
         runners=runners("p", PAIR, UNCONNECTED), marks={"busy": frozenset({P})}),
    Case("what is as desired stays", [], runners=LOADED),
    Case("the same request again changes nothing", [], [wish(requested_at=NOW)], runners=LOADED),
    Case("other bounds replace an idle placement", ["replan p", "unload p/0 on a"], [PAIRED],
         runners=LOADED),
    Case("its successor loads beside one with answers",
         ["replan p", "load n1/0 on a", "load n1/1 on b"], [PAIRED], runners=LOADED,
         answers=[(P, ONE)]),
    Case("drafting that was switched on loads the model again", ["replan p", "unload p/0 on a"],
         runners=LOADED, lacking=frozenset("m")),
    # ------------------------------------------------------------------ losses
    Case("a stage lost to a GPU fault goes to a node that takes its chunk", ["load p/1 on c"],
         [PAIRED], runners=TWIN[:1], chunks={"b": 256}),
    Case("without such a node the others, whose chunk is as long, go with it",
         ["replan p", "unload p/0 on a"], [PAIRED], "a b", runners=TWIN[:1],
         chunks={"a": 256, "b": 256}),
    Case("a whole model whose runner is lost is planned again", ["load n1/0 on a"],
         failures=failed("loss", last_s=0.1), marks=PROVEN),
    Case("a lost stage goes to a node that holds no other", ["load p/1 on b"], [PAIRED],
         runners=TWIN[:1]),
    Case("of several such nodes to the one with most memory", ["load p/1 on c"], [PAIRED],
         room(a=100, b=20, c=90), runners=TWIN[:1]),
    Case("the only other node dies, and the first takes its stage", ["load p/1 on a"], [PAIRED],
         "a b!", runners=TWIN[:1]),
    Case("two lost stages are loaded together", ["load p/1 on d", "load p/2 on d"],
         [wish(options=THREE)], "a b! c! d", runners=runners("p", TRIO)[:1]),
    Case("the other stages wait for one that loads", [], [PAIRED],
         runners=[TWIN[0], runner("p", 1, "c", PAIR, state="loading")]),
    Case("a stage that is back is connected with the others", ["connect p: a c"], [PAIRED],
         runners=[TWIN[0], runner("p", 1, "c", PAIR)]),
    Case("a stage that is loaded again in its place is connected again", ["connect p: a b"],
         [PAIRED], runners=[TWIN[0], runner("p", 1, "b", PAIR)]),
    Case("an answer broke though all stages answer: the same runners are connected again",
         ["connect p: a b"], [PAIRED], runners=TWIN, marks={"broken": {P: ONE}}),
    Case("that it broke in an earlier epoch changes nothing", [], [PAIRED],
         runners=runners("p", PAIR, TWO), marks={"broken": {P: ONE}}),
    Case("a broken answer of a whole model disturbs no other", [], runners=LOADED,
         answers=[(P, ONE)], marks={"broken": {P: ONE}}),
    Case("no room for a lost stage: the model is planned again on what is left",
         ["replan p", "unload p/0 on a"], [PAIRED], room(a=25, c=15, d=15), runners=TWIN[:1]),
    Case("and what is left of it is unloaded once its answers ended", ["unload p/0 on a"],
         [PAIRED], room(a=45), runners=TWIN[:1], marks={"retiring": {P: NOW - 1}}),
    Case("a runner that hangs is killed", ["kill p/0 on a"],
         runners=[replace(LOADED[0], silent=True)]),
    Case("and its stage is loaded on another node meanwhile", ["kill p/1 on b", "load p/1 on c"],
         [PAIRED], runners=[TWIN[0], replace(TWIN[1], silent=True)]),
    Case("or waits for its memory where no other node has room", ["kill p/1 on b"], [PAIRED],
         room(a=25, b=25), runners=[TWIN[0], replace(TWIN[1], silent=True)]),
    Case("a node never holds one stage twice, not even while the first one ends", [], [PAIRED],
         "b", runners=[replace(TWIN[1], state="stopping"), runner("p", 0, "b", PAIR, ONE)]),
    Case("a lost stage does not go to an excluded node", ["load p/1 on a"],
         [wish(options=WITHOUT_C)], "a b! c",
         runners=runners("p", replace(PAIR, options=WITHOUT_C))[:1]),
    Case("a node that did not answer a moment ago is passed over", ["load p/1 on c"], [PAIRED],
         runners=TWIN[:1], failures=failed("node", node="b", last_s=1)),
    Case("for planning too", ["load n1/0 on b"], failures=failed("node", last_s=1)),
    Case("a node that has come back since is used", ["load n1/0 on a"],
         nodes=(LiveNode(A, 100, alive_since=NOW - 1), LiveNode(B, 100)),
         failures=failed("node", last_s=2)),
    Case("nothing is moved to a silent node", [], [wish(options=PINNED, requested_at=NOW - 1)],
         runners=runners("p", replace(staged_plan("m", "b4"), options=PINNED, displaced=True)),
         failures=failed("node", last_s=1)),
    Case("ten seconds later it may be used again", ["load n1/0 on a"],
         failures=failed("node", last_s=11)),
    # ------------------------------------------------------------------ successors
    Case("a runner that is ready takes the place of a lost stage", ["connect p: a c"], [PAIRED],
         runners=[TWIN[0], runner("p", 1, "c", PAIR)], answers=[(P, ONE)],
         failures=failed("loss", last_s=0.1, stage=1), marks=PROVEN),
    Case("a lost stage goes to a node without the placement, however little room it has",
         ["load p/1 on c"], [PAIRED], room(a=100, c=25), TWIN[:1]),
    Case("what hangs is killed while another takes its place",
         ["kill p/1 on b", "connect p: a c"], [PAIRED],
         runners=[TWIN[0], replace(TWIN[1], silent=True), runner("p", 1, "c", PAIR)],
         answers=[(P, ONE)]),
    Case("a runner whose stage has another owner is unloaded", ["unload p/1 on c"],
         [PAIRED], runners=[*TWIN, runner("p", 1, "c", PAIR)]),
    Case("loads that no answer waits for do not count as the model's failures",
         ["load n1/0 on a"],
         failures=failed("extra", "extra", "extra", "extra", last_s=0.1)),
    # ------------------------------------------------------------------ failures of loads
    Case("a load that failed is tried on another node at once", ["load n1/0 on b"],
         failures=failed("load", last_s=0.1)),
    Case("a model that was never ready is given up where no other node is left",
         ["give up m until 999.9"], nodes="a", failures=failed("load", last_s=0.1)),
    Case("after two failures for a second", ["give up m until 1000.5"], nodes="a b",
         failures=[*failed("load", last_s=1.5), *failed("load", node="b", last_s=0.5)]),
    Case("it is not tried again by itself", [], nodes="a",
         failures=failed("load"), marks={"given_up": {M: mark(NOW - 90)}}),
    Case("but for the next request", ["retry m", "load n1/0 on a"], nodes="a",
         waiting=WAITS, failures=failed("load"), marks={"given_up": {M: mark(NOW - 90)}}),
    Case("what failed is remembered although nothing wants it", [], [first(used_at=-inf)], "a",
         failures=failed("load"), marks={"given_up": {M: mark(NOW - 90)}}),
    Case("want of room is not", ["retry m"], [first(used_at=-inf)], "a",
         marks={"given_up": {M: mark(inf, no_room=True)}}),
    Case("not during its pause", [], nodes="a", waiting=WAITS,
         failures=failed("load"), marks={"given_up": {M: mark(NOW + 1)}}),
    Case("an explicit request waits for no pause", ["retry m", "load n1/0 on a"],
         [wish(requested_at=NOW)], failures=failed("load", "load", last_s=0.1),
         marks={"given_up": {M: mark(NOW + 60)}}),
    Case("one that was ready before is tried on the same node", ["load n1/0 on a"], nodes="a",
         failures=failed("load", last_s=0.1), marks=PROVEN),
    Case("one failure does not move it", ["load n1/0 on a"], failures=failed("load", last_s=0.1),
         marks=PROVEN),
    Case("two on a node do", ["load n1/0 on b"], failures=failed("load", "load", last_s=1.1),
         marks=PROVEN),
    Case("the second failure asks for a second", [], nodes="a",
         failures=failed("load", "load", last_s=0.5), marks=PROVEN),
    Case("of that node, and of no other", ["load n1/0 on b"],
         failures=failed("load", "load", last_s=0.5), marks=PROVEN),
    Case("two copies that are lost at once ask for no pause", ["load n1/0 on a"],
         failures=[*failed("loss", last_s=0.1), *failed("loss", node="b", last_s=0.1)],
         marks=PROVEN),
    Case("each stage's losses count by themselves", ["load p/1 on b"], [PAIRED], runners=TWIN[:1],
         failures=[*failed("loss", stage=0, last_s=2), *failed("loss", stage=1, last_s=0.1)],
         marks=PROVEN),
    Case("three losses of one stage ask for two seconds", [], [PAIRED], "a b", TWIN[:1],
         failures=failed("loss", "loss", "loss", node="b", stage=1, last_s=1.5), marks=PROVEN),
    Case("but not on a node without any", ["load p/1 on c"], [PAIRED], runners=TWIN[:1],
         failures=failed("loss", "loss", "loss", node="b", stage=1, last_s=1.5), marks=PROVEN),
    Case("no more", ["load p/1 on b"], [PAIRED], "a b", TWIN[:1],
         failures=failed("loss", "loss", "loss", node="b", stage=1, last_s=2.5), marks=PROVEN),
    Case("a pause is a minute at most", ["load p/1 on b"], [PAIRED], "a b", TWIN[:1],
         failures=failed(*repeated("loss", 30), node="b", stage=1, last_s=60.1), marks=PROVEN),
    Case("losses are never given up", [], nodes="a", waiting=WAITS,
         failures=failed(*repeated("loss", 9), last_s=1), marks=PROVEN),
    Case("the fourth load that fails in a row is told to those who wait",
         ["give up m until 1003.5"], waiting=WAITS,
         failures=failed(*repeated("load", 4), last_s=0.5), marks=PROVEN),
    Case("and tried again when its pause is over", ["retry m", "load n1/0 on b"],
         failures=failed(*repeated("load", 4), last_s=5),
         marks={**PROVEN, "given_up": {M: mark(NOW - 1)}}),
    Case("what is left of a model that was given up is unloaded", ["unload p/0 on a"], [PAIRED],
         runners=TWIN[:1], failures=failed(*repeated("load", 4)),
         marks={**PROVEN, "given_up": {M: mark(NOW + 60)}}),
    Case("a good answer clears earlier failures", ["load n1/0 on a"],
         failures=failed(*repeated("load", 4), last_s=1),
         marks={**PROVEN, "answered_at": {M: NOW - 0.5}}),
    Case("so do ten minutes", ["load n1/0 on a"], failures=failed(*repeated("load", 4), last_s=601),
         marks=PROVEN),
    Case("a node that died is no failure of the model", ["load n1/0 on a"],
         failures=failed(*repeated("gone", 6), last_s=0.1), marks=PROVEN),
    Case("broken files give up at once", ["give up m until 999.5"], waiting=WAITS,
         failures=failed("files", last_s=0.5)),
    Case("a split that was found to be wrong is planned again at once", ["load n1/0 on a"],
         failures=failed("plan", last_s=0.1)),
    # ------------------------------------------------------------------ memory
    Case("no room: those who wait are told", ["give up m until room"], nodes=room(a=30),
         waiting=WAITS),
    Case("once", [], nodes=room(a=30), marks={"given_up": {M: mark(inf, no_room=True)}}),
    Case("the next one too", ["give up m until room"], nodes=room(a=30), waiting=WAITS,
         marks={"given_up": {M: mark(inf, no_room=True)}}),
    Case("room came back: what is desired is loaded", ["retry m", "load n1/0 on a"],
         nodes=room(a=60), marks={"given_up": {M: mark(inf, no_room=True)}}),
    Case("an idle model with a limited stay gives way", ["release n", "unload o/0 on a"],
         [first(), wish(N, keep_alive_s=300)], room(a=60), OTHER, WAITS),
    Case("no more models give way than it takes", ["release n", "unload o/0 on a"],
         [first(options=PlanOptions(max_nodes=1)), wish(K, 90, keep_alive_s=300),
          wish(N, 20, keep_alive_s=300)],
         room(a=60, b=25), [*OTHER, *runners("q", staged_plan("k", "b2"))], WAITS,
         sizes={"k": Size(2)}),
    Case("of several the least recently used", ["release k", "unload q/0 on b"],
         [first(), wish(K, 90, keep_alive_s=300), wish(N, 20, keep_alive_s=300)],
         room(a=45, b=45), [*OTHER, *runners("q", staged_plan("k", "b4"))], WAITS),
    Case("a model that stays for ever does not give way", ["give up m until room"],
         [first(), wish(N)], room(a=60), OTHER, WAITS),
    Case("nor one that answers", ["give up m until room"],
         [first(), wish(N, keep_alive_s=300)], room(a=60), OTHER, WAITS, [(OF_N, ONE)]),
    Case("nor one that was used a moment ago", ["give up m until room"],
         [first(), wish(N, 0.5, keep_alive_s=300)], room(a=60), OTHER, WAITS),
    Case("nothing is unloaded in vain", ["give up m until room"],
         [first(), wish(N, keep_alive_s=300)], room(a=45), OTHER, WAITS, sizes={"m": Size(6)}),
    Case("memory that is about to be free is waited for", [], [first(), first(N, used_at=-inf)],
         room(a=60), [replace(OTHER[0], state="stopping")], WAITS),
    Case("and given to no other model", [], [first(), wish(K)], room(a=60),
         [replace(OTHER[0], state="stopping")], WAITS, sizes={"k": Size(2)}),
    Case("a longer context gives way to another model", ["replan o", "unload o/0 on a"],
         [first(), wish(N)], room(a=100),
         runners("o", replace(staged_plan("n", "a4"), memory=(80,))), WAITS,
         sizes={"n": Size(4, 10, 10)}),
    Case("not one that would take as much again", ["give up m until room"],
         [first(), wish(N)], room(a=60), OTHER, WAITS),
    Case("several models that load at once get no extras",
         ["load n1/0 on a", "load n2/0 on a", "load n3/0 on a"], [first(), first(N), wish(K)],
         room(a=125), (), {M: NOW - 1, N: NOW - 5}, sizes={"n": Size(4, 10, 10)}),
    Case("two models that load at once do not share memory", ["load n1/0 on a", "load n2/0 on b"],
         [wish(), wish(N)], room(a=45, b=45)),
    Case("the model that was waited for longest comes first",
         ["load n1/0 on a", "give up m until room"], [first(), first(N)], room(a=45), (),
         {M: NOW - 1, N: NOW - 5}),
    Case("what a runner uses beyond its promise counts", ["give up m until room"],
         [first(), wish(N)], room(a=85), [replace(OTHER[0], used_memory=50)], WAITS),
    # ------------------------------------------------------------------ unloading
    Case("a model is unloaded after its stay", ["unload p/0 on a"], [wish(keep_alive_s=5)],
         runners=LOADED),
    Case("not while an answer runs on it", [], [wish(keep_alive_s=5)], runners=LOADED,
         answers=[(P, ONE)]),
    Case("not in the second after it was given to a request", [],
         [wish(used_s=0.5, keep_alive_s=0)], runners=LOADED),
    Case("a removed model is unloaded", ["unload p/0 on a"], [], runners=LOADED),
    Case("its answers end first", [], [], runners=LOADED, answers=[(P, ONE)]),
    Case("as its node counts them", [], [], runners=[replace(LOADED[0], requests=1)]),
    Case("a removed model that loses a stage still saves its answers", ["load p/1 on b"], [],
         runners=TWIN[:1], answers=[(P, ONE)]),
    Case("a removed model is not planned again", ["replan p", "unload p/0 on a"], [], room(a=25),
         TWIN[:1], answers=[(P, ONE)]),
    Case("answers on what is replaced have thirty seconds", ["load n1/0 on a", "load n1/1 on b"],
         [PAIRED], runners=LOADED, answers=[(P, ONE)], marks={"retiring": {P: NOW - 29}}),
    Case("then they are cut, and resume on its successor", ["unload p/0 on a"], [PAIRED],
         runners=[*LOADED, *runners("q", PAIR)], answers=[(P, ONE)],
         marks={"retiring": {P: NOW - 31}}),
    Case("not while the successor is being loaded", [], [PAIRED],
         runners=[*LOADED, *runners("q", PAIR, UNCONNECTED, state="loading")],
         answers=[(P, ONE)], marks={"retiring": {P: NOW - 31}}),
    Case("a placement that is replaced goes once it is idle", ["unload p/0 on a"], [PAIRED],
         runners=[*LOADED, *runners("q", PAIR)], marks={"retiring": {P: NOW - 3}}),
    Case("a former stage is killed: its frames lead nowhere", ["kill p/1 on c"], [PAIRED],
         runners=[*runners("p", PAIR, TWO), runner("p", 1, "c", PAIR, ONE)], answers=[(P, ONE)]),
    Case("a placement that comes back goes where another one serves", ["unload q/0 on b"],
         runners=[*LOADED, *(replace(r, adopted=True, since=1.0) for r in ELSEWHERE)]),
    Case("its answers run to their end", [], answers=[(Q, ONE)],
         runners=[*LOADED, *(replace(r, adopted=True, since=1.0) for r in ELSEWHERE)]),
    # ------------------------------------------------------------------ leaving nodes
    Case("the stage of a leaving node is loaded elsewhere first", ["extra p/1 on c"], [PAIRED],
         "a b? c", TWIN, answers=[(P, ONE)]),
    Case("once", [], [PAIRED], "a b? c", [*TWIN, runner("p", 1, "c", PAIR, state="loading")]),
    Case("then the answers change over", ["connect p: a c"], [PAIRED], "a b? c",
         [*TWIN, runner("p", 1, "c", PAIR)], answers=[(P, ONE)]),
    Case("two stages of a leaving node change over together", [], [PAIRED], "a b? c",
         [*runners("p", staged_plan("m", "b2", "b2", options=SPLIT)),
          runner("p", 0, "c", staged_plan("m", "b2", "b2", options=SPLIT)),
          runner("p", 1, "c", staged_plan("m", "b2", "b2", options=SPLIT), state="loading")]),
    Case("of two successors the one that is ready is used", ["connect p: a d", "unload p/1 on c"],
         [PAIRED], "a b? c d",
         [*TWIN, runner("p", 1, "c", PAIR, state="loading"), runner("p", 1, "d", PAIR)]),
    Case("answers of a whole model end where they run", [], nodes="a? b",
         runners=[*LOADED, runner("p", 0, "b", WHOLE, TWO)], answers=[(P, ONE)]),
    Case("and then it goes", ["unload p/0 on a"], nodes="a? b",
         runners=[*LOADED, runner("p", 0, "b", WHOLE, TWO)]),
    Case("a stage that no other node can hold stays", [], nodes="a?", runners=LOADED),
    Case("nothing is loaded on a leaving node", ["load n1/0 on b"], nodes="a? b"),
    # ------------------------------------------------------------------ moving back
    Case("a displaced placement goes back after two idle minutes", ["replan p", "unload p/0 on b"],
         [wish(used_s=130)], runners=runners("p", replace(staged_plan("m", "b4"), displaced=True)),
         speeds={"b": 0.02}),
    Case("a stage that was moved makes it displaced", ["replan p", "unload p/0 on b"],
         [wish(used_s=130)], runners=[runner("p", 0, "b", WHOLE, ONE)], speeds={"b": 0.02}),
    Case("not before", [], [wish(used_s=110)], runners=[runner("p", 0, "b", WHOLE, ONE)],
         speeds={"b": 0.02}),
    Case("not while it answers", [], [wish(used_s=130)], runners=[runner("p", 0, "b", WHOLE, ONE)],
         speeds={"b": 0.02}, answers=[(P, ONE)]),
    Case("not for five per cent", [], [wish(used_s=130)],
         runners=[runner("p", 0, "b", WHOLE, ONE)], speeds={"b": 0.0105}),
    Case("not to a node that comes and goes", [], [wish(used_s=130)],
         runners=[runner("p", 0, "b", WHOLE, ONE)], speeds={"b": 0.02, "c": 0.02},
         failures=[*failed("node", last_s=19), *failed("node", last_s=60)]),
    Case("not while its node is suspected, when its speed is not known", [], [wish(used_s=130)],
         runners=[runner("p", 0, "b", WHOLE, ONE)], speeds={"b": inf}),
    Case("at once where it is requested again", ["replan p", "unload p/0 on b"],
         [wish(requested_at=NOW - 1)], runners=[runner("p", 0, "b", WHOLE, ONE)],
         speeds={"b": 0.02}),
    Case("as many nodes are back as are desired", ["replan p", "unload p/0 on a"],
         [wish(used_s=130, options=SPLIT)],
         runners=runners("p", replace(WHOLE, options=SPLIT, displaced=True))),
    Case("the node that a person names is back", ["replan p", "unload p/0 on b"],
         [wish(options=PINNED, requested_at=NOW - 1)],
         runners=runners("p", replace(staged_plan("m", "b4"), options=PINNED, displaced=True))),
    Case("what nothing displaced stays where it is", [], [wish(used_s=130)],
         runners=runners("p", staged_plan("m", "b4")), speeds={"b": 0.02}),
    # ------------------------------------------------------------------ stages that share a node
    Case("a stage that shares a node is loaded where it was planned", ["extra p/2 on c"], [SPREAD],
         room(a=100, b=100, c=40, d=100), SHARING),
    Case("on another node without a stage where that one is away", ["extra p/2 on d"], [SPREAD],
         "a b c! d", SHARING),
    Case("not on one without room", [], [SPREAD], room(a=100, b=100, c=9), SHARING),
    Case("nor on one that leaves", [], [SPREAD], "a b c?", SHARING),
    Case("nor on one that a person excludes", [],
         [replace(SPREAD, options=replace(THREE, exclude=frozenset({C})))],
         runners=[replace(r, plan=replace(TRIO, options=replace(THREE, exclude=frozenset({C}))))
                  for r in SHARING]),
    Case("not before ten idle seconds", [], [wish(used_s=9, options=THREE)], runners=SHARING),
    Case("not while it answers at all", [], [SPREAD], runners=SHARING, answers=[(P, ONE)]),
    Case("not within ten seconds of the node's failure", [], [SPREAD], runners=SHARING,
         failures=failed("extra", node="c", last_s=9)),
    Case("a failure counts once, of however many stages and calls", ["extra p/2 on c"], [SPREAD],
         runners=SHARING, failures=failed("gone", "loss", "node", node="c", last_s=11)),
    Case("not within twenty seconds of its second one", [], [SPREAD], runners=SHARING,
         failures=[*failed("node", node="c", last_s=19), *failed("node", node="c", last_s=60)]),
    Case("afterwards it is", ["extra p/2 on c"], [SPREAD], runners=SHARING,
         failures=[*failed("node", node="c", last_s=21), *failed("node", node="c", last_s=60)]),
    Case("not within ten seconds of its return", [], [SPREAD],
         (*nodes("a b"), LiveNode(C, 100, alive_since=NOW - 9)), SHARING),
    Case("a failure of another node does not matter", ["extra p/2 on c"], [SPREAD],
         runners=SHARING, failures=failed("loss", node="b", last_s=9)),
    Case("what is loaded for it is connected in its place", ["connect p: a b c"], [SPREAD],
         runners=[*SHARING, SPARE]),
    Case("once it is ready", [], [SPREAD], runners=[*SHARING, replace(SPARE, state="loading")]),
    Case("and no answer runs", [], [SPREAD], runners=[*SHARING, SPARE], answers=[(P, ONE)]),
    Case("it takes over at once where the shared node dies", ["load p/0 on b"], [SPREAD],
         "a! b c", [*SHARING, SPARE], answers=[(P, ONE)]),
    Case("it goes where another model waits", ["unload p/2 on c", "load n1/0 on a"],
         [SPREAD, first(N)], runners=[*SHARING, SPARE], waiting={N: NOW - 1}),
    Case("nor is it loaded then", ["load n1/0 on a"], [SPREAD, first(N)], runners=SHARING,
         waiting={N: NOW - 1}),
    Case("the former one goes afterwards", ["kill p/2 on a"], [SPREAD],
         runners=[*runners("p", TRIO, TWO), runner("p", 2, "a", TRIO, ONE)]),
    Case("stages that were planned for one node stay there", [],
         [SPREAD], runners=runners("p", staged_plan("m", "a2", "a1", "b1", options=THREE))),
    # ------------------------------------------------------------------ replicas
    Case("a second replica goes to a node without the model", ["extra n1/0 on b"],
         [wish(replicas=2)], runners=LOADED),
    Case("once the first one serves", [], [wish(replicas=2)],
         runners=runners("p", WHOLE, UNCONNECTED, state="loading")),
    Case("not where no other node has room", [], [wish(replicas=2)], room(a=100, b=35),
         LOADED),
    Case("not within ten seconds of a failure", [], [wish(replicas=2)], runners=LOADED,
         failures=failed("extra", last_s=5.0)),
    Case("both stay", [], [wish(replicas=2)], runners=[*LOADED, *ELSEWHERE]),
    Case("a third one is surplus", ["unload r/0 on c"], [wish(replicas=2)],
         runners=[*LOADED, *ELSEWHERE, *runners("r", staged_plan("m", "c4"), since=NOW - 9)]),
    Case("it answers to its end", [], [wish(replicas=2)],
         runners=[*LOADED, *ELSEWHERE, *runners("r", staged_plan("m", "c4"), since=NOW - 9)],
         answers=[(PlacementId("r"), ONE)]),
    Case("each one is connected by itself", ["connect q: b"], [wish(replicas=2)],
         runners=[*LOADED, *runners("q", staged_plan("m", "b4"), UNCONNECTED)]),
    Case("a lost stage goes to no node of another replica", ["load p/1 on c"],
         [wish(options=SPLIT, replicas=2)], room(a=30, d=100, c=50),
         [*TWIN[:1], *runners("q", staged_plan("m", "d4", options=SPLIT))]),
    Case("a further replica gives way to a model that has no room",
         ["unload q/0 on b"], [wish(replicas=2), first(N)], room(a=45, b=45),
         [*LOADED, *ELSEWHERE], {N: NOW - 1}),
    # ------------------------------------------------------------------ as many as are needed
    Case("one that answers crowd gets another one", ["scale m to 2"], [AUTO], runners=LOADED,
         answers=[(P, ONE)] * 2, marks={"demand": {P: CROWDED}}),
    Case("not before ten seconds", [], [AUTO], runners=LOADED, answers=[(P, ONE)] * 2,
         marks={"demand": {P: Demand(crowded_since=NOW - 9)}}),
    Case("not where no other node has room", [], [AUTO], room(a=100, b=35), LOADED,
         answers=[(P, ONE)] * 2, marks={"demand": {P: CROWDED}}),
    Case("not unless that is desired", [], runners=LOADED, answers=[(P, ONE)] * 2,
         marks={"demand": {P: CROWDED}}),
    Case("not where one of two has time", [], [AUTO_PAIR], runners=[*LOADED, *ELSEWHERE],
         answers=[(P, ONE)] * 2, marks={"demand": {P: CROWDED, Q: Demand()}}),
    Case("the next one is loaded first", ["extra n1/0 on b"], [AUTO_PAIR], runners=LOADED,
         answers=[(P, ONE)] * 2, marks={"demand": {P: CROWDED}}),
    Case("one that is idle for two minutes goes", ["scale m to 1 without p"], [AUTO_PAIR],
         runners=[*LOADED, *ELSEWHERE], answers=[(Q, ONE)],
         marks={"demand": {P: IDLE, Q: Demand()}}),
    Case("nor while another one is crowded: it would come back", [], [AUTO_PAIR],
         runners=[*LOADED, *ELSEWHERE], answers=[(Q, ONE)] * 2,
         marks={"demand": {P: IDLE, Q: CROWDED}}),
    Case("an idle one does not go before two minutes", [], [AUTO_PAIR],
         runners=[*LOADED, *ELSEWHERE],
         marks={"demand": {P: Demand(idle_since=NOW - 110), Q: Demand()}}),
    Case("the last one stays", [], [AUTO], runners=LOADED, marks={"demand": {P: IDLE}}),
    Case("a number that a person named stays", [], [wish(replicas=2)],
         runners=[*LOADED, *ELSEWHERE], marks={"demand": {P: IDLE, Q: IDLE}}),
    # ------------------------------------------------------------------ heads
    Case("a new head does nothing before it has heard every node", [], [PAIRED], "a b~", TWIN[:1]),
    Case("it continues with what runs", [], [PAIRED], leads_s=1,
         runners=[replace(r, adopted=True, since=NOW - 1) for r in TWIN]),
    Case("it unloads no runner of the last head in its first seconds", [], [], leads_s=4,
         runners=[replace(LOADED[0], adopted=True, since=NOW - 4)]),
    Case("afterwards it does", ["unload p/0 on a"], [],
         runners=[replace(LOADED[0], adopted=True, since=NOW - 6)]),
    Case("not on a node that it has just met again", [], [],
         (LiveNode(A, 100, alive_since=NOW - 2),), [replace(LOADED[0], adopted=True)]),
    Case("nor on one that follows another head", [], [],
         (LiveNode(A, 100, follows=False),), [replace(LOADED[0], adopted=True)]),
    Case("stages that went with the last head are replaced", ["load p/0 on c"], [PAIRED],
         "a! b c", TWIN, leads_s=1),
    Case("two epochs of one placement: the later one owns its stages",
         ["unload p/0 on a", "unload p/1 on b"], [PAIRED], "a b c d",
         [*TWIN, runner("p", 0, "c", PAIR, BY_B), runner("p", 1, "d", PAIR, BY_B)]),
    Case("a complete older epoch owns them where the later one lost some", ["kill p/0 on c"],
         [PAIRED], runners=[*TWIN, runner("p", 0, "c", PAIR, BY_B)], answers=[(P, ONE)]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    actions = reconcile(case.desired, case.observed(), case.view(), NOW)
    assert [text(action) for action in actions] == list(case.actions)


_SPEEDS = st.dictionaries(st.sampled_from("abc"), st.floats(1e-6, 10.0))


@given(st.lists(_SPEEDS, max_size=6), st.sampled_from([10.0, 130.0]))
def test_no_estimate_moves_a_loaded_model_that_losses_did_not(
    estimates: list[dict[str, float]], used_s: float
) -> None:
    for speeds in estimates:
        case = Case("", [], [wish(used_s=used_s)], runners=LOADED, speeds=speeds)
        assert reconcile(case.desired, case.observed(), case.view(), NOW) == []


@given(st.lists(st.floats(1 - NOISE / 2, 1 + NOISE / 2), min_size=1, max_size=6))
def test_small_corrections_move_not_even_a_displaced_one(factors: list[float]) -> None:
    moved = runners("p", replace(staged_plan("m", "b4"), displaced=True))
    for factor in factors:
        case = Case("", [], [wish(used_s=130)], runners=moved, speeds={"b": 0.01 * factor})
        assert reconcile(case.desired, case.observed(), case.view(), NOW) == []
