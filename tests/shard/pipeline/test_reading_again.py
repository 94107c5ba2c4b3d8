"""A runner that takes a lost stage's place reads the prompt again, and no other stage does.

Three stages of a small model, perturbed by their rows. What is read or rebuilt by whom is
counted in forwards.
"""

from dataclasses import replace

import pytest
from pipelines import PROMPT, Pipeline

from exo_node.mtp.types import Forward, Round

CHUNK = 8
FEW = 4
LONG = (PROMPT * 4)[:46]
"""Of six chunks, the last one shorter."""


@pytest.fixture
def pipeline() -> Pipeline:
    """Reads prompts in chunks of 8, and says little."""
    return Pipeline(prefill_chunk=CHUNK, tokens=FEW)


@pytest.fixture(scope="module")
def expected() -> tuple[Round, ...]:
    return Pipeline(prefill_chunk=CHUNK, tokens=FEW).undisturbed(LONG)


@pytest.mark.parametrize("after", [0, 2, 5])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_prompt_is_read_on_by_the_stages_that_are_left(
    pipeline: Pipeline, expected: tuple[Round, ...], lost: int, after: int
) -> None:
    pipeline.lose(lost, after)
    assert pipeline.until_lost(LONG, request="r1") == ()
    assert pipeline.forwards.count(lost) == after
    pipeline.replace(lost)
    assert pipeline.rest((), 2, LONG, request="r1") == expected
    steps = FEW - 1
    read = {n: pipeline.forwards.count(n) - steps for n in (1, 2)}
    assert read[lost] == 6
    # The one before the lost stage was a chunk ahead; the one behind it had as many.
    assert read[3 - lost] == (6 - after - 1 if lost == 2 else 6 - after)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_prompt_that_was_read_is_read_again_by_the_new_stage_only(
    pipeline: Pipeline, expected: tuple[Round, ...], lost: int
) -> None:
    """The attempt was lost between the last chunk and the first token that anybody saw."""
    pipeline.lose(1, 6)
    [_] = pipeline.until_lost(LONG, request="r1")
    pipeline.workers[0].forward = type(pipeline.workers[0]).forward.__get__(pipeline.workers[0])
    pipeline.replace(lost)
    assert pipeline.rest((), 2, LONG, request="r1") == expected
    read = {n: pipeline.forwards.count(n) - (FEW - 1) for n in (1, 2)}
    assert read == {1: 6 if lost == 1 else 0, 2: 6 if lost == 2 else 0}


def test_a_log_of_rejected_drafts_is_repeated_on_every_stage(pipeline: Pipeline) -> None:
    """A stage that was lost between such a forward and its rollback holds rows of no answer."""
    first = pipeline.undisturbed()[0]
    rejected = Round((first.tokens[0],), 2, 0, Forward(len(PROMPT), 3), first.logprobs)
    log = (first, rejected, replace(rejected, forward=Forward(len(PROMPT) + 1, 3)))
    expected = pipeline.rest(log, 2, request="r1")
    pipeline.lose(2, 2)
    assert pipeline.until_lost(request="r2", attempt=2, replay=log) == ()
    pipeline.replace(2)
    assert pipeline.rest(log, 3, request="r2") == expected
    assert pipeline.forwards.count(1) == pipeline.forwards.count(2)
