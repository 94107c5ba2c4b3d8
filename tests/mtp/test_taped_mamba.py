"""Mamba2 layers with a tape: blocks compute what single steps do, and rows can be taken back."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from families import stage_of
from models import make_checkpoint
from tiny import row_of_ids

from exo_node.mtp.caches.batch_caches import drop_rejected, left_aligned
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.rollback import cache_arrays, can_roll_back, rollback
from exo_node.mtp.caches.window import MAX_ROLLBACK_ROWS
from exo_node.shard.model.stage_model import StageModel

LAYERS = 4
PROMPT = 90


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    folder = tmp_path_factory.mktemp("nemotron") / "model"
    return stage_of(make_checkpoint(folder, "nemotron_h", dtype="float32", vocab=64), LAYERS)


def forward(stage: StageModel, caches: Sequence[Any], tokens: mx.array) -> mx.array:
    model: Any = stage.model
    logits: mx.array = model(tokens.reshape(-1, tokens.shape[-1]), cache=caches)
    mx.eval(logits, cache_arrays(caches))
    return logits


def read(stage: StageModel, *blocks: mx.array) -> list[Any]:
    caches = stage.make_caches()
    for block in blocks:
        _ = forward(stage, caches, block)
    return caches


@pytest.mark.parametrize("prompt", [0, 1, PROMPT])
@pytest.mark.parametrize("rows", [2, 4, 33, MAX_ROLLBACK_ROWS])
def test_a_block_computes_what_single_steps_do(stage: StageModel, prompt: int, rows: int) -> None:
    before = [row_of_ids(prompt)] if prompt else []
    single, block = read(stage, *before), read(stage, *before)
    ids = row_of_ids(rows, seed=3)
    steps = [forward(stage, single, ids[i : i + 1]) for i in range(rows)]
    assert mx.array_equal(forward(stage, block, ids), mx.concatenate(steps, axis=1))
    after = row_of_ids(1, seed=9)
    assert mx.array_equal(forward(stage, block, after), forward(stage, single, after))


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 17])
def test_any_number_of_rows_can_be_taken_back(stage: StageModel, rows: int) -> None:
    assert can_roll_back(stage.make_caches())
    block, after = row_of_ids(rows, seed=4), row_of_ids(3, seed=5)
    for dropped in range(rows + 1):
        rolled = read(stage, row_of_ids(PROMPT), block)
        rollback(rolled, dropped)
        rest = [block[: rows - dropped]] if rows > dropped else []
        never = read(stage, row_of_ids(PROMPT), *rest)
        assert mx.array_equal(forward(stage, rolled, after), forward(stage, never, after))


def test_a_chunk_of_a_prompt_cannot_be_taken_back(stage: StageModel) -> None:
    caches = read(stage, row_of_ids(MAX_ROLLBACK_ROWS + 1))
    with pytest.raises(AssertionError, match="cannot take 1 rows back"):
        rollback(caches, 1)


@pytest.mark.parametrize(
    ("rows", "kept"),
    [(4, ([1, 3, 4], [4, 4, 4], [2, 1, 3])), (8, ([1, 5, 8], [8, 2, 7], [3, 8, 6]))],
)
def test_each_request_of_a_batch_keeps_its_own_rows(
    stage: StageModel, rows: int, kept: tuple[list[int], ...]
) -> None:
    alone = [read(stage, row_of_ids(70 + 20 * i, seed=i)) for i in range(3)]
    positions = Positions([70, 90, 110])
    together = left_aligned(copy.deepcopy(alone), positions)
    for number, rest in enumerate(kept):
        blocks = [row_of_ids(rows, seed=10 * number + i) for i in range(3)]
        logits = forward(stage, together, mx.stack(blocks))
        drop_rejected(together, rows, rest)
        positions.advance(rest)
        for index, caches in enumerate(alone):
            mine = forward(stage, caches, blocks[index])
            rollback(caches, rows - rest[index])
            assert mx.array_equal(mine[0], logits[index])
