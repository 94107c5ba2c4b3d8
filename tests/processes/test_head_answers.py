"""Answers in progress when the head is killed, stopped or told to stop: none is lost."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from listening import Answer, ask, events
from nodes import Node, eventually
from test_cluster import sees
from test_head_change import Trio, agree, cluster

from exo_node.node.machine.timing import LAN

NEVER_END = {"logit_bias": {"4095": -100, "4093": -100}}
STORY = "Tell me a story."
LASTS_S = 5.0
"""Two at once last longer than an election, and than strays are kept, where the machine's speed
stays as it is."""
FEWEST_TOKENS, MOST_TOKENS = 120, 3500
MOST_STALLS = 4
ENDS_WITHIN_S = 600.0
WITHIN_S = 120.0
"""What has no limit of its own: long, so that a loaded machine fails no test."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with ExitStack() as stack:
        yield Trio(tmp_path_factory.mktemp("answers"), stack)


@pytest.fixture
def trio(nodes: Trio) -> Trio:
    nodes.complete()
    return nodes


def own_id(running: Node) -> str:
    return str(cluster(running)["self"])


def place(door: Node, *on: Node, spares: int = 0) -> Any:
    """On just these nodes, the generator first."""
    body = {"model": "demo", "nodes": [own_id(n) for n in on], "spares": spares}
    sizes = {"min_nodes": len(on), "max_nodes": len(on)}
    reply = door.call("POST", "/v1/placements", {**body, **sizes})
    assert reply.status == 200, reply
    return reply.body


def whole(answer: Answer, expected: list[int]) -> None:
    assert answer.ended(ENDS_WITHIN_S)
    assert answer.error == ""
    assert answer.ids == expected


@dataclass(slots=True)
class Story:
    """A long answer that nothing disturbs; a placement's shape does not change its ids."""

    ids: list[int]
    tokens: int
    """As many as this machine gives in LASTS_S; more once that was too short."""

    def told(self) -> list[int]:
        return self.ids[: self.tokens]


@pytest.fixture(scope="module")
def story(nodes: Trio) -> Story:
    nodes.complete()
    door = nodes.head()
    _ = place(door, door)
    asked = time.monotonic()
    tokens = len(undisturbed(door, 64))
    rate = tokens / (time.monotonic() - asked)
    tokens = min(MOST_TOKENS, max(FEWEST_TOKENS, int(LASTS_S * rate)))
    return Story(undisturbed(door, tokens), tokens)


def undisturbed(door: Node, tokens: int) -> list[int]:
    answer = ask(door, STORY, max_tokens=tokens, **NEVER_END)
    assert answer.ended(ENDS_WITHIN_S) and not answer.error, answer.error
    return answer.ids


def outliving(trio: Trio, story: Story, attempt: Callable[[list[int]], bool | None]) -> None:
    """Lengthens the answer until it is in progress for all that `attempt` does to the head.

    A machine that other work has left may be faster than when the story was measured. One that
    stands still for seconds has answers resumed as well, if not each time: then it returns None.
    """
    stalls = 0
    while not (shown := attempt(story.told())):
        trio.complete()
        if shown is None:
            stalls += 1
            assert stalls < MOST_STALLS, "answers that nothing happened to are resumed each time"
            continue
        assert story.tokens < MOST_TOKENS, "the answers were too short to show anything"
        story.tokens = min(MOST_TOKENS, 2 * story.tokens)
        if story.tokens > len(story.ids):
            door = trio.head()
            _ = place(door, door)
            story.ids = undisturbed(door, story.tokens)


def begun(door: Node, count: int, expected: list[int]) -> list[Answer]:
    asked = {"max_tokens": len(expected), **NEVER_END}
    answers = [ask(door, STORY, **asked) for _ in range(count)]
    for answer in answers:
        assert answer.until(lambda a: len(a.ids) >= 20, ENDS_WITHIN_S), answer.error
    return answers


@pytest.mark.parametrize("stages", [1, 2])
def test_a_killed_head_costs_answers_that_run_elsewhere_nothing(
    trio: Trio, story: Story, stages: int
) -> None:
    def outlived(expected: list[int]) -> bool | None:
        head, [door, other] = trio.head(), trio.others()
        placed = place(door, *[other, door][:stages])
        answers = begun(door, 2, expected)
        trio.kill(head)
        survivors = list(trio.nodes.values())
        eventually(lambda: agree(survivors), WITHIN_S)
        in_progress = all(answer.ended_at is None for answer in answers)
        for answer in answers:
            whole(answer, expected)
        if any(answer.stats.get("resumes") or answer.commented("resuming") for answer in answers):
            return None
        [kept] = door.call("GET", "/v1/placements").body["data"]
        as_placed = (placed["id"], "ready")
        assert (kept["id"], kept["status"]) == as_placed, "the new head goes on with it"
        assert "adopted" in [event["kind"] for event in events(trio.head())]
        return in_progress

    outliving(trio, story, outlived)


def test_an_answer_whose_stage_is_lost_with_the_head_goes_on_at_the_next_one(
    trio: Trio, story: Story
) -> None:
    head, [door, other] = trio.head(), trio.others()
    _ = place(door, head, other)
    expected = story.told()[: story.tokens // 2]
    [answer] = begun(door, 1, expected)
    trio.kill(head)
    whole(answer, expected)
    assert answer.stats["resumes"] >= 1
    assert answer.stats["resume_exact"] is True


def test_drafting_answers_on_the_head_alone_outlive_it(trio: Trio, story: Story) -> None:
    head, [door, _] = trio.head(), trio.others()
    _ = place(door, head)
    expected = story.told()[: story.tokens // 2]
    answers = begun(door, 2, expected)
    trio.kill(head)
    for answer in answers:
        whole(answer, expected)
        assert answer.stats["drafter_kind"] == "native_mtp"


def test_a_head_that_is_told_to_stop_leaves_long_answers_alone(trio: Trio, story: Story) -> None:
    """Its own stage moves; those of others go on for longer than strays are kept."""

    def outlived(expected: list[int]) -> bool | None:
        head, [door, other] = trio.head(), trio.others()
        _ = place(door, other, door)
        [answer] = begun(door, 1, expected)
        at = answer.arrivals[-1]
        head.process.send_signal(signal.SIGTERM)
        assert head.process.wait(WITHIN_S) == 0
        del trio.nodes[head.data_dir.name]
        whole(answer, expected)
        if answer.stats.get("resumes"):
            return None
        return answer.arrivals[-1] - at > LAN.placements.orphan_s

    outliving(trio, story, outlived)


def test_a_stopped_head_wakes_as_a_follower_and_ends_nobodys_answer(
    trio: Trio, story: Story
) -> None:
    head, [door, other] = trio.head(), trio.others()
    _ = place(door, other, door)
    expected = story.told()
    answers = begun(door, 2, expected)
    head.process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: cluster(door)["head"] not in (None, own_id_of(head, trio)), WITHIN_S)
    finally:
        head.process.send_signal(signal.SIGCONT)
    for answer in answers:
        whole(answer, expected)
        # A machine under load may be late with a sign of life; that ends no answer either.
        assert answer.stats.get("resumes", 0) <= 1, answer.comments


def own_id_of(running: Node, trio: Trio) -> str:
    """Of a node that may be stopped."""
    [door, *_] = [n for n in trio.nodes.values() if n is not running]
    names = {n["name"]: n["id"] for n in cluster(door)["nodes"]}
    return str(names[running.data_dir.name])


def test_answers_that_run_while_the_cluster_gets_a_new_key_end_well(
    trio: Trio, story: Story
) -> None:
    """Every node starts anew with it after the answers that it has a part in; until then the
    cluster has its head, which is why they outlive the loss of a stage."""

    def outlived(long: list[int]) -> bool:
        head, [door, other] = trio.head(), trio.others()
        _ = place(door, other, head)
        expected = long[: max(60, len(long) // 3)]
        asked = {"max_tokens": len(expected), **NEVER_END}
        nodes = list(trio.nodes.values())
        answers = [ask(running, STORY, **asked) for running in nodes]
        for answer in answers:
            assert answer.until(lambda a: len(a.ids) >= 5, ENDS_WITHIN_S), answer.error
        old_key, old = (door.data_dir / "cluster.key").read_text(), cluster(door)["cluster"]
        reply = door.call("POST", "/v1/join/rekey", {})
        assert reply.status == 200, reply
        assert sorted(reply.body["kept"]) == sorted(n.data_dir.name for n in (head, other))
        [runner] = psutil.Process(other.process.pid).children()
        runner.kill()
        in_progress = all(answer.ended_at is None for answer in answers)
        for answer in answers:
            whole(answer, expected)
            in_progress = in_progress and answer.stats.get("resumes", 0) >= 1
        eventually(lambda: together(nodes, but=old), WITHIN_S)
        [key] = {(n.data_dir / "cluster.key").read_text() for n in nodes}
        assert key != old_key
        assert door.chat("Who are you?", max_tokens=4)["choices"]
        return in_progress

    outliving(trio, story, outlived)


def together(nodes: list[Node], *, but: str) -> bool:
    """One cluster, another one than `but`, with one head; not while a node starts anew, which
    closes its HTTP."""
    try:
        shown = {cluster(running)["cluster"] for running in nodes}
        if len(shown) != 1 or but in shown:
            return False
        return all(sees(n, len(nodes)) for n in nodes) and agree(nodes)
    except OSError:
        return False
