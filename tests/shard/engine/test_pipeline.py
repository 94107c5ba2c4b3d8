"""Several stages in one process: the same ids, the same bytes, and nothing left behind."""

from collections.abc import Generator
from typing import Any

import pytest
from engines import DEMO, ORACLE, answer, load_quietly, request, spec, split_engine
from small import PROMPT, small_checkpoint, small_engine

from exo_node.placement.errors import InvalidCheckpoint, LoadFailed
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.events import Delta
from exo_node.shard.engine.text_engine import TextEngine


def test_stages_give_the_oracles_ids() -> None:
    engine, _, _ = split_engine((0, 1, 6, 15, 16))
    for row in ORACLE[:2]:
        assert list(answer(engine, request(row["prompt_ids"])).ids) == row["greedy_ids"]


@pytest.fixture(scope="module")
def whole() -> TextEngine:
    return small_engine()


@pytest.mark.parametrize(
    ("bounds", "chunk"), [((0, 2, 4), 256), ((0, 1, 4), 256), ((0, 1, 3, 4), 4)], ids=str
)
def test_stages_give_the_whole_models_ids(
    whole: TextEngine, bounds: tuple[int, ...], chunk: int
) -> None:
    engine, _, _ = split_engine(bounds, folder=small_checkpoint(), prefill_chunk=chunk)
    engine_request = request(PROMPT, 0, 50, top_logprobs=0)
    got, expected = answer(engine, engine_request), answer(whole, engine_request)
    assert got.ids == expected.ids
    logprobs = [[r.logprobs for r in each.rounds] for each in (got, expected)]
    assert logprobs[0] == logprobs[1]


def test_each_stage_reads_and_holds_only_its_own_layers() -> None:
    _, _, loaded = split_engine((0, 6, 16))
    whole = load_quietly(spec())
    assert sum(stage.weight_bytes for stage in loaded) == whole.weight_bytes
    generator, second = loaded
    assert second.weight_bytes < generator.weight_bytes + whole.weight_bytes // 2
    for stage in loaded:
        # float32 in memory, bfloat16 on disk; what else is read is headers and the tokenizer.
        assert stage.checkpoint_bytes_read < stage.weight_bytes // 2 + 800_000


def test_release_frees_every_stage() -> None:
    engine, workers, _ = split_engine((0, 1, 3, 4), folder=small_checkpoint())
    steps = engine.generate(request(PROMPT))
    while not isinstance(next(steps), Delta):
        pass
    assert [worker.live_requests for worker in workers] == [1, 1]
    assert all(worker.cache_bytes() > 0 for worker in workers)
    steps.close()
    assert [worker.live_requests for worker in workers] == [0, 0]
    assert [worker.cache_bytes() for worker in workers] == [0, 0]


def test_requests_in_turn_do_not_mix(whole: TextEngine) -> None:
    engine, _, _ = split_engine((0, 2, 4), folder=small_checkpoint())
    engine_request = [request(row["prompt_ids"], 0, 10 * i) for i, row in enumerate(ORACLE[:3], 1)]
    running: list[Generator[Any] | None] = [engine.generate(each) for each in engine_request]
    ids: list[list[int]] = [[] for _ in engine_request]
    while any(running):
        for i, steps in enumerate(running):
            if steps is None:
                continue
            event = next(steps, None)
            if event is None:
                running[i] = None
            elif isinstance(event, Delta):
                ids[i] += event.round.tokens
    assert ids == [list(answer(whole, each).ids) for each in engine_request]


def test_prompt_chunks_ask_for_no_answer_and_the_last_for_one_row() -> None:
    replies: list[int] = []
    engine, _, _ = split_engine(
        (0, 2, 4),
        lambda frame: replies.append(frame.hidden.reply),
        small_checkpoint(),
        prefill_chunk=4,
    )
    assert len(PROMPT) == 13
    _ = answer(engine, request(PROMPT, max_tokens=2))
    assert replies == [pb.REPLY_COMPUTED] * 3 + [pb.REPLY_LAST, pb.REPLY_ALL]


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(LoadFailed, match="16"):
        _ = load_quietly(spec(DEMO, 8, 17, stage=1, num_stages=2))


def test_a_stage_of_another_copy_of_the_model_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match="same revision"):
        _ = load_quietly(spec(checkpoint_sha256="0" * 64))
