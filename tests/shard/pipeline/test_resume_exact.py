"""A resumed answer is the answer that would have been given, on backends that round by row count.

The engine is the real one on a small checkpoint, whole or in three stages; every linear layer is
perturbed by its number of rows, as kernels chosen by it would do.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engines import Answer, answer, engine_of, load_quietly, request
from pipelines import PROMPT, TOKENS, Pipeline, small_pipeline
from shims import by_rows, perturb
from small import small_spec

from exo_node.mtp.types import Round, Sampling
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.text_engine import TextEngine

SIZE = 0.4
"""Size of the perturbation."""


def whole() -> TextEngine:
    stage_spec = small_spec(native_mtp=True)
    loaded = load_quietly(stage_spec)
    assert perturb(loaded.model.model, by_rows, size=SIZE) > 10
    return engine_of(loaded, stage_spec)


def split(observe: Callable[[pb.Frame], None] = lambda _: None) -> Pipeline:
    return small_pipeline(numbers=by_rows, size=SIZE, observe=observe)


@pytest.fixture(scope="module")
def engines() -> dict[str, TextEngine]:
    return {"whole": whole(), "split": split().engine}


def undisturbed(engine: TextEngine, k: int, **changes: Any) -> Answer:
    return answer(engine, request(PROMPT, k, TOKENS, ignore_eos=True, **changes))


@functools.cache
def whole_answer(engine: TextEngine, k: int) -> Answer:
    """`undisturbed`, once for all tests that share the engine."""
    return undisturbed(engine, k)


def resumed(engine: TextEngine, first: Answer, cut: int, k: int, **changes: Any) -> Answer:
    """Another attempt, after `cut` rounds of the first one were handed out."""
    log = first.rounds[:cut]
    engine_request = request(PROMPT, k, TOKENS, ignore_eos=True, attempt=2, replay=log, **changes)
    return answer(engine, engine_request)


@pytest.mark.smoke
def test_penalties_count_the_tokens_of_the_earlier_attempt(engines: dict[str, TextEngine]) -> None:
    greedy = Sampling()
    # What was said draws what comes: the small model hardly repeats itself of its own accord.
    penalised = {"sampling": replace(greedy, presence_penalty=-1.0)}
    first = undisturbed(engines["split"], 0, **penalised)
    assert first.ids != whole_answer(engines["split"], 0).ids
    assert resumed(engines["split"], first, 12, 0, **penalised).ids == first.ids[12:]


def test_recorded_forwards_are_repeated_by_blocks_that_say_which() -> None:
    """Each is answered with word that it was computed; a row after the last of them is not."""
    frames: list[pb.Frame] = []
    engine = split(frames.append).engine
    first = undisturbed(engine, 0)
    frames.clear()
    _ = resumed(engine, first, 25, 0)
    hidden = [f.hidden for f in frames if f.WhichOneof("kind") == "hidden" and f.hidden.stage == 1]
    assert [h.reply for h in hidden] == [pb.REPLY_COMPUTED] * 3 + [pb.REPLY_ALL] * 5
    assert [[(f.rows, f.kept_rows) for f in h.replayed] for h in hidden[:4]] == [
        [],
        [(1, 1)] * 16,
        [(1, 1)] * 8,
        [],
    ]


@pytest.mark.parametrize("cut", [2, 9])
def test_stages_continue_from_drafts_of_a_whole_model_as_it_does(
    engines: dict[str, TextEngine], cut: int
) -> None:
    """Rows that were rejected are written, and taken back, on each of them."""
    first = undisturbed(engines["whole"], 2, top_logprobs=0)
    rejected = [
        round_ for round_ in first.rounds[1:cut] if len(round_.tokens) < round_.forward.rows
    ]
    assert rejected, "it shows nothing"
    rest = [resumed(engine, first, cut, 0, top_logprobs=0).rounds for engine in engines.values()]
    assert rest[0] == rest[1] != ()


# ----------------------------------------------------- what is lost is read again by every stage


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return split()


@pytest.fixture(scope="module")
def expected(pipeline: Pipeline) -> tuple[Round, ...]:
    return pipeline.rounds()


@pytest.mark.smoke
@pytest.mark.parametrize("lost", [(1,), (2,), (1, 2), (0,), (0, 1, 2)])
def test_an_answer_continues_when_stages_were_lost(
    pipeline: Pipeline, expected: tuple[Round, ...], lost: tuple[int, ...]
) -> None:
    name = "lost-" + "-".join(map(str, lost))
    pipeline.lose(max(1, *lost, 0), 20)
    log = pipeline.until_lost(name=name)
    assert log == expected[:20]
    assert pipeline.engine.cache_bytes() == 0, "nothing is kept for the next attempt"
    assert [worker.live_requests for worker in pipeline.workers] == [0, 0]
    for number in {*lost, max(1, *lost, 0)}:
        pipeline.replace(number)
    assert pipeline.rounds(attempt=2, replay=log, name=name) == expected[20:]
    assert pipeline.forwards.count(1) == pipeline.forwards.count(2) == len(expected)


def test_a_second_loss_while_the_first_is_mended_changes_nothing(
    pipeline: Pipeline, expected: tuple[Round, ...]
) -> None:
    pipeline.lose(1, 20)
    log = pipeline.until_lost(name="second")
    pipeline.replace(1)
    pipeline.lose(2, 0)
    assert pipeline.until_lost(name="second", attempt=2, replay=log) == ()
    pipeline.replace(2)
    assert pipeline.rounds(attempt=3, replay=log, name="second") == expected[20:]


def test_shared_rounds_of_a_log_are_not_called_measured_where_none_was_shared_yet() -> None:
    """Later stages say only with a shared round whether it has the bits of single ones."""
    engine = split().engine
    first = undisturbed(engine, 0)
    log = [replace(r, forward=replace(r.forward, batch=2)) for r in first.rounds[:17]]
    again = request(PROMPT, 0, TOKENS, ignore_eos=True, attempt=2, replay=log)
    end = answer(engine, again).end
    assert end.stats.batched_tokens and end.batch_identity == "off"
