"""Answers in progress when the head is killed, stopped or told to stop: none is lost.

Their runners are slowed down until what happens to the head is over, so that short answers last as
long as that takes.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
from listening import Answer, ask, events
from nodes import Node, eventually
from slow_motion import runners_of, slowed
from small import small_checkpoint
from test_cluster import sees
from test_head_change import Trio, agree, cluster

from exo_node.node.machine.timing import LAN

NEVER_END = {"logit_bias": {"4095": -100, "4093": -100}}
STORY = "Tell me a story."
TOKENS = 250
"""Slowed down, two answers tell less than half of them during an election."""
MOST_TRIES = 4
ENDS_WITHIN_S = 600.0
WITHIN_S = 120.0
"""What has no limit of its own: long, so that a loaded machine fails no test."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    models = str(small_checkpoint().parent)
    with ExitStack() as stack:
        yield Trio(tmp_path_factory.mktemp("answers"), stack, "--models-dir", models)


@pytest.fixture
def trio(nodes: Trio) -> Trio:
    nodes.complete()
    return nodes


def own_id(running: Node) -> str:
    return str(cluster(running)["self"])


def asked(tokens: int) -> dict[str, Any]:
    """Of the small model: what is shown here holds whatever the weights are."""
    return {"model": small_checkpoint().name, "max_tokens": tokens, **NEVER_END}


def place(door: Node, *on: Node, spares: int = 0) -> Any:
    """On just these nodes, the generator first."""
    nodes = [own_id(n) for n in on]
    body = {"model": small_checkpoint().name, "nodes": nodes, "spares": spares}
    sizes = {"min_nodes": len(on), "max_nodes": len(on)}
    reply = door.call("POST", "/v1/placements", {**body, **sizes})
    assert reply.status == 200, reply
    return reply.body


def whole(answer: Answer, expected: list[int]) -> None:
    assert answer.ended(ENDS_WITHIN_S)
    assert answer.error == ""
    assert answer.ids == expected


@pytest.fixture(scope="module")
def story(nodes: Trio) -> list[int]:
    """A long answer without drafts that nothing disturbs; neither those nor a placement's shape
    change its ids."""
    nodes.complete()
    door = nodes.head()
    _ = place(door, door)
    answer = ask(door, STORY, num_draft_tokens=0, **asked(TOKENS))
    assert answer.ended(ENDS_WITHIN_S) and not answer.error, answer.error
    assert len(answer.ids) == TOKENS
    return answer.ids


def outliving(trio: Trio, attempt: Callable[[], bool | None]) -> None:
    """Until the answers were in progress for all that `attempt` does to the head.

    On a machine that stands still for seconds they may not be, and answers may be resumed as well,
    if not each time: then it returns None.
    """
    tries: list[bool | None] = []
    while not (shown := attempt()):
        trio.complete()
        tries.append(shown)
        assert tries.count(False) < MOST_TRIES, "the answers were too short to show anything"
        assert tries.count(None) < MOST_TRIES, "what nothing happened to is resumed each time"


def begun(door: Node, count: int, tokens: int) -> list[Answer]:
    answers = [ask(door, STORY, **asked(tokens)) for _ in range(count)]
    for answer in answers:
        assert answer.until(lambda a: len(a.ids) >= 20, ENDS_WITHIN_S), answer.error
    return answers


def in_progress(answers: list[Answer]) -> bool:
    return all(answer.ended_at is None for answer in answers)


def was_resumed(answer: Answer) -> bool:
    return bool(answer.stats.get("resumes")) or answer.commented("resuming")


@pytest.mark.parametrize("stages", [1, 2])
def test_a_killed_head_costs_answers_that_run_elsewhere_nothing(
    trio: Trio, story: list[int], stages: int
) -> None:
    def outlived() -> bool | None:
        head, [door, other] = trio.head(), trio.others()
        placed = place(door, *[other, door][:stages])
        answers = begun(door, 2, TOKENS)
        with slowed(runners_of([door, other])):
            trio.kill(head)
            survivors = list(trio.nodes.values())
            eventually(lambda: agree(survivors), WITHIN_S)
            eventually(lambda: "adopted" in [e["kind"] for e in events(trio.head())], WITHIN_S)
            met = in_progress(answers)
        for answer in answers:
            whole(answer, story)
        if any(map(was_resumed, answers)):
            return None
        [kept] = door.call("GET", "/v1/placements").body["data"]
        as_placed = (placed["id"], "ready")
        assert (kept["id"], kept["status"]) == as_placed, "the new head goes on with it"
        return met

    outliving(trio, outlived)


def test_an_answer_whose_stage_is_lost_with_the_head_goes_on_at_the_next_one(
    trio: Trio, story: list[int]
) -> None:
    def outlived() -> bool:
        head, [door, other] = trio.head(), trio.others()
        _ = place(door, head, other)
        with slowed(runners_of([head, other])):
            [answer] = begun(door, 1, TOKENS)
            trio.kill(head)
        whole(answer, story)
        assert answer.stats["resume_exact"] is True
        return answer.stats["resumes"] >= 1

    outliving(trio, outlived)


def test_drafting_answers_on_the_head_alone_outlive_it(trio: Trio, story: list[int]) -> None:
    def outlived() -> bool:
        """False where the last tokens of one were on their way to its client already."""
        head, [door, _] = trio.head(), trio.others()
        _ = place(door, head)
        with slowed(runners_of([head])):
            answers = begun(door, 2, TOKENS)
            trio.kill(head)
        for answer in answers:
            whole(answer, story)
            assert answer.stats["drafter_kind"] == "native_mtp"
        return all(answer.stats["resumes"] >= 1 for answer in answers)

    outliving(trio, outlived)


def test_a_head_that_is_told_to_stop_leaves_long_answers_alone(
    trio: Trio, story: list[int]
) -> None:
    """Its own stage moves; those of others go on for longer than strays are kept."""

    def outlived() -> bool | None:
        head, [door, other] = trio.head(), trio.others()
        _ = place(door, other, door)
        [answer] = begun(door, 1, TOKENS)
        with slowed(runners_of([door, other])):
            at = answer.arrivals[-1]
            head.process.send_signal(signal.SIGTERM)
            assert head.process.wait(WITHIN_S) == 0
            del trio.nodes[head.data_dir.name]
            time.sleep(max(0.0, at + LAN.placements.orphan_s + 1 - time.monotonic()))
        whole(answer, story)
        if was_resumed(answer):
            return None
        return answer.arrivals[-1] - at > LAN.placements.orphan_s

    outliving(trio, outlived)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_stopped_head_that_wakes_ends_nobodys_answer(
    trio: Trio, story: list[int], late: bool
) -> None:
    """Once one of the others leads, when it mostly leads again; and once both agree: it follows."""

    def outlived() -> bool | None:
        head, [door, other] = trio.head(), trio.others()
        _ = place(door, other, door)
        answers = begun(door, 2, TOKENS)
        old = own_id(head)
        with slowed(runners_of([door, other])):
            head.process.send_signal(signal.SIGSTOP)
            try:
                eventually(lambda: cluster(door)["head"] not in (None, old), WITHIN_S)
                if late:
                    eventually(lambda: agree([door, other]), WITHIN_S)
            finally:
                head.process.send_signal(signal.SIGCONT)
            eventually(lambda: agree([head, door, other]), WITHIN_S)
            # On a machine under load it may be elected again, which is the other story.
            follows = cluster(head)["head"] != old
            met = in_progress(answers)
        for answer in answers:
            whole(answer, story)
            # A machine under load may be late with a sign of life; that ends no answer either.
            assert answer.stats.get("resumes", 0) <= 1, answer.comments
        return None if any(map(was_resumed, answers)) or (late and not follows) else met

    outliving(trio, outlived)


def test_answers_that_run_while_the_cluster_gets_a_new_key_end_well(
    trio: Trio, story: list[int]
) -> None:
    """Every node starts anew with it after the answers that it has a part in; until then the
    cluster has its head, which is why they outlive the loss of a stage."""

    def outlived() -> bool:
        head, [door, other] = trio.head(), trio.others()
        _ = place(door, other, head)
        nodes = list(trio.nodes.values())
        answers = [ask(running, STORY, **asked(TOKENS)) for running in nodes]
        for answer in answers:
            assert answer.until(lambda a: len(a.ids) >= 5, ENDS_WITHIN_S), answer.error
        old_key, old = (door.data_dir / "cluster.key").read_text(), cluster(door)["cluster"]
        with slowed(runners_of([other, head])):
            reply = door.call("POST", "/v1/join/rekey", {})
            assert reply.status == 200, reply
            assert sorted(reply.body["kept"]) == sorted(n.data_dir.name for n in (head, other))
            [runner] = psutil.Process(other.process.pid).children()
            runner.kill()
            met = in_progress(answers)
        for answer in answers:
            whole(answer, story)
            met = met and answer.stats.get("resumes", 0) >= 1
        eventually(lambda: together(nodes, but=old), WITHIN_S)
        [key] = {(n.data_dir / "cluster.key").read_text() for n in nodes}
        assert key != old_key
        assert door.chat("Who are you?", **asked(4))["choices"]
        return met

    outliving(trio, outlived)


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
