"""Election over simulated nodes: stories with the head and term they end in, then any story."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated import Disk, Simulated

from exo_node.node.cluster.election import Election, HeadChanged, HeadLost, LeaderClaim
from exo_node.node.cluster.membership import Died
from exo_node.node.machine.timing import LAN
from exo_node.placement.ids import NodeId, Term

# Each line: what happens, or `SECONDS` that pass, or `NODES: HEAD TERM` that must hold.
STORIES = {
    "a node alone leads itself, after it has looked for others": """
        start a
        0.5
        a: - 0
        1
        a: a 1
        """,
    "nodes started together have one head, the lowest id": """
        start abc
        2
        abc: a 1
        """,
    "a node that joins does not depose the head, even with a lower id": """
        start b
        3
        start a
        3
        ab: b 1
        """,
    "a node that led alone for many terms joins, and the head stays under a higher term": """
        start a
        2
        kill a
        start a
        2
        kill a
        start a
        2
        a: a 3
        kill a
        start bc
        3
        bc: b 1
        start a
        5
        abc: b 4
        """,
    "so it is where that node led already when they met": """
        start a
        2
        kill a
        start a
        2
        kill a
        part a bc
        start bc
        8
        start a
        2
        a: a 3
        bc: b 1
        heal
        5
        abc: b 4
        """,
    "of two heads that meet, the one that has led longer stays": """
        start a
        20
        part a b
        start b
        3
        heal
        5
        ab: a 2
        """,
    "two that led as long are decided by their ids": """
        part a b
        start ab
        3
        a: a 1
        b: b 1
        heal
        3
        ab: b 1
        """,
    "a head that dies is replaced within five seconds, once": """
        start abc
        3
        kill a
        5
        bc: b 2
        """,
    "the head comes back as a follower": """
        start abc
        3
        kill a
        5
        start a
        3
        abc: b 2
        """,
    "a head that restarts at once has lost its lease: a new term for any winner": """
        start abc
        3
        kill a
        start a
        6
        abc: a 2
        """,
    "a head stopped for two seconds stays": """
        start abc
        3
        pause a
        2
        resume a
        3
        abc: a 1
        """,
    "a head stopped for ten seconds is replaced, and follows when it wakes": """
        start abc
        3
        pause a
        5
        bc: b 2
        5
        resume a
        5
        abc: b 2
        """,
    "so it does where one other node is left, however long it led before": """
        start ab
        60
        pause a
        7
        b: b 2
        resume a
        5
        ab: b 2
        """,
    "a node that is alone has no reason to give up its lease": """
        start a
        3
        pause a
        60
        resume a
        1
        a: a 1
        """,
    "a follower that stops for ten seconds changes nothing": """
        start abc
        3
        pause c
        10
        resume c
        5
        abc: a 1
        """,
    "both sides of a partition have a head; after the heal it is the one that is followed": """
        start abc
        3
        part a bc
        6
        a: a 1
        bc: b 2
        heal
        6
        abc: b 2
        """,
    "two nodes that part both serve; after the heal the one that led before stays": """
        start ab
        20
        part a b
        6
        a: a 1
        b: b 2
        heal
        6
        ab: a 3
        """,
    "a cut between the head and one node causes no election while a third reaches both": """
        start abc
        3
        sever a b
        20
        abc: a 1
        """,
    "and the head's death is seen through the third one as well": """
        start abc
        3
        sever a b
        5
        kill a
        5.5
        bc: b 2
        """,
    "a head that leaves hands over at once": """
        start abc
        3
        leave a
        2
        abc: b 2
        """,
    "a node that is about to leave is not elected": """
        start abc
        3
        leave b
        1
        kill a
        7
        bc: c 2
        """,
    "where two nodes die at once, the next one waits for none of them": """
        start abc
        3
        kill a
        kill b
        5.5
        c: c 2
        """,
}


def play(cluster: Simulated, story: str) -> None:
    for line in filter(None, map(str.strip, story.splitlines())):
        match line.split():
            case [seconds] if seconds[0].isdigit():
                cluster.run(float(seconds))
            case [nodes, head, term] if nodes.endswith(":"):
                expected = (None if head == "-" else head, int(term))
                heads = cluster.heads()
                assert {heads[n] for n in nodes[:-1]} == {expected}, f"{line}: {heads}"
            case ["start", nodes]:
                for node in nodes:
                    cluster.start(node)
            case [what, *whom]:
                getattr(cluster, what)(*whom)
            case _:
                raise ValueError(line)


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_story(story: str) -> None:
    play(Simulated(), story)


def test_followers_of_a_healthy_head_listen_to_no_other_claim() -> None:
    cluster = Simulated()
    cluster.part("a", "bc")
    for node in "bc":
        cluster.start(node)
    cluster.run(10)
    for _ in range(3):  # a's terms are higher than b's when they meet
        cluster.start("a")
        cluster.run(2)
        cluster.kill("a")
    cluster.start("a")
    cluster.run(2)
    met_at = cluster.now
    cluster.heal()
    cluster.run(5)
    assert {node for node, _ in cluster.since(met_at, HeadChanged)} == {"a"}
    assert set(cluster.heads().values()) == {("b", 5)}


@pytest.mark.parametrize("seed", range(5))
def test_one_heartbeat_in_twenty_lost_kills_no_node_in_ten_minutes(seed: int) -> None:
    chance = random.Random(seed)
    cluster = Simulated()
    for node in "abc":
        cluster.start(node)
    cluster.run(5)
    settled = cluster.now
    cluster.lost = lambda: chance.random() < 0.05
    cluster.run(600)
    assert cluster.since(settled, Died) == []
    assert cluster.since(settled, HeadChanged) == []


def test_a_term_is_stored_before_it_is_sent() -> None:
    terms: list[tuple[int, int]] = []

    class Watched(Disk):
        def save(self, term: Term) -> None:
            terms.append((int(term), int(election.claim(0.0).term)))
            super().save(term)

    disk = Watched(7)
    election = Election(NodeId("b"), disk, 0.0, LAN, wait_s=0.0)
    _ = election.tick((), 0.0)
    assert terms == [(8, 7)]
    foreign = LeaderClaim(Term(20), NodeId("a"), followers=3)
    _ = election.record_claim(NodeId("a"), foreign, (NodeId("a"),), 1.0)
    assert (election.head, terms[-1]) == ("a", (20, 8))


def test_a_head_that_was_stopped_beyond_its_lease_listens_before_it_leads_again() -> None:
    node, other, timing = NodeId("a"), NodeId("b"), LAN
    election = Election(node, Disk(), 0.0, timing, wait_s=0.0)
    _ = election.tick((), 0.0)
    assert election.head == node
    woken = timing.lease_s + 1
    assert election.tick((other,), woken) == (HeadLost(node, Term(1)),)
    listened_until = woken + timing.waking_s / 2
    assert election.tick((other,), listened_until) == ()
    successor = LeaderClaim(Term(2), other)
    assert election.record_claim(other, successor, (other,), listened_until) == (
        HeadChanged(other, Term(2), node),
    )


# ------------------------------------------------------------------------- any story

NODES = st.sampled_from("abcde")


class AnyStory(RuleBasedStateMachine):
    """Starts, kills, pauses, partitions and lost heartbeats in any order.

    The promises on terms are checked by `Simulated` at every step; here, that it all ends well.
    """

    disk: type[Disk] = Disk

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Simulated(self.disk)
        self.healthy = False

    @initialize(count=st.integers(1, 5))
    def begin(self, count: int) -> None:
        for node in "abcde"[:count]:
            self.cluster.start(node)

    @rule(node=NODES)
    def start(self, node: str) -> None:
        if node not in self.cluster.up:
            self.cluster.start(node)

    @rule(node=NODES)
    def kill(self, node: str) -> None:
        if node in self.cluster.up:
            self.cluster.kill(node)
            self.healthy = False

    @rule(node=NODES)
    def restart(self, node: str) -> None:
        self.kill(node)
        self.start(node)

    @rule(node=NODES, seconds=st.sampled_from([1, 3, 5, 20]))
    def stop_for(self, node: str, seconds: int) -> None:
        if node in self.cluster.up:
            self.cluster.pause(node)
            try:
                self.cluster.run(seconds)
            finally:
                self.cluster.resume(node)
            self.healthy = False

    @precondition(lambda self: self.healthy and len(self.cluster.up) > 1)
    @rule(node=NODES, seconds=st.sampled_from([6, 10, 40]))
    def wake_up_in_a_healthy_cluster(self, node: str, seconds: int) -> None:
        if node in self.cluster.up:
            self.cluster.run(2)  # all have met: a node that was stopped before is a stranger
            self.cluster.pause(node)
            self.cluster.run(seconds)
            before = [leader for leader in self.cluster.leaders() if leader != node]
            assert len(before) == 1
            self.cluster.resume(node)
            self.cluster.run(5)
            assert self.cluster.leaders() == before

    @rule(side=st.sets(NODES, max_size=4))
    def part(self, side: set[str]) -> None:
        others = set("abcde") - side
        self.cluster.part("".join(side), "".join(others))
        self.healthy = False

    @rule(one=NODES, other=NODES)
    def sever(self, one: str, other: str) -> None:
        if one != other:
            self.cluster.sever(one, other)
            self.healthy = False

    @rule()
    def heal(self) -> None:
        self.cluster.heal()

    @rule(seconds=st.sampled_from([0.25, 1, 2, 4, 8]))
    def run(self, seconds: float) -> None:
        self.cluster.run(seconds)

    @rule(pattern=st.lists(st.booleans(), min_size=1, max_size=12), seconds=st.integers(1, 8))
    def run_with_loss(self, pattern: list[bool], seconds: int) -> None:
        turns = iter(pattern * 1000)
        self.cluster.lost = lambda: next(turns)
        try:
            self.cluster.run(seconds)
        finally:
            self.cluster.lost = lambda: False
        self.healthy = False

    @rule()
    def settle(self) -> None:
        """After any story, ten quiet seconds lead to one head."""
        self.cluster.heal()
        self.cluster.run(10)
        if self.cluster.up:
            assert self.cluster.agreed(), self.cluster.heads()
            self.healthy = True

    @precondition(lambda self: self.healthy)
    @rule(node=NODES, seconds=st.integers(1, 10))
    def join_a_healthy_cluster(self, node: str, seconds: int) -> None:
        before = self.cluster.leaders()
        self.start(node)
        self.cluster.run(seconds)
        assert self.cluster.leaders() == before

    @invariant()
    def a_healthy_cluster_keeps_its_head(self) -> None:
        if self.healthy:
            assert len(self.cluster.leaders()) == 1, self.cluster.heads()

    def teardown(self) -> None:
        self.settle()


BUDGET = settings(
    max_examples=60,
    stateful_step_count=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_after_any_story_terms_hold_and_one_head_is_left() -> None:
    run_state_machine_as_test(AnyStory, settings=BUDGET)  # pyright: ignore[reportUnknownMemberType]
