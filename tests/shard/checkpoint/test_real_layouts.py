"""Heads in the layouts that people really have: found whole, or refused by name with a remedy."""

# mlx_lm is typed in part only.
# pyright: reportPrivateUsage=false

import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm.utils
import pytest
from header_files import (
    EXPERT,
    NAMES,
    Entry,
    Headers,
    changed,
    checkpoint_of,
    head_of,
    headers,
    reason,
    whole_head,
    write_checkpoint,
)

from exo_node.mtp.families.family import Family
from exo_node.mtp.families.head import DraftHead, HeadSource, HeadUnusable
from exo_node.mtp.families.table import family_of
from exo_node.mtp.families.weights import fill_head
from exo_node.placement.card import ModelCard
from exo_node.placement.ids import ModelId
from exo_node.placement.library import derive_card, packaged_cards
from exo_node.shard.checkpoint.checkpoint import Checkpoint, read_checkpoint

CARD_CONFIGS = Path(__file__).parents[2] / "card_configs.json"


@dataclass(frozen=True)
class Expected:
    tensors: int
    files: tuple[str, ...]
    shares: bool = False
    quantised: bool = False
    layout: str = "qwen"
    claim: str = "mtp_num_hidden_layers = 1"


EXPECTED = {
    "qwen3.6-27b": Expected(
        15, ("model-00013-of-00015.safetensors", "model-00015-of-00015.safetensors"), shares=True
    ),
    "qwen3.5-4b": Expected(15, ("model.safetensors-00002-of-00002.safetensors",), shares=True),
    "qwen3.5-9b": Expected(15, ("model.safetensors-00004-of-00004.safetensors",), shares=True),
    "qwen3.6-35b-a3b": Expected(
        19, ("model-00025-of-00026.safetensors", "model-00026-of-00026.safetensors"), shares=True
    ),
    "qwen3.5-35b-a3b": Expected(
        17 + 768,
        (
            "model.safetensors-00013-of-00014.safetensors",
            "model.safetensors-00014-of-00014.safetensors",
        ),
        shares=True,
    ),
    "qwen3-next-80b-a3b": Expected(1553, ("model-00041-of-00041.safetensors",), claim=""),
    "qwen3.5-9b-optiq-4bit": Expected(29, ("optiq/mtp.safetensors",), quantised=True),
    "qwen3.5-4b-optiq-4bit": Expected(29, ("mtp.safetensors",), quantised=True),
    "qwen3.6-35b-a3b-optiq-4bit": Expected(37, ("mtp.safetensors",), quantised=True),
    "qwen3-next-80b-a3b-6bit-model-mtp": Expected(
        42, ("model-mtp.safetensors",), quantised=True, claim="num_nextn_predict_layers = 1"
    ),
    "ornith-1.5-35b-a3b-mtplx": Expected(17 + 768, ("mtp/weights.safetensors",)),
    "ornith-1.5-35b-a3b-oq4e-mtp": Expected(
        42, ("model-00005-of-00005.safetensors",), shares=True, quantised=True
    ),
    "qwen3.6-35b-a3b-oq3-mtp": Expected(
        42,
        ("model-00004-of-00004.safetensors",),
        shares=True,
        quantised=True,
    ),
    "deepseek-v3": Expected(
        1564,
        ("model-00163-of-000163.safetensors",),
        layout="nextn",
        claim="num_nextn_predict_layers = 1",
    ),
    "glm-4.5-air": Expected(
        404,
        ("model-00047-of-00047.safetensors",),
        shares=True,
        layout="nextn",
        claim="num_nextn_predict_layers = 1",
    ),
    "glm-4.6": Expected(
        500, ("mtp.safetensors",), layout="nextn", claim="num_nextn_predict_layers = 1"
    ),
}


def test_every_fixture_says_where_its_facts_are_from() -> None:
    assert set(NAMES) == set(EXPECTED)
    for name in NAMES:
        assert headers(name).source and headers(name).derived, name


def figure(name: str, key: str) -> int:
    fixture = headers(name)
    entries = [*fixture.entries, *fixture.unwritten]
    head = whole_head(checkpoint_of(name))
    match key:
        case "tensors":
            return len(entries)
        case "bytes":
            return sum(entry.nbytes for entry in entries)
        case "parameters":
            return sum(math.prod(entry.shape) for entry in entries)
        case "billions":
            return round(sum(math.prod(entry.shape) for entry in entries) / 1e9)
        case "head_tensors":
            return len(head.tensors)
        case "head_bytes":
            return head.nbytes
        case _:
            raise AssertionError(key)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3.6-27b",
        "qwen3.5-4b",
        "qwen3.5-9b",
        "qwen3.6-35b-a3b",
        "qwen3.5-35b-a3b",
        "qwen3-next-80b-a3b",
        "qwen3.6-35b-a3b-optiq-4bit",
        "ornith-1.5-35b-a3b-oq4e-mtp",
        "ornith-1.5-35b-a3b-mtplx",
        "deepseek-v3",
        "glm-4.5-air",
        "glm-4.6",
    ],
)
def test_the_tensors_add_up_to_the_published_figures(name: str) -> None:
    published = {k: v for k, v in headers(name).published.items() if k != "weight_bytes"}
    assert published
    assert {key: figure(name, key) for key in published} == published


def test_the_optiq_heads_file_has_the_published_size() -> None:
    name = "qwen3.5-9b-optiq-4bit"
    header = headers(name).published["head_file_bytes"] - whole_head(checkpoint_of(name)).nbytes
    assert 29 * 90 < header < 29 * 140, "a header has about a hundred bytes for each tensor"


@pytest.mark.parametrize("name", EXPECTED)
def test_the_head_is_found_whole_and_where_it_lies(name: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    head = whole_head(read_checkpoint(headers(name).write(tmp_path)))
    assert (head.layout, len(head.tensors)) == (expected.layout, expected.tensors)
    assert (head.files, head.shares_file_with_backbone) == (expected.files, expected.shares)
    assert head.quantised is expected.quantised
    assert {"fc.weight", "norm.weight"} <= set(head.tensors) or head.layout == "nextn"
    assert {"eh_proj.weight", "mlp.gate.weight"} <= set(head.tensors) or head.layout == "qwen"


_DTYPES = {"BF16": mx.bfloat16, "F32": mx.float32, "U32": mx.uint32, "I8": mx.int8}
FILLED = (
    "deepseek-v3",
    "glm-4.6",
    "qwen3.5-35b-a3b",
    "qwen3.6-35b-a3b",
    "qwen3.6-35b-a3b-oq3-mtp",
)
"""One fixture of each form of experts."""


@cache
def family(name: str) -> Family:
    """The model's family at its real sizes: MLX computes nothing, and allocates nothing."""
    config = headers(name).config
    model_class, arguments = cast("Any", mlx_lm.utils)._get_classes(config)
    return family_of(model_class(arguments.from_dict(config))) or pytest.fail("no family")


def filled(checkpoint: Checkpoint) -> DraftHead:
    tensors = whole_head(checkpoint).tensors.items()
    arrays = {key: mx.zeros(t.shape, _DTYPES.get(t.dtype, mx.uint8)) for key, t in tensors}
    return fill_head(family(str(checkpoint.folder)), HeadSource(arrays, backbone_is_raw=True))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_models_class_takes_the_published_head(name: str) -> None:
    assert filled(checkpoint_of(name)).hidden_kind == "post_norm"


def refusal(checkpoint: Checkpoint) -> str:
    with pytest.raises(HeadUnusable) as refused:
        _ = filled(checkpoint)
    assert re.search(r"; use (the original|the head|a repository)", str(refused.value))
    return str(refused.value)


@pytest.mark.parametrize("name", FILLED)
def test_a_head_that_does_not_fit_is_refused_with_the_tensor(name: str) -> None:
    head = head_of(name)
    norm = next(tensor for tensor, key in head.items() if key.endswith("input_layernorm.weight"))
    assert "lacks" in refusal(changed(name, norm, lambda _: None))
    assert "(3, 7)" in refusal(changed(name, norm, lambda e: replace(e, shape=(3, 7))))
    matrix = next(t for t, key in head.items() if key.endswith("self_attn.o_proj.weight"))
    text = refusal(changed(name, matrix, lambda e: replace(e, dtype="I8")))
    assert "int8" in text or "quantised self_attn.o_proj.weight" in text.replace("layers.0.", "")
    last = next(e for e in reversed(headers(name).entries) if e.name in head)
    stray = f"{last.name.removesuffix(head[last.name])}stray.weight"
    strays = [*headers(name).entries, Entry(last.file, stray, "BF16", (1,))]
    assert "1 tensors that config.json does not predict" in refusal(checkpoint_of(name, strays))


@pytest.mark.parametrize("name", FILLED)
def test_half_of_the_experts_are_no_head(name: str) -> None:
    head, entries = head_of(name), list[Entry]()
    count = max((int(m[1]) for m in map(EXPERT.search, head) if m), default=-1) + 1
    for entry in headers(name).entries:
        match = EXPERT.search(entry.name)
        if entry.name not in head or (match and int(match[1]) < count // 2):
            entries.append(entry)
        elif match is None:
            together = re.search(r"switch_mlp|mlp\.experts\.", entry.name)
            shape = (entry.shape[0] // 2, *entry.shape[1:]) if together else entry.shape
            entries.append(replace(entry, shape=shape))
    text = refusal(checkpoint_of(name, entries))
    assert f"lacks mlp.experts.{count // 2}." in text or "_proj.weight has shape" in text


@pytest.mark.parametrize(
    "changes",
    [{"shape": ()}, {"shape": (0, 0)}, {"shape": (2, 2, 2)}],
)
@pytest.mark.parametrize("part", ["q_proj.weight", "o_proj.scales", "gate_proj.weight"])
def test_hostile_shapes_are_a_reason_and_no_crash(part: str, changes: dict[str, Any]) -> None:
    name = "qwen3.6-35b-a3b-oq3-mtp"
    victim = next(tensor for tensor in head_of(name) if tensor.endswith(part))
    _ = refusal(changed(name, victim, lambda e: replace(e, **changes)))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_head_that_was_stripped_is_told_from_none(name: str, tmp_path: Path) -> None:
    fixture, head = headers(name), head_of(name)
    entries = [entry for entry in fixture.entries if entry.name not in head]
    write_checkpoint(tmp_path, fixture.config, entries, unindexed=fixture.unindexed)
    text = reason(read_checkpoint(tmp_path))
    if not EXPECTED[name].claim:
        assert text == "the checkpoint has no MTP head, and config.json declares none."
        return
    assert f"({EXPECTED[name].claim})" in text and "mtp.*" in text and "stripped" in text
    assert ". Use the original repository" in text
    if EXPECTED[name].layout == "nextn":
        assert f"model.layers.{fixture.config['num_hidden_layers']}.*" in text


def card_of(name: str) -> ModelCard:
    fixture: Headers = headers(name)
    total = sum(entry.nbytes for entry in [*fixture.entries, *fixture.unwritten])
    weight_bytes = fixture.published.get("weight_bytes", total)
    return derive_card(ModelId(name), fixture.config, weight_bytes)


CARDS = {
    # layers, KV layers, KV heads, head_dim, experts, of them chosen, expert width, bits
    "qwen3.6-27b": (64, 16, 4, 256, 0, 0, 0, None),
    "qwen3.6-35b-a3b": (40, 10, 2, 256, 256, 8, 512, None),
    "qwen3.5-35b-a3b": (40, 10, 2, 256, 256, 8, 512, None),
    "qwen3-next-80b-a3b": (48, 12, 2, 256, 512, 10, 512, None),
    "ornith-1.5-35b-a3b-oq4e-mtp": (40, 10, 2, 256, 256, 8, 512, 4),
    "deepseek-v3": (61, 61, 128, 192, 256, 8, 2048, None),
    "glm-4.5-air": (46, 46, 8, 128, 128, 8, 1408, None),
    "glm-4.6": (92, 92, 8, 128, 160, 8, 1536, None),
}


@pytest.mark.parametrize("name", CARDS)
def test_the_card_of_each_config_has_its_figures(name: str) -> None:
    card = card_of(name)
    assert (card.num_layers, card.num_attention_layers) == CARDS[name][:2]
    assert (card.num_key_value_heads, card.head_dim) == CARDS[name][2:4]
    assert (card.num_experts, card.num_experts_per_tok) == CARDS[name][4:6]
    assert (card.moe_intermediate_size, card.quantization) == CARDS[name][6:]
    assert card.native_mtp is None


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5-air", "glm-4.6", "qwen3-next-80b-a3b"])
def test_a_mixtures_card_reads_few_of_its_bytes(name: str) -> None:
    card = card_of(name)
    read = card.num_layers * card.active_layer_bytes + card.embedding_bytes
    assert 0.03 < read / card.memory_bytes < 0.15  # an undeclared head is counted as read


PACKAGED = {
    "Qwen/Qwen3.6-27B": "qwen3.6-27b",
    "Qwen/Qwen3.5-27B": "qwen3.6-27b",
    "Qwen/Qwen3.8-27B": "qwen3.6-27b",
    "Qwen/Qwen3.5-4B": "qwen3.5-4b",
    "Qwen/Qwen3.5-9B": "qwen3.5-9b",
    "Qwen/Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
    "Qwen/Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b",
    "Qwen/Qwen3-Next-80B-A3B-Thinking": "qwen3-next-80b-a3b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "zai-org/GLM-4.6": "glm-4.6",
    "zai-org/GLM-4.7": "glm-4.6",
}
"""The fixture of each card's shape; some models share theirs."""
FIRST = {name: model for model, name in reversed(PACKAGED.items())}.values()
"""One model of each fixture."""


OTHER_CONTEXT = {"zai-org/GLM-4.5": "glm-4.6"}


def test_every_packaged_card_has_its_fixture() -> None:
    fixtures = {*PACKAGED, *OTHER_CONTEXT, *json.loads(CARD_CONFIGS.read_text())}
    # Embedders have no head; tests/node/store/test_encoders.py is about their cards.
    chat = {
        name for name, card in packaged_cards().items() if "embeddings" not in card.capabilities
    }
    by_its_class = "Qwen/Qwen3.8-Flash-Next"  # tests/shard/model/test_card_sizes.py
    assert fixtures | {"demo", by_its_class} == chat


FREE = ("id", "repository", "native_mtp", "sampling", "variants", "capabilities")
"""The fields of a card that do not follow from headers."""


@pytest.mark.parametrize(("model", "name"), [*PACKAGED.items(), *OTHER_CONTEXT.items()])
def test_the_packaged_cards_say_what_the_checkpoint_says(model: str, name: str) -> None:
    packaged = packaged_cards()[ModelId(model)]
    free = (*FREE, "context_length") if model in OTHER_CONTEXT else FREE
    declared = {key: getattr(packaged, key) for key in free}
    assert card_of(name).model_copy(update=declared) == packaged
    assert packaged.repository == packaged.id


@pytest.mark.parametrize(("model", "name"), [*PACKAGED.items(), *OTHER_CONTEXT.items()])
def test_a_packaged_cards_head_is_in_the_checkpoint(model: str, name: str) -> None:
    declared = packaged_cards()[ModelId(model)].native_mtp
    head = whole_head(checkpoint_of(name))
    assert declared is not None
    layer = re.compile(r"mtp\.layers\.(\d+)\." if head.layout == "qwen" else r"layers\.(\d+)\.")
    layers = {match[1] for t in head.tensors.values() if (match := layer.search(t.name))}
    assert len(layers) == declared.num_layers
    # Qwen's families take no other; nextn heads take both, and transformers feeds them this one.
    assert declared.hidden == "post_norm"


@pytest.mark.parametrize("model", FIRST)
def test_a_packaged_card_weighs_what_is_loaded(model: str) -> None:
    card, fixture = packaged_cards()[ModelId(model)], headers(PACKAGED[model])
    tensors = [e for e in [*fixture.entries, *fixture.unwritten] if "_scale_inv" not in e.name]
    loaded = sum(e.nbytes * (2 if e.dtype == "F8_E4M3" else 1) for e in tensors)
    counted = card.endpoint_bytes + card.num_layers * card.mean_layer_bytes + card.mtp_bytes
    assert loaded <= counted < 1.005 * loaded
    embeddings = next(e for e in fixture.entries if e.name.endswith("embed_tokens.weight"))
    assert card.embedding_bytes == embeddings.nbytes
