"""Variations within the layouts of MTP heads, and refused heads, on headers alone."""

import dataclasses

import pytest
from header_files import (
    COPIES,
    EXPERT,
    Entry,
    changed,
    checkpoint_of,
    head_of,
    headers,
    reason,
    whole_head,
)

from exo_node.shard.checkpoint.checkpoint import Checkpoint
from exo_node.shard.checkpoint.head_tensors import HeadFound, HeadMissing, find_head


@pytest.mark.parametrize("name", ["qwen3.6-27b", "deepseek-v3"])
@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "num_nextn_predict_layers"])
def test_a_head_of_several_layers_is_refused_by_its_field(name: str, key: str) -> None:
    fields = dict.fromkeys(("mtp_num_hidden_layers", "num_nextn_predict_layers"), 0) | {key: 2}
    text = reason(checkpoint_of(name, changes=fields))
    assert f"({key} = 2 in config.json)" in text and "Remove [native_mtp]" in text


def renamed(name: str, old: str, new: str) -> list[Entry]:
    entries = headers(name).entries
    return [dataclasses.replace(e, name=e.name.replace(old, new)) for e in entries]


def test_a_layer_after_the_heads_is_not_its_own() -> None:
    stray = Entry("model-00163-of-000163.safetensors", "model.layers.62.enorm.weight", "BF16", (7,))
    text = reason(checkpoint_of("deepseek-v3", [*headers("deepseek-v3").entries, stray]))
    assert "the first model.layers.62.enorm.weight" in text


def test_layers_past_the_last_are_no_head_unless_they_say_so() -> None:
    plain = [e for e in headers("glm-4.6").entries if "_proj.weight" in e.name]
    plain = [e for e in plain if "eh_proj" not in e.name]
    text = reason(checkpoint_of("glm-4.6", plain, {"num_nextn_predict_layers": 0}))
    assert text == "the checkpoint has no MTP head, and config.json declares none."
    claimed = reason(checkpoint_of("glm-4.6", plain))
    assert "model.layers.92.eh_proj.weight, expected in shape (5120, 10240), is missing" in claimed


def test_a_nextn_head_needs_no_claim() -> None:
    assert (
        whole_head(checkpoint_of("deepseek-v3", changes={"num_nextn_predict_layers": None})).layout
        == "nextn"
    )


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5-air"])
def test_copies_of_the_ends_may_be_absent_but_not_misshaped(name: str) -> None:
    head, entries = head_of(name), headers(name).entries
    without = [e for e in entries if head.get(e.name) not in COPIES]
    assert len(whole_head(checkpoint_of(name, without)).tensors) == len(head) - 2
    victim = next(e.name for e in entries if head.get(e.name) == "shared_head.head.weight")
    text = reason(changed(name, victim, lambda e: dataclasses.replace(e, shape=(1, 2))))
    assert f"{victim} has shape (1, 2), expected" in text


def test_two_heads_of_different_layouts_are_ambiguous() -> None:
    fc = Entry("mtp.safetensors", "mtp.fc.weight", "BF16", (5120, 10240))
    text = reason(checkpoint_of("glm-4.6", [*headers("glm-4.6").entries, fc]))
    assert "mtp.fc.weight" in text and "model.layers.92." in text and "Remove the file" in text


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_nextn_head_is_found_under_a_multimodal_models_prefix(prefix: str) -> None:
    head = whole_head(checkpoint_of("glm-4.5-air", renamed("glm-4.5-air", "model.", prefix)))
    assert head.tensors["eh_proj.weight"].name == f"{prefix}layers.46.eh_proj.weight"


def test_queries_without_a_low_rank_are_predicted_too() -> None:
    entries = [e for e in headers("deepseek-v3").entries if ".61.self_attn.q_" not in e.name]
    query = Entry("model-00163-of-000163.safetensors", "", "BF16", (128 * 192, 7168))
    name = "model.layers.61.self_attn.q_proj.weight"
    whole = [*entries, dataclasses.replace(query, name=name)]
    assert whole_head(checkpoint_of("deepseek-v3", whole, {"q_lora_rank": None})).layout == "nextn"
    assert name in reason(checkpoint_of("deepseek-v3", entries, {"q_lora_rank": None}))


def test_a_dense_head_is_predicted_where_its_layer_is_dense() -> None:
    entries = [e for e in headers("glm-4.5-air").entries if ".46.mlp." not in e.name]
    shapes = {"gate_proj": (10944, 4096), "up_proj": (10944, 4096), "down_proj": (4096, 10944)}
    dense = [
        Entry("mtp.safetensors", f"model.layers.46.mlp.{part}.weight", "BF16", shape)
        for part, shape in shapes.items()
    ]
    whole = [*entries, *dense]
    assert whole_head(checkpoint_of("glm-4.5-air", whole, {"first_k_dense_replace": 47}))
    assert "mlp.up_proj.weight" in reason(
        checkpoint_of("glm-4.5-air", [*entries, dense[0], dense[2]], {"first_k_dense_replace": 47})
    )


def stacked(name: str, bits: int, group: int) -> list[Entry]:
    """A nextn head as mlx-lm would convert it if it kept one: experts stacked, matrices packed.

    No such conversion of these two families has been found published.
    """
    entries = list[Entry]()
    for entry in headers(name).entries:
        key = head_of(name).get(entry.name)
        match = EXPERT.search(entry.name)
        if key is None or len(entry.shape) == 1:
            entries.append(entry)
        elif match is None or match[1] == "0":
            stem = entry.name.removesuffix("weight").replace("experts.0.", "switch_mlp.")
            lead = () if match is None else (headers(name).config["n_routed_experts"],)
            *outer, inputs = (*lead, *entry.shape)
            for part, dtype, width in (
                ("weight", "U32", inputs * bits // 32),
                ("scales", "BF16", inputs // group),
                ("biases", "BF16", inputs // group),
            ):
                entries.append(Entry(entry.file, f"{stem}{part}", dtype, (*outer, width)))
    return entries


@pytest.mark.parametrize(("bits", "group"), [(3, 128), (4, 32), (5, 64), (6, 64), (8, 64)])
def test_a_converted_nextn_head_would_be_found(bits: int, group: int) -> None:
    head = whole_head(checkpoint_of("glm-4.5-air", stacked("glm-4.5-air", bits, group)))
    assert head.bits["mlp.switch_mlp.down_proj.weight"] == bits == head.bits["eh_proj.weight"]
    assert set(head.bits.values()) == {bits}


def with_dtypes(name: str, dtypes: dict[str, str]) -> Checkpoint:
    entries = headers(name).entries
    head = head_of(name)
    return checkpoint_of(
        name,
        [
            dataclasses.replace(e, dtype=dtypes.get(e.dtype, e.dtype)) if e.name in head else e
            for e in entries
        ],
    )


def test_fp8_is_read_only_where_the_family_reads_it() -> None:
    """Qwen publishes 35B-A3B in FP8 as well, head included; mlx-lm's Qwen models cannot read it."""
    text = reason(with_dtypes("qwen3.6-35b-a3b", {"BF16": "F8_E4M3"}))
    assert "mtp.fc.weight is stored as F8_E4M3" in text and "Use a repository whose head" in text
    other = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    text = reason(checkpoint_of("deepseek-v3", changes=other))
    assert "F8_E4M3, not read" in text and "Use a repository whose head" in text


def test_scales_of_an_mx_format_are_refused_by_name() -> None:
    packed = with_dtypes("qwen3.5-9b-optiq-4bit", {})
    name = "mtp.layers.0.self_attn.q_proj.scales"
    tensors = dict(packed.tensors) | {name: dataclasses.replace(packed.tensors[name], dtype="U8")}
    text = reason(dataclasses.replace(packed, tensors=tensors))
    assert "q_proj.weight is quantised with scales of U8" in text
    assert "Use a repository whose head" in text


def test_scales_and_biases_of_different_groups_are_refused() -> None:
    name = "mtp.layers.0.self_attn.q_proj.biases"
    wider = changed(
        "qwen3.5-9b-optiq-4bit", name, lambda e: dataclasses.replace(e, shape=(8192, 4096 // 32))
    )
    assert f"{name} has shape (8192, 128) of BF16, which does not fit" in reason(wider)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe_layer_freq": 0}, None),
        ({"moe_layer_freq": 2}, "mlp.gate_proj.weight"),
        ({"first_k_dense_replace": "3"}, None),
        ({"n_shared_experts": 10**9}, "shared_experts.gate_proj.weight has shape"),
        ({"kv_lora_rank": "512"}, "gives no num_key_value_heads"),
        ({"v_head_dim": None, "hidden_size": True}, "gives no hidden_size and no v_head_dim"),
        ({"qk_rope_head_dim": -(10**30)}, "has shape"),
        ({"n_routed_experts": None}, "mlp.gate_proj.weight"),
    ],
)
def test_a_hostile_config_is_a_reason_and_no_crash(
    changes: dict[str, object], says: str | None
) -> None:
    fields = {"num_key_value_heads": None} | changes
    head = find_head(checkpoint_of("deepseek-v3", changes=fields))
    assert isinstance(head, HeadFound) if says is None else says in reason_of(head)


def reason_of(head: HeadFound | HeadMissing) -> str:
    assert isinstance(head, HeadMissing)
    return head.reason
