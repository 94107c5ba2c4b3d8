import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from cards import MTP
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from exo_node.placement.card import MAX_K, ModelCard
from exo_node.placement.cost import ModelSizes
from exo_node.placement.errors import InvalidCard
from exo_node.placement.ids import ModelId
from exo_node.placement.library import derive_card, parse_card

DEMO = Path(__file__).parents[2] / "shard" / "models" / "demo"
PLAIN: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
    "dtype": "float16",
}
FACTS: dict[str, object] = {
    "id": "m",
    "model_type": "llama",
    "num_layers": 10,
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_layers": 10,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "context_length": 1000,
    "weight_bytes": 1_000_000,
}


def card(**changes: object) -> ModelCard:
    return parse_card(FACTS | changes, "test.toml")


def derive(
    config: Mapping[str, object] | None = None, overrides: Mapping[str, object] | None = None
) -> ModelCard:
    return derive_card(ModelId("m"), {**PLAIN, **(config or {})}, 10**9, overrides)


def demo_config() -> dict[str, object]:
    return json.loads((DEMO / "config.json").read_text())


def test_a_plain_config_needs_no_card() -> None:
    derived = derive()
    assert (derived.num_layers, derived.hidden_size, derived.vocab_size) == (24, 1024, 32000)
    assert derived.num_attention_layers == 24
    assert (derived.num_key_value_heads, derived.head_dim) == (16, 64)
    assert (derived.context_length, derived.weight_bytes) == (8192, 10**9)
    assert (derived.dtype, derived.quantization, derived.tie_word_embeddings) == (
        "float16",
        None,
        False,
    )
    assert derived.num_experts == derived.moe_intermediate_size == 0


def test_the_text_half_of_a_multimodal_config_wins() -> None:
    derived = derive(
        {"text_config": {"num_hidden_layers": 8, "head_dim": 128, "model_type": "inner"}}
    )
    assert (derived.num_layers, derived.head_dim, derived.model_type) == (8, 128, "llama")
    assert derived.hidden_size == 1024


def test_mtp_is_declared_by_a_person_and_never_by_config() -> None:
    claims = {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    assert derive(claims).native_mtp is None
    declared = derive(claims, {"native_mtp": MTP}).native_mtp
    assert declared is not None
    assert (declared.num_layers, declared.hidden) == (1, "post_norm")


def test_what_a_person_wrote_beats_config_even_where_config_is_wrong() -> None:
    fields = {"num_layers": 12, "context_length": 4096, "id": "mine", "weight_bytes": 5}
    derived = derive({"num_hidden_layers": "many", "max_position_embeddings": None}, fields)
    assert derived.model_dump(include=set(fields)) == fields


@pytest.mark.parametrize(
    ("config", "holding_kv"),
    [
        ({}, 24),
        ({"full_attention_interval": 4}, 6),
        ({"layer_types": ["linear_attention", "full_attention"] * 12}, 12),
        ({"layer_types": ["sliding_attention", "full_attention"] * 12}, 24),
        ({"layer_types": ["mamba", "conv", "attention"] * 8}, 8),
        # The list decides where both stand, and entries after the backbone are the MTP head's.
        ({"layer_types": ["mamba"] * 24 + ["attention"], "full_attention_interval": 4}, 0),
    ],
)
def test_layers_that_hold_a_cache_are_counted(config: dict[str, object], holding_kv: int) -> None:
    assert derive(config).num_attention_layers == holding_kv


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}


@pytest.mark.parametrize(
    ("config", "bits", "fp8"),
    [
        ({}, None, False),
        ({"quantization": {"group_size": 64, "bits": 4}}, 4, False),
        ({"quantization_config": {"bits": 8}}, 8, False),
        ({"quantization_config": {"quant_method": "mxfp8"}}, 8, False),
        ({"quantization_config": {"quant_method": "other"}}, None, False),
        ({"quantization_config": FP8}, None, True),
        ({"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}, None, True),
        ({"quantization_config": MXFP8}, 8, False),  # mlx-lm keeps these packed
        ({"quantization": {"bits": 4}, "quantization_config": FP8}, 4, False),
        ({"quantization_config": {"quant_method": "mxfp4"}}, 4, False),
    ],
)
def test_quantisation_is_read_and_fp8_is_16_bits_in_memory_unless_mlx_keeps_it(
    config: dict[str, object], bits: int | None, fp8: bool
) -> None:
    derived = derive(config)
    assert (derived.quantization, derived.fp8) == (bits, fp8)


def test_a_persons_quantization_beats_the_configs_fp8() -> None:
    assert derive({"quantization_config": FP8}, {"quantization": 8}).fp8 is False


def test_what_fp8_weighs_in_memory_is_twice_the_download_less_its_ends() -> None:
    ends = 2 * 100 * 64 * 2
    plain, fp8 = card(), card(fp8=True)
    assert plain.memory_bytes == fp8.weight_bytes == 1_000_000
    assert fp8.memory_bytes == 2 * 1_000_000 - ends
    assert fp8.endpoint_bytes == ends
    assert fp8.mean_layer_bytes == 2 * plain.mean_layer_bytes
    assert card(fp8=True, dtype="float32").memory_bytes == 4 * 1_000_000 - 3 * 2 * ends
    assert card(fp8=True, weight_bytes=ends - 1).memory_bytes == ends - 1


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}


def test_latent_attention_keeps_one_row_for_all_heads() -> None:
    derived = derive(LATENT)
    assert (derived.head_dim, derived.kv_row_width) == (128 + 64, 512 + 64)
    assert derived.kv_bytes_per_layer_token == 1152
    # Some configs name the rotary part head_dim.
    assert derive(LATENT | {"head_dim": 64}) == derived
    assert derive(LATENT | {"index_head_dim": 128}).kv_row_width == 576 + 2 * 128
    assert derive({"kv_lora_rank": None}).kv_row_width == derive({"kv_lora_rank": 0}).kv_row_width


def test_latent_attention_that_mlx_expands_first_keeps_every_head() -> None:
    width = 16 * (128 + 64 + 96)
    assert derive(LATENT | {"model_type": "deepseek_v2"}).kv_row_width == width
    nested = {"model_type": "outer", "text_config": {"model_type": "deepseek_v2"}}
    assert derive(LATENT | nested).kv_row_width == width
    without_v = LATENT | {"model_type": "deepseek_v2", "v_head_dim": None}
    assert derive(without_v).kv_row_width == 16 * 2 * (128 + 64)


def test_what_a_person_wrote_of_the_cache_beats_latent_attention() -> None:
    assert derive(LATENT, {"kv_row_width": 1152}).kv_bytes_per_layer_token == 2304


@pytest.mark.parametrize("field", ["qk_nope_head_dim", "qk_rope_head_dim"])
def test_latent_attention_without_its_parts_is_refused_by_their_name(field: str) -> None:
    with pytest.raises(InvalidCard, match=f"config.json: {field} is missing"):
        derive(LATENT | {field: None})


def test_the_dense_layers_of_a_mixture_are_read() -> None:
    assert derive({"first_k_dense_replace": 3}).num_dense_layers == 0
    mixture = {"n_routed_experts": 8, "first_k_dense_replace": 3}
    assert derive(mixture).num_dense_layers == 3


def test_a_dense_intermediate_size_is_no_experts() -> None:
    assert derive({"intermediate_size": [4096] * 24}).moe_intermediate_size == 0
    mixtral = derive({"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512})
    assert (mixtral.num_experts, mixtral.num_experts_per_tok) == (8, 2)
    assert mixtral.moe_intermediate_size == 512


COUNTS = [
    ("num_hidden_layers", 1024),
    ("hidden_size", 65536),
    ("vocab_size", 2**21),
    ("max_position_embeddings", 2**24),
    ("num_key_value_heads", 65536),
    ("num_attention_heads", 65536),
    ("head_dim", 65536),
    ("full_attention_interval", 1024),
    ("num_experts", 65536),
    ("kv_lora_rank", 65536),
]


@pytest.mark.parametrize(("field", "limit"), COUNTS)
@pytest.mark.parametrize("bad", [True, "24", -1, 1.5, [1], "over", "huge"])
def test_a_config_number_that_is_none_is_refused_by_its_name(
    field: str, limit: int, bad: object
) -> None:
    values = {"over": limit + 1, "huge": 16**9000}  # the latter has too many digits to print
    config = {field: values.get(str(bad), bad)}
    with pytest.raises(InvalidCard, match=f"^config.json: {field} is ") as caught:
        derive(config)
    assert caught.value.param == f"config.json: {field}"
    assert "exo-card.toml" in caught.value.message
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(("field", "limit"), COUNTS)
def test_a_config_number_at_its_bound_is_taken(field: str, limit: int) -> None:
    derive({"qk_nope_head_dim": 1, "qk_rope_head_dim": 1, field: limit})


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"]
)
def test_a_missing_config_number_names_the_line_to_write(field: str) -> None:
    with pytest.raises(InvalidCard, match=f"config.json: {field} is missing; write `.* = …` into"):
        derive({field: None})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"text_config": [1]}, "text_config"),
        ({"model_type": 7}, "model_type"),
        ({"model_type": "../os"}, "model_type"),
        ({"model_type": "os.path"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": [1] * 24}, "layer_types"),
        ({"layer_types": "full"}, "layer_types"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"dtype": "int4"}, "dtype"),
        ({"dtype": ["float16"]}, "dtype"),
        ({"quantization": 4}, "quantization"),
        ({"quantization": {"bits": 64}}, "bits"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_experts": 4, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts": 4, "first_k_dense_replace": 25}, "num_dense_layers"),
        ({"quantization_config": "fp8"}, "quantization_config"),
    ],
)
def test_any_other_bad_config_field_is_refused_by_its_name(
    config: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidCard, match=rf"^config\.json: {field} is ") as caught:
        derive(config)
    assert caught.value.param == f"config.json: {field}"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(PLAIN)), inner)
    ),
    max_leaves=6,
)
config_fields = [*PLAIN, "text_config", "layer_types", "quantization", "num_experts"]
config_fields += [*LATENT, "quantization_config", "first_k_dense_replace"]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(config_fields), json_values, max_size=4))
def test_no_config_raises_anything_but_invalid_card(config: dict[str, object]) -> None:
    try:
        derived = derive(config)
    except InvalidCard:
        return
    assert derived.num_attention_layers <= derived.num_layers


def test_a_checkpoint_without_tensors_is_refused() -> None:
    with pytest.raises(InvalidCard, match="holds no tensors; download it again"):
        derive_card(ModelId("m"), PLAIN, 0)


GROUPED = {"head_dim": 64}
"""Numbers of a key that quantised caches can group."""


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"native_mtp": {"default_k": 3, "max_k": 2}}, "native_mtp.max_k", "raise max_k or lower"),
        ({"native_mtp": {"default_k": 0, "max_k": 2}}, "native_mtp.default_k", "greater than"),
        ({"native_mtp": {"default_k": 1, "max_k": 9}}, "native_mtp.max_k", "less than or equal to"),
        ({"native_mtp": {"max_k": 2}}, "native_mtp.default_k", "write `default_k = …`"),
        ({"native_mtp": MTP | {"hidden": "raw"}}, "native_mtp.hidden", "'post_norm' or 'pre_norm'"),
        ({"native_mtp": MTP | {"defaultk": 1}}, "native_mtp.defaultk", "did you mean default_k?"),
        ({"native_mtp": MTP | {"max_k": True}}, "native_mtp.max_k", "valid integer"),
        ({"native_mtp": True}, "native_mtp", "valid dictionary"),
        ({"sampling": {"temprature": 1.0}}, "sampling.temprature", "did you mean temperature?"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p", "greater than 0"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature", "finite"),
        ({"num_layer": 3}, "num_layer", "did you mean num_layers?"),
        ({"zzz": 3}, "zzz", "the fields are id, repository"),
        ({"num_layers": "10"}, "num_layers", "valid integer"),
        ({"num_attention_layers": 11}, "num_attention_layers", "above num_layers = 10"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok", "above num_experts = 0"),
        ({"num_dense_layers": 11}, "num_dense_layers", "above num_layers = 10"),
        ({"fp8": True, "quantization": 8}, "fp8", "beside quantization = 8: remove one"),
        ({"model_type": "a.b"}, "model_type", "match pattern"),
        ({"repository": "../../etc"}, "repository", "match pattern"),
        ({"id": "a\x1b[2J"}, "id", "match pattern"),
        ({"id": " m"}, "id", "match pattern"),
        ({"id": None}, "id", "valid string"),
        (GROUPED | {"kv_bits": 3}, "kv_bits", "4 or 8"),
        (
            GROUPED | {"kv_bits": 8, "kv_row_width": 576},
            "kv_bits",
            "keeps no plain keys and values: remove it",
        ),
        ({"kv_bits": 8, "head_dim": 80}, "kv_bits", "80, which groups of 32 numbers do not"),
        (GROUPED | {"kv_bits": 4, "num_attention_layers": 0}, "kv_bits", "layers is 0: remove it"),
    ],
)
def test_a_bad_card_names_field_and_remedy(
    changes: dict[str, object], param: str, says: str
) -> None:
    with pytest.raises(InvalidCard) as caught:
        card(**changes)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"test.toml: {param} ")
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_a_number_of_too_many_digits_is_refused_like_any_other() -> None:
    with pytest.raises(InvalidCard, match="num_layers is <int, too long to print>"):
        card(num_layers=16**9000)


def test_a_missing_field_is_named() -> None:
    facts = {field: value for field, value in FACTS.items() if field != "head_dim"}
    with pytest.raises(
        InvalidCard, match=r"^test\.toml: head_dim is missing; write `head_dim = …`"
    ):
        parse_card(facts, "test.toml")


def test_a_persons_card_may_draft_eight_and_a_shipped_one_three() -> None:
    eight = {"native_mtp": {"default_k": 1, "max_k": MAX_K}}
    assert card(**eight).native_mtp is not None
    with pytest.raises(InvalidCard, match=r"native_mtp\.max_k is 8; set it to 3 or less"):
        parse_card(FACTS | eight, "shipped.toml", max_k=3)


def test_a_card_never_changes() -> None:
    with pytest.raises(ValidationError):
        card().num_layers = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_caches_are_counted_where_every_fourth_layer_holds_one() -> None:
    types = ["linear_attention"] * 3 + ["full_attention"]
    hybrid = card(num_layers=16, num_attention_layers=4)
    per_layer = hybrid.kv_bytes_per_layer_token
    for first in range(17):
        for end in range(first, 17):
            full_layers = (types * 4)[first:end].count("full_attention")
            assert ModelSizes.of(hybrid, 1).caches(first, end) == full_layers * per_layer


def test_kv_is_two_rows_of_heads() -> None:
    assert card().kv_bytes_per_layer_token == 2 * 2 * 16 * 2
    assert card(dtype="float32").kv_bytes_per_layer_token == 2 * card().kv_bytes_per_layer_token
    # Published figure for Qwen3.6-27B's shape: 16 layers of 4 heads of 256, 64 KiB a token.
    qwen = card(num_layers=64, num_attention_layers=16, num_key_value_heads=4, head_dim=256)
    assert qwen.num_attention_layers * qwen.kv_bytes_per_layer_token == 65536
    assert card(kv_row_width=20).kv_bytes_per_layer_token == 20 * 2


@pytest.mark.parametrize(
    ("bits", "head_dim", "row"),
    [
        # Four heads of keys and values: the numbers, and a scale and a bias for each group of 64.
        (8, 256, 2 * 4 * (256 + 4 * 2 * 2)),
        (4, 256, 2 * 4 * (128 + 4 * 2 * 2)),
        (8, 96, 2 * 4 * (96 + 3 * 2 * 2)),
    ],
)
def test_quantised_caches_take_their_bits_and_scales(bits: int, head_dim: int, row: int) -> None:
    facts = {"num_layers": 8, "num_attention_layers": 8, "num_key_value_heads": 4}
    small, whole = (
        card(**facts, head_dim=head_dim, kv_bits=each, native_mtp=MTP) for each in (bits, None)
    )
    assert small.kv_bytes_per_layer_token == row
    sizes, plain = (ModelSizes.of(each, 1000) for each in (small, whole))
    assert sizes.head_cache == plain.head_cache == 1000 * whole.kv_bytes_per_layer_token
    assert sizes.caches(0, 8) == 8 * 1000 * row


def test_untied_embeddings_are_held_twice_and_read_once() -> None:
    tied, untied = card(tie_word_embeddings=True), card()
    assert tied.endpoint_bytes == 100 * 64 * 2
    assert untied.endpoint_bytes == 2 * tied.endpoint_bytes
    assert untied.embedding_bytes == tied.embedding_bytes == tied.endpoint_bytes


def test_quantised_weights_carry_half_a_bit_of_scales() -> None:
    assert card(quantization=4).embedding_bytes == 100 * 64 * 9 // 16


def test_the_mtp_head_stays_unquantised() -> None:
    mtp = {"default_k": 1, "max_k": 1}
    plain, four = card(native_mtp=mtp), card(native_mtp=mtp, quantization=4)
    fusion = 2 * 64 * 64 * 2
    assert plain.mtp_bytes - fusion == plain.mean_layer_bytes
    assert four.mtp_bytes - fusion == pytest.approx(four.mean_layer_bytes * 32 / 9, abs=1)
    assert card().mtp_bytes == 0


def test_the_demo_head_is_weighed_within_a_fifth() -> None:
    demo = derive_card(ModelId("demo"), demo_config(), 33_044_512, {"native_mtp": MTP})
    # From its safetensors headers: fc 256x512, one decoder layer, four norms, bfloat16.
    attention = 256 * (2 * 4 * 64) + 2 * 256 * (2 * 64) + (4 * 64) * 256
    exact = 2 * (2 * 256 * 256 + attention + 3 * 256 * 768)
    assert demo.mtp_bytes == pytest.approx(exact, rel=0.2)


def test_a_token_reads_only_the_chosen_experts() -> None:
    moe = card(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, weight_bytes=1_500_000
    )
    routed = 8 * 3 * 64 * 32 * 2
    assert moe.active_layer_bytes == moe.mean_layer_bytes - routed * 6 // 8
    assert card(num_experts=8).active_layer_bytes == card().mean_layer_bytes
    assert card(num_experts=8, num_experts_per_tok=8).active_layer_bytes == card().mean_layer_bytes


def test_dense_layers_hold_no_experts_to_leave_unread() -> None:
    facts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    every, some = card(**facts), card(**facts, num_dense_layers=5)
    assert every.mean_layer_bytes == some.mean_layer_bytes
    unread = every.mean_layer_bytes - every.active_layer_bytes
    assert unread == 8 * 3 * 64 * 8 * 2 * 6 // 8
    assert some.mean_layer_bytes - some.active_layer_bytes == unread // 2
    unknown = card(num_experts=8, num_experts_per_tok=2, num_dense_layers=10)
    assert unknown.active_layer_bytes == unknown.mean_layer_bytes


@settings(deadline=None)
@given(
    st.integers(1, 10**7),
    st.integers(1, 64),
    st.sampled_from([None, 2, 4, 8]),
    st.booleans(),
    st.booleans(),
)
def test_the_parts_never_weigh_less_than_the_checkpoint(
    weight: int, layers: int, bits: int | None, tied: bool, mtp: bool
) -> None:
    any_card = card(
        weight_bytes=weight,
        num_layers=layers,
        num_attention_layers=layers,
        quantization=bits,
        tie_word_embeddings=tied,
        native_mtp={"default_k": 1, "max_k": 1} if mtp else None,
    )
    layer = any_card.mean_layer_bytes
    assert any_card.endpoint_bytes + layers * layer + any_card.mtp_bytes >= weight
    assert 1 <= any_card.active_layer_bytes <= layer


OWN_NAMES: dict[str, tuple[Mapping[str, object], Mapping[str, object]]] = {
    "gpt2": (
        {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_ctx": 1024},
        {"num_layers": 12, "hidden_size": 768, "num_key_value_heads": 12, "head_dim": 64},
    ),
    "gpt_bigcode": (
        {"n_layer": 24, "n_embd": 2048, "n_head": 16, "n_positions": 8192, "multi_query": True},
        {"num_layers": 24, "hidden_size": 2048, "num_key_value_heads": 1, "head_dim": 128},
    ),
    "gptj": (
        {"n_layer": 28, "n_embd": 4096, "n_head": 16, "n_positions": 2048, "rotary_dim": 64},
        {"num_layers": 28, "hidden_size": 4096, "context_length": 2048, "head_dim": 256},
    ),
    "dbrx": (
        {
            "n_layers": 40,
            "d_model": 6144,
            "n_heads": 48,
            "max_seq_len": 32768,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
            "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752},
        },
        {
            "num_layers": 40,
            "hidden_size": 6144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "context_length": 32768,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 10752,
        },
    ),
    "openelm": (
        {
            "num_transformer_layers": 3,
            "model_dim": 1280,
            "head_dim": 64,
            "num_query_heads": [12, 16, 20],
            "num_kv_heads": [3, 4, 5],
            "max_context_length": 2048,
        },
        {"num_layers": 3, "hidden_size": 1280, "num_key_value_heads": 5, "context_length": 2048},
    ),
    "phixtral": (
        {"num_vocab": 51200, "model_dim": 2560, "num_heads": 32, "num_layers": 32}
        | {"n_positions": 2048, "vocab_size": None},
        {"num_layers": 32, "vocab_size": 51200, "num_key_value_heads": 32, "head_dim": 80},
    ),
    "lille-130m": (
        {"n_layer": 24, "n_embd": 640, "n_head": 10, "n_kv_heads": 2, "block_size": 512},
        {"hidden_size": 640, "num_key_value_heads": 2, "head_dim": 64, "context_length": 512},
    ),
    "exaone": (
        {"num_layers": 30, "hidden_size": 2560, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "max_position_embeddings": 32768},
        {"num_layers": 30, "num_key_value_heads": 8, "head_dim": 80},
    ),
    "mamba": (
        {"num_hidden_layers": 48, "hidden_size": 1536, "state_size": 16, "conv_kernel": 4},
        {"num_attention_layers": 0, "num_key_value_heads": 1},
    ),
    "mamba2": (
        {"num_hidden_layers": 64, "hidden_size": 2560, "state_size": 128, "num_heads": 80},
        {"num_attention_layers": 0, "num_key_value_heads": 1},
    ),
    "rwkv7": (
        {"num_hidden_layers": 24, "hidden_size": 2048, "head_dim": 64, "decay_low_rank_dim": 96},
        {"num_attention_layers": 0, "num_key_value_heads": 1},
    ),
}


@pytest.mark.parametrize("model_type", OWN_NAMES)
def test_a_publishers_own_names_for_sizes_need_no_card(model_type: str) -> None:
    config, wanted = OWN_NAMES[model_type]
    made = derive_card(ModelId("m"), {"model_type": model_type, "vocab_size": 99, **config}, 10**9)
    assert {name: getattr(made, name) for name in wanted} == wanted


@pytest.mark.parametrize("bad", [[], [4, 0], [4, True], [4, "4"], [65537], [4, [4]]])
def test_heads_for_each_layer_are_checked_like_one_number(bad: object) -> None:
    with pytest.raises(InvalidCard, match=r"^config.json: num_kv_heads is .* whole number"):
        _ = derive({"num_attention_heads": None, "num_query_heads": [4], "num_kv_heads": bad})
