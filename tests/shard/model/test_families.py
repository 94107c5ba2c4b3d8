"""Each family's head and backbone compute what transformers does, and drafting changes no token."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from families import ATOL, CASES, FED, NEXTN, ORACLE, generated, opened, row, stage_of
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model
from models import Family as Name
from models import make_checkpoint

from exo_node.mtp.caches.rollback import cache_arrays, rollback
from exo_node.mtp.families.family import draft_logits
from exo_node.mtp.families.head import HiddenKind
from exo_node.shard.model.stage_model import StageModel


def close(actual: mx.array, expected: Any) -> bool:
    return bool(mx.allclose(actual, mx.array(expected), rtol=0, atol=ATOL).item())


@pytest.mark.parametrize(
    ("name", "fed"),
    [pytest.param(*case, marks=pytest.mark.smoke if case[0] in NEXTN else ()) for case in CASES],
)
def test_hidden_logits_and_drafts_are_those_of_transformers(name: str, fed: HiddenKind) -> None:
    it = opened(name, fed)
    for prompt, answer in zip(it.prompts, it.expected, strict=True):
        ids = [*prompt, *answer["greedy_ids"]]
        hidden = it.family.hidden(row(ids[:-1]), it.stage.make_caches())
        logits = it.family.logits(hidden)[0]
        output = it.head(hidden, it.family.embed(row(ids[1:])), KVCache())
        drafts = draft_logits(it.family, it.head)(output)[0]
        rows_of_logits = len(answer["logits"])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answer["greedy_ids"]
        assert drafts.argmax(-1).tolist() == answer["draft_ids"]
        assert close(logits[-rows_of_logits:], answer["logits"])
        assert close(hidden[0, -rows_of_logits:], answer["hidden"])
        assert close(drafts[-rows_of_logits:], answer["draft_logits"])


@pytest.mark.parametrize(
    ("name", "fed", "k"),
    [(name, fed, k) for name, fed in CASES for k in range(4) if k or fed == FED[name][0]],
)
def test_the_engine_gives_the_oracles_ids_and_counts(name: str, fed: HiddenKind, k: int) -> None:
    it = opened(name, fed)
    for number, (prompt, answer) in enumerate(zip(it.prompts, it.expected, strict=True)):
        if k not in (0, number + 1):  # drafts: another prompt and chunk for each depth
            continue
        rounds = generated(it, prompt, k, chunk=(512, 5, 3)[number])
        assert [token for r in rounds for token in r.tokens] == answer["greedy_ids"]
        if k:
            drafted = [r for r in rounds if r.drafted]
            assert answer["K"][str(k)] == {
                "rounds": len(drafted),
                "drafted": sum(r.drafted for r in drafted),
                "accepted": sum(r.accepted for r in drafted),
            }


@pytest.mark.parametrize(("name", "fed"), CASES)
def test_hidden_and_logits_make_up_the_models_own_call(name: str, fed: HiddenKind) -> None:
    it = opened(name, fed)
    whole = cast(Any, it.stage.model)(row(it.prompts[2]), cache=it.stage.make_caches())
    hidden = it.family.hidden(row(it.prompts[2]), it.stage.make_caches())
    assert mx.array_equal(it.family.logits(hidden), whole)


def forward(it: StageModel, caches: list[Any], ids: Sequence[int]) -> mx.array:
    logits = cast(Any, it.model)(row(ids), cache=caches)[0]
    mx.eval(logits, cache_arrays(caches))
    return logits


def quantised_stage(name: Name, folder: Path) -> StageModel:
    checkpoint_folder = make_checkpoint(folder / name, name, raw=False, bits=4, layers=4)
    return stage_of(checkpoint_folder, 4, mx.bfloat16)


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_next",
        pytest.param("deepseek_v3", marks=pytest.mark.smoke),
        *("glm4_moe", "qwen3_next 4 bits", "deepseek_v3 4 bits", "glm4_moe 4 bits"),
    ],
)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    name, _, bits = request.param.partition(" ")
    if bits:
        return quantised_stage(name, tmp_path_factory.mktemp("quantised"))
    return opened(name, "post_norm").stage


PROMPT = list(range(2, 41, 2))
BLOCK, AFTER = [7, 50, 33, 12], [20, 41]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_taken_back_were_never_written(stage: StageModel, rows: int) -> None:
    read = stage.make_caches()
    _ = forward(stage, read, PROMPT)
    for count in range(rows + 1):
        rolled, never = copy.deepcopy(read), copy.deepcopy(read)
        _ = forward(stage, rolled, BLOCK[:rows])
        rollback(rolled, rows - count)
        if count:
            _ = forward(stage, never, BLOCK[:count])
        assert mx.array_equal(forward(stage, rolled, AFTER), forward(stage, never, AFTER))


def test_a_block_is_computed_as_its_single_rows_are(stage: StageModel) -> None:
    single, block = stage.make_caches(), stage.make_caches()
    for caches in (single, block):
        _ = forward(stage, caches, PROMPT)
    rows = [forward(stage, single, [token]) for token in BLOCK]
    assert mx.array_equal(forward(stage, block, BLOCK), mx.concatenate(rows))


def test_the_stand_ins_compute_what_mlx_lm_does() -> None:
    """Blocks of DeepSeek's attention aside, which mlx-lm rounds otherwise than single rows."""
    for name in FED:
        it = opened(name, "post_norm")
        stock: Any = load_model(ORACLE / name, strict=False, model_config={"model_type": name})[0]
        stock.set_dtype(mx.float32)
        theirs, ours = make_prompt_cache(stock), it.stage.make_caches()
        for ids in (PROMPT, [3], BLOCK, [9]):
            expected, got = stock(row(ids), cache=theirs)[0], forward(it.stage, ours, ids)
            exact = mx.array_equal(got, expected)
            assert exact or (name == "deepseek_v3" and mx.allclose(got, expected, atol=ATOL)), name
