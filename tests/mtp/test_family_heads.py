"""Heads of every layout are loaded by every family, or refused with the reason."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from engines import load_quietly, spec
from families import (
    ATOL,
    NEXTN,
    ORACLE,
    Tensors,
    head_tensors,
    made_family,
    opened,
    row,
    stage_of,
)
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache
from models import GROUP_SIZE, make_checkpoint
from models import Family as Name
from tiny import row_of_ids, taped_qwen

from exo_node.mtp.families.family import Family, draft_logits
from exo_node.mtp.families.head import HeadSource, HeadUnusable
from exo_node.mtp.families.table import family_of
from exo_node.mtp.families.weights import load_head
from exo_node.shard.model.stage_model import StageModel


def build_checkpoint(folder: Path, name: Name) -> Path:
    """With a tokenizer, which a runner wants."""
    return make_checkpoint(folder / name, name, dtype="float32", vocab=4096)


def head_state(folder: Path, fed: str) -> str:
    return load_quietly(spec(folder, 0, 4, native_mtp=True, mtp_hidden=fed)).head_state


def test_a_qwen_head_is_not_fed_before_the_norm(tmp_path: Path) -> None:
    state = head_state(build_checkpoint(tmp_path, "qwen3_next"), "pre_norm")
    assert "native_mtp.hidden is 'pre_norm'" in state
    assert "fed 'post_norm'; correct the card" in state


@pytest.mark.parametrize("name", NEXTN)
def test_a_nextn_head_is_fed_as_the_card_says(tmp_path: Path, name: Name) -> None:
    folder = build_checkpoint(tmp_path, name)
    for fed in ("post_norm", "pre_norm"):
        loaded = load_quietly(spec(folder, 0, 4, native_mtp=True, mtp_hidden=fed))
        assert loaded.head_state == "loaded"
        assert loaded.head.hidden_kind == fed
    assert "fed 'post_norm' or 'pre_norm'; correct the card" in head_state(folder, "nowhere")


def test_caches_that_keep_no_way_back_turn_drafting_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotating(_stage: StageModel) -> list[Any]:
        return [RotatingKVCache(max_size=8)]

    monkeypatch.setattr(StageModel, "make_caches", rotating)
    state = head_state(build_checkpoint(tmp_path, "glm4_moe"), "post_norm")
    assert "rows cannot be taken back" in state
    assert "RotatingKVCache" in state
    assert "remove [native_mtp]" in state


def refusal(family: Family, tensors: Tensors) -> str:
    with pytest.raises(HeadUnusable) as refused:
        _ = load_head(family, HeadSource(tensors, True), None)
    return str(refused.value)


@pytest.mark.parametrize("tensor", ["mlp.experts.1.up_proj.weight", "self_attn.kv_b_proj.weight"])
def test_tensors_that_do_not_fit_together_are_refused(tensor: str) -> None:
    tensors = head_tensors(ORACLE / "deepseek_v3") | {tensor: mx.zeros((15, 8))}
    reason = refusal(opened("deepseek_v3", "post_norm").family, tensors)
    assert "do not fit together" in reason


def test_a_projection_in_two_forms_is_refused(tmp_path: Path) -> None:
    raw, converted = (
        head_tensors(make_checkpoint(tmp_path / str(form), "deepseek_v3", raw=form))
        for form in (True, False)
    )
    family = made_family(stage_of(tmp_path / "True", 4), "post_norm")
    assert "a part twice" in refusal(family, raw | converted)


def drafted(family: Family, tensors: Tensors, raw: bool, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Draft logits for arbitrary hiddens."""
    head = load_head(family, HeadSource(tensors, raw), dtype)
    size = family.embed(row([1])).shape[-1]
    hidden = mx.random.normal((1, 5, size), key=mx.random.key(1)).astype(dtype)
    output = head(hidden, family.embed(row([1, 2, 3, 4, 5])).astype(dtype), KVCache())
    assert output.dtype == dtype
    return draft_logits(family, head)(output)


@pytest.mark.parametrize("name", ["qwen3_next", *NEXTN])
def test_a_raw_head_and_a_converted_one_draft_the_same(tmp_path: Path, name: Name) -> None:
    raw = make_checkpoint(tmp_path / "raw", name, dtype="float32")
    converted = make_checkpoint(tmp_path / "converted", name, dtype="float32", raw=False)
    family = made_family(stage_of(raw, 4), "post_norm")
    expected = drafted(family, head_tensors(raw), True)
    got = drafted(family, head_tensors(converted), False)
    assert mx.allclose(got, expected, rtol=0, atol=ATOL)


def dequantised(tensors: Tensors, bits: int) -> Tensors:
    plain = {k: v for k, v in tensors.items() if not k.endswith((".scales", ".biases"))}
    for stem in [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]:
        parts = (tensors[f"{stem}.{part}"] for part in ("weight", "scales", "biases"))
        plain[f"{stem}.weight"] = mx.dequantize(*parts, group_size=GROUP_SIZE, bits=bits)
    return plain


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["qwen3_next", *NEXTN])
def test_a_quantised_head_drafts_as_its_dequantised_weights_do(
    tmp_path: Path, name: Name, bits: int
) -> None:
    folder = make_checkpoint(tmp_path / "m", name, dtype="float32", raw=False, head_bits=bits)
    family = made_family(stage_of(folder, 4), "post_norm")
    tensors = head_tensors(folder)
    got, expected = (drafted(family, t, False) for t in (tensors, dequantised(tensors, bits)))
    assert mx.allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next", *NEXTN])
def test_a_plain_head_drafts_over_a_quantised_backbone(tmp_path: Path, name: Name) -> None:
    """On a CPU, which gathers experts of 16 bits only where they are quantised."""
    folder = make_checkpoint(tmp_path / "m", name, raw=False, bits=4)
    family = made_family(stage_of(folder, 4, mx.bfloat16), "post_norm")
    tensors = head_tensors(folder)
    got = drafted(family, tensors, False, mx.bfloat16)
    expected = drafted(family, tensors, False, mx.float32)
    assert mx.allclose(got, expected, rtol=0, atol=0.05)


def test_fp8_blocks_are_dequantised(tmp_path: Path) -> None:
    """DeepSeek-V3 as published: weights in E4M3 with a scale for each block of 128 by 128."""
    folder = make_checkpoint(tmp_path / "m", "deepseek_v3", dtype="float32")
    family = made_family(stage_of(folder, 4), "post_norm")
    tensors = head_tensors(folder)
    plain, packed = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            scale = mx.max(mx.abs(value)) / 100
            packed[name] = mx.to_fp8(value / scale)
            blocks = [-(-side // 128) for side in value.shape]
            packed[f"{name}_scale_inv"] = mx.full(blocks, scale)
            stored = mx.from_fp8(packed[name], dtype=mx.bfloat16)
            plain[name] = (stored * scale).astype(mx.bfloat16).astype(mx.float32)
    assert len(packed) > len(tensors)
    assert mx.allclose(drafted(family, packed, True), drafted(family, plain, True), atol=1e-2)
    assert not mx.allclose(drafted(family, tensors, True), drafted(family, plain, True), atol=1e-2)


def test_copies_of_shared_tensors_are_not_loaded(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "glm4_moe", dtype="float32")
    tensors = head_tensors(folder)
    assert {"embed_tokens.weight", "shared_head.head.weight"} < set(tensors)
    family = made_family(stage_of(folder, 4), "post_norm")
    head = load_head(family, HeadSource(tensors, True), None)
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(head.parameters()))
    loaded = sum(value.nbytes for _, value in parameters)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    assert loaded == sum(v.nbytes for k, v in tensors.items() if k not in copies)


@pytest.mark.parametrize("tied", [False, True])
def test_a_familys_hidden_and_logits_make_up_the_models_own(tied: bool) -> None:
    """The oracle's models are tested in test_families.py."""
    model = taped_qwen(tie_word_embeddings=tied)
    family, ids = family_of(model), row_of_ids(6)[None]
    assert family is not None
    whole = model(ids, cache=model.make_cache())
    assert mx.array_equal(family.logits(family.hidden(ids, model.make_cache())), whole)


def test_other_models_have_no_family() -> None:
    assert family_of(nn.Linear(2, 2)) is None
