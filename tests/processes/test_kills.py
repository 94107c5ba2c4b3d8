"""Runners and nodes killed under an answer: no token lost, none repeated, no long wait.

The long version, with every combination at random, is `bench/kills.py`.
"""

import itertools
import random
import signal
from collections.abc import Generator
from itertools import islice

import nodes
import psutil
import pytest
from laboratory import WHOLE_WITHIN_S, Laboratory, laboratory
from listening import Answer, ask
from nodes import alive, eventually
from slow_motion import slowed
from trials import (
    HOWS,
    NEVER_END,
    PHASES,
    TARGETS,
    How,
    Outcome,
    Phase,
    Question,
    Target,
    Trial,
    attempt,
    oracle_question,
    questions,
    trials,
)

BUSY_S = 60.0
"""What other work on the machine may add to a wait: no verdict here depends on its speed."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Laboratory]:
    """It keeps no prefix: else a long prompt is read once, and no blow comes while it is read."""
    env = {"EXO_PREFIX_CACHE_ENABLED": "0"}
    with laboratory(tmp_path_factory.mktemp("kills"), env=env) as lab:
        yield lab


@pytest.fixture(scope="module")
def story(lab: Laboratory) -> Question:
    """Answered once undisturbed: the ids are the oracle's, the times this machine's."""
    return oracle_question("Tell me a story.").asked(lab)


def struck(
    lab: Laboratory, question: Question, target: Target, how: How, phase: Phase = "decode"
) -> Outcome:
    """A trial that met an answer that still went on.

    How soon it goes on is what `bench/kills.py` shows on an idle machine. Stages that a lost runner
    moved to one node stay there: they are processes of their own wherever they run.
    """
    seeds = itertools.count(1)

    def attempted() -> Outcome | None:
        trial = Trial("test", target, how, phase, question, random.Random(next(seeds)))
        outcome = attempt(lab, trial, slack_s=BUSY_S, together=True)
        assert outcome.faults == ()
        return outcome if outcome.hit and (outcome.warm or phase == "resume") else None

    return nodes.struck(attempted)


def test_an_answer_goes_on_when_a_node_dies_with_its_runners(
    lab: Laboratory, story: Question
) -> None:
    """First, while each stage has a node of its own."""
    _ = struck(lab, story, "node", "kill")


@pytest.mark.parametrize("target", ["generator", "stage 1", "stage 2"])
def test_an_answer_goes_on_when_a_stages_runner_is_killed(
    lab: Laboratory, story: Question, target: Target
) -> None:
    assert struck(lab, story, target, "kill").resumes == 1


def test_an_answer_goes_on_when_a_stages_runner_is_stopped(
    lab: Laboratory, story: Question
) -> None:
    _ = struck(lab, story, "stage 1", "stop, continue")


def test_an_answer_goes_on_when_a_stage_is_killed_while_its_prompt_is_read(
    lab: Laboratory, story: Question
) -> None:
    prompt = " ".join([story.prompt] * 45)
    long = Question("long prompt", prompt, {"max_tokens": 16, **NEVER_END}).asked(lab)
    _ = struck(lab, long, "stage 1", "kill", "prefill")


def test_an_answer_goes_on_when_another_stage_is_killed_while_it_is_resumed(
    lab: Laboratory, story: Question
) -> None:
    assert struck(lab, story, "stage 1", "kill", "resume").resumes >= 1


def test_a_killed_spare_disturbs_no_answer_and_is_replaced(
    lab: Laboratory, story: Question
) -> None:
    before = {place.pid for place in lab.ready_spares()}
    trial = Trial("test", "spare", "kill", "decode", story, random.Random(1))
    outcome = attempt(lab, trial, slack_s=BUSY_S, together=True)
    assert (outcome.faults, outcome.resumes) == ((), 0)
    assert len(before) == 3

    def replaced() -> bool:
        after = {place.pid for place in lab.ready_spares()}
        return len(after) == 3 and len(after - before) == 1

    eventually(replaced, WHOLE_WITHIN_S)


def test_two_of_four_nodes_killed_at_once_cost_an_answer_nothing(
    lab: Laboratory, story: Question
) -> None:
    """The head and another one with a stage: what is left has room for all of them."""
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


def test_an_answer_with_drafts_goes_on_when_its_only_runner_is_killed(
    lab: Laboratory, story: Question
) -> None:
    _ = lab.place(min_nodes=1, max_nodes=1, spares=0)
    eventually(lambda: lab.placement()["status"] == "ready", WHOLE_WITHIN_S)
    [place] = lab.places()
    answer = ask(lab.node(lab.head()), story.prompt, **story.fields)
    assert answer.until(lambda a: len(a.ids) >= 20, WHOLE_WITHIN_S)
    psutil.Process(place.pid).send_signal(signal.SIGKILL)
    assert answer.until(lambda a: a.commented("resuming"), WHOLE_WITHIN_S)
    models = lab.node(lab.head()).call("GET", "/v1/models").body["data"]
    assert [m["id"] for m in models if m["loaded"]] == ["demo"], "clients that pick it keep to it"
    assert answer.ended_at is None
    assert answer.ended(WHOLE_WITHIN_S)
    assert answer.error == ""
    assert tuple(answer.ids) == story.ids
    stats = answer.stats
    assert (stats["drafter_kind"], stats["resumes"], stats["resume_exact"]) == (
        "native_mtp",
        1,
        True,
    )


def test_all_answers_on_one_stopped_runner_go_on(lab: Laboratory, story: Question) -> None:
    """H5: two on each of three nodes; what one of them gives up another one may be asking."""
    if len(lab.placement()["stages"]) > 1:
        _ = lab.place(min_nodes=1, max_nodes=1, spares=0)
    eventually(lambda: lab.placement()["status"] == "ready", WHOLE_WITHIN_S)
    [place] = lab.places()
    hangs = psutil.Process(place.pid)
    doors = [lab.node(node) for node in lab.ids[:3]]

    def hit() -> list[Answer] | None:
        """Six answers in progress; None where one of them was over before."""
        with slowed([hangs]):
            answers = [ask(door, story.prompt, max_tokens=72) for door in [*doors, *doors]]
            for answer in answers:
                assert answer.until(lambda a: len(a.ids) >= 3, WHOLE_WITHIN_S), answer.error
        hangs.suspend()
        if all(answer.ended_at is None for answer in answers):
            return answers
        hangs.resume()
        assert all(answer.ended(WHOLE_WITHIN_S) for answer in answers)
        return None

    try:
        for answer in nodes.struck(hit):
            assert answer.ended(WHOLE_WITHIN_S)
            assert answer.error == ""
            assert tuple(answer.ids) == story.ids[:72]
            assert answer.stats["resumes"] >= 1
        eventually(lambda: not alive(place.pid), WHOLE_WITHIN_S)
    finally:
        if hangs.is_running():
            hangs.resume()


def test_the_seed_and_number_of_a_trial_repeat_it() -> None:
    def first(seed: int) -> list[tuple[Target, How, Phase, float]]:
        made = islice(trials(seed, questions()), 50)
        return [(t.target, t.how, t.phase, t.chance.random()) for t in made]

    assert first(1) == first(1)
    assert first(1) != first(2)
    combinations = len(TARGETS) * len(HOWS) * len(PHASES)
    assert len({row[:3] for row in first(1)}) == combinations
