"""Qwen3.8-Flash-Next, of which mlx-lm has no class, against mlx-vlm's own forward of it."""

import copy
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
import qwen4
from chips import M3_MAX, as_on_a_cpu, on_chip, quantised
from engines import answer, engine_of, load_quietly, request, spec
from families import made_family
from mlx import nn
from mlx.utils import tree_flatten
from pipelines import pipeline_of
from qwen4 import LAYERS
from zoo_runs import together_on_one_node

from exo_node.mtp.caches.batch_caches import left_aligned
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.rollback import cache_arrays, rollback
from exo_node.mtp.families.head import HeadSource
from exo_node.mtp.families.weights import load_head
from exo_node.mtp.targets import FamilyTarget
from exo_node.node.store.library import ModelLibrary
from exo_node.node.store.places import in_folders
from exo_node.placement.errors import InvalidCheckpoint, LoadFailed
from exo_node.placement.ids import ModelId
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.checkpoint.model_classes import TABLE
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.drafter import DraftModel
from exo_node.shard.model import vlm_classes
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.open_model import open_model, read_layers
from exo_node.shard.model.small_config import small_config
from exo_node.shard.model.split_check import stage_fault
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.tools.bare_engine import bare_engine, bare_request, ids_of, rounds_of

PROMPT = [(37 * i + 11) % 500 for i in range(21)]
OTHERS = (
    [(53 * i + 7) % 500 for i in range(40)],
    [5, 4095, 9],
    [(11 * i) % 300 for i in range(13)],
)
TOKENS = 24
_KEPT = tempfile.TemporaryDirectory(prefix="exo-qwen4-")


@functools.cache
def pair_of_theirs() -> tuple[Any, Any]:
    """The model and its head, which drafts right at times."""
    config = qwen4.config_of(vocabulary=4096)
    model, head = qwen4.theirs(config), qwen4.their_head(config)
    qwen4.fit(model, head)
    return model, head


def model_of_theirs() -> Any:
    return pair_of_theirs()[0]


@functools.cache
def checkpoint() -> Path:
    config = qwen4.config_of(vocabulary=4096)
    return qwen4.save(Path(_KEPT.name) / "plain", config, qwen4.published(*pair_of_theirs()))


@functools.cache
def stage() -> StageModel:
    model = open_model(checkpoint())
    _ = read_layers(model, 0, LAYERS, mx.float32, outer=True, progress=lambda _part, _total: None)
    return StageModel(model, 0, LAYERS)


@functools.cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    return qwen4.greedy(model_of_theirs(), prompt, TOKENS)[0]


def forward(caches: list[Any], ids: Sequence[int]) -> mx.array:
    logits = cast(Any, stage().model)(mx.array([list(ids)]), cache=caches)[0]
    mx.eval(logits, cache_arrays(caches))
    return logits


@pytest.mark.smoke
def test_single_rows_have_the_bits_of_mlx_vlm() -> None:
    """A prompt too, where it is read so: in one forward mlx-vlm sums a recurrence in chunks."""
    model, theirs, ours = model_of_theirs(), model_of_theirs().make_cache(), stage().make_caches()
    for token in [*PROMPT, *OTHERS[0], 4095, 3, 4]:
        got = model(mx.array([[token]]), cache=theirs).logits[0]
        assert mx.array_equal(got, forward(ours, [token]))


def test_the_publishers_fp8_files_have_the_numbers_of_the_same_files_without_fp8() -> None:
    config = qwen4.config_of(vocabulary=4096)
    packed, whole = qwen4.in_fp8(qwen4.published(*pair_of_theirs()))
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folders = [
        qwen4.save(Path(_KEPT.name) / "fp8", config | fp8, packed),
        qwen4.save(Path(_KEPT.name) / "whole", config, whole),
    ]
    qwen4.name_fp8(folders[0])
    answers = list[Any]()
    for folder in folders:
        fields: dict[str, Any] = {"native_mtp": True, "mtp_hidden": "pre_norm"}
        fields["max_draft_tokens"] = 3
        stage_spec = spec(folder, 0, LAYERS, num_layers=LAYERS, **fields)
        it = load_quietly(stage_spec)
        assert it.head_state == "loaded", it.head_state
        served = engine_of(it, stage_spec)
        answers += [answer(served, request(PROMPT, k, TOKENS)) for k in (0, 3)]
    plain, drafted, plain_of_whole, drafted_of_whole = answers
    assert plain.ids == drafted.ids == plain_of_whole.ids == drafted_of_whole.ids
    assert drafted.rounds == drafted_of_whole.rounds
    logits = [cast(Any, open_model(folder))(mx.array([PROMPT])) for folder in folders]
    assert mx.array_equal(*logits)
    card = ModelLibrary((folders[0].parent,), offline=True).get(ModelId("fp8")).card
    assert card.fp8 and 0 < card.mapped_bytes < card.weight_bytes


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lm_head.weight_scale_inv": mx.ones((1, 1))}, "1 tensors beside the experts are in FP8"),
        ({".ngram_embedding.weight_scale": None}, "have a scale exactly if they are in FP8"),
        ({".experts.1.up_proj.weight_scale_inv": None}, "Missing FP8 scale"),
    ],
)
def test_fp8_files_of_another_form_are_refused_with_the_reason(
    tmp_path: Path, change: dict[str, mx.array | None], why: str
) -> None:
    packed, _ = qwen4.in_fp8(qwen4.published(*pair_of_theirs()))
    for part, value in change.items():
        names = [name for name in packed if name.endswith(part)] or [part]
        packed = {name: each for name, each in packed.items() if name not in names}
        packed |= {} if value is None else dict.fromkeys(names, value)
    folder = qwen4.save(tmp_path / "m", qwen4.config_of(vocabulary=4096), packed)
    with pytest.raises(InvalidCheckpoint, match=why):
        _ = open_model(folder)


def test_a_prompt_in_one_forward_is_close_to_mlx_vlms() -> None:
    got = model_of_theirs()(mx.array([PROMPT]), cache=model_of_theirs().make_cache()).logits[0]
    assert mx.allclose(got, forward(stage().make_caches(), PROMPT), rtol=0, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("before", [0, 9, 21])
def test_a_block_is_its_single_rows_and_rows_taken_back_were_never_written(
    rows: int, before: int
) -> None:
    read, block, after = stage().make_caches(), OTHERS[0][:rows], [20, 4095, 41]
    if before:
        _ = forward(read, PROMPT[:before])
    single = copy.deepcopy(read)
    expected_rows = mx.concatenate([forward(single, [token]) for token in block])
    for count in range(rows + 1):
        rolled, never = copy.deepcopy(read), copy.deepcopy(read)
        assert mx.array_equal(forward(rolled, block), expected_rows)
        rollback(rolled, rows - count)
        if count:
            _ = forward(never, block[:count])
        assert mx.array_equal(forward(rolled, after), forward(never, after))


def test_where_products_depend_on_rows_a_block_is_its_single_rows() -> None:
    """On a stand-in for a chip, in 4 bits: mlx-vlm's own products of several rows have others."""
    with on_chip(M3_MAX):
        with as_on_a_cpu():
            plain = load_quietly(engine_spec(dtype="bfloat16"))
        packed = quantised(plain, "affine").model
        model, read = cast(Any, packed.model), packed.make_caches()
        _ = model(mx.array([PROMPT]), cache=read)
        mx.eval(cache_arrays(read))
        block, single = copy.deepcopy(read), copy.deepcopy(read)
        rows = [model(mx.array([[token]]), cache=single) for token in OTHERS[0][:4]]
        got = model(mx.array([OTHERS[0][:4]]), cache=block)
        assert mx.array_equal(got, mx.concatenate(rows, axis=1))


def engine_spec(**changes: Any) -> pb.StageSpec:
    fields = {"num_layers": LAYERS, "prefill_chunk": 8} | changes
    return spec(checkpoint(), 0, LAYERS, **fields)


@functools.cache
def loaded(*, drafts: bool = False) -> Loaded:
    found = load_quietly(engine_spec(native_mtp=drafts, mtp_hidden="pre_norm", max_draft_tokens=7))
    assert not drafts or found.head_state == "loaded"
    return found


def engine(*, drafts: bool = False, **changes: Any) -> TextEngine:
    fields = {"native_mtp": drafts, "mtp_hidden": "pre_norm", "max_draft_tokens": 7} | changes
    return engine_of(loaded(drafts=drafts), engine_spec(**fields))


@pytest.mark.smoke
def test_answers_have_mlx_vlms_ids() -> None:
    for prompt in (PROMPT, *OTHERS):
        got = answer(engine(), request(prompt, 0, TOKENS, ignore_eos=True)).ids
        assert list(got) == expected(tuple(prompt))


@pytest.mark.parametrize("bounds", [(0, 2, 5), (0, 1, 5), (0, 4, 5), (0, 1, 3, 5)])
def test_stages_have_mlx_vlms_ids(bounds: tuple[int, ...]) -> None:
    split = pipeline_of(bounds, checkpoint(), prefill_chunk=8)
    for prompt in (PROMPT, OTHERS[1]):
        rounds = split.rounds(prompt, TOKENS)
        assert [t for r in rounds for t in r.tokens] == expected(tuple(prompt))
    assert not split.leftovers


def test_requests_that_share_forwards_get_the_ids_that_each_gets_alone() -> None:
    prompts = (PROMPT, *OTHERS)
    ids = together_on_one_node(cast("Any", stage().model), prompts, 8, TOKENS)
    assert ids == [expected(tuple(prompt)) for prompt in prompts]


def test_rows_of_a_batch_have_the_bits_of_each_alone_where_keys_begin_to_be_chosen() -> None:
    """The third row of the longer request is its first that leaves keys out; none of the other."""
    counts, blocks = (4 * qwen4.BUDGET // 4 + 1, 9), ([7, 4095, 33, 12], [5, 6, 8, 9])
    alone, read = list[mx.array](), list[list[Any]]()
    for count, block in zip(counts, blocks, strict=True):
        caches = stage().make_caches()
        _ = forward(caches, PROMPT[:count])
        read.append(copy.deepcopy(caches))
        alone.append(forward(caches, block))
    together = left_aligned(read, Positions(counts))
    logits = cast(Any, stage().model)(mx.array(list(blocks)), cache=together)
    assert mx.array_equal(logits, mx.stack(alone))


def test_a_prompt_continues_from_a_prefix_and_an_answer_from_its_log() -> None:
    served = engine(prefix_cache_bytes=64 << 20)
    first = answer(served, request(PROMPT, 0, TOKENS, ignore_eos=True))
    longer = [*PROMPT, *first.ids, *OTHERS[2]]
    second = answer(served, request(longer, 0, TOKENS, ignore_eos=True))
    assert second.stats.cached_tokens == 16  # whole chunks
    assert list(second.ids) == expected(tuple(longer))
    log = first.rounds[:7]
    resumed = answer(engine(), request(PROMPT, 0, TOKENS, ignore_eos=True, replay=log, attempt=2))
    assert resumed.ids == first.ids[7:]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_conversion_has_mlx_vlms_bits(tmp_path: Path, bits: int) -> None:
    """In mlx-vlm's names; the tables are quantised, too."""
    config = qwen4.config_of("bfloat16")
    model = qwen4.theirs(config)
    nn.quantize(model, 32, bits)
    sizes = {"quantization": {"group_size": 32, "bits": bits}}
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    weights = {f"language_model.{name}": value for name, value in flat}
    folder = qwen4.save(tmp_path / "packed", config | sizes, weights)
    ours = cast(Any, open_model(folder))
    _ = read_layers(ours, 0, LAYERS, mx.bfloat16, outer=True, progress=lambda _part, _total: None)
    theirs, caches = model.make_cache(), StageModel(ours, 0, LAYERS).make_caches()
    for token in (*PROMPT, 511, 3, 4):
        got = ours(mx.array([[token]]), cache=caches)
        want = model(mx.array([[token]]), cache=theirs).logits
        assert mx.array_equal(got, want)


def test_without_the_extra_a_load_names_both_ways_to_add_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vlm_classes, "has_extra", lambda: False)
    with pytest.raises(LoadFailed, match=r"models of the type qwen4_exp.*exo-node\[vision\]"):
        _ = open_model(checkpoint())


def test_the_tables_are_left_in_their_files_and_out_of_the_memory_of_a_plan() -> None:
    tables = [t for t in read_checkpoint(checkpoint()).tensors.values() if TABLE in t.name]
    assert len(tables) == 3
    held = cast("list[tuple[str, mx.array]]", tree_flatten(stage().model.parameters()))
    assert not [name for name, _ in held if "ngram_embedding." in name]
    place = next(p for p in in_folders([checkpoint().parent]) if p.folder == checkpoint())
    card = ModelLibrary([checkpoint().parent], offline=True).open(place).card
    assert card.mapped_bytes == sum(t.nbytes for t in tables)
    assert card.memory_bytes == card.weight_bytes - card.mapped_bytes
    assert (card.hidden_width, card.kv_row_width) == (4 * 64, 2 * 2 * 32 + 2 * 32 + 9)


def test_a_table_that_lacks_rows_is_refused(tmp_path: Path) -> None:
    config = qwen4.config_of()
    weights = qwen4.published(qwen4.theirs(config))
    short = next(name for name in weights if name.endswith("shard_1.weight"))
    weights[short] = weights[short][1:]
    folder = qwen4.save(tmp_path / "short", config, weights)
    with pytest.raises(InvalidCheckpoint, match=r"n-gram tables have other rows.*mlx-vlm"):
        _ = open_model(folder)


def test_the_head_computes_what_mlx_vlms_does() -> None:
    """Its prompt in one forward and then single rows, past the keys that it chooses among."""
    theirs = qwen4.their_head(qwen4.config_of(vocabulary=4096))
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(theirs.parameters()))
    family = made_family(stage(), "pre_norm")
    head = load_head(family, HeadSource(dict(flat), None), mx.float32)
    ids = [*PROMPT, *OTHERS[2]]
    hidden = family.hidden(mx.array([ids]), stage().make_caches())
    embeddings = family.embed(mx.array([[*ids[1:], 9]]))
    theirs_cache, ours_cache, start = theirs.make_cache(), head.make_cache(), 0
    for end in (21, 22, 23, 26, len(ids)):
        part = slice(start, end)
        rows = hidden[:, part], embeddings[:, part]
        theirs._next_position = start
        mixed, streams = theirs._forward_hidden(rows[1], rows[0], rows[0], theirs_cache)
        got = head(*rows, ours_cache)
        assert mx.allclose(got, streams, rtol=0, atol=1e-5)
        assert mx.allclose(head.read_out(got), mixed, rtol=0, atol=1e-5)
        start = end


@pytest.mark.parametrize("k", [*range(1, 7), pytest.param(7, marks=pytest.mark.smoke)])
def test_drafts_change_no_id(k: int) -> None:
    served = engine(drafts=True)
    for prompt in (PROMPT, *OTHERS):
        got = answer(served, request(prompt, k, TOKENS, ignore_eos=True))
        assert list(got.ids) == expected(tuple(prompt))
        assert got.stats.drafter_kind == "native_mtp"
        assert 0 < sum(r.accepted for r in got.rounds) < sum(r.drafted for r in got.rounds)


def test_drafts_of_requests_that_share_forwards_change_no_id() -> None:
    family, head = made_family(stage(), "pre_norm"), loaded(drafts=True).head
    drafts = DraftModel.of(family, head)
    served = bare_engine(FamilyTarget(family), stage().make_caches, drafts)
    prompts = (PROMPT, *OTHERS)
    requests = [bare_request(each, TOKENS, 8, 3 - i % 3) for i, each in enumerate(prompts)]
    answers = rounds_of(served, requests)
    assert [list(ids_of(each)) for each in answers] == [expected(tuple(each)) for each in prompts]
    assert all(sum(r.accepted for r in each) for each in answers)


def test_layers_of_the_published_sizes_may_be_stages() -> None:
    """By the small model of its config.json, whose tables alone had 51 billion numbers."""
    fixture = json.loads((Path(__file__).parents[1] / "qwen4_config.json").read_text())
    text = fixture["config"]["text_config"]
    text |= {"num_hidden_layers": 8, "layer_types": text["layer_types"][:8]}
    small = json.dumps(small_config(fixture["config"]), sort_keys=True)
    assert (
        stage_fault(small, 0, 3) == stage_fault(small, 3, 8) == stage_fault(small, 1, 2) == ("", ())
    )
