"""Membership by scenarios: `seconds event` on the left, its changes on the right."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_node.node.cluster.membership import (
    Change,
    Died,
    Joined,
    LeftCluster,
    Membership,
    Recovered,
    Refuted,
    Status,
    Suspected,
    View,
)
from exo_node.node.machine.timing import LAN
from exo_node.placement.ids import NodeId

SELF = NodeId("self")

SCENARIOS = {
    "a node joins with its first heartbeat, once": """
        0.0 beat a         -> joined a
        1.0 beat a         ->
        """,
    "a silent node is suspected, then dies, each reported once": """
        0.0 beat a         -> joined a
        0.5 tick           ->
        1.0 tick           ->
        1.5 tick           ->
        1.6 tick           -> suspected a
        2.0 tick           ->
        3.0 tick           ->
        3.5 tick           ->
        3.6 tick           -> died a
        4.0 tick           ->
        """,
    "a suspect recovers with its next heartbeat": """
        0.0 beat a         -> joined a
        1.6 tick           -> suspected a
        1.7 beat a         -> recovered a
        2.6 tick           ->
        3.3 tick           -> suspected a
        """,
    "a dead node rejoins once it has received the view that it was dead": """
        0.0 beat a/1       -> joined a
        4.0 tick           -> suspected a, died a
        5.0 beat a/1       ->
        5.5 beat a/2       -> joined a
        6.0 tick           ->
        """,
    "a restart within the interval kills the old life and joins the new one": """
        0.0 beat a/1       -> joined a
        0.4 beat a/2 new   -> restarted a, joined a
        1.0 beat a/2 new   ->
        """,
    "a restart of a suspect is no recovery: its stages are lost": """
        0.0 beat a/1       -> joined a
        1.6 tick           -> suspected a
        1.8 beat a/2 new   -> restarted a, joined a
        """,
    "a higher incarnation of the same process is no restart": """
        0.0 beat a/1       -> joined a
        1.0 beat a/2       ->
        2.6 tick           -> suspected a
        2.7 beat a/3       -> recovered a
        """,
    "a node that misses a heartbeat is suspect at once where another suspects it": """
        0.0 beat a/1       -> joined a
        0.0 beat b         -> joined b
        1.2 view b a suspect/1  -> suspected a by b
        1.3 view b a suspect/1  ->
        """,
    "such a suspect is cleared by a higher incarnation only": """
        0.0 beat a/1       -> joined a
        0.0 beat b         -> joined b
        1.2 view b a suspect/1  -> suspected a by b
        1.3 beat a/1       ->
        1.8 beat a/2       -> recovered a
        1.9 view b a suspect/1  ->
        """,
    "another node's suspicion does not make a suspect of a node whose heartbeats arrive here": """
        0.0 beat a/1       -> joined a
        0.0 beat b         -> joined b
        0.9 view b a suspect/1  ->
        0.9 view b a dead/1     ->
        """,
    "suspicions of others kill no node": """
        0.0 beat a/1       -> joined a
        0.0 beat b         -> joined b
        1.2 view b a dead/1     -> suspected a by b
        2.4 view b a dead/1     ->
        2.5 beat a/2       -> recovered a
        """,
    "a node whose heartbeats reach another one does not die, but gets no new work": """
        0.0 beat a/1       -> joined a
        0.0 beat b         -> joined b
        1.0 beat b         ->
        1.6 tick           -> suspected a
        2.0 beat b         ->
        3.0 beat b         ->
        3.1 view b a alive/1    ->
        3.6 tick           ->
        4.0 beat b         ->
        4.1 view b a alive/1    ->
        5.0 beat b         ->
        5.1 view b a suspect/1  ->
        5.5 tick           -> died a
        """,
    "the view of a node that is silent itself does not count": """
        0.0 beat a/1       -> joined a
        0.0 beat b         -> joined b
        1.9 view b a alive/1    ->
        2.0 tick           -> suspected a, suspected b
        2.9 tick           ->
        3.4 view b a alive/1    ->
        3.6 tick           -> died a, died b
        """,
    "an outdated view does not count": """
        0.0 beat a/5       -> joined a
        0.0 beat b         -> joined b
        1.2 view b a suspect/4  ->
        1.6 tick           -> suspected a, suspected b
        2.0 beat b         -> recovered b
        2.5 tick           ->
        3.0 beat b         ->
        3.4 view b a alive/4    ->
        3.4 tick           ->
        3.6 tick           -> died a
        """,
    "a node that is suspected refutes it, once": """
        0.0 beat b         -> joined b
        0.1 view b self suspect/1  -> refuted self by b
        0.2 view b self suspect/1  ->
        0.3 view b self dead/2     -> refuted self by b
        """,
    "after a clock that was set back the node takes a higher incarnation": """
        0.0 beat b         -> joined b
        0.1 view b self alive/90   ->
        0.2 view b self dead/90    ->
        0.3 view b self dead/91    -> refuted self by b
        """,
    "an old incarnation is no sign of life": """
        0.0 beat a/5       -> joined a
        1.0 beat a/4       ->
        1.6 tick           -> suspected a
        1.7 beat a/4       ->
        2.6 tick           ->
        3.6 tick           -> died a
        3.7 beat a/5       ->
        3.8 beat a/6       -> joined a
        """,
    "a dead node that never refutes it is forgotten after a minute": """
        0.0 beat a/5       -> joined a
        4.0 tick           -> suspected a, died a
        5.0 beat a/4       ->
        59.0 ticks         ->
        59.1 beat a/4      ->
        60.6 ticks         ->
        60.7 beat a/4      -> joined a
        """,
    "nor does a refutation of its death that was under way, until another process comes": """
        0.0 beat a/1       -> joined a
        1.0 left a         -> left a
        1.1 beat a/2       ->
        1.5 beat a/3 new   -> joined a
        """,
    "a node that leaves is gone at once, and its last heartbeats do not bring it back": """
        0.0 beat a/1       -> joined a
        1.0 left a         -> left a
        1.1 beat a/1       ->
        1.2 left a         ->
        5.0 tick           ->
        6.0 beat a/2 new   -> joined a
        """,
    "a node that left is forgotten after a minute": """
        0.0 beat a/5       -> joined a
        1.0 left a         -> left a
        61.0 ticks         ->
        61.1 beat a/4      -> joined a
        """,
    "a node that is unknown cannot leave": """
        0.0 left a         ->
        """,
    "this node is not its own peer": """
        0.0 beat self      ->
        9.0 tick           ->
        """,
    "nodes are judged one by one": """
        0.0 beat a         -> joined a
        0.0 beat b         -> joined b
        1.0 beat b         ->
        1.6 tick           -> suspected a
        2.0 beat b         ->
        2.6 tick           ->
        3.0 beat b         ->
        3.6 tick           -> died a
        """,
    "a node whose address refuses twice is dead after a heartbeat and a quarter": """
        0.0 beat a         -> joined a
        0.5 refused a      ->
        0.8 refused a      ->
        1.1 tick           -> suspected a
        1.2 tick           ->
        1.3 refused a      -> died a
        """,
    "one refusal, and its echo, kill no node": """
        0.0 beat a         -> joined a
        1.05 refused a     -> suspected a
        1.1 refused a      ->
        1.3 tick           ->
        2.2 tick           ->
        3.1 tick           ->
        3.6 tick           -> died a
        """,
    "a node that sends heartbeats is alive although its address refuses": """
        0.0 beat a         -> joined a
        0.3 refused a      ->
        0.8 refused a      ->
        1.0 beat a         ->
        1.3 refused a      ->
        2.0 beat a         ->
        2.1 refused a      ->
        2.9 refused a      ->
        3.0 beat a         ->
        """,
    "refusals before a heartbeat do not count after it": """
        0.0 beat a         -> joined a
        0.5 refused a      ->
        0.8 refused a      ->
        1.0 beat a         ->
        2.1 tick           ->
        2.4 tick           ->
        2.6 tick           -> suspected a
        3.4 tick           ->
        4.4 tick           ->
        4.6 tick           -> died a
        """,
    "nor one whose heartbeats reach another node": """
        0.0 beat a/1       -> joined a
        0.0 beat b         -> joined b
        0.5 refused a      ->
        0.9 refused a      ->
        1.0 beat b         ->
        1.1 view b a alive/1    ->
        1.3 refused a      -> suspected a
        1.9 view b a suspect/1  ->
        1.9 tick           -> died a
        """,
    "this node's own pause is not held against the others": """
        0.0 beat a         -> joined a
        0.5 tick           ->
        20.0 tick          ->
        20.1 beat a        ->
        20.5 tick          ->
        """,
    "a node that stays silent after this node's pause dies in the usual time": """
        0.0 beat a         -> joined a
        0.5 tick           ->
        20.0 tick          ->
        20.6 tick          -> suspected a
        21.6 tick          ->
        22.0 tick          ->
        22.1 tick          -> died a
        """,
}


class Step(NamedTuple):
    """A call of a method of Membership, without its time."""

    method: str
    arguments: tuple[Any, ...] = ()

    def take(self, membership: Membership, now: float) -> tuple[Change, ...]:
        times = () if self.method == "remove" else (now,)
        return getattr(membership, self.method)(*self.arguments, *times)


TICK = Step("tick")
LINE = re.compile(r"([\d.]+) (.*?) *->(.*)")
STATUSES: dict[str, Status] = {"alive": "alive", "suspect": "suspect", "dead": "dead"}


def describe(change: Change) -> str:
    match change:
        case Joined(node):
            return f"joined {node}"
        case Suspected(node, by):
            return f"suspected {node}" + (f" by {by}" if by else "")
        case Recovered(node):
            return f"recovered {node}"
        case Died(node, restarted):
            return f"{'restarted' if restarted else 'died'} {node}"
        case LeftCluster(node):
            return f"left {node}"
        case Refuted(node, by):
            return f"refuted {node} by {by}"


def beat(node: str, incarnation: int = 1, boot_id: int = 0) -> Step:
    return Step("record_heartbeat", (NodeId(node), incarnation, boot_id))


def step(text: str) -> Step:
    """`beat a/2`, `beat a/2 new` (another process), `view b a suspect/1`, `refused a`, ..."""
    match text.split():
        case ["beat", node, *restarted]:
            name, _, number = node.partition("/")
            return beat(name, int(number or 1), len(restarted))
        case ["view", sender, node, view]:
            status, _, number = view.partition("/")
            views = (View(NodeId(node), int(number), STATUSES[status]),)
            return Step("record_views", (NodeId(sender), views))
        case ["left", node]:
            return Step("remove", (NodeId(node),))
        case ["refused", node]:
            return Step("record_refusal", (NodeId(node),))
        case ["tick"]:
            return TICK
        case _:
            raise ValueError(f"no such step: {text}")


def words(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(",") if part.strip()]


def every_half_second(membership: Membership, last: float, now: float) -> tuple[Change, ...]:
    steps = int((now - last) * 2)
    return tuple(
        change for half in range(1, steps + 1) for change in membership.tick(last + half / 2)
    )


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_scenario(scenario: str) -> None:
    membership, last = Membership(SELF, 1, LAN), 0.0
    for line in filter(None, map(str.strip, scenario.splitlines())):
        parsed = LINE.fullmatch(line)
        assert parsed is not None, line
        seconds, what, expected = parsed.groups()
        now = float(seconds)
        if what == "ticks":
            changes = every_half_second(membership, last, now)
        else:
            changes = step(what).take(membership, now)
        assert [describe(change) for change in changes] == words(expected), line
        last = now


def test_suspects_are_live_but_take_no_new_work() -> None:
    membership = Membership(SELF, 1, LAN)
    for node, heard_at in (("a", 0.0), ("b", 2.0), ("c", 3.9)):
        _ = beat(node).take(membership, heard_at)
    _ = membership.tick(4.0)
    assert membership.statuses() == {"a": "dead", "b": "suspect", "c": "alive"}
    assert membership.alive() == {"c"}
    assert membership.live() == {"b", "c"}


# ------------------------------------------------------------------ properties

NODES = [NodeId("a"), NodeId("b")]
VIEWS = st.builds(
    View, st.sampled_from([*NODES, SELF]), st.integers(1, 3), st.sampled_from([*STATUSES.values()])
)
ANY_NODE = st.sampled_from(NODES)
CALLS = st.one_of(
    st.builds(beat, ANY_NODE, st.integers(1, 3), st.integers(0, 1)),
    st.builds(Step, st.just("record_views"), st.tuples(ANY_NODE, st.tuples(VIEWS))),
    st.builds(Step, st.sampled_from(["remove", "record_refusal"]), st.tuples(ANY_NODE)),
    st.just(TICK),
)
STEPS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 40.0]), CALLS), max_size=60)

# The statuses before and after each change; "out" is unknown, left or forgotten.
EDGES: dict[type[Change], tuple[set[Status | str], str]] = {
    Joined: ({"out", "dead"}, "alive"),
    Suspected: ({"alive"}, "suspect"),
    Recovered: ({"suspect"}, "alive"),
    Died: ({"alive", "suspect"}, "dead"),
    LeftCluster: ({"alive", "suspect", "dead"}, "out"),
}


def broken_rule(membership: Membership, steps: Iterable[tuple[float, Step]]) -> str | None:
    """The first rule that the run breaks, or None."""
    now = 0.0
    states: dict[NodeId, str] = {}
    newest: dict[NodeId, tuple[int, float]] = {}
    for pause, call in steps:
        now += pause
        is_heartbeat = call.method == "record_heartbeat"
        if is_heartbeat:
            node, incarnation, _ = call.arguments
            if incarnation >= newest.get(node, (0, 0.0))[0]:
                newest[node] = (incarnation, now)
        for change in call.take(membership, now):
            if isinstance(change, Refuted):
                continue
            origins, target = EDGES[type(change)]
            if states.get(change.node, "out") not in origins:
                return f"{change} from {states.get(change.node, 'out')}"
            states[change.node] = target
            if isinstance(change, Died) and not is_heartbeat:
                silence = now - newest[change.node][1]
                if silence <= LAN.refused_dead_after_s:
                    return f"{change} after {silence} s"
        for node, status in membership.statuses().items():
            if states.get(node) != status:
                return f"{node} is {status}, but {states.get(node)} was reported"
    return None


@given(STEPS)
def test_states_move_along_the_drawn_edges_and_a_node_with_timely_heartbeats_stays(
    steps: list[tuple[float, Step]],
) -> None:
    assert broken_rule(Membership(SELF, 1, LAN), steps) is None
