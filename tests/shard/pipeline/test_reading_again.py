"""A stage is lost before an answer has begun, or while what was recorded of it is rebuilt.

Three stages of a small model, perturbed by their rows.
"""

from dataclasses import replace

import pytest
from pipelines import PROMPT, Pipeline, small_pipeline
from shims import by_rows

from exo_node.mtp.types import Forward, Round

CHUNK = 8
FEW = 4
LONG = (PROMPT * 4)[:46]
"""A prompt of six chunks, the last one shorter."""


@pytest.fixture
def pipeline() -> Pipeline:
    return small_pipeline(chunk=CHUNK, numbers=by_rows, size=0.4)


@pytest.fixture(scope="module")
def expected() -> tuple[Round, ...]:
    return small_pipeline(chunk=CHUNK, numbers=by_rows, size=0.4).rounds(LONG, FEW)


@pytest.mark.parametrize("after", [0, 2, 5, 6])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_prompt_is_read_again_by_all_stages(
    pipeline: Pipeline, expected: tuple[Round, ...], lost: int, after: int
) -> None:
    """The last loss comes between the last chunk and the next row."""
    pipeline.lose(lost, after)
    rounds = pipeline.until_lost(LONG, FEW, name="r1")
    assert rounds == expected[: after == 6]
    assert pipeline.forwards.count(lost) == after
    pipeline.replace(lost)
    assert pipeline.rounds(LONG, FEW, name="r1", attempt=2) == expected
    assert pipeline.forwards == [1, 2] * (6 + FEW - 1)


@pytest.mark.parametrize("after", [1, 2], ids=["log", "row"])
def test_a_log_of_rejected_drafts_is_repeated_on_every_stage(
    pipeline: Pipeline, after: int
) -> None:
    """A stage that was lost after such forwards leaves rows of no answer on the others."""
    prompt = PROMPT[:CHUNK]
    first = pipeline.rounds(prompt, FEW)[0]
    rejected = Round((first.tokens[0],), 2, 0, Forward(len(prompt), 3), first.logprobs)
    log = (first, rejected, replace(rejected, forward=Forward(len(prompt) + 1, 3)))
    expected = pipeline.rounds(prompt, FEW, name="r1", attempt=2, replay=log)
    assert pipeline.forwards == [1, 2] + [1, 1, 2, 2] + [1, 2] * (FEW - 3)
    pipeline.lose(2, after)
    assert pipeline.until_lost(prompt, FEW, name="r2", attempt=2, replay=log) == ()
    pipeline.replace(2)
    assert pipeline.rounds(prompt, FEW, name="r2", attempt=3, replay=log) == expected
    assert pipeline.forwards == [1, 2] + [1, 1, 2, 2] + [1, 2] * (FEW - 3)
