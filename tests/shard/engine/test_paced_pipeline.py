"""A prompt beside answers in a pipeline: who waits for whom, in virtual time, on real stages."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from engines import answer, request
from paced import CHUNK_S, ROW_S, ROWS, Forward, PacedPipeline, Told
from small import PROMPT, small_engine

from exo_node.placement.errors import PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.text_engine import TextEngine
from exo_node.shard.pipeline import ring

CHUNKS = 12
"""Chunks of a long prompt."""
ANSWERS = 3
DEADLINE_S = 10.0


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


@pytest.fixture(scope="module")
def whole() -> TextEngine:
    return small_engine(prefill_chunk=ROWS)


def read(pipeline: PacedPipeline, number: int, **changes: bool) -> Told:
    return pipeline.ask(request(prompt(number), max_tokens=2, ignore_end=True, **changes))


def answers(pipeline: PacedPipeline, count: int = ANSWERS) -> list[Told]:
    paced_answers = [
        pipeline.ask(request(short(i), max_tokens=400, ignore_end=True)) for i in range(count)
    ]
    _ = pipeline.until(lambda: all(len(each.ids) > 3 for each in paced_answers))
    return paced_answers


def first_token(pipeline: PacedPipeline, paced_answer: Told) -> float:
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


def test_ids_are_those_of_each_alone(pipeline: PacedPipeline, whole: TextEngine) -> None:
    others = answers(pipeline)
    joined = [read(pipeline, 7), read(pipeline, 8)]
    _ = pipeline.until(lambda: all(each.ended for each in joined))
    pipeline.end()
    for number, each in zip((7, 8), joined, strict=True):
        assert each.ended == [None]
        expected = answer(whole, request(prompt(number), max_tokens=2, ignore_end=True))
        assert tuple(each.ids) == expected.ids
    for number, each in enumerate(others):
        expected = answer(whole, request(short(number), max_tokens=len(each.ids), ignore_end=True))
        assert tuple(each.ids) == expected.ids
    assert pipeline.refused == 0


def test_prompts_take_turns_on_every_stage(pipeline: PacedPipeline) -> None:
    first, second = read(pipeline, 7), read(pipeline, 8)
    _ = pipeline.until(lambda: bool(first.ids and second.ids))
    for stage in range(pipeline.stages):
        whose = [chunk.first_id for chunk in pipeline.chunks(stage)]
        ahead = list(itertools.accumulate(1 if number == 7 else -1 for number in whose))
        assert max(map(abs, ahead)) <= pipeline.stages + 1, whose


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


def test_chunks_that_nobody_hears_of_end_their_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "PREFILL_DEADLINE_S", DEADLINE_S)
    pipeline = PacedPipeline(monkeypatch, 2)
    (other,) = answers(pipeline, 1)

    def loses(frame: pb.Frame) -> bool:
        return frame.HasField("computed") and frame.request == "unheard"

    pipeline.loses = loses
    start = pipeline.now
    unread = pipeline.ask(request(prompt(7), max_tokens=2, request="unheard"))
    end = pipeline.until(lambda: bool(unread.ended))
    assert isinstance(unread.ended[0], PeerLost) and "did not answer" in str(unread.ended[0])
    assert DEADLINE_S <= end - start <= DEADLINE_S + 3 * CHUNK_S
    after = read(pipeline, 8)
    _ = pipeline.until(lambda: bool(after.ended))
    assert after.ended == [None]
    assert not other.ended
    pipeline.end()
    assert pipeline.held_bytes == [0, 0]


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
