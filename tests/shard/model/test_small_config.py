"""A small config keeps what decides how layers work together, and no size."""

from typing import Any

import pytest

from exo_node.shard.model.small_config import HEAD_DIM, HIDDEN, small_config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 7168, "vocab_size": 129280}, {"hidden_size": HIDDEN, "vocab_size": 512}),
        ({"hidden_size": 64}, {"hidden_size": 64}),
        (
            {"num_attention_heads": 96, "num_key_value_heads": 8},
            {"num_attention_heads": 4, "num_key_value_heads": 2},
        ),
        (
            {"num_attention_heads": 128, "num_key_value_heads": 128},
            {"num_attention_heads": 4, "num_key_value_heads": 4},
        ),
        (
            {"num_attention_heads": 71, "num_key_value_heads": 1},
            {"num_attention_heads": 4, "num_key_value_heads": 1},
        ),
        ({"head_dim": 128, "rotary_dim": 64}, {"head_dim": HEAD_DIM, "rotary_dim": HEAD_DIM // 2}),
        ({"q_lora_rank": None, "kv_lora_rank": 512}, {"q_lora_rank": None, "kv_lora_rank": 64}),
        ({"sliding_window": None}, {"sliding_window": None}),
        ({"sliding_window": 4096}, {"sliding_window": 8}),
        ({"num_experts": 0}, {"num_experts": 0}),
        (
            {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
            {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        ),
        (
            {"head_dim": 128, "rope_scaling": {"long_factor": [1.0] * 64, "type": "longrope"}},
            {"head_dim": 32, "rope_scaling": {"long_factor": [1.0] * 16, "type": "longrope"}},
        ),
        ({"tie_word_embeddings": True, "x": "y"}, {"tie_word_embeddings": True, "x": "y"}),
        ({"quantization": {"bits": 4}, "quantization_config": {}}, {}),
        (
            {"text_config": {"hidden_size": 4096, "num_hidden_layers": 40}},
            {"text_config": {"hidden_size": HIDDEN, "num_hidden_layers": 40}},
        ),
    ],
)
def test_sizes_shrink_and_structure_stays(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert small_config(config) == expected


def test_layers_keep_their_number_and_order() -> None:
    """The planned stage is tried, not one like it."""
    kinds = ["a"] * 20 + ["b", "c"] + ["a"] * 10
    config = {
        "num_hidden_layers": 32,
        "kinds": kinds,
        "full_attn_idxs": [2, 30],
        "attn_layer_period": 8,
    }
    assert small_config(config) == config


def test_the_given_config_is_not_changed() -> None:
    config: dict[str, Any] = {"hidden_size": 4096, "text_config": {"hidden_size": 4096}}
    _ = small_config(config)
    assert config == {"hidden_size": 4096, "text_config": {"hidden_size": 4096}}
