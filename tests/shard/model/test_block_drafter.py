"""A block drafter drafts what mlx-vlm's own forward of the same checkpoint drafts, or is refused.

The classes of mlx-vlm that are imported are no public interface: what changes there shows here.
"""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from drafters import LAYER_IDS, drafter_config, make_drafter, second_config, stock_module
from engines import load_quietly, spec
from mlx.utils import tree_flatten
from models import make_checkpoint

from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import as_row
from exo_node.mtp.types import Sampling
from exo_node.placement.errors import InvalidCheckpoint
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.checkpoint.drafters import DrafterUnusable, read_drafter
from exo_node.shard.engine.drafter import Drafter, DraftModel
from exo_node.shard.engine.states.state import DraftState
from exo_node.shard.model import block_drafter
from exo_node.shard.model.block_drafter import BlockDrafter
from exo_node.shard.model.draft_pair import DraftPair
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.split_check import small_model
from exo_node.shard.model.stage_model import target_of

VOCABULARY = 4096
PROMPT = [(7 * i + 3) % VOCABULARY for i in range(40)]
K = 5
FORMS: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 1, "model_type": "llama"},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 12},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"final_logit_softcapping": 2.0},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "qwen3"
    return make_checkpoint(folder, "qwen3", dtype="float32", vocab=VOCABULARY)


def loaded(target: Path, drafter: Path | str, **changes: Any) -> Loaded:
    return load_quietly(
        spec(
            target,
            0,
            4,
            num_layers=4,
            native_mtp=True,
            drafter="a/drafter",
            drafter_path=str(drafter),
            **({"drafter_bytes": 1 << 20} | changes),
        )
    )


def weights(folder: Path) -> dict[str, mx.array]:
    return cast("dict[str, mx.array]", mx.load(str(folder / "model.safetensors")))


def layer_outputs(it: Loaded, ids: list[int]) -> mx.array:
    """(1, n, 3 * H): what the drafter's layers of the target give, as mlx-vlm wants it."""
    _, records = it.model.record(as_row(ids)[None], it.model.make_caches())
    return mx.concatenate([records.outputs[i] for i in LAYER_IDS], axis=-1)


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_drafts_are_those_of_mlx_vlms_own_forward(
    target: Path, tmp_path: Path, form: dict[str, Any]
) -> None:
    config = drafter_config(VOCABULARY) | form
    folder = make_drafter(tmp_path / "drafter", config)
    it = loaded(target, folder)
    assert it.head_state == "loaded" and isinstance(it.head, BlockDrafter)
    outputs = layer_outputs(it, PROMPT)
    stock = stock_module(config)
    stock.load_weights(str(folder / "model.safetensors"))
    whole: Any = it.model.model
    logits = list[mx.array]()

    def sampler(row_logits: mx.array) -> mx.array:
        logits.append(row_logits)
        return mx.argmax(row_logits, axis=-1)

    for rows in (30, 36):  # each at once: mlx-vlm's windows are wider after several passes
        cache = stock.reset(whole)
        _ = stock.draft_block(PROMPT[rows], outputs[:, :rows], cache, K + 1, sampler)
    target_model = it.head.target(target_of(it.model, None))
    caches = it.model.make_caches()
    model = it.head
    own_cache = model.make_cache()
    for begin, end, expected in ((0, 30, logits[0]), (30, 36, logits[1])):
        hidden = target_model.forward(as_row(PROMPT[begin:end]), caches, want="all").hidden
        assert hidden is not None
        after = model.embed(as_row(PROMPT[begin + 1 : end + 1])[None])
        last = model.read(hidden, after, own_cache)[:, -1:]
        own = model.logits(model.block(last, K, own_cache))
        assert own.shape == (1, K, VOCABULARY)
        assert mx.abs(own - expected).max() < 1e-4 * mx.abs(expected).max()


def test_a_target_whose_text_model_is_inside_another_drafts_too(tmp_path: Path) -> None:
    """As mlx-lm has multimodal models, and as mlx-vlm has all."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    text = {"model_type": "llama", "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 4}
    text |= {**sizes, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config = {"model_type": "mistral3", "text_config": text}
    outer = make_checkpoint(tmp_path / "outer", "qwen3", dtype="float32", vocab=VOCABULARY)
    _ = shutil.copytree(outer, tmp_path / "inner")  # its tokenizer
    (tmp_path / "inner" / "config.json").write_text(json.dumps(config))
    model = small_model(config)
    named: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(tmp_path / "inner" / "model.safetensors"), dict(named))
    it = loaded(tmp_path / "inner", make_drafter(tmp_path / "d", drafter_config(VOCABULARY)))
    assert it.head_state == "loaded"


def test_drafts_of_the_second_layout_follow_each_other_as_in_mlx_vlms_own_forward(
    target: Path, tmp_path: Path
) -> None:
    config = second_config(VOCABULARY)
    folder = make_drafter(tmp_path / "drafter", config)
    it = loaded(target, folder)
    assert it.head_state == "loaded", it.head_state
    outputs = layer_outputs(it, PROMPT)
    stock = stock_module(config)
    stock.load_weights([*stock.sanitize(weights(folder)).items()])
    stock.validate_target_compatibility = id  # it wants one of mlx-vlm's own classes
    stock.bind(it.model.model)
    target_model, model = it.head.target(target_of(it.model, None)), DraftModel.of(None, it.head)
    assert model.follow is not None and model.block is not None
    scores = list[mx.array]()

    class Proposals:
        def sample_proposal(self, row: mx.array) -> mx.array:
            scores.append(row)
            return mx.argmax(row, axis=-1)

    changed = 0
    for rows in (24, 33, 39):
        scores.clear()
        cache = stock.make_cache()
        args = PROMPT[rows], outputs[:, :rows], cache, K + 1, Proposals()
        expected = stock.draft_block(*args)[0].tolist()
        hidden = target_model.forward(
            as_row(PROMPT[:rows]), it.model.make_caches(), want="all"
        ).hidden
        assert hidden is not None
        state = DraftState()
        state.observe(hidden, as_row(PROMPT[1 : rows + 1]))
        drafter, greedy = Drafter(model, [state]), greedy_sampler()
        assert drafter.draft(K, [K], [greedy], [rows]).tokens[0].tolist() == expected
        own = model.block(*block_inputs(model, hidden, rows))
        logits = model.logits(own)
        before = [PROMPT[rows], *expected]
        for depth, row in enumerate(scores):
            output = own[:, depth : depth + 1]
            followed = model.follow(output, logits[:, depth], as_row(before[depth : depth + 1]))
            assert mx.isfinite(followed).all(), "a grammar may bar all that are ranked"
            best = mx.sort(followed[0])[-row.shape[1] :]
            assert mx.allclose(best, mx.sort(row[0]), atol=1e-3)
        changed += mx.argmax(logits[0], axis=-1).tolist() != expected
    assert changed, "no pair of ids decided"


def greedy_sampler() -> Sampler:
    return Sampler(Sampling(), 0)


def block_inputs(model: DraftModel, hidden: mx.array, rows: int) -> tuple[mx.array, int, Any]:
    cache = model.make_cache()
    after = model.embed(as_row(PROMPT[1 : rows + 1])[None])
    return model.head(hidden, after, cache)[:, -1:], K, cache


@pytest.mark.parametrize("want", ["all", "last", "none"])
def test_hidden_states_are_those_of_every_row_whatever_logits_are_wanted(
    target: Path, tmp_path: Path, want: Any
) -> None:
    it = loaded(target, make_drafter(tmp_path / "drafter", drafter_config(VOCABULARY)))
    module = it.head.module
    expected = module.hidden_norm(module.fc(layer_outputs(it, PROMPT)))
    plain = target_of(it.model, None)
    tapped = it.head.target(plain)
    out = tapped.forward(as_row(PROMPT), it.model.make_caches(), want=want)
    assert out.hidden is not None and mx.allclose(out.hidden, expected, atol=1e-5)
    same = plain.forward(as_row(PROMPT), it.model.make_caches(), want=want)
    assert same.hidden is None and mx.array_equal(out.logits, same.logits)


def test_a_head_of_the_models_own_is_loaded_beside_a_drafter(tmp_path: Path) -> None:
    hybrid = make_checkpoint(tmp_path / "t", "qwen3_5", dtype="float32", vocab=VOCABULARY)
    drafter = make_drafter(tmp_path / "drafter", drafter_config(VOCABULARY))
    both, alone = loaded(hybrid, drafter), loaded(hybrid, drafter, mtp_hidden="")
    assert isinstance(both.head, DraftPair) and isinstance(alone.head, BlockDrafter)
    assert both.head_state == alone.head_state == "loaded"
    assert alone.head_bytes == sum(tensor.nbytes for tensor in weights(drafter).values())
    own = load_quietly(spec(hybrid, 0, 4, num_layers=4, native_mtp=True))
    assert both.head_bytes == alone.head_bytes + own.head_bytes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vocab_size": 511}, "a vocabulary of 511 ids, and this one has 4096"),
        ({"hidden_size": 32}, "hidden states of 32 numbers, and this one has 64"),
        ({"num_target_layers": 5}, "5 layers, and this one has 4"),
        ({"num_target_layers": 0, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [4]}},
         "reads layer 4, and the model has 4"),
        ({"block_size": 3}, "drafts at most 2 tokens a round; set drafter.max_k"),
        ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel"),
        ({"architectures": ["DFlash2DraftModel"]}, "requires a positive integer conv_kernel_size"),
        ({"architectures": ["DFlashDraftModel", "DFlash2DraftModel"]}, "no block drafter"),
        ({"is_causal": True}, "masks its block"),
        ({"dflash_query_causal": True}, "masks its block"),
        *(({"block_size": n}, f"block_size in config.json of the block drafter a/drafter is {n}")
          for n in ("8", 0, -1, 1, 10**9, True, None, 7.5)),
        ({"num_hidden_layers": 65}, "num_hidden_layers in config.json"),
        ({"num_attention_heads": 0}, "num_attention_heads in config.json"),
        ({"num_key_value_heads": 0}, "num_key_value_heads in config.json"),
        ({"intermediate_size": 0}, "intermediate_size in config.json"),
        ({"num_target_layers": "4"}, "num_target_layers in config.json"),
        ({"layer_types": 2}, "is 2, not a list"),
        ({"rope_scaling": "x"}, "is x, not an object"),
        ({"sliding_window": True}, "is True, not a whole number"),
        ({"dflash_config": {"mask_token_id": 4096, "target_layer_ids": [0]}},
         "is 4096, not a number from 0 to 4095"),
        *(({"dflash_config": {"mask_token_id": 5, "target_layer_ids": ids}}, "target_layer_ids in")
          for ids in ([0, 0], [], [-1], ["0"], {"0": 1}, [10**9])),
        ({"dflash_config": [0, 2, 3]}, "mask_token_id in config.json"),
        ({"vocab_size": None}, "the block drafter a/drafter cannot be read: "),
        ({"head_dim": 32}, "cannot be loaded"),
        ({"rope_theta": "x"}, "cannot be loaded (TypeError: "),
        ({"rope_theta": [1]}, "cannot be loaded (TypeError: "),
        ({"final_logit_softcapping": "x"}, "cannot be loaded (ValueError: "),
    ],
)  # fmt: skip
def test_a_drafter_that_does_not_fit_is_refused_by_name_and_the_model_is_loaded(
    target: Path, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    folder = make_drafter(tmp_path / "drafter", drafter_config(VOCABULARY))
    config = drafter_config(VOCABULARY) | changes
    _ = (folder / "config.json").write_text(json.dumps(config))
    it = loaded(target, folder)
    assert it.head is None and it.head_bytes == 0 and "a/drafter" in it.head_state
    assert why in it.head_state and ("; " in it.head_state)


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("", mx.int32),
        ("fc.weight", mx.int32),
        ("down_proj.weight", mx.uint8),
        ("q_norm.weight", mx.bool_),
        ("codebook", mx.complex64),
    ],
    ids=str,
)
def test_a_drafter_that_is_stored_in_other_numbers_is_refused(
    target: Path, tmp_path: Path, part: str, dtype: mx.Dtype
) -> None:
    """All rows of prompts pass it: a forward that fails would end answers without drafts, too."""
    folder = make_drafter(tmp_path / "drafter", second_config(VOCABULARY))
    stored = {
        name: value.astype(dtype) if name.endswith(part) else value
        for name, value in weights(folder).items()
    }
    mx.eval(stored)
    mx.save_safetensors(str(folder / "model.safetensors"), stored, {"format": "pt"})
    it = loaded(target, folder)
    assert it.head is None
    assert "the block drafter a/drafter cannot be loaded (ValueError: " in it.head_state
    assert f"is stored as {dtype}, where " in it.head_state and "use a whole copy" in it.head_state


def test_a_drafter_that_is_absent_says_how_to_get_it(target: Path) -> None:
    assert "`exo-node models pull a/drafter`" in loaded(target, "").head_state
    assert loaded(target, "", drafter_fault="it is locked").head_state == "it is locked"


def test_a_drafter_that_a_person_named_is_loaded_or_the_load_fails(
    target: Path, tmp_path: Path
) -> None:
    folder = make_drafter(tmp_path / "drafter", drafter_config(VOCABULARY))
    assert loaded(target, folder, drafter_required=True).head_state == "loaded"
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        InvalidCheckpoint, match=r"a/drafter .* its files there, or load "
    ) as caught:
        _ = loaded(target, folder, drafter_required=True)
    assert caught.value.param == "drafter"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("data", [None, b"", b"no"])
def test_a_model_is_loaded_without_a_drafter_whose_files_are_damaged(
    target: Path, tmp_path: Path, file: str, data: bytes | None
) -> None:
    folder = make_drafter(tmp_path / "drafter", drafter_config(VOCABULARY))
    (folder / file).unlink() if data is None else (folder / file).write_bytes(data)
    it = loaded(target, folder)
    assert it.head is None and "the block drafter a/drafter" in it.head_state


def test_one_that_the_plan_has_no_memory_for_says_how_it_gets_some(
    target: Path, tmp_path: Path
) -> None:
    folder = make_drafter(tmp_path / "drafter", drafter_config(VOCABULARY))
    size = read_drafter(read_checkpoint(folder), "it").weight_bytes
    assert loaded(target, folder, drafter_bytes=size).head_state == "loaded"
    state = loaded(target, folder, drafter_bytes=size - 1).head_state
    assert "the plan has no memory for the 0 MB of the block drafter a/drafter" in state


def test_a_node_without_the_extra_says_so(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_drafter(tmp_path / "drafter", drafter_config(VOCABULARY))
    monkeypatch.setattr(block_drafter, "has_extra", lambda: False)
    assert "no software for block drafters" in loaded(target, folder).head_state


def test_a_quantised_drafter_and_copies_of_the_targets_ends_are_read(
    target: Path, tmp_path: Path
) -> None:
    config = drafter_config(VOCABULARY)
    folder = make_drafter(tmp_path / "drafter", config)
    file = folder / "model.safetensors"
    packed: dict[str, mx.array] = {"embed_tokens.weight": mx.zeros((VOCABULARY, 64))}
    for name, value in weights(folder).items():
        if value.ndim == 2:
            weight, scales, biases = mx.quantize(value, 32, 8)
            stem = name.removesuffix(".weight")
            packed |= {name: weight, f"{stem}.scales": scales, f"{stem}.biases": biases}
        else:
            packed[name] = value
    mx.eval(packed)
    mx.save_safetensors(str(file), packed, {"format": "mlx"})
    form = {"quantization": {"group_size": 32, "bits": 8}}
    _ = (folder / "config.json").write_text(json.dumps(config | form))
    it = loaded(target, folder)
    assert it.head_state == "loaded" and 0 < it.head_bytes < 120_000


def test_the_facts_of_a_checkpoint_are_read_without_its_class(tmp_path: Path) -> None:
    folder = make_drafter(tmp_path / "drafter", drafter_config(VOCABULARY))
    facts = read_drafter(read_checkpoint(folder), "it")
    assert facts.weight_bytes == sum(each.nbytes for each in weights(folder).values())
    assert (facts.cached_numbers, facts.block_size) == (2 * 2 * 2 * 16, 8)
    with pytest.raises(DrafterUnusable, match="drafts at most 7"):
        facts.require_fit(VOCABULARY, 64, 4, 8)
    facts.require_fit(VOCABULARY, 64, 4, 7)
