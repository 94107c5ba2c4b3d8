"""A spare that was sent copies goes on with little to compute, and with the numbers of before.

Three stages of a small model, perturbed by their rows. What is read or rebuilt by whom is
counted in forwards.
"""

from dataclasses import replace

import pytest
from pipelines import PROMPT, Pipeline

from exo_node.mtp.types import Forward, Round
from exo_node.shard.pipeline.state_store import StateStore

EVERY = 8
"""Steps from one copy to the next."""
CHUNK = 8
FEW = 4
TOKENS = 28
LONG = (PROMPT * 4)[:46]
"""Of six chunks, the last one shorter."""


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(copied=EVERY, tokens=TOKENS)


@pytest.fixture(scope="module")
def expected() -> tuple[Round, ...]:
    return Pipeline(tokens=TOKENS).undisturbed()


def reading(copied: int) -> Pipeline:
    """Reads prompts in chunks of 8, and says little."""
    return Pipeline(copied=copied, prefill_chunk=CHUNK, tokens=FEW)


@pytest.fixture(scope="module")
def long_answer() -> tuple[Round, ...]:
    return reading(0).undisturbed(LONG)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_spare_computes_what_came_after_its_last_copy(
    pipeline: Pipeline, expected: tuple[Round, ...], lost: int
) -> None:
    pipeline.lose(lost, 20)
    log = pipeline.until_lost(request="r1")
    assert log == expected[:20]
    pipeline.replace(lost)
    assert pipeline.rest(log, 2, request="r1") == expected[20:]
    left = len(expected) - 20
    assert pipeline.forwards.count(3 - lost) == left
    again = pipeline.forwards.count(lost) - left
    assert 0 < again <= EVERY, "without copies it would have been 20"


def test_a_generators_spare_does_so_too(
    pipeline: Pipeline, expected: tuple[Round, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.lose(1, 20)
    log = pipeline.until_lost(request="r1")
    pipeline.workers[0].forward = type(pipeline.workers[0]).forward.__get__(pipeline.workers[0])
    pipeline.replace(0)
    begun = list[int]()
    take = StateStore.take

    def taken(copies: StateStore, name: str, attempt: int, position: int) -> object:
        state = take(copies, name, attempt, position)
        begun.append(-1 if state is None else state.position)
        return state

    monkeypatch.setattr(StateStore, "take", taken)
    assert pipeline.rest(log, 2, request="r1") == expected[20:]
    committed = len(PROMPT) + 19
    assert committed - EVERY <= begun[0] < committed
    assert pipeline.forwards.count(1) == pipeline.forwards.count(2) == len(expected) - 20


@pytest.mark.parametrize("second", [0, 1, 2])
def test_a_second_loss_before_the_answer_went_on_finds_copies_too(
    pipeline: Pipeline, expected: tuple[Round, ...], second: int
) -> None:
    """Stage 1 is lost, its spare rebuilds, and then it, or another one, is lost."""
    pipeline.lose(1, 20)
    log = pipeline.until_lost(request="r1")
    pipeline.replace(1)
    pipeline.lose(1, 0)
    assert pipeline.until_lost(request="r1", attempt=2, replay=log) == ()
    pipeline.replace(1)
    if second != 1:
        pipeline.replace(second)
    assert pipeline.rest(log, 3, request="r1") == expected[20:]
    again = pipeline.forwards.count(2) - (len(expected) - 20)
    assert again <= (EVERY if second == 2 else 0)


def test_all_may_be_lost_at_once_and_go_on_from_copies_of_different_age(
    pipeline: Pipeline, expected: tuple[Round, ...]
) -> None:
    pipeline.lose(2, 22)
    log = pipeline.until_lost(request="r1")
    for number in (0, 1, 2):
        pipeline.replace(number)
    assert pipeline.rest(log, 2, request="r1") == expected[22:]
    left = len(expected) - 22
    assert all(pipeline.forwards.count(n) - left <= EVERY + 1 for n in (1, 2))


# ------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("after", [0, 2, 5])
@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("copied", [0, 1], ids=["bare", "copied"])
def test_a_prompt_is_read_on_where_a_stage_was_lost(
    long_answer: tuple[Round, ...], copied: int, lost: int, after: int
) -> None:
    pipeline = reading(copied)
    pipeline.lose(lost, after)
    assert pipeline.until_lost(LONG, request="r1") == ()
    before = pipeline.forwards.count(lost)
    assert before == after
    pipeline.replace(lost)
    assert pipeline.rest((), 2, LONG, request="r1") == long_answer
    steps = FEW - 1
    read = {n: pipeline.forwards.count(n) - steps for n in (1, 2)}
    assert read[lost] == (6 - after if copied else 6)
    # The one before the lost stage was a chunk ahead; the one behind it had as many.
    assert read[3 - lost] == (6 - after - 1 if lost == 2 else 6 - after)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("copied", [0, 1], ids=["bare", "copied"])
def test_a_prompt_that_was_read_is_not_read_again_for_its_first_token(
    long_answer: tuple[Round, ...], copied: int, lost: int
) -> None:
    """The attempt was lost between the last chunk and the first token that anybody saw."""
    pipeline = reading(copied)
    pipeline.lose(1, 6)
    [_] = pipeline.until_lost(LONG, request="r1")
    pipeline.workers[0].forward = type(pipeline.workers[0]).forward.__get__(pipeline.workers[0])
    pipeline.replace(lost)
    assert pipeline.rest((), 2, LONG, request="r1") == long_answer
    read = {n: pipeline.forwards.count(n) - (FEW - 1) for n in (1, 2)}
    bare = {1: 6 if lost == 1 else 0, 2: 6 if lost == 2 else 0}
    assert read == ({1: 0, 2: 0} if copied else bare)


def test_a_log_of_rejected_drafts_is_repeated_on_every_stage(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that was lost between such a forward and its rollback holds rows of no answer."""
    first = pipeline.undisturbed()[0]
    rejected = Round((first.tokens[0],), 2, 0, Forward(len(PROMPT), 3), first.logprobs)
    log = (first, rejected, replace(rejected, forward=Forward(len(PROMPT) + 1, 3)))
    expected = pipeline.rest(log, 2, request="r1")
    pipeline.lose(2, 2)
    assert pipeline.until_lost(request="r2", attempt=2, replay=log) == ()
    pipeline.replace(2)
    monkeypatch.setattr(StateStore, "take", None)
    assert pipeline.rest(log, 3, request="r2") == expected
    assert pipeline.forwards.count(1) == pipeline.forwards.count(2)
