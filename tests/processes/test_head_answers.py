"""Answers in progress when the head is killed, stopped or shut down: none is lost.

Their runners are slowed down until the cluster has settled, so that short answers last that long.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from listening import Answer, ask, events
from nodes import Node, eventually
from slow_motion import runners_of, slowed
from small import small_checkpoint
from test_head_change import Trio, agree, cluster

from exo_node.node.machine.timing import LAN

NEVER_END = {"logit_bias": {"4095": -100, "4093": -100}}
STORY = "Tell me a story."
TOKENS = 250
"""Two slowed answers emit less than half of them during an election."""
MOST_TRIES = 4
ENDS_WITHIN_S = 600.0
WITHIN_S = 120.0
"""The limit of every other wait: long, so that a loaded machine fails no test."""

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


def chat_fields(tokens: int) -> dict[str, Any]:
    """The fields of a request to the small model; the weights do not matter here."""
    return {"model": small_checkpoint().name, "max_tokens": tokens, **NEVER_END}


def place(door: Node, *on: Node) -> Any:
    """Places the small model on exactly these nodes, the generator first.

    Returns once all nodes know of the request: another head learns it from heartbeats.
    """
    nodes = [own_id(n) for n in on]
    body = {"model": small_checkpoint().name, "nodes": nodes}
    sizes = {"min_nodes": len(on), "max_nodes": len(on)}
    reply = door.call("POST", "/v1/placements", {**body, **sizes})
    assert reply.status == 200, reply
    time.sleep(1.5 * LAN.heartbeat_s)
    return reply.body


def assert_whole(answer: Answer, expected: list[int]) -> None:
    assert answer.ended(ENDS_WITHIN_S)
    assert answer.error == ""
    assert answer.ids == expected


@pytest.fixture(scope="module")
def story(nodes: Trio) -> list[int]:
    """The ids of a long, undisturbed answer. Neither drafts nor a placement's shape change them."""
    nodes.complete()
    door = nodes.head()
    _ = place(door, door)
    answer = ask(door, STORY, num_draft_tokens=0, **chat_fields(TOKENS))
    assert answer.ended(ENDS_WITHIN_S) and not answer.error, answer.error
    assert len(answer.ids) == TOKENS
    return answer.ids


def repeat_until_in_time(trio: Trio, attempt: Callable[[], bool | None]) -> None:
    """Repeats `attempt` until its answers were in progress for the whole of it.

    `attempt` returns False if an answer ended too early, and None if an answer was resumed for
    another reason; both happen at times on a machine that stalls for seconds.
    """
    tries: list[bool | None] = []
    while not (result := attempt()):
        trio.complete()
        tries.append(result)
        assert tries.count(False) < MOST_TRIES, "the answers were too short to show anything"
        assert tries.count(None) < MOST_TRIES, "undisturbed answers are resumed each time"


def start_answers(door: Node, count: int, tokens: int) -> list[Answer]:
    answers = [ask(door, STORY, **chat_fields(tokens)) for _ in range(count)]
    for answer in answers:
        assert answer.until(lambda a: len(a.ids) >= 20, ENDS_WITHIN_S), answer.error
    return answers


def in_progress(answers: list[Answer]) -> bool:
    return all(answer.ended_at is None for answer in answers)


def was_resumed(answer: Answer) -> bool:
    return bool(answer.stats.get("resumes")) or answer.commented("resuming")


@pytest.mark.parametrize("stages", [1, 2])
def test_a_killed_head_does_not_disturb_answers_on_other_nodes(
    trio: Trio, story: list[int], stages: int
) -> None:
    def strike_head() -> bool | None:
        head, [door, other] = trio.roles()
        placed = place(door, *[other, door][:stages])
        answers = start_answers(door, 2, TOKENS)
        with slowed(runners_of([door, other])):
            trio.kill(head)
            survivors = list(trio.nodes.values())
            eventually(lambda: agree(survivors), WITHIN_S)
            eventually(lambda: "adopted" in [e["kind"] for e in events(trio.head())], WITHIN_S)
            in_time = in_progress(answers)
        for answer in answers:
            assert_whole(answer, story)
        if any(map(was_resumed, answers)):
            return None
        [placement] = door.call("GET", "/v1/placements").body["data"]
        as_placed = (placed["id"], "ready")
        assert (placement["id"], placement["status"]) == as_placed, "the new head adopts it"
        return in_time

    repeat_until_in_time(trio, strike_head)


def test_an_answer_whose_stage_is_lost_with_the_head_resumes_under_the_next_head(
    trio: Trio, story: list[int]
) -> None:
    def strike_head() -> bool:
        head, [door, other] = trio.roles()
        _ = place(door, head, other)
        with slowed(runners_of([head, other])):
            [answer] = start_answers(door, 1, TOKENS)
            trio.kill(head)
        assert_whole(answer, story)
        assert answer.stats["resume_exact"] is True
        return answer.stats["resumes"] >= 1

    repeat_until_in_time(trio, strike_head)


def test_an_orderly_stop_of_the_head_does_not_disturb_long_answers(
    trio: Trio, story: list[int]
) -> None:
    """Stages on other nodes continue for longer than orphaned stages are kept."""

    def strike_head() -> bool | None:
        head, [door, other] = trio.roles()
        _ = place(door, other, door)
        [answer] = start_answers(door, 1, TOKENS)
        with slowed(runners_of([door, other])):
            at = answer.arrivals[-1]
            head.process.send_signal(signal.SIGTERM)
            assert head.process.wait(WITHIN_S) == 0
            del trio.nodes[head.data_dir.name]
            time.sleep(max(0.0, at + LAN.takeover_s + 1 - time.monotonic()))
        assert_whole(answer, story)
        if was_resumed(answer):
            return None
        return answer.arrivals[-1] - at > LAN.takeover_s

    repeat_until_in_time(trio, strike_head)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_stopped_head_that_resumes_ends_no_answer(
    trio: Trio, story: list[int], late: bool
) -> None:
    """It resumes at once, and mostly leads again, or after the others agreed, and follows."""

    def strike_head() -> bool | None:
        head, [door, other] = trio.roles()
        _ = place(door, other, door)
        answers = start_answers(door, 2, TOKENS)
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
            in_time = in_progress(answers)
        for answer in answers:
            assert_whole(answer, story)
            # A machine under load may be late with a sign of life; that ends no answer either.
            assert answer.stats.get("resumes", 0) <= 1, answer.comments
        return None if any(map(was_resumed, answers)) or (late and not follows) else in_time

    repeat_until_in_time(trio, strike_head)
