"""Runners and nodes that are killed during an answer: no token is lost or repeated.

The long version, with every combination at random, is `bench/kills.py`.
"""

import itertools
import random
from collections.abc import Generator

import nodes
import psutil
import pytest
from laboratory import WHOLE_WITHIN_S, Laboratory, laboratory
from listening import Answer, ask
from nodes import alive, eventually
from slow_motion import slowed
from trials import (
    NEVER_END,
    How,
    Outcome,
    Phase,
    Question,
    Target,
    Trial,
    attempt,
    oracle_question,
)

BUSY_S = 60.0
"""Added to every limit for other work on the machine: no verdict here depends on its speed."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Laboratory]:
    """Without a prefix cache: else a long prompt is read once, and no blow falls in its prefill."""
    env = {"EXO_PREFIX_CACHE_ENABLED": "0"}
    with laboratory(tmp_path_factory.mktemp("kills"), env=env) as lab:
        yield lab


@pytest.fixture(scope="module")
def story(lab: Laboratory) -> Question:
    """An undisturbed answer: its ids are the oracle's, its times this machine's."""
    return oracle_question("Tell me a story.").answered_by(lab)


def struck(
    lab: Laboratory, question: Question, target: Target, how: How, phase: Phase = "decode"
) -> Outcome:
    """The first trial whose blow fell while the answer was in progress.

    `bench/kills.py` measures how soon answers resume on an idle machine. Stages that a lost runner
    moved to one node stay there: they are separate processes anywhere.
    """
    seeds = itertools.count(1)

    def attempted() -> Outcome | None:
        trial = Trial("test", target, how, phase, question, random.Random(next(seeds)))
        outcome = attempt(lab, trial, slack_s=BUSY_S, together=True)
        assert outcome.faults == ()
        return outcome if outcome.hit else None

    return nodes.struck(attempted)


def test_an_answer_resumes_when_a_node_dies_with_its_runners(
    lab: Laboratory, story: Question
) -> None:
    """This test runs first, while each stage has a node of its own."""
    _ = struck(lab, story, "node", "kill")


@pytest.mark.parametrize("target", ["generator", "stage 1", "stage 2"])
def test_an_answer_resumes_when_a_stages_runner_is_killed(
    lab: Laboratory, story: Question, target: Target
) -> None:
    assert struck(lab, story, target, "kill").resumes == 1


def test_an_answer_resumes_when_a_stages_runner_is_stopped(
    lab: Laboratory, story: Question
) -> None:
    _ = struck(lab, story, "stage 1", "stop, continue")


def test_an_answer_resumes_when_a_stage_is_killed_during_prefill(
    lab: Laboratory, story: Question
) -> None:
    prompt = " ".join([story.prompt] * 45)
    long = Question("long prompt", prompt, {"max_tokens": 16, **NEVER_END}).answered_by(lab)
    _ = struck(lab, long, "stage 1", "kill", "prefill")


def test_an_answer_resumes_when_another_stage_is_killed_during_its_resume(
    lab: Laboratory, story: Question
) -> None:
    assert struck(lab, story, "stage 1", "kill", "resume").resumes >= 1


def test_an_answer_outlives_two_of_four_nodes_killed_at_once(
    lab: Laboratory, story: Question
) -> None:
    """The head and another node with a stage; the other two have memory for all stages."""
    _ = lab.until_whole()  # each stage on a node of its own

    def killed() -> Answer | None:
        head = lab.head()
        other = next(place.node for place in lab.places() if place.node != head)
        [door, _] = [node for node in lab.ids if node not in (head, other)]
        answer = ask(lab.node(door), story.prompt, **story.fields)
        assert answer.until(lambda a: len(a.ids) >= 5, WHOLE_WITHIN_S), answer.error
        for victim in (head, other):
            lab.node(victim).process.kill()
        hit = answer.ended_at is None
        assert answer.ended(WHOLE_WITHIN_S)
        assert answer.error == ""
        assert tuple(answer.ids) == story.ids
        for victim in (head, other):
            lab.until_ended(victim)
        _ = lab.until_whole(together=hit)
        return answer if hit else None

    answer = nodes.struck(killed)
    assert answer.stats["resumes"] >= 1
    assert answer.stats["resume_exact"] is True


def test_all_answers_on_one_stopped_runner_resume(lab: Laboratory, story: Question) -> None:
    """Two answers from each of three nodes."""
    if len(lab.placement()["stages"]) > 1:
        _ = lab.place(min_nodes=1, max_nodes=1)
    eventually(lambda: lab.placement()["status"] == "ready", WHOLE_WITHIN_S)
    [place] = lab.places()
    runner = psutil.Process(place.pid)
    doors = [lab.node(node) for node in lab.ids[:3]]

    def hit() -> list[Answer] | None:
        """Six answers in progress; None if one of them ended before the blow."""
        with slowed([runner]):
            answers = [ask(door, story.prompt, max_tokens=72) for door in [*doors, *doors]]
            for answer in answers:
                assert answer.until(lambda a: len(a.ids) >= 3, WHOLE_WITHIN_S), answer.error
        runner.suspend()
        if all(answer.ended_at is None for answer in answers):
            return answers
        runner.resume()
        assert all(answer.ended(WHOLE_WITHIN_S) for answer in answers)
        return None

    try:
        answers = nodes.struck(hit)
        for answer in answers:
            assert answer.ended(WHOLE_WITHIN_S)
            assert answer.error == ""
            assert tuple(answer.ids) == story.ids[:72]
        # One whose last ids were on their way to the reader ends without a resume.
        assert any(answer.stats["resumes"] for answer in answers)
        eventually(lambda: not alive(place.pid), WHOLE_WITHIN_S)
    finally:
        if runner.is_running():
            runner.resume()
