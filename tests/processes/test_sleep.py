"""Machines that sleep during an answer: it is whole, and one whose parts all slept only goes on.

Sleep is a stop of the node and its runners for longer than a node takes for being busy.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
from listening import ask, events
from nodes import Node, copy_key, eventually, grpc_address, node, sees
from small import small_checkpoint
from test_head_answers import (
    ENDS_WITHIN_S,
    STORY,
    TOKENS,
    WITHIN_S,
    assert_whole,
    chat_fields,
    place,
)
from test_head_change import agree

SLEEP_S = 34.0

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    root, flags = tmp_path_factory.mktemp("sleep"), ("--no-mdns", "--dtype", "float32")
    flags = (*flags, "--models-dir", str(small_checkpoint().parent))
    with ExitStack() as stack:
        one = stack.enter_context(node(root / "one", *flags, sound=True))
        _ = copy_key(one, root / "two")
        peer = ("--peer", grpc_address(one))
        other = stack.enter_context(node(root / "two", *flags, *peer, sound=True))
        eventually(lambda: sees(one, 2) and sees(other, 2), WITHIN_S)
        yield [one, other]


def everything_of(running: Node) -> list[psutil.Process]:
    own = psutil.Process(running.process.pid)
    return [own, *own.children(recursive=True)]


def sleep(running: Node) -> None:
    for process in everything_of(running):
        process.send_signal(signal.SIGSTOP)
    time.sleep(SLEEP_S)
    for process in everything_of(running):
        process.send_signal(signal.SIGCONT)


def woke(running: Node) -> int:
    return [event["kind"] for event in events(running)].count("woke")


@pytest.mark.parametrize("placed", ["on the sleeper", "on both", "on the other"])
def test_no_answer_is_lost_by_a_sleep(two: list[Node], placed: str) -> None:
    """The answer's door is the machine that sleeps."""
    door, other = two
    on = {"on the sleeper": [door], "on both": [door, other], "on the other": [other]}[placed]
    eventually(lambda: sees(door, 2) and sees(other, 2) and agree(two), WITHIN_S)
    _ = place(door, *on)
    whole = ask(door, STORY, num_draft_tokens=0, **chat_fields(TOKENS))
    assert whole.ended(ENDS_WITHIN_S) and len(whole.ids) == TOKENS, whole.error
    before = woke(door)
    answer = ask(door, STORY, **chat_fields(TOKENS))
    assert answer.until(lambda a: len(a.ids) >= 20, ENDS_WITHIN_S), answer.error
    sleep(door)
    eventually(lambda: woke(door) == before + 1, WITHIN_S)
    assert_whole(answer, whole.ids)
    if placed == "on the sleeper":
        assert not answer.stats.get("resumes"), answer.comments
