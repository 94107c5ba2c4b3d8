"""A prompt beside answers in a pipeline: who waits for whom, in virtual time, on real stages."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from engines import request
from paced import CHUNK_S, ROW_S, ROWS, Forward, PacedAnswer, PacedPipeline
from small import PROMPT

CHUNKS = 12
"""Chunks of a long prompt."""
ANSWERS = 3


def prompt(number: int, chunks: int = CHUNKS) -> list[int]:
    """Each chunk begins with an id that tells whose it is."""
    rows = itertools.islice(itertools.cycle(PROMPT), chunks * ROWS)
    return [number if i % ROWS == 0 else token for i, token in enumerate(rows)]


def short(number: int) -> list[int]:
    return [40 + number, *PROMPT[:2]]


@pytest.fixture(params=[(2, 1), (3, 3)], ids=["two", "three, one slow"])
def pipeline(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PacedPipeline]:
    paced = PacedPipeline(monkeypatch, *request.param)
    yield paced
    paced.end()
    assert paced.held_bytes == [0] * paced.stages


def read(pipeline: PacedPipeline, number: int, **changes: bool) -> PacedAnswer:
    return pipeline.ask(request(prompt(number), max_tokens=2, ignore_end=True, **changes))


def answers(pipeline: PacedPipeline, count: int = ANSWERS) -> list[PacedAnswer]:
    paced_answers = [
        pipeline.ask(request(short(i), max_tokens=400, ignore_end=True)) for i in range(count)
    ]
    _ = pipeline.until(lambda: all(len(each.ids) > 3 for each in paced_answers))
    return paced_answers


def first_token(pipeline: PacedPipeline, paced_answer: PacedAnswer) -> float:
    return pipeline.until(lambda: bool(paced_answer.ids))


def of(chunks: Sequence[Forward], number: int) -> list[Forward]:
    return [chunk for chunk in chunks if chunk.first_id == number]


@pytest.mark.parametrize("prompts", [1, 3])
def test_an_answer_waits_for_a_chunk_on_each_stage_at_most(
    pipeline: PacedPipeline, prompts: int
) -> None:
    others = answers(pipeline)
    start, joined = pipeline.now, [read(pipeline, 7 + i) for i in range(prompts)]
    end = max(first_token(pipeline, each) for each in joined)
    # On each stage the chunk under way, a row of each other answer, and one of its own.
    stages = pipeline.stages - 1 + pipeline.slow
    round_s = stages * (CHUNK_S + 2 * ANSWERS * ROW_S)
    assert max(other.gap(start, end) for other in others) <= round_s
    assert pipeline.refused == 0


def test_a_prompt_waits_for_a_row_of_each_answer_behind_each_chunk(
    pipeline: PacedPipeline,
) -> None:
    start, alone = pipeline.now, read(pipeline, 7)
    alone_s = first_token(pipeline, alone) - start
    # The slowest stage stood still for its first chunk only.
    assert alone_s == (CHUNKS * pipeline.slow + pipeline.stages - 1) * CHUNK_S
    _ = answers(pipeline)
    start, beside = pipeline.now, read(pipeline, 8)
    beside_s = first_token(pipeline, beside) - start
    assert beside_s <= alone_s * (1 + 1.5 * ANSWERS * ROW_S / CHUNK_S)


def test_a_prompt_passes_those_in_the_background(pipeline: PacedPipeline) -> None:
    behind = read(pipeline, 7, background=True)
    _ = pipeline.until(lambda: len(pipeline.chunks(0)) == 5)
    start, front = pipeline.now, read(pipeline, 8)
    end = first_token(pipeline, front)
    assert not behind.ids
    # Those that were under way already, and none that set out later.
    last = pipeline.stages - 1
    assert len(of(pipeline.chunks(last, start), 7)) <= pipeline.stages + 1
    assert end - start <= (CHUNKS + 2 * pipeline.stages) * pipeline.slow * CHUNK_S
    _ = pipeline.until(lambda: bool(behind.ended))
    assert behind.ended == [None]


def test_a_cancelled_prompt_stops_within_a_chunk_on_every_stage(pipeline: PacedPipeline) -> None:
    _ = answers(pipeline)
    cancelled = read(pipeline, 7)
    _ = pipeline.until(lambda: len(pipeline.chunks(pipeline.stages - 1)) >= 4 + ANSWERS)
    start = pipeline.now
    pipeline.cancel(cancelled)
    after = read(pipeline, 8)
    _ = pipeline.until(lambda: bool(after.ended))
    for stage in range(pipeline.stages):
        assert len(of(pipeline.chunks(stage, start), 7)) <= 1
    assert pipeline.refused == 0
