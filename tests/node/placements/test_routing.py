"""Which replica a new answer is given, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from small_planner import ONE, runner, runners
from test_reconcile import ELSEWHERE, LOADED, NOW, UNCONNECTED, WHOLE, Case, P, Q, wish

from exo_node.node.placements.replicas import ReplicaRoute, admit
from exo_node.node.placements.state import Demand, Epoch, StageRunner
from exo_node.placement.ids import PlacementId
from exo_node.placement.reading import reading_key
from exo_node.proto import peer_pb2 as pb


@pytest.mark.parametrize(
    ("where", "present", "marks"),
    [
        ("p", LOADED, {}),
        (None, (), {}),
        (None, runners("p", WHOLE, UNCONNECTED), {}),
        (None, LOADED, {"busy": frozenset({P})}),
        (None, LOADED, {"retiring": {P: NOW}}),
        ("p", [*LOADED, runner("q", 0, "b", WHOLE, state="loading")], {"retiring": {P: NOW}}),
        ("q", [*LOADED, *ELSEWHERE], {"retiring": {P: NOW}}),
        ("q", [*LOADED, *ELSEWHERE], {"answers": {(P, ONE): 2, (Q, ONE): 1}}),
        ("p", [*LOADED, *ELSEWHERE], {"answers": {(P, ONE): 1, (Q, ONE): 1}}),
    ],
    ids=[
        "the one that is connected",
        "none is there",
        "it is not connected",
        "it is being connected",
        "it is replaced, and its successor waits for its room",
        "it is replaced, and serves until its successor does",
        "its successor serves",
        "of two replicas the one with fewer answers",
        "the first of two that have as many",
    ],
)
def test_a_new_answer_is_given(
    where: str | None, present: Sequence[StageRunner], marks: dict[str, object]
) -> None:
    case = Case("", [], [wish(replicas=2)], runners=present, marks=marks)
    route = admit(case.situation(), case.desired[0])
    assert (route and route.placement.id) == where


# ---------------------------------------------------------------------- by the cached prefix

PROMPT = 1000
"""Rows; the small planner reads one in 2.4 ms, so all of them in 2.4 s."""


def cached(rows: int, tier: str = "memory", key: str = "k", nbytes: int = 1000) -> pb.CachedPrefix:
    return pb.CachedPrefix(
        prompt_rows=PROMPT, rows=rows, tier=tier if rows else "", bytes=nbytes, key=key
    )


@dataclass(frozen=True)
class Choice:
    name: str
    where: PlacementId
    prefixes: Mapping[PlacementId, pb.CachedPrefix]
    source: PlacementId | None = None
    reason: str = ""
    answers: Mapping[tuple[PlacementId, Epoch], int] = field(
        default_factory=dict[tuple[PlacementId, Epoch], int]
    )
    demand: Mapping[PlacementId, Demand] = field(default_factory=dict[PlacementId, Demand])
    link_rate: float = 0.0


CHOICES = [
    Choice("the one that has its conversation", Q, {P: cached(0), Q: cached(900)},
           reason="900 of 1000 prompt tokens are in its memory"),
    Choice("on disk as well", Q, {P: cached(0), Q: cached(900, "disk")},
           reason="900 of 1000 prompt tokens are in its disk"),
    Choice("although it has more answers", Q, {P: cached(0), Q: cached(900)},
           answers={(Q, ONE): 1}),
    Choice("not where it would wait longer than it reads", P, {P: cached(0), Q: cached(900)},
           answers={(Q, ONE): 4}, reason="it has the least work"),
    Choice("nor for a fraction of a second", Q, {P: cached(700), Q: cached(900)},
           demand={Q: Demand(reading_until=NOW + 0.9)}),
    Choice("not behind prompts that take longer to read", P, {P: cached(0), Q: cached(900)},
           demand={Q: Demand(reading_until=NOW + 3)}),
    Choice("behind short ones", Q, {P: cached(0), Q: cached(900)},
           demand={Q: Demand(reading_until=NOW + 1)}),
    Choice("behind those that are read by now", Q, {P: cached(0), Q: cached(900)},
           demand={Q: Demand(reading_until=NOW - 3)}),
    Choice("a short common prefix is no reason", P, {P: cached(0), Q: cached(100)},
           answers={(Q, ONE): 1}),
    Choice("one that did not say reads the whole prompt", Q, {Q: cached(900)}),
    Choice("without prefixes the one with fewer answers", Q, {}, answers={(P, ONE): 1}),
    Choice("without prefixes the one with fewer prompts to read", Q, {},
           demand={P: Demand(reading_until=NOW + 1)}),
    Choice("its state moves where the link is quicker than reading", P,
           {P: cached(0), Q: cached(900)}, source=Q, answers={(Q, ONE): 4}, link_rate=1e4,
           reason="it has less work, and copies 900 prompt tokens from q"),
    Choice("not over a slow link", P, {P: cached(0), Q: cached(900)}, answers={(Q, ONE): 4},
           link_rate=1e2),
    Choice("not between replicas that compute otherwise", P,
           {P: cached(0), Q: cached(900, key="other")}, answers={(Q, ONE): 4}, link_rate=1e4),
    Choice("not of split models", P, {P: cached(0, key=""), Q: cached(900, key="")},
           answers={(Q, ONE): 4}, link_rate=1e4),
    Choice("not what it has itself", P, {P: cached(900), Q: cached(900)}, link_rate=1e4,
           answers={(Q, ONE): 4}, reason="900 of 1000 prompt tokens are in its memory"),
]  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_choice(choice: Choice) -> None:
    marks = {"answers": choice.answers, "demand": choice.demand}
    case = Case("", [], [wish(replicas=2)], runners=[*LOADED, *ELSEWHERE], marks=marks)
    here = case.situation(link_rate=choice.link_rate)
    route = admit(here, case.desired[0], choice.prefixes)
    assert route is not None
    assert (route.placement.id, route.source) == (choice.where, choice.source)
    assert not choice.reason or route.reason == choice.reason


def test_the_expected_time_is_that_of_the_rest_of_the_prompt() -> None:
    case = Case("", [], [wish(replicas=2)], runners=[*LOADED, *ELSEWHERE])
    prefixes = {P: cached(0), Q: cached(900)}
    route = admit(case.situation(), case.desired[0], prefixes)
    assert route is not None and route.reading_s == pytest.approx(0.24)


def test_one_placement_needs_no_reason() -> None:
    case = Case("", [], [wish()], runners=LOADED)
    route = admit(case.situation(), case.desired[0], {P: cached(900)})
    assert route is not None
    assert route == ReplicaRoute(route.placement)


# ------------------------------------------------------------------------------- readers


def long_prompt(rows: int = 0, key: str = "k") -> pb.CachedPrefix:
    return pb.CachedPrefix(prompt_rows=10_000, rows=rows, key=key)


def reading_of(
    prefixes: Mapping[PlacementId, pb.CachedPrefix], rate: float = 1e9, **marks: object
) -> ReplicaRoute:
    case = Case("", [], [wish(replicas=2)], runners=[*LOADED, *ELSEWHERE], marks=marks)
    route = admit(case.situation(reading_rate=rate), case.desired[0], prefixes)
    assert route is not None and route.placement.id == P
    return route


def test_the_other_replica_reads_the_upper_layers_of_a_long_prompt() -> None:
    route = reading_of({P: long_prompt(), Q: long_prompt()})
    ((reader, layers),) = route.readers
    assert (reader.placement, layers.node, layers.end_layer) == (
        Q,
        "b",
        4,
    ) and layers.first_layer == 2
    assert route.read_reason.startswith("with b (layers 2-3): 10000 tokens take ")
    alone = reading_of({P: long_prompt(), Q: long_prompt()}, rate=0.0)
    assert alone.readers == () and route.reading_s < 0.6 * alone.reading_s


@pytest.mark.parametrize(
    "prefixes",
    [
        {P: long_prompt(), Q: long_prompt(key="other")},
        {P: long_prompt(key=""), Q: long_prompt(key="")},
        {P: long_prompt()},
        {},
        {P: cached(0), Q: cached(900, key="other")},
    ],
    ids=["of another kind", "states do not move", "did not say", "none was asked", "a short one"],
)
def test_it_reads_nothing_where_its_states_are_of_no_use(
    prefixes: Mapping[PlacementId, pb.CachedPrefix],
) -> None:
    case = Case("", [], [wish(replicas=2)], runners=[*LOADED, *ELSEWHERE])
    route = admit(case.situation(reading_rate=1e9), case.desired[0], prefixes)
    assert route is not None and route.readers == ()


def test_a_short_prompt_is_routed_as_without_readers() -> None:
    short = pb.CachedPrefix(prompt_rows=200, key="k")
    with_links, without = (reading_of({P: short, Q: short}, rate=rate) for rate in (1e9, 0.0))
    assert replace(with_links, read_reason="") == without and without.readers == ()
    assert with_links.read_reason.startswith("alone: ")


def test_a_replica_of_another_kind_reads_where_both_allow_it() -> None:
    mac, box = (reading_key("m", kind, any_kind=True) for kind in ("mac", "box"))
    assert reading_of({P: long_prompt(key=mac), Q: long_prompt(key=box)}).readers
    has_more = {P: long_prompt(key=mac), Q: long_prompt(rows=9000, key=box)}
    case = Case("", [], [wish(replicas=2)], runners=[*LOADED, *ELSEWHERE])
    route = admit(case.situation(reading_rate=1e9, link_rate=1e9), case.desired[0], has_more)
    assert route is not None and route.source is None, "cached states are of one kind"


def test_a_busy_replica_gets_fewer_layers() -> None:
    route = reading_of({P: long_prompt(), Q: long_prompt()}, answers={(Q, ONE): 1})
    ((_, layers),) = route.readers
    assert layers.first_layer == 3
    busy = reading_of({P: long_prompt(), Q: long_prompt()}, answers={(Q, ONE): 9})
    assert busy.readers == () and busy.read_reason.startswith("alone: ")
