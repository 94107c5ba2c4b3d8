"""Several stages in one process: the same ids, the same bytes, and nothing left behind."""

from collections.abc import Generator
from typing import Any

import pytest
from engines import DEMO, ORACLE, answer, load_quietly, request, spec, split_engine

from exo_node.placement.errors import InvalidCheckpoint, LoadFailed
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.engine import Delta

STORY: dict[str, Any] = next(row for row in ORACLE if row["prompt"] == "Tell me a story.")


@pytest.mark.parametrize("bounds", [(0, 8, 16), (0, 3, 16), (0, 1, 6, 15, 16)], ids=str)
def test_stages_give_the_oracles_ids(bounds: tuple[int, ...]) -> None:
    engine, _, _ = split_engine(bounds)
    for row in ORACLE[:2]:
        assert list(answer(engine, request(row["prompt_ids"])).ids) == row["greedy_ids"]


def test_prefill_in_chunks_over_stages_gives_the_same_ids() -> None:
    engine, _, _ = split_engine((0, 5, 11, 16), prefill_chunk=4)
    assert list(answer(engine, request(STORY["prompt_ids"])).ids) == STORY["greedy_ids"]


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
    engine, workers, _ = split_engine((0, 8, 12, 16))
    steps = engine.generate(request(STORY["prompt_ids"]))
    while not isinstance(next(steps), Delta):
        pass
    assert [worker.live_requests for worker in workers] == [1, 1]
    assert all(worker.cache_bytes() > 0 for worker in workers)
    steps.close()
    assert [worker.live_requests for worker in workers] == [0, 0]
    assert [worker.cache_bytes() for worker in workers] == [0, 0]


def test_requests_in_turn_do_not_mix() -> None:
    engine, _, _ = split_engine((0, 8, 16))
    rows = ORACLE[:3]
    running: list[Generator[Any] | None] = [
        engine.generate(request(row["prompt_ids"], request=f"r{i}")) for i, row in enumerate(rows)
    ]
    ids: list[list[int]] = [[] for _ in rows]
    while any(running):
        for i, steps in enumerate(running):
            if steps is None:
                continue
            event = next(steps, None)
            if event is None:
                running[i] = None
            elif isinstance(event, Delta):
                ids[i] += event.round.tokens
    assert ids == [row["greedy_ids"] for row in rows]


def test_prompt_chunks_ask_for_no_answer_and_the_last_for_one_row() -> None:
    replies: list[int] = []
    engine, _, _ = split_engine(
        (0, 8, 16), lambda frame: replies.append(frame.hidden.reply), prefill_chunk=4
    )
    prompt = STORY["prompt_ids"]
    assert len(prompt) == 13
    _ = answer(engine, request(prompt, max_tokens=2))
    assert replies == [pb.REPLY_NONE] * 3 + [pb.REPLY_LAST, pb.REPLY_ALL]


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(LoadFailed, match="16"):
        _ = load_quietly(spec(DEMO, 8, 17, stage=1, num_stages=2))


def test_a_stage_of_another_copy_of_the_model_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match="same revision"):
        _ = load_quietly(spec(checkpoint_sha256="0" * 64))
